"""Gradients of ops, as their entries in the table have them: what a rule is given, and rules that several ops share.

A rule is called with a `Reverse`, the node's operands and, as keywords, its attributes.  It returns an entry for each
operand (or the entry, if there is one operand): a tensor; a function that writes it, which is called only if somebody
wants it; None if the result does not change with the operand, or only in jumps.  Missing entries at the end are None.
Entries have the operand's shape or one that broadcasting made of it, in any dtype of floats: `fusegraph.gradients` sums
and casts them.  A composite's rule may return NotImplemented: gradients then go through what it is written as.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from fusegraph.dtypes import promote
from fusegraph.ops.modes import reduced_shape

Rule: TypeAlias = Callable[..., Any]


class Reverse(Protocol):
    """A node that gradients pass, from its results to its operands.

    graph    has the methods with which a rule writes nodes.
    name     of the op.
    results  of the node; y is the first of them.
    losses   the gradient of the loss by each result, None where the loss does not depend on it.
    loss     that by the first result, zeros if the loss does not depend on it.
    wants    tells whether the gradient by an operand, of a number, is wanted.
    """

    graph: Any
    name: str
    results: tuple[Any, ...]
    losses: tuple[Any, ...]

    @property
    def y(self) -> Any: ...
    @property
    def loss(self) -> Any: ...
    def wants(self, operand: int) -> bool: ...


def flat(_: Reverse, *operands: Any, **attributes: Any) -> tuple[()]:
    """The gradient of what changes only in jumps, or not at all: zero."""
    return ()


def by_backward(at: Reverse, x: Any, **attributes: Any) -> Any:
    """The gradient by the op ``<name>_backward(loss, x)``, which has the same attributes."""
    return getattr(at.graph, f"{at.name}_backward")(at.loss, x, **attributes)


def by_backward_of_y(at: Reverse, x: Any, **attributes: Any) -> Any:
    """The gradient by the op ``<name>_backward(loss, y)``, y being the result."""
    return getattr(at.graph, f"{at.name}_backward")(at.loss, at.y, **attributes)


def linear(by_input: Rule | None = None) -> Rule:
    """Returns the rule of an op (loss, input) that is linear in the loss.

    by_input is (at, loss, input, attributes) -> the gradient by the input.
    """

    def rule(at: Reverse, loss: Any, x: Any, **attributes: Any) -> tuple[Any, Any]:
        second = by_input and (lambda: by_input(at, loss, x, **attributes))
        return lambda: getattr(at.graph, at.name)(at.loss, x, **attributes), second

    return rule


def kept(at: Reverse, tensor: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> Any:
    """Returns what is left of a shape reduced along axes, with these as dimensions of size 1."""
    wanted = reduced_shape(shape, axes, True)
    return tensor if tensor.shape == wanted else at.graph.reshape(tensor, wanted)


def factor(at: Reverse, *operands: Any) -> Any:
    """Returns the loss of a product as its operands are multiplied: rounded to their dtype if that has 16 bits."""
    common = promote(operands[0].dtype, operands[1].dtype)
    narrow = common.is_float and common.bits == 16
    return at.graph.cast(at.loss, common) if narrow and at.loss.dtype != common else at.loss
