"""`from_cudnn`: reads a graph built with cudnn-frontend's Python API into a `Graph`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Any

from fusegraph.dtypes import float64
from fusegraph.errors import DTypeError, FusegraphError, GraphError, NotSupportedError
from fusegraph.frontends.cudnn.graph import CudnnGraph
from fusegraph.frontends.cudnn.nodes import RULES, Rule, pointwise_op
from fusegraph.frontends.cudnn.ragged import LENGTHS
from fusegraph.frontends.cudnn.reading import Reading, tensors_of
from fusegraph.frontends.cudnn.shapes import Shapes, reshaped
from fusegraph.frontends.cudnn.words import computed, dtype_of, label_of


def is_pygraph(value: Any) -> bool:
    """Tells whether a value is a graph of cudnn-frontend, without importing that package."""
    return any(k.__module__.partition(".")[0] == "cudnn" and k.__name__ == "pygraph" for k in type(value).__mro__)


def from_cudnn(pygraph: Any, values: Mapping[Any, Any] | None = None, *, tf32: bool = False) -> CudnnGraph:
    """Reads a ``cudnn.pygraph``, which must have all its nodes but need not have been validated or built.

    This needs neither a driver nor a GPU.

    Tensors keep their uids, names (if these are unique), shapes, strides and data types.  Those that are not virtual
    are the inputs and outputs, in the order in which the nodes take and make them.  Strides that were not set are those
    that cuDNN infers.  Nodes compute in float32, or in float64 if one node of the graph does; each result is rounded to
    its data type.  A virtual FLOAT tensor that is multiplied by a HALF or BFLOAT16 one is rounded to that type.
    Booleans are bytes.

    values  numbers for scalars that cuDNN reads on the host (``is_pass_by_value``), by uid, tensor or name: they become
            part of the graph.  Scalars made with ``tensor_scalar``, or given as arrays when the node was made, are
            known already.  Others are inputs, and may change with every call.
    tf32    allows products of float32 to be rounded to tf32, as cuDNN does by default.

    Dropout by a seed draws random numbers as rng_uniform does, not those of cuDNN; a node and its gradient draw the
    same ones.  A ragged tensor becomes an array of rows, with as much memory as sequences without gaps need;
    `CudnnGraph.execute` adapts to the size that it is given.  A ragged output comes with a second one, which says which
    of its rows are to be written.

    Other shapes for a call (``is_override_shape_enabled``) are read and compiled when they first occur.

    The result runs like the pygraph (`CudnnGraph.execute`) and is a `Graph` for everything else.

    Raises NotSupportedError, which lists all nodes without a counterpart and all parts of nodes that are not
    understood; GraphError (ShapeError, ...), which names the node whose tensors do not fit.
    """
    return _read(pygraph, values, tf32, {}, {})


def _read(
    pygraph: Any, values: Mapping[Any, Any] | None, tf32: bool, elements: Mapping[int, int], shapes: Shapes
) -> CudnnGraph:
    """Does what `from_cudnn` says, with ``elements`` of memory for ragged tensors, by uid, and other ``shapes``."""
    if not is_pygraph(pygraph):
        raise GraphError(f"from_cudnn takes a cudnn.pygraph, got {type(pygraph).__module__}.{type(pygraph).__name__}")
    if not isinstance(getattr(pygraph, "nodes", None), list):
        raise GraphError(
            "this cudnn-frontend does not show the nodes of its graphs; install nvidia-cudnn-frontend>=1.32"
        )
    settings = getattr(pygraph, "_cpp_graph_kwargs", {})
    source = reshaped(pygraph, shapes) if shapes else pygraph
    nodes, label = source.nodes, label_of(settings.get("name")) or "cudnn_graph"
    if not nodes:
        raise GraphError(f"pygraph {label!r} has no nodes; one that was deserialized cannot be read")
    _check(label, nodes)
    doubles = any(computed(n.compute_data_type) == float64 for n in nodes)
    compute = float64 if doubles else "tf32" if tf32 else "float32"
    graph = CudnnGraph(label, dtype_of(pygraph.context.io_data_type) or "float32", compute)
    known = {_uid(source, key): value for key, value in (values or {}).items()}
    _add(Reading(source, graph, known, elements, _add), nodes)
    if not graph.outputs:
        raise GraphError(f"pygraph {label!r} has no output; mark one with set_output(True)")
    names = [(str(t.name), uid) for uid, t in tensors_of(source).items() if uid in graph.uids]
    graph.labels = {name: uid for name, uid in names if sum(n == name for n, _ in names) == 1}
    if graph.ragged:
        graph.of_sizes = lambda sizes: _read(pygraph, values, tf32, sizes, shapes)
    if settings.get("is_override_shape_enabled"):
        graph.of_shapes = lambda others: _read(pygraph, values, tf32, elements, others)
    return graph


def _add(reading: Reading, nodes: Sequence[Any]) -> None:
    """Adds cuDNN's nodes to the graph.  Raises the errors of `from_cudnn`."""
    label = reading.graph.name
    _check(label, nodes)
    for node in nodes:
        try:
            results = RULES[node.node_type.name].make(reading, node)
            for port, tensor in node.outputs.items():
                if port not in results and not reading.is_wanted(tensor):
                    continue
                if port not in results:
                    raise GraphError(f"there is no result {port} ({tensor.name!r})")
                reading.finish(node, port, results[port])
        except FusegraphError as error:
            raise type(error)(f"pygraph {label!r}, {_called(node)}: {error}") from None
        except (TypeError, ValueError, AttributeError, LookupError, OverflowError) as error:
            told = f"{error}; it was told {dict(node.params)}"
            raise GraphError(f"pygraph {label!r}, {_called(node)}: a parameter is of a wrong kind: {told}") from None


def _uid(pygraph: Any, key: Any) -> int:
    """Returns the uid of a key of ``values``.

    Raises GraphError unless it is that of one tensor which a node takes and which is passed by value.
    """
    every = tensors_of(pygraph)
    if isinstance(key, str):
        named = [uid for uid, t in every.items() if t.name == key]
        if len(named) != 1:
            raise GraphError(f"values= names {key!r}, which {len(named)} tensors of the pygraph are called")
        return named[0]
    uid = int(key.get_uid()) if hasattr(key, "get_uid") else key
    if not isinstance(uid, int) or uid not in every:
        raise GraphError(f"values= has {key!r}, which is no tensor that a node of the pygraph takes")
    if not every[uid].is_pass_by_value:
        raise GraphError(f"values= has {every[uid].name!r}, which is not passed by value")
    return uid


# ---- what there is nothing for


def _check(label: str, nodes: Sequence[Any]) -> None:
    """Raises NotSupportedError that lists everything unsupported about some nodes."""
    lacking = [reason for node in nodes for reason in _lacking(node)]
    if lacking:
        raise NotSupportedError(f"pygraph {label!r} cannot be read: {'; '.join(dict.fromkeys(lacking))}")


def _called(node: Any) -> str:
    kind = node.params.get("mode") if node.node_type.name == "POINTWISE" else node.node_type.name.lower()
    return f"{kind} {node.name!r}"


def _lacking(node: Any) -> list[str]:
    """Returns what is unsupported about a node, each item in a few words with the node's name."""
    rule = RULES.get(node.node_type.name)
    if rule is None or (node.node_type.name == "POINTWISE" and pointwise_op(node) is None):
        return [f"there is no op for {_called(node)}"]
    found = [f"{_called(node)}: {port}" for port in node.inputs if not _known(rule, port)]
    found += [f"{_called(node)}: {key}" for key, v in node.params.items() if key not in rule.params and _set(v)]
    for port, tensor in (*node.inputs.items(), *node.outputs.items()):
        if tensor is None:
            continue
        what = f"tensor {tensor.name!r} (uid {tensor.uid})"
        found += [f"{what}: {problem}" for problem in _malformed(tensor)]
        try:
            dtype_of(tensor.data_type)
        except DTypeError as error:
            found.append(f"{what}: {error}")
        if tensor.ragged_offset is not None and not (rule.ragged and port in LENGTHS):
            found.append(f"{what}: ragged_offset")
        if tensor.reordering_type is not None:
            found.append(f"{what}: reordering_type {getattr(tensor.reordering_type, 'name', tensor.reordering_type)}")
    return found


def _malformed(tensor: Any) -> Iterator[str]:
    """Yields what is malformed about a tensor: cudnn-frontend accepts anything and leaves checks to the backend."""
    if not isinstance(tensor.uid, int):
        yield "a uid is an integer"
    rank = None
    for what in ("dim", "stride"):
        numbers = getattr(tensor, what)
        try:
            sizes = [index(n) for n in (() if numbers is None else numbers)]
        except TypeError:
            yield f"its {what} {numbers!r} is no list of integers"
            return
        if rank and sizes and len(sizes) != rank:
            yield f"its {what} {sizes} has not as many numbers as its dim"
        rank = len(sizes)


def _set(value: Any) -> bool:
    return value is not None and value is not False


def _known(rule: Rule, port: str) -> bool:
    return port in rule.ports or any(p.endswith("*") and port.startswith(p[:-1]) for p in rule.ports)
