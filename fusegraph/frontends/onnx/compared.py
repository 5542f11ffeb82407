"""Whether a graph is the ONNX model that it was read from, which onnxruntime or ONNX's evaluator runs beside it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx

from fusegraph.frontends.onnx.importer import valid_name
from fusegraph.graph import Graph
from fusegraph.ops.base import Array
from fusegraph.report.bounds import Rounding, bounded
from fusegraph.report.check import LIBRARY_SLACK, check_output
from fusegraph.report.debug import Finding, told
from fusegraph.report.parts import between, part

#: How far evaluators may be off beside their rounding of results, relative to the largest element: they compute in the
#: model's own types, norms of 16-bit floats too.
UNITS = 16


def model_values(path: str, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], str]:
    """Returns the values of all results of a model's nodes, by the names of tensors, and what computed them.

    ``inputs`` are by the names of tensors, too.
    """
    model = onnx.load(path)
    there = {output.name for output in model.graph.output}
    names = [name for node in model.graph.node for name in node.output if name and name not in there]
    model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    tensor_of = {i.name: valid_name(i.name) for i in model.graph.input}
    given = {name: np.asarray(inputs[tensor]) for name, tensor in tensor_of.items() if tensor in inputs}
    try:
        import onnxruntime
    except ImportError:
        from onnx.reference import ReferenceEvaluator

        evaluator: Any = ReferenceEvaluator(model)
        by, results = "onnx.reference", evaluator.run(None, given)
    else:
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        by, results = "onnxruntime", session.run(None, given)
    tensors = [valid_name(output.name) for output in model.graph.output]
    counts = Counter(tensors)
    found = {name: value for name, value in zip(tensors, results) if counts[name] == 1}
    return {name: value for name, value in found.items() if isinstance(value, np.ndarray)}, by


def first_unlike(graph: Graph, inputs: Mapping[str, Array], values: Mapping[str, Array], by: str) -> Finding | None:
    """Returns the first tensor that is not what its model says; None if all that have the model's names are.

    ``values`` are those of the model.  Each tensor is computed of those that the model gave for what it follows from.
    """
    known = dict(inputs)
    names = frozenset(graph.tensors)
    for node in graph.nodes:
        tensor, value = node.output, values.get(node.name)
        if value is None or value.shape != tensor.shape or value.dtype != tensor.dtype.numpy:
            continue
        behind = part(graph, between(graph, [tensor], known), (tensor.name,))
        given = {t.name: known[t.name] for t in behind.inputs}
        rounding = Rounding(approximate=names, strict=True)
        ours, error = bounded(behind, given, rounding)[behind.tensors[tensor.name]]
        if tensor.dtype.is_float:
            slack = max(LIBRARY_SLACK, UNITS * tensor.dtype.unit_roundoff)
            error = error + slack * np.abs(np.where(np.isfinite(ours), ours, 0.0)).max(initial=0.0)
        found = check_output(tensor, value, ours, error)
        if not found.ok:
            detail = f"{by} differs from the graph: {told(found)}"
            return Finding("differs", node.name, node.op.name, tensor.name, detail, part=behind, inputs=given)
        known[tensor.name] = value
    return None
