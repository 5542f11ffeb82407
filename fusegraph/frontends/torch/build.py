"""Builds a piece of an FX graph as a Graph."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusegraph.errors import FusegraphError, NotSupportedError
from fusegraph.frontends.torch.cut import COPY, Analysis, Piece
from fusegraph.frontends.torch.forms import is_projection
from fusegraph.frontends.torch.table import FREE, HANDLERS, IGNORED, Call, Form, Precision
from fusegraph.frontends.torch.vectors import Layer, lines
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import overlaps
from fusegraph.origins import Origin, written_for
from fusegraph.passes.image_layouts import channels_last

_NORM = "aten._native_batch_norm_legit_no_training.default"


@dataclass(frozen=True)
class Built:
    """A piece's graph, with inputs and outputs in the piece's order.

    ``refused`` maps the nodes that handlers did not take, which torch has to compute, to reasons; if there are any, the
    graph is not complete.
    """

    graph: Graph
    refused: Mapping[Any, str]


def _takes_dim(operator: Any) -> bool:
    """Tells whether an operator works along a dimension, which torch also allows for tensors of rank 0."""
    schema = getattr(operator, "_schema", None)
    return schema is not None and any(argument.name in ("dim", "dims") for argument in schema.arguments)


def _as_scalars(result: Any, forms: Sequence[Form | None]) -> Any:
    """Reshapes results to rank 0 if they have rank 0 in torch."""
    if isinstance(result, tuple):
        return tuple(_as_scalars(r, [form]) for r, form in zip(result, forms))
    scalar = isinstance(result, Tensor) and result.shape == (1,) and forms[0] is not None and forms[0].shape == ()
    return result.reshape(()) if scalar else result


def _origin(node: Any) -> Origin:
    """Returns where a node comes from, as far as torch's tracer noted it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    modules = [*stack.values()]
    return Origin(modules[-1][0] if modules else "", node.name, str(node.target), node.meta.get("stack_trace") or "")


class _Skip(Exception):
    """Raised if an operand of a node could not be made."""


def build(
    piece: Piece,
    analysis: Analysis,
    name: str,
    precision: Precision,
    names: Mapping[Any, str],
    owned: Container[Any] = (),
    movable: Container[Any] = (),
) -> Built:
    """Builds a piece's graph.

    ``names`` has more readable names of inputs than those of their nodes, ``owned`` those that are donated to it, and
    ``movable`` the results that may have other strides than in torch; ``analysis.strides`` gets those.
    """
    return _Builder(piece, analysis, name, precision, names, owned, movable).build()


class _Builder:
    def __init__(
        self,
        piece: Piece,
        analysis: Analysis,
        name: str,
        precision: Precision,
        names: Mapping[Any, str],
        owned: Container[Any],
        movable: Container[Any],
    ) -> None:
        self._piece, self._analysis, self._precision, self._movable = piece, analysis, precision, movable
        self._graph = Graph(name)
        self._values: dict[Any, Any] = {}
        self._refused: dict[Any, str] = {}
        for node in piece.inputs:
            form = self._form(node)
            name = label = names.get(node, node.name)
            while name in self._graph.tensors:
                name = f"{label}_{len(self._graph.tensors)}"
            self._values[node] = made = self._graph.tensor(name, form.shape, form.dtype, strides=form.strides)
            if node in analysis.parameters:
                self._graph.parameters.add(made)
            if node in owned:
                self._graph.donated.add(made)
        self._lines = lines(self._graph, self._layers())

    def _layers(self) -> Iterator[Layer]:
        """Yields the layers of batch normalization whose vectors are the piece's inputs."""
        known = {None: None, **self._values}
        for node in self._piece.nodes:
            if str(node.target) == _NORM and all(v in known for v in node.args[1:5]):
                scale, bias, mean, variance = (known[v] for v in node.args[1:5])
                yield Layer(scale, bias, mean, variance, node.args[6])

    def build(self) -> Built:
        copies = [n for n in self._piece.nodes if str(n.target) == COPY]
        for node in (*(n for n in self._piece.nodes if n not in copies), *copies):
            try:
                with written_for(partial(_origin, node)):
                    self._values[node] = self._applied(node, HANDLERS) if node not in copies else self._assigned(node)
            except _Skip:
                continue
            except FusegraphError as error:
                self._refused[node] = str(error)
        if not self._refused:
            for node in self._piece.outputs:
                try:
                    self._output(node)
                except NotSupportedError as error:  # a result that its handler leaves out, such as seeds of attention
                    self._refused[node.args[0]] = str(error)
            self._lay_out()
        return Built(self._graph, self._refused)

    def _assigned(self, node: Any) -> Tensor:
        """Assigns a value to the input that a node copies it into."""
        target, value = (self._value(n) for n in node.args[:2])
        return self._graph.assign(
            target, value if value.dtype == target.dtype else self._graph.cast(value, target.dtype)
        )

    def _output(self, node: Any) -> None:
        form = self._form(node)
        value = self._value(node)
        if value in self._graph.outputs:
            value = self._graph.identity(value)
        strides = form.strides if not overlaps(form.shape, form.strides) else None
        self._graph.output(value, strides=strides)

    def _lay_out(self) -> None:
        """Chooses the strides of results that may have any: those of images in kernels."""
        movable = [n for n in self._piece.outputs if n in self._movable and n in self._values]
        images = channels_last(self._graph) if movable else {}
        for node in movable:
            tensor = self._values[node]
            if tensor in images and tensor in self._graph.outputs:
                tensor.strides = self._analysis.strides[node] = images[tensor]

    def _form(self, node: Any) -> Form:
        form = self._analysis.forms.of(node)
        assert form is not None
        return form

    def _value(self, node: Any) -> Any:
        """Returns a node's tensor or tuple of tensors; a view, a constant or one of several results is made now."""
        if node not in self._values:
            if is_projection(node):
                self._values[node] = self._value(node.args[0])[node.args[1]]
            elif node in self._analysis.forms.numbers:
                return self._analysis.forms.numbers[node]
            elif self._analysis.is_free(node):
                self._values[node] = self._applied(node, FREE)
            else:
                raise _Skip
            if self._values[node] is None:
                raise NotSupportedError(f"its result {node.args[1]} is needed, which fusegraph does not compute")
        return self._values[node]

    def _applied(self, node: Any, table: Mapping[str, Any]) -> Any:
        """Applies a node's handler; raises NotSupportedError if the results' shapes or dtypes are not torch's."""
        forms = self._analysis.forms.forms[node]
        assert forms is not None
        used = frozenset(user.args[1] for user in node.users if is_projection(user))
        given = tuple(self._analysis.forms.of(a) if hasattr(a, "all_input_nodes") else None for a in node.args)
        call = Call(self._graph, forms, self._precision, used, self._lines, given)
        skipped = IGNORED.get(str(node.target), ())
        as_rows = table is HANDLERS and _takes_dim(node.target)
        args = self._argument(tuple(None if n in skipped else a for n, a in enumerate(node.args)), as_rows)
        result = table[str(node.target)](call, *args, **self._argument(node.kwargs, as_rows))
        if as_rows:
            result = _as_scalars(result, forms)
        for tensor, form in zip(result if isinstance(result, tuple) else (result,), forms):
            if not isinstance(tensor, Tensor) or form is None:
                continue
            if (tensor.shape, tensor.dtype) != (form.shape, form.dtype):
                raise NotSupportedError(
                    f"its result would be {tensor.dtype} {list(tensor.shape)}, in torch it is {form.dtype} "
                    f"{list(form.shape)}"
                )
        return result

    def _argument(self, value: Any, as_rows: bool) -> Any:
        """Returns an argument with tensors in place of nodes; ``as_rows`` reshapes those of rank 0 to one element."""
        if isinstance(value, tuple | list):
            return tuple(self._argument(v, as_rows) for v in value)
        if isinstance(value, dict):
            return {key: self._argument(v, as_rows) for key, v in value.items()}
        value = self._value(value) if hasattr(value, "all_input_nodes") else value
        return value.reshape(1) if as_rows and isinstance(value, Tensor) and not value.rank else value
