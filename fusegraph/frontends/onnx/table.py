"""The table of ONNX operators: each has a function that writes it with methods of `Graph`.

    @operator("Selu")
    def selu(call: Call, x: Tensor) -> Tensor:
        return call.graph.mul(call.graph.elu(x, call["alpha"]), call["gamma"])

A function takes the call and its inputs (None for one that is left out) and returns the outputs; it may leave out the
last ones.  It raises `Call.refuse` for what it does not support.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from codegen.declined import Declined
from codegen.sizes import Size
from fusegraph.dtypes import DType
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.tensors import DTYPES, Array, checked_shape, type_name
from fusegraph.frontends.onnx.values import Values
from fusegraph.graph import Graph, Tensor

if TYPE_CHECKING:
    from onnx import NodeProto

#: How many nodes a model may become.
MAX_WRITTEN = 100_000
#: What a function of the table returns: one output or several.
Result = Tensor | Sequence[Tensor]
Handler = Callable[..., Result]
H = TypeVar("H", bound=Handler)

#: (domain, operator) -> function.
TABLE: dict[tuple[str, str], Handler] = {}


class Unknown(Exception):
    """Raised for a value that must be known while the graph is built but depends on these inputs of the graph."""

    def __init__(self, what: str, inputs: tuple[str, ...]) -> None:
        super().__init__(what)
        self.inputs = inputs


def operator(*names: str, domain: str = "") -> Callable[[H], H]:
    """Enters a function in the table for operators of a domain."""

    def enter(function: H) -> H:
        for name in names:
            assert (domain, name) not in TABLE, name
            TABLE[domain, name] = function
        return function

    return enter


@dataclass(frozen=True)
class Call:
    """One node of a model while it is written.

    graph       the graph that it is written to.
    node        the node.
    version     the version of its operator set.
    attributes  its attributes, including defaults of the operator's schema.
    wanted      how many outputs are wanted, up to the last that has a name.
    values      the values known of tensors.
    shapes      given shapes of results whose sizes depend on values, by name.
    once        tells whether at most one node of the model takes a tensor, as far as is known.
    """

    graph: Graph
    node: NodeProto
    version: int
    attributes: Mapping[str, Any]
    wanted: int
    values: Values
    shapes: Mapping[str, Any]
    once: Callable[[Tensor], bool]

    def __getitem__(self, attribute: str) -> Any:
        """Returns an attribute's value; None if it is absent and has no default."""
        return self.attributes.get(attribute)

    def word(self, attribute: str, *known: str) -> Any:
        """Returns the value of an attribute that is one of these words.  Raises ModelError for another."""
        value = self[attribute]
        if value not in known:
            raise ModelError(f"{attribute} is {', '.join(known[:-1])} or {known[-1]}, got {value[:40]!r}")
        return value

    def refuse(self, what: str) -> Declined:
        """Returns the refusal (to be raised) of a use of this operator; ``what`` is such as "mode cubic"."""
        return Declined(f"{self.node.op_type}: {what}")

    def check_size(self, more: int = 0) -> None:
        """Raises ModelError if the nodes written so far and ``more`` of them, as for time steps, are too many."""
        if self.graph.node_count + more > MAX_WRITTEN:
            raise ModelError(f"more than {MAX_WRITTEN} nodes would be written, with this one's once a time step")

    def known(self, tensor: Tensor, what: str) -> Array:
        """Returns the value of a tensor that must not depend on inputs, such as a shape.  Raises Unknown if it does."""
        found = self.values.known(tensor)
        if found is None:
            raise Unknown(f"{self.node.op_type}: {what} must be known", self.values.roots(tensor))
        return found

    def given_size(self, shape: Sequence[int | None]) -> int | None:
        """Returns the given size of the first output along its one dimension that depends on values.

        That is None in ``shape``.  Returns None if no shape was given; raises ModelError if it does not fit.
        """
        name = self.node.output[0] if self.node.output else ""
        if name not in self.shapes:
            return None
        sizes = self.shapes[name]
        found = checked_shape(f"output {name[:80]!r}", [sizes] if isinstance(sizes, int) else sizes)
        if len(found) != len(shape) or any(b not in (None, a) for a, b in zip(found, shape)):
            wanted = ["any" if n is None else n for n in shape]
            raise ModelError(f"output {name[:80]!r} has the shape {wanted}, the one given is {list(found)}")
        return found[list(shape).index(None)]

    def _followed(self, tensor: Tensor, what: str) -> Array:
        """Returns the value of a tensor as `known`; Sizes may be in it."""
        found = self.values.followed(tensor)
        return self.known(tensor, what) if found is None else found

    def fixed(self, size: int, what: str) -> int:
        """Returns a number that decides what is written.  Raises Unknown if it varies."""
        if isinstance(size, Size):
            raise Unknown(f"{self.node.op_type}: {what} must be known, but varies", ())
        return size

    def integers(self, tensor: Tensor, what: str) -> list[int]:
        """Returns a known tensor of integers, of rank 1 at most, as a list; sizes that vary may be among them.

        Raises ModelError for others.
        """
        value = self._followed(tensor, what)
        if value.dtype.kind not in "iuO" or value.ndim > 1:
            raise ModelError(f"{what} is a list of integers, got {value.dtype} {list(value.shape)}")
        return [v if isinstance(v, Size) else int(v) for v in value.reshape(-1)]

    def number(self, tensor: Tensor, what: str) -> Any:
        """Returns a known tensor of one element as a Python number, or a size that varies.

        Raises ModelError for others.
        """
        value = self._followed(tensor, what)
        if value.size != 1:
            raise ModelError(f"{what} is one number, got {list(value.shape)}")
        if value.dtype == object:
            return value.reshape(-1)[0]
        return value.reshape(-1)[0].item() if value.dtype.kind in "fiub" else float(value.reshape(-1)[0])

    def integer(self, tensor: Tensor, what: str) -> int:
        """Returns what `number` returns as an integer."""
        found = self.number(tensor, what)
        return found if isinstance(found, Size) else int(found)

    def dtype(self, element: int) -> DType:
        """Returns the dtype of an ONNX element type.  Raises Declined if there is none."""
        if element not in DTYPES:
            raise Declined(f"type {type_name(element)}")
        return DTYPES[element]
