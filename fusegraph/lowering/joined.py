"""Tensors joined along an axis, in memory: where the element of a coordinate lies, whichever of them has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from codegen.sizes import below
from fusegraph.graph import Tensor
from fusegraph.lowering.affine import Affine, total


def choice(ctype: str, itype: str, texts: Sequence[str], edges: Sequence[int]) -> str:
    """Returns the template that chooses among texts by argument 0: the first if that is below the first edge, ..."""
    if len(set(texts)) == 1:
        return texts[0]
    steps = [f"{text}, {edge}" for text, edge in zip(texts, edges)]
    return f"choose<{ctype}, {itype}>({{0}}, {', '.join((*steps, texts[-1]))})"


@dataclass(frozen=True)
class Joined:
    """Where an element lies in the parts of a concatenation: at ``shared + own[k]`` in part k.

    shared   the steps that all parts have in common: neighbours along these can be one vector.
    own      the rest of each part's position.
    counted  what tells the parts apart: an element is in one of the first k + 1 if that is below ``edges[k]``.
    """

    shared: tuple[int, ...]
    own: tuple[Affine, ...]
    counted: Affine
    edges: tuple[int, ...]

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers whose multiples are added up in the parts' own positions."""
        return (*(place.start for place in self.own), *(step for place in self.own for step in place.steps))


def joined(at: Sequence[Affine], axis: int, parts: Sequence[tuple[int, Tensor]], space: Sequence[int]) -> Joined | None:
    """Returns where the element at these coordinates lies in parts, each a tensor and where it begins along an axis.

    None if a coordinate decreases along the space.
    """
    step = max(t.strides[axis] if t.shape[axis] > 1 else 0 for _, t in parts)
    places = []
    for start, tensor in parts:
        terms = [(c, s) for d, (c, s, n) in enumerate(zip(at, tensor.strides, tensor.shape)) if n > 1 and d != axis]
        along = tensor.strides[axis] if tensor.shape[axis] > 1 else step
        plain = total([*terms, (at[axis], along)], len(space), -start * along)
        places.append(Affine(tuple(s if n > 1 else 0 for s, n in zip(plain.steps, space)), plain.start))
    if any(s < 0 for place in places for s in place.steps):
        return None
    shared = tuple(column[0] if len(set(column)) == 1 else 0 for column in zip(*(p.steps for p in places)))
    own = tuple(Affine(tuple(a - b for a, b in zip(p.steps, shared)), p.start) for p in places)
    # The position in common tells where an element is along the axis, if all else in it is less than a step of that.
    # A kernel then sees fewer dimensions.
    rest = Affine(tuple(s - step * along for s, along in zip(shared, at[axis].steps)))
    whole = min(rest.steps, default=0) >= 0 and below(rest.ends(space)[1], step)
    counted, unit = (shared, step) if whole else (at[axis].steps, 1)
    edges = tuple((start - at[axis].start) * unit for start, _ in parts[1:])
    return Joined(shared, own, Affine(counted), edges)
