"""Checks a compiled graph on random inputs against the reference, element by element within a proven bound."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np

from codegen import coarse_products
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.arguments import as_bytes, as_values
from fusegraph.engines.base import Executable
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.errors import ArgumentError
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.attention_prologue import prologues_of
from fusegraph.ops.base import Array, Kind
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.plan import Plan
from fusegraph.report.bounds import Rounding, accepts, bounded
from fusegraph.report.drawing import table
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import Device, DeviceArray, to_device, to_numpy
from fusegraph.runtime.memory import check_room
from fusegraph.runtime.strides import empty_numpy

#: `compare`'s slack for libraries.  The bounds are proven for fusegraph's own formulas.  Others may lose all digits of
#: an element close to 0, as x / 2 * (1 + erf(x / sqrt(2))) does for negative x, though the error is small relative to
#: the largest element.
LIBRARY_SLACK = 2.0**-20


@dataclass(frozen=True)
class OutputCheck:
    """One output compared with the reference.

    max_abs_error  the largest absolute difference of finite values.
    rel_error      the norm of the difference over the norm of the reference, for finite values.
    undecided      how many elements have an infinite bound (overflow, a discontinuity that rounding may cross), so that
                   any value passes.
    wrong          how many elements are outside their bound; worst describes the first of them.
    """

    name: str
    max_abs_error: float
    rel_error: float
    undecided: int
    wrong: int
    worst: str = ""

    @property
    def ok(self) -> bool:
        return self.wrong == 0


@dataclass(frozen=True)
class CheckResult:
    """A graph on an engine compared with the reference; note tells of results that depend on the order of threads."""

    graph: str
    engine: str
    outputs: tuple[OutputCheck, ...]
    note: str = ""

    @property
    def ok(self) -> bool:
        return not self.note and all(o.ok for o in self.outputs)

    def __str__(self) -> str:
        parts = [f"{o.name}: {o.wrong} wrong, {o.worst}" for o in self.outputs if not o.ok]
        return f"graph {self.graph!r} on {self.engine}: " + ("; ".join([*parts, self.note]) if not self.ok else "ok")

    def _repr_html_(self) -> str:
        headings = ("output", "max abs error", "rel error", "wrong", "undecided")
        rows = [
            (o.name, f"{o.max_abs_error:.3g}", f"{o.rel_error:.3g}", str(o.wrong), str(o.undecided))
            for o in self.outputs
        ]
        return f"<p>{escape(str(self))}</p>{table(headings, rows)}"


def random_inputs(graph: Graph, seed: int = 0, *, special: float = 0.0) -> dict[str, Array]:
    """Returns arrays for a graph's inputs, by name, with the inputs' strides.

    Floats are standard normal, integers are at most 9 in size, bools are true with probability 1/2.  ``special`` is the
    share of float elements that are replaced by NaN, infinities, zeros of both signs, +-1 and the dtype's extremes.
    Raises OutOfMemoryError for an input larger than the host's memory.
    """
    rng = np.random.default_rng(seed)
    for t in graph.inputs:
        check_room(8 * t.size, f"input {t.name!r} of graph {graph.name!r}, of float64 random numbers {list(t.shape)},")
    return {t.name: laid_out(random_values(rng, t, special), t) for t in graph.inputs}


def random_values(rng: np.random.Generator, tensor: Tensor, special: float = 0.0) -> Array:
    """Returns random values of a tensor's shape and dtype, as `random_inputs` makes them."""
    dtype = tensor.dtype
    if dtype.is_bool:
        return rng.random(tensor.shape) < 0.5
    if dtype.is_int:
        low, high = max(int(dtype.min), -9), min(int(dtype.max), 9)
        return rng.integers(low, high + 1, tensor.shape).astype(dtype.numpy)
    values = rng.standard_normal(tensor.shape)
    if special:
        specials = [0.0, -0.0, 1.0, -1.0, float(dtype.max), float(dtype.min), np.nan, np.inf, -np.inf]
        chosen = rng.choice(np.array(specials), tensor.shape)
        values = np.where(rng.random(tensor.shape) < special, chosen, values)
    return from_reference(values, dtype)


def laid_out(values: Array, tensor: Tensor) -> Array:
    """Returns a copy of the values with a tensor's strides; elements that share memory (stride 0) have one value."""
    base = np.zeros(max(extent(tensor.shape, tensor.strides), 1), tensor.dtype.numpy)
    steps = tuple(s * tensor.dtype.itemsize for s in tensor.strides)
    array = np.ndarray(tensor.shape, tensor.dtype.numpy, base, strides=steps)
    array[...] = values
    return array


#: Composite -> those of its parts that are operands of products and that cuDNN rounds as fusegraph's kernels do.
_OPERANDS = {"sdpa": ("rounded",), "sdpa_fp8": ("rounded",), "sdpa_backward": ("rounded", "rounded by products")}
#: Composite -> those of its parts that are sums of fp8 products.
_SUMS = {"sdpa_fp8": ("products", "attended")}


def rounding_of(executable: Executable, *, strict: bool = False) -> Rounding:
    """Returns where an Executable's kernels round, for the error analysis."""
    plan = executable.plan
    if plan is None:
        return Rounding(strict=strict)
    # A group without a program of fusegraph's (one that cuDNN runs) may use approximate instructions anywhere.
    kernels = [g for g in plan.partition.groups if g.family != "view"]
    programs = [(g, getattr(g.lowered.spec, "program", None)) for g in kernels]
    approximate = {
        t
        for g, program in programs
        if program is None or program.approximate or getattr(g.lowered.spec, "approximate", False)
        for n in g.nodes
        for t in n.outputs
    }
    ours, foreign = [n for g in kernels for n in g.nodes], [n for g, own in programs if own is None for n in g.nodes]
    coarse = {n.output: 0 for n in foreign if _is_fp8(n)}
    for kernel in plan.kernels:
        spec, schedule = kernel.group.lowered.spec, kernel.choice.schedule
        if (most := coarse_products(spec, schedule)) is not None:
            summing = [n for n in kernel.group.nodes if n.kind in (Kind.ATTENTION, Kind.CONTRACTION)]
            coarse |= {n.outputs[0]: most for n in summing}
    # The prologue of a contraction is rounded to the dtype of the operand that it makes, as if it were stored.
    operands = {t for g in plan.partition.groups for n in g.nodes if n.kind is Kind.CONTRACTION for t in n.inputs}
    stored = plan.partition.materialized | operands

    every = [(old, (new, *plan.copies.get(new, ()))) for old, new in plan.counterparts.items()]

    def parts_of(whole: str) -> Iterator[str]:
        for name in plan.joined.get(whole, ()):
            yield from plan.namesakes.get(name, (name,))

    def names(chosen: Collection[Tensor]) -> frozenset[str]:
        """Returns the names of the graph's tensors whose counterpart in the plan, a copy of it, or the whole that it is
        a part of is in ``chosen``.
        """
        wanted = {t.name for t in chosen}  # of a plan for a range of sizes, nodes have the tensors of another size
        parts = {name for whole in wanted for name in parts_of(whole)}
        return frozenset(old.name for old, all_ in every if any(t.name in wanted for t in all_)) | parts

    constants = frozenset(old.name for old, new in plan.counterparts.items() if new.is_constant)
    sums = {old.name: coarse[t] for old, all_ in every for t in all_ if t in coarse}
    sums |= {name: most for t, most in coarse.items() for name in parts_of(t.name)}
    tiles = {
        name: a.tile for n, a in plan.algorithms.items() if a.tile is not None for name in plan.namesakes.get(n, (n,))
    }
    sums |= dict.fromkeys(_parts(plan, foreign, _SUMS), 0)
    narrowed = frozenset(_narrowed(plan, ours, foreign))
    narrowed |= {name for x in plan.unscaled for name in plan.namesakes.get(x, (x,))}
    # The prologue of attention is rounded as if it were stored.
    prologues = [f.name for n in ours if n.kind is Kind.ATTENTION for f in prologues_of(n) if f is not None]
    kept = names(stored) | constants | {name for f in prologues for name in plan.namesakes.get(f, (f,))}
    return Rounding(kept, names(approximate), strict, sums, tiles, narrowed)


def _narrowed(plan: Plan, nodes: Iterable[Node], foreign: Iterable[Node]) -> Iterator[str]:
    """Yields the names of operands that attention rounds: in ``nodes`` of generated kernels, and ``foreign`` ones."""
    found: list[str] = []
    for node in nodes:
        if node.kind is Kind.ATTENTION and node.attributes["rounded"]:
            found.append(node.attributes["probabilities"])
        elif node.kind is Kind.ATTENTION_BACKWARD:
            found += node.attributes["rounded"]
    for name in found:
        yield from plan.namesakes.get(name, (name,))
    yield from _parts(plan, foreign, _OPERANDS)


def _parts(plan: Plan, nodes: Iterable[Node], of: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    """Yields the names of those parts of composites that ``of`` lists by op name."""
    for node in nodes:
        for name in plan.namesakes.get(node.name, (node.name,)):
            yield from (f"{name} {part}" for part in of.get(node.op.name, ()))


def _is_fp8(node: Node) -> bool:
    """Tells whether a node sums up products of fp8."""
    return node.kind is Kind.CONTRACTION and all(t.dtype.is_float and t.dtype.itemsize == 1 for t in node.inputs)


def compare(
    graph: Graph, inputs: Mapping[str, Array], outputs: Mapping[str, Array], rounding: Rounding, *, slack: float = 0.0
) -> tuple[OutputCheck, ...]:
    """Compares outputs, by name and as stored, with the reference.

    ``slack`` is how far an element of a float output may be beyond its bound, relative to the output's largest element.
    """
    values = bounded(graph, inputs, rounding)
    return tuple(check_output(t, outputs[t.name], values[t][0], _widened(t, *values[t], slack)) for t in graph.outputs)


def _widened(tensor: Tensor, value: Array, error: Array, slack: float) -> Array:
    if not slack or not tensor.dtype.is_float:
        return error
    largest = np.abs(np.where(np.isfinite(value), value, 0.0)).max(initial=0.0)
    return np.asarray(error + slack * float(largest))


def check_output(tensor: Tensor, actual: Array, value: Array, error: Array) -> OutputCheck:
    """Compares a result, as stored, with a reference value and the bound on the error."""
    good = accepts(tensor.dtype, actual, value, error)
    seen = to_reference(actual, tensor.dtype).astype(np.float64)
    wanted = np.asarray(value, np.float64)
    finite = np.isfinite(seen) & np.isfinite(wanted)
    with np.errstate(all="ignore"):
        difference = np.where(finite, seen - wanted, 0.0)
        norm = float(np.linalg.norm(np.where(finite, wanted, 0.0).reshape(-1)))
        length = float(np.linalg.norm(difference.reshape(-1)))
    worst = ""
    if not good.all():
        place = tuple(int(k) for k in np.argwhere(~good)[0])
        bound = np.broadcast_to(error, seen.shape)[place]
        worst = f"at {list(place)} got {seen[place]!r}, reference {wanted[place]!r}, bound {bound:.3g}"
    return OutputCheck(
        tensor.name,
        float(np.abs(difference).max(initial=0.0)),
        length / norm if norm else length,
        int(np.isinf(np.broadcast_to(error, seen.shape)).sum()),
        int((~good).sum()),
        worst,
    )


def placed(array: Any, device: Device) -> Any:
    """Returns an array on a device.  A NumPy array is copied to a GPU with its strides, gaps included."""
    if not device.is_cuda:
        return array
    if not isinstance(array, np.ndarray) or any(s < 0 or s % array.itemsize for s in array.strides):
        return to_device(array, device.index)
    strides = tuple(s // array.itemsize for s in array.strides)
    result = DeviceArray.empty(array.shape, array.dtype, strides=strides, device=device.index)
    driver.copy_to_device(
        result.pointer, array.ctypes.data, extent(array.shape, strides) * array.itemsize, device.index
    )
    return result


def run(executable: Executable, inputs: Mapping[str, Array]) -> dict[str, Array]:
    """Runs an Executable and returns its outputs by name as NumPy arrays, new values of inputs among them.

    Inputs are copied to its device if necessary, and always if the graph assigns to them.  On the cpu engine the
    outputs' memory is filled with 0xff (NaN in every float dtype) beforehand, so that it cannot hold the results of an
    earlier run.
    """
    graph = executable.graph
    arrays = operands(graph, inputs, executable.device)
    out = [_untouched(t) for t in graph.made] if executable.engine == "cpu" else None
    results = executable(*arrays, out=out)
    found = dict(zip(graph.results, results if isinstance(results, tuple) else (results,)))
    found |= {new: arrays[graph.input_numbers[x]] for new, x in graph.updates.items()}
    return {t.name: as_values(t, to_numpy(found[t])) for t in graph.outputs}


def operands(graph: Graph, inputs: Mapping[str, Array], device: Device) -> list[Any]:
    """Returns the arrays of a call on a device, in order; those that the graph assigns to are copies."""
    written = graph.updates.values()
    given = {t: as_bytes(t, inputs[t.name]) for t in graph.inputs}
    copies = {t: laid_out(x, t) if t in written and not device.is_cuda else x for t, x in given.items()}
    return [placed(x, device) for x in copies.values()]


def _untouched(tensor: Tensor) -> Array:
    """Returns an array for an output in which all bits of every element are set."""
    if tensor.dtype.is_packed:
        return np.full(tensor.dtype.nbytes(extent(tensor.shape, tensor.strides)), 0xFF, np.uint8)
    array = empty_numpy(tensor.shape, tensor.strides, tensor.dtype.numpy)
    array[...] = True if tensor.dtype.is_bool else np.frombuffer(b"\xff" * tensor.dtype.itemsize, tensor.dtype.numpy)[0]
    return array


def check_executable(
    executable: Executable,
    inputs: Mapping[str, Array] | None = None,
    *,
    outputs: Mapping[str, Array] | None = None,
    seed: int = 0,
    strict: bool = False,
) -> CheckResult:
    """Checks an Executable against the reference on inputs, by name (default: random ones).

    ``outputs``, by name, are the results of an earlier call on these inputs, which is then not repeated.  On the cpu
    engine the kernels run twice (the earlier call counts), their threads in opposite orders, and must give the same
    bits.  Raises ArgumentError for outputs without inputs.
    """
    graph = executable.graph
    if outputs is not None and inputs is None:
        raise ArgumentError("outputs without the inputs that they were computed from")
    given = dict(inputs) if inputs is not None else random_inputs(graph, seed)
    outputs = run(executable, given) if outputs is None else outputs
    note = ""
    if isinstance(executable, CpuExecutable):
        before = executable.order
        executable.order = "forward" if before == "reverse" else "reverse"
        try:
            again = run(executable, given)
        finally:
            executable.order = before
        for name, array in outputs.items():
            if array.tobytes() != again[name].tobytes():
                note = f"output {name!r} depends on the order of threads: a barrier is missing"
    slack = LIBRARY_SLACK if executable.engine == "cudnn" else 0.0
    checks = compare(graph, given, outputs, rounding_of(executable, strict=strict), slack=slack)
    return CheckResult(graph.name, executable.engine, checks, note)


def check(
    graph: Graph,
    engine: str | None = "cpu",
    inputs: Mapping[str, Array] | None = None,
    *,
    seed: int = 0,
    **options: Any,
) -> CheckResult:
    """Compiles a graph, runs it on inputs (default: random ones) and compares it with the reference.

    ``options`` are those of `fusegraph.compile`.  The result's `ok` tells whether every element is within its bound.
    """
    executable = compile_graph(graph, engine, **options)
    return check_executable(executable, inputs, seed=seed, strict=bool(options.get("strict")))
