"""If, Loop and Scan: only the branch that is taken is written, and loop bodies are written once per iteration.

A graph has no control flow, so conditions and numbers of iterations must be known while it is built.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call
from fusegraph.graph import Tensor
from fusegraph.ops.reduction import normal_axes

if TYPE_CHECKING:
    from onnx import GraphProto

#: A function that writes a body, given its inputs, and returns its outputs.
Body = Callable[["GraphProto", Sequence[Tensor]], list[Tensor]]


def if_(call: Call, body: Body, condition: Tensor) -> list[Tensor]:
    return body(call["then_branch" if call.number(condition, "its condition") else "else_branch"], [])


def loop(call: Call, body: Body, count: Tensor | None = None, condition: Tensor | None = None, *values: Tensor) -> Any:
    """Writes the body while the condition holds and at most ``count`` times; either may be left out."""
    graph = call.graph
    iterations = "the number of iterations"
    most = None if count is None else int(call.fixed(call.number(count, iterations), iterations))
    goes_on = condition is None or bool(call.number(condition, "its condition"))
    if most is None and condition is None:
        raise ModelError("it has neither a number of iterations nor a condition")
    states, done = list(values), 0
    collected: list[list[Tensor]] = [[] for _ in call["body"].output[1 + len(values) :]]
    while goes_on and (most is None or done < most):
        first = graph.constant(np.int64(done)), graph.constant(True)
        results = body(call["body"], [*first, *states])
        states = results[1 : 1 + len(states)]
        for parts, result in zip(collected, results[1 + len(states) :]):
            parts.append(graph.unsqueeze(result, 0))
        goes_on = condition is None or bool(call.number(results[0], "the condition of the next iteration"))
        done += 1
    if not done and collected:
        raise call.refuse("results of no iteration")
    return [*states, *(graph.concatenate(*parts, axis=0) for parts in collected)]


def scan(call: Call, body: Body, *inputs: Tensor) -> list[Tensor]:
    """Writes the body for each element of the scanned inputs along an axis, and joins its results along another."""
    return _batched(call, body, *inputs) if call.version < 9 else _scanned(call, body, *inputs)


def _batched(call: Call, body: Body, lengths: Tensor | None, *inputs: Tensor) -> list[Tensor]:
    """Scans as before version 9: each sample of a batch by itself, with a length of its own."""
    graph = call.graph
    batches = {x.shape[0] if x.rank else 0 for x in inputs}
    steps = {x.shape[1] if x.rank > 1 else 0 for x in inputs[-call["num_scan_inputs"] :]}
    if len(batches) != 1 or len(steps) != 1 or not min(batches) or not min(steps):
        raise ModelError("its inputs have no batch of one size, or its sequences not one length")
    batch, length = (call.fixed(n, what) for (n,), what in ((batches, "the batch"), (steps, "the length")))
    counts = [length] * batch if lengths is None else call.integers(lengths, "the lengths of sequences")
    if len(counts) != batch or not all(1 <= n <= length for n in counts):
        raise ModelError(f"lengths {counts[:8]} are not {batch} numbers from 1 to {length}")
    samples = []
    for number, count in enumerate(counts):
        own = [x[number] for x in inputs]
        first = len(own) - call["num_scan_inputs"]
        results = _scanned(call, body, *own[:first], *(x[:count] for x in own[first:]))
        padded = (graph.pad(x, [(0, length - count)] + [(0, 0)] * (x.rank - 1)) for x in results[first:])
        samples.append([*results[:first], *padded])
    return [graph.concatenate(*(graph.unsqueeze(x, 0) for x in every), axis=0) for every in zip(*samples)]


def _scanned(call: Call, body: Body, *inputs: Tensor) -> list[Tensor]:
    graph, scanned = call.graph, call["num_scan_inputs"]
    if not 1 <= scanned <= len(inputs):
        raise ModelError(f"num_scan_inputs is {scanned}, there are {len(inputs)} inputs")
    states, sequences = list(inputs[:-scanned]), inputs[-scanned:]
    results = len(call["body"].output) - len(states)
    axes = _each(call, "scan_input_axes", scanned)
    backwards = _each(call, "directions" if call.version < 9 else "scan_input_directions", scanned)
    into, turned = (_each(call, f"scan_output_{name}", results) for name in ("axes", "directions"))
    along = [normal_axes(axis, x.rank)[0] for axis, x in zip(axes, sequences)]
    lengths = {x.shape[axis] for axis, x in zip(along, sequences)}
    if len(lengths) > 1:
        raise ModelError(f"its sequences have lengths {sorted(lengths)}")
    length = call.fixed(lengths.pop(), "the length of sequences")
    if not length:
        raise call.refuse("sequences of no elements")
    collected: list[list[Tensor]] = [[] for _ in range(results)]
    for n in range(length):
        places = [length - 1 - n if back else n for back in backwards]
        parts = [x[(slice(None),) * axis + (at,)] for x, axis, at in zip(sequences, along, places)]
        found = body(call["body"], [*states, *parts])
        states = found[: len(states)]
        for every, axis, part in zip(collected, into, found[len(states) :]):
            every.append(graph.unsqueeze(part, axis))
    joined = [list(reversed(every)) if back else every for every, back in zip(collected, turned)]
    return [*states, *(graph.concatenate(*every, axis=axis) for every, axis in zip(joined, into))]


def _each(call: Call, name: str, count: int) -> list[int]:
    """Returns an attribute with one number for each of ``count`` sequences, by default 0.  Raises ModelError."""
    values = call[name] or [0] * count
    if len(values) != count:
        raise ModelError(f"{name} has {count} numbers, got {len(values)}")
    return list(values)


CONTROL: dict[str, Callable[..., list[Tensor]]] = {"If": if_, "Loop": loop, "Scan": scan}
