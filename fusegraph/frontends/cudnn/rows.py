"""The memory of a ragged tensor as rows: one for each token and head, ``unit`` elements apart."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

from fusegraph.errors import LayoutError


@dataclass(frozen=True)
class Rows:
    """The memory of a ragged tensor.

    shape, strides  those of the padded tensor, strides in elements.
    unit            elements from one row to the next; all strides of tokens and heads, and all offsets, are multiples.
    elements        the size of the memory in elements.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    unit: int
    elements: int

    @property
    def count(self) -> int:
        """How many whole rows there are."""
        return max((self.elements - self.shape[3]) // self.unit + 1, 0)

    @property
    def steps(self) -> tuple[int, int]:
        """How many rows apart consecutive heads are, and consecutive tokens; 0 if there is only one."""
        (_, heads, tokens, _), (_, by_head, by_token, _) = self.shape, self.strides
        return by_head // self.unit if heads > 1 else 0, by_token // self.unit if tokens > 1 else 0


def rows_of(shape: tuple[int, ...], strides: tuple[int, ...], elements: int | None) -> Rows:
    """Returns the memory of a ragged tensor, by default as many elements as sequences without gaps need.

    Raises LayoutError if the tensor does not have rank 4, or if the elements of a token and head are not contiguous and
    apart from all others.
    """
    if len(shape) != 4 or len(strides) != 4:
        raise LayoutError(f"a ragged tensor has 4 dimensions, got {list(shape)} with strides {list(strides)}")
    batch, heads, tokens, depth = shape
    _, by_head, by_token, by_element = strides
    unit = gcd(by_head if heads > 1 else 0, by_token if tokens > 1 else 0) or depth
    if (depth > 1 and by_element != 1) or unit < depth:
        raise LayoutError(
            f"a ragged tensor has the {depth} elements of a token and head one after the other, apart from those of "
            f"others; {list(shape)} has strides {list(strides)}"
        )
    whole = max(tokens * (by_token if tokens > 1 else 0), heads * (by_head if heads > 1 else 0), unit)
    return Rows(shape, strides, unit, batch * whole if elements is None else elements)
