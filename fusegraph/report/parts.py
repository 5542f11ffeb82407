"""Some nodes of a graph as a graph of their own, and graphs as Python code that builds them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, float32
from fusegraph.errors import NotSupportedError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.ops import TABLE
from fusegraph.ops.base import Array, Kind
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.pattern import made_of
from fusegraph.report.check import laid_out

#: Constants of at most so many elements stand in the code; others in a file of arrays.
MOST_WRITTEN = 8


def part(graph: Graph, nodes: Collection[Node], keep: Collection[str] = ()) -> Graph:
    """Returns a graph of some of a graph's nodes, with the names of its tensors.

    What they take from others is an input.  Its outputs are those results that no other of the nodes takes, the graph's
    own outputs, and the tensors named in ``keep``.
    """
    wanted, made = set(nodes), Graph(graph.name, graph.io_dtype, graph.compute_dtype)
    new: dict[Tensor, Tensor] = {}

    def counterpart(tensor: Tensor, given: bool) -> Tensor:
        if tensor not in new:
            new[tensor] = made._add_tensor(tensor.name, tensor.shape, tensor.strides, tensor.dtype, tensor.value)
            if given and not tensor.is_constant:
                made.inputs.append(new[tensor])
                if tensor in graph.parameters:
                    made.parameters.add(new[tensor])
        return new[tensor]

    ordered = [node for node in graph.nodes if node in wanted]
    for node in ordered:
        operands = tuple(counterpart(t, graph.producer(t) not in wanted) for t in node.inputs)
        made.add_node(Node(node.op, operands, node.attributes, *(counterpart(t, False) for t in node.outputs)))
    outputs = set(graph.outputs)
    for tensor in (t for node in ordered for t in node.outputs):
        if tensor in outputs or tensor.name in keep or not any(n in wanted for n in graph.consumers(tensor)):
            made.outputs.append(new[tensor])
    note_updates(made)
    return made


def note_updates(graph: Graph) -> None:
    """Notes that results of assignments are new values of inputs, those that no other replaces; all are outputs."""
    for node in graph.nodes:
        if node.kind is Kind.ASSIGN:
            _updated(graph, node)


def _updated(graph: Graph, node: Node) -> None:
    if any(n.kind is Kind.ASSIGN and n.inputs[0] is node.output for n in graph.consumers(node.output)):
        graph.outputs = [t for t in graph.outputs if t is not node.output]
        return
    origin = node.inputs[0]
    while (before := graph.producer(origin)) is not None:
        origin = before.inputs[0]
    graph.updates[node.output] = origin
    if node.output not in graph.outputs:
        graph.outputs.append(node.output)


def between(graph: Graph, targets: Iterable[Tensor], known: Collection[str]) -> list[Node]:
    """Returns the nodes from which tensors follow, back to tensors whose names are known, in the graph's order."""
    found = made_of(graph, targets, lambda node: [t for t in node.inputs if t.name not in known])
    return [node for node in graph.nodes if node in found]


# --- arrays in files


def saved_arrays(graph: Graph, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Returns the arrays that a file for a graph's code holds: inputs, and constants that the code does not write.

    They are of NumPy's own dtypes: dtypes that NumPy lacks become float32 and int8, which hold all of their values.
    """
    found = {t.name: (np.asarray(inputs[t.name]), t.dtype) for t in graph.inputs}
    found |= {t.name: (t.value, t.dtype) for t in graph.tensors.values() if t.value is not None and not _is_written(t)}
    return {name: _plain(value, dtype) for name, (value, dtype) in found.items()}


def _plain(value: Array, dtype: DType) -> Array:
    if value.dtype.kind in "fiub" and not dtype.is_packed:
        return value
    return to_reference(value, dtype).astype(np.float32 if dtype.is_float else np.int8)


def restored(arrays: Mapping[str, Array], tensor: Tensor) -> Array:
    """Returns a tensor's array, as stored, from those of a file that `saved_arrays` or a user made.

    Raises NotSupportedError if there is none, or one of another shape.
    """
    if tensor.name not in arrays:
        raise NotSupportedError(
            f"there is no array for input {tensor.name!r}; there are: {', '.join(arrays) or 'none'}"
        )
    value = np.asarray(arrays[tensor.name])
    if value.shape != tensor.shape:
        raise NotSupportedError(f"input {tensor.name!r} has shape {list(tensor.shape)}, its array {list(value.shape)}")
    if value.dtype != tensor.dtype.numpy:
        value = from_reference(value.astype(np.float64) if tensor.dtype.is_float else value, tensor.dtype)
    return laid_out(value, tensor)


# --- code


def _is_written(tensor: Tensor) -> bool:
    return tensor.value is not None and tensor.size <= MOST_WRITTEN


def builder_code(graph: Graph) -> str:
    """Returns Python code that builds a graph as the name ``graph``, without nodes that no output follows from.

    It takes large constants from a mapping ``arrays``, and needs ``fusegraph as fg`` and ``numpy as np``.  Raises
    NotSupportedError for nodes that users cannot write, which passes made.
    """
    variables, nodes = _Variables(), between(graph, graph.outputs, ())
    read = {t for node in nodes for t in node.inputs}
    lines = [f"graph = fg.Graph({graph.name!r}{_changed(graph)})"]
    for tensor in graph.tensors.values():
        if tensor.is_constant and tensor in read:
            lines.append(f"{variables[tensor]} = {_constant(tensor)}")
    for tensor in graph.inputs:
        lines.append(f"{variables[tensor]} = graph.tensor({tensor.name!r}, {tensor.shape!r}{_lies(graph, tensor)})")
    for node in nodes:
        if node.kind is Kind.ASSIGN:
            target, values = _region(node, variables), variables[node.inputs[1]]
            lines.append(f"{variables[node.output]} = graph.assign({target}, {values}, name={node.name!r})")
            continue
        if node.op is not TABLE.get(node.op.name):
            raise NotSupportedError(f"{node.op.name} {node.name!r} has no method of Graph")
        results = ", ".join(variables[t] for t in node.outputs)
        operands = [variables[t] for t in node.inputs]
        given = {k: _value(v) for k, v in node.attributes.items() if k in node.op.attributes}
        words = [f"{key}={value}" for key, value in given.items() if value != _value(node.op.attributes[key])]
        lines.append(f"{results} = graph.{node.op.name}({', '.join([*operands, *words, f'name={node.name!r}'])})")
        parts = [f"{node.name[:180]} {named}" for named in node.op.results[1:]]
        renamed = [t for t, name in zip(node.outputs[1:], parts) if t.name != name]
        lines += [f"graph.rename({variables[t]}, {t.name!r})" for t in renamed]
    for tensor in graph.results:
        strides = f", strides={tensor.strides!r}" if tensor.strides != packed_strides(tensor.shape) else ""
        strides = "" if tensor in graph.updates else strides
        lines.append(f"graph.output({variables[tensor]}{strides})")
    return "\n".join(lines)


def _region(node: Node, variables: _Variables) -> str:
    """Returns the elements that an assignment replaces, as users write them.

    Raises NotSupportedError for an index along several axes, which passes made.
    """
    x, values, *index = node.inputs
    starts, steps, axes = (node.attributes[key] for key in ("starts", "steps", "axes"))
    found, axis = variables[x], -1
    if index:
        if len(axes) != 1:
            raise NotSupportedError(f"{node.op.name} {node.name!r} has an index along axes {axes}, not along one")
        (axis,) = axes
        found = f"graph.gather({found}, {variables[index[0]]}, axis={axis})"
    slices = [
        ":"
        if d == axis or (start, step, count) == (0, 1, size)
        else f"{start}:{start + (count - 1) * step + 1 if count else start}" + (f":{step}" if step != 1 else "")
        for d, (size, count, start, step) in enumerate(zip(x.shape, values.shape, starts, steps))
    ]
    return found if all(part == ":" for part in slices) else f"{found}[{', '.join(slices)}]"


class _Variables(dict[Tensor, str]):
    """Tensor -> a name for it in Python, near its own and unlike the others."""

    def __missing__(self, tensor: Tensor) -> str:
        stem = re.sub(r"\W+", "_", tensor.name, flags=re.ASCII).strip("_") or "t"
        stem = f"t_{stem}" if stem[0].isdigit() or keyword.iskeyword(stem) or stem in _TAKEN else stem
        name, taken, number = stem, set(self.values()), 2
        while name in taken:
            name, number = f"{stem}_{number}", number + 1
        self[tensor] = name
        return name


_TAKEN = ("graph", "fg", "np", "arrays", "replay")


def _changed(graph: Graph) -> str:
    """Returns the arguments of a graph that differ from the defaults."""
    return "" if graph.compute_dtype == float32 else f", compute_dtype={graph.compute_dtype.name!r}"


def _lies(graph: Graph, tensor: Tensor) -> str:
    dtype = "" if tensor.dtype == float32 else f", {tensor.dtype.name!r}"
    strides = "" if tensor.strides == packed_strides(tensor.shape) else f", strides={tensor.strides!r}"
    return dtype + strides + (", parameter=True" if tensor in graph.parameters else "")


def _constant(tensor: Tensor) -> str:
    assert tensor.value is not None
    value = f"arrays[{tensor.name!r}]"
    if _is_written(tensor):
        value = _value(to_reference(tensor.value, tensor.dtype).tolist())
    return f"graph.constant({value}, {tensor.name!r}, {tensor.dtype.name!r})"


def _value(value: Any) -> str:
    """Returns an attribute's value, or a nested list of numbers, as Python code."""
    if isinstance(value, DType):
        return repr(value.name)
    if isinstance(value, float) and not np.isfinite(value):
        return f'float("{value}")'
    if isinstance(value, list | tuple):
        inner = ", ".join(map(_value, value)) + ("," if isinstance(value, tuple) and len(value) == 1 else "")
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, np.ndarray):
        return f"np.array({_value(value.tolist())}, {value.dtype.name!r})"
    return repr(value)
