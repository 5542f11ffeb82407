"""Finds the first node of a graph whose kernel is wrong, or the first that makes a NaN or an infinity.

A graph's kernels run one by one (`engines.stepping`).  What each writes is compared with the reference on what that
kernel did read, not on what it should have read: errors do not add up along the graph, so bounds stay tight, and the
first result outside of its bound is the fault of the kernel that wrote it.  The nodes behind that result are then run
again by themselves with every intermediate kept, which tells the node.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fusegraph.engines import compile as compile_graph
from fusegraph.engines.base import Executable
from fusegraph.engines.reference import evaluate
from fusegraph.errors import FusegraphError, NotSupportedError, one_line
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.plan import Kernel
from fusegraph.report.bounds import Rounding, bounded
from fusegraph.report.check import LIBRARY_SLACK, OutputCheck, check_output, compare, laid_out, rounding_of, run
from fusegraph.report.eager import Eager
from fusegraph.report.finite import first_new, new_in
from fusegraph.report.parts import between, part
from fusegraph.report.walk import Overwritten, Walk, fixed_names

#: The values and the bounds of a graph's tensors, by name, from its inputs and from where its kernels round.
Judge = Callable[[Graph, Mapping[str, Array], Rounding], Mapping[str, tuple[Array, Array]]]


@dataclass(frozen=True)
class Finding:
    """The first thing that is wrong with a graph on an engine.

    kind     "differs", "not finite", "overwritten" (memory changed between the kernel that wrote it and one that reads
             it) or "raised".
    node     the user's node, its op, and the tensor that is wrong: its result, or a part of what it is made of.
    kernel   the name of the kernel that made it, its number from 1, its family, and all of its nodes.
    detail   what is wrong, in words.
    part     a small graph around the node, and ``inputs``, what it read; ``alone`` is whether that fails by itself.
    """

    kind: str
    node: str
    op: str
    tensor: str
    detail: str
    kernel: str = ""
    number: int = 0
    family: str = ""
    kernel_nodes: tuple[str, ...] = ()
    part: Graph | None = None
    inputs: Mapping[str, Array] = field(default_factory=dict)
    alone: bool = False


@dataclass(frozen=True)
class Setup:
    """How a graph is compiled: an engine, and the options of `fusegraph.compile` that change results."""

    engine: str = "cpu"
    strict: bool = False
    fusion: bool = True
    target: str | None = None

    def compile(self, graph: Graph, **changes: Any) -> Executable:
        chosen = {"strict": self.strict, "fusion": self.fusion, "target": self.target, **changes}
        return compile_graph(graph, chosen.pop("engine", self.engine), **chosen)

    def run(self, executable: Executable, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Returns the outputs by name; ``inputs`` may have other strides than the graph's."""
        return run(executable, {t.name: laid_out(inputs[t.name], t) for t in executable.graph.inputs})

    def wrong(
        self,
        graph: Graph,
        inputs: Mapping[str, Array],
        executable: Executable | None = None,
        outputs: Mapping[str, Array] | None = None,
    ) -> tuple[OutputCheck, ...]:
        """Returns the outputs outside of their bounds, in the graph's order; it may have been compiled, and run."""
        executable = executable or self.compile(graph)
        outputs = self.run(executable, inputs) if outputs is None else outputs
        found = compare(graph, inputs, outputs, rounding_of(executable, strict=self.strict))
        return tuple(check for check in found if not check.ok)

    def failure(self, graph: Graph, inputs: Mapping[str, Array]) -> str | None:
        """Returns what kind of failure a graph has: "differs", the name of an exception, None without one."""
        try:
            return "differs" if self.wrong(graph, inputs) else None
        except Exception as error:  # of a compiler's defect, of any type
            return type(error).__name__


# --- what results are compared with


def judge(against: str, setup: Setup) -> Judge:
    """Returns what gives values and bounds: "reference", "unfused", another engine, or "torch", op by op.

    The reference has none of its own errors; other engines compute the same values, so the bounds of both add up.  What
    these do not support is compared with the reference.
    """

    def reference(graph: Graph, inputs: Mapping[str, Array], rounding: Rounding) -> Mapping[str, tuple[Array, Array]]:
        return {t.name: both for t, both in bounded(graph, inputs, rounding).items()}

    def other(graph: Graph, inputs: Mapping[str, Array], rounding: Rounding) -> Mapping[str, tuple[Array, Array]]:
        try:
            outputs, theirs = _run_on(against, setup, graph, inputs)
        except NotSupportedError:
            return reference(graph, inputs, rounding)
        mine, other = bounded(graph, inputs, rounding), bounded(graph, inputs, theirs)
        slack = LIBRARY_SLACK if against == "torch" else 0.0
        found = {}
        for tensor in graph.outputs:
            value = to_reference(outputs[tensor.name], tensor.dtype)
            error = mine[tensor][1] + other[tensor][1]
            if tensor.dtype.is_float:
                finite = np.abs(np.where(np.isfinite(value), value, 0.0))
                error = error + slack * finite.max(initial=0.0) + 2 * tensor.dtype.unit_roundoff * finite
            found[tensor.name] = value, error
        return found

    return reference if against == "reference" else other


def _run_on(
    against: str, setup: Setup, graph: Graph, inputs: Mapping[str, Array]
) -> tuple[Mapping[str, Array], Rounding]:
    """Returns the outputs of a graph on another engine, and where that rounds."""
    if against == "torch":
        eager = Eager(graph)
        with eager.exact():
            return eager.arrays(eager(*eager.tensors(inputs))), eager.rounding
    changes: dict[str, Any] = {"fusion": False} if against == "unfused" else {"engine": against}
    executable = setup.compile(graph, **changes)
    return setup.run(executable, inputs), rounding_of(executable, strict=setup.strict)


# --- the search


def first_wrong(
    graph: Graph,
    inputs: Mapping[str, Array],
    setup: Setup,
    *,
    against: str = "reference",
    progress: Callable[[str], object] = lambda _: None,
) -> Finding | None:
    """Returns the first node whose kernel is wrong; None if every kernel is right.

    Raises NotSupportedError for engines that do not run kernels one by one, and what compiling the graph raises.
    """
    judged = judge(against, setup)

    def look(walk: Walk, kernel: Kernel, known: Mapping[str, Array]) -> Finding | None:
        for tensor in kernel.group.writes:
            for name in walk.origins.names(tensor)[:1]:
                behind, values = walk.behind(name, known)
                if not behind.nodes or name not in walk.values:
                    continue
                value, error = judged(behind, values, rounding_of(walk.executable, strict=setup.strict))[name]
                found = check_output(behind.tensors[name], walk.values[name], value, error)
                if not found.ok:
                    first = _first_outside(behind, values, setup) if behind.node_count > 1 else None
                    return _told(walk, setup, *(first or (name, told(found))), behind, "differs")
        return None

    def whole(walk: Walk) -> Finding | None:
        progress("comparing the outputs")
        return _wrong_output(walk, graph, inputs, setup)

    return _search(graph, inputs, setup, look, progress, whole if against == "reference" else None)


def _wrong_output(walk: Walk, graph: Graph, inputs: Mapping[str, Array], setup: Setup) -> Finding | None:
    """Returns the first output that is wrong though every kernel is right, as it is of what composites are made of."""
    outputs = {t.name: walk.values[t.name] for t in graph.outputs if t.name in walk.values}
    wrong = setup.wrong(graph, inputs, walk.executable, outputs if len(outputs) == len(graph.outputs) else None)
    if not wrong:
        return None
    node = graph.producer(graph.tensors[wrong[0].name])
    assert node is not None
    detail = f"{told(wrong[0])}; every kernel is right by itself, so a pass or the definition of a composite is not"
    return Finding("differs", node.name, node.op.name, wrong[0].name, detail, part=graph, inputs=inputs, alone=True)


def first_not_finite(
    graph: Graph, inputs: Mapping[str, Array], setup: Setup, *, progress: Callable[[str], object] = lambda _: None
) -> Finding | None:
    """Returns the first node that makes a NaN of none, or an infinity of finite numbers; None if there is no such.

    Raises as `first_wrong` does.
    """

    def look(walk: Walk, kernel: Kernel, known: Mapping[str, Array]) -> Finding | None:
        for tensor in kernel.group.writes:
            for name in walk.origins.names(tensor)[:1]:
                value = walk.values.get(name)
                if value is None or not new_in(value, known.values()):
                    continue
                behind, values = walk.behind(name, known)
                with contextlib.suppress(FusegraphError):  # parts of composites need not compile by themselves
                    values = {**values, **setup.run(setup.compile(behind), values)}
                if (first := first_new(behind, {name: value, **values})) is not None:
                    return _told(walk, setup, *first, behind, "not finite")
        return None

    return _search(graph, inputs, setup, look, progress)


def _search(
    graph: Graph,
    inputs: Mapping[str, Array],
    setup: Setup,
    look: Callable[[Walk, Kernel, Mapping[str, Array]], Finding | None],
    progress: Callable[[str], object],
    whole: Callable[[Walk], Finding | None] | None = None,
) -> Finding | None:
    """Runs the kernels one by one until ``look`` finds something in what one of them wrote; at last ``whole`` looks."""
    with fixed_names(graph):
        progress("building")
        walk = Walk(setup.compile(graph), graph, inputs)
        found = _walked(walk, look, progress)
    return whole(walk) if found is None and whole is not None else found


def _walked(
    walk: Walk, look: Callable[[Walk, Kernel, Mapping[str, Array]], Finding | None], progress: Callable[[str], object]
) -> Finding | None:
    assert walk.executable.plan is not None
    count, kernels = len(walk.executable.plan.every_kernel), walk.kernels()
    for number in itertools.count(1):
        progress(f"kernel {number} of {count}")
        try:
            kernel, known = next(kernels)
        except StopIteration:
            break
        except Overwritten as error:
            return _of_kernel(_overwritten(walk, error.tensor), walk)
        except FusegraphError as error:
            if walk.kernel is None:
                raise
            last = walk.kernel.group.nodes[-1]
            return _of_kernel(Finding("raised", last.name, last.op.name, last.name, one_line(error)), walk)
        if (found := look(walk, kernel, known)) is not None:
            return _of_kernel(found, walk)
    return None


def _overwritten(walk: Walk, tensor: Tensor) -> Finding:
    name = next(iter(walk.origins.names(tensor)), tensor.name)
    node = walk.origins.user_node(name) if name in walk.origins.written_out.tensors else None
    said = (node.name, node.op.name) if node is not None else (name, "")
    return Finding("overwritten", *said, name, "its memory changed before this kernel read it")


def _of_kernel(finding: Finding, walk: Walk) -> Finding:
    """Returns a finding with the kernel that ran last."""
    kernel = walk.kernel
    assert kernel is not None
    nodes = tuple(n.name for n in kernel.group.nodes)
    return replace(finding, kernel=kernel.name, number=walk.number + 1, family=kernel.group.family, kernel_nodes=nodes)


def _told(walk: Walk, setup: Setup, name: str, detail: str, behind: Graph, kind: str) -> Finding:
    """Returns the finding for a wrong tensor; ``behind`` are the nodes that the kernel's result follows from."""
    user = walk.origins.user_node(name)
    users = list(dict.fromkeys(walk.origins.user_node(n.name) for n in behind.nodes))
    cut, given, alone = _failing(walk, setup, user, users, kind)
    return Finding(kind, user.name, user.op.name, name, detail, part=cut, inputs=given, alone=alone)


def _failing(
    walk: Walk, setup: Setup, node: Node, users: Sequence[Node], kind: str
) -> tuple[Graph, dict[str, Array], bool]:
    """Returns the least of some graphs around a node that fails, its inputs, and whether it does.

    Tried are the node alone, the nodes of its kernel that its result follows from, and all that it follows from.
    """
    graph = walk.origins.graph
    fails = _makes_new if kind == "not finite" else lambda made, given, on: on.failure(made, given) == kind
    cases = []
    for nodes in ([node], users, between(graph, node.outputs, ())):
        made = part(graph, nodes, [t.name for t in node.outputs])
        given = {t.name: _value_of(walk, t) for t in made.inputs}
        if fails(made, given, setup):
            return made, given, True
        cases.append((made, given, False))
    return cases[1]


def _value_of(walk: Walk, tensor: Tensor) -> Array:
    """Returns what a tensor was in memory; one that no kernel wrote is computed of what was."""
    if tensor.name in walk.values:
        return walk.values[tensor.name]
    graph = walk.origins.graph
    made = part(graph, between(graph, [graph.tensors[tensor.name]], walk.values), (tensor.name,))
    values = evaluate(made, {t.name: walk.values[t.name] for t in made.inputs})
    return from_reference(values[made.tensors[tensor.name]], tensor.dtype)


def _first_outside(graph: Graph, inputs: Mapping[str, Array], setup: Setup) -> tuple[str, str] | None:
    """Returns the first node whose result is outside of its bound when all are kept; None if none is.

    Nodes that change by being kept are looked for by halving: the shortest beginning whose last result is wrong.
    """

    def wrong(of: Graph) -> tuple[str, str] | None:
        found = next(iter(setup.wrong(of, {t.name: inputs[t.name] for t in of.inputs})), None)
        return (found.name, told(found)) if found is not None else None

    try:
        if (kept := wrong(graph)) is not None:
            return kept
        nodes, last = graph.nodes, None
        low, high = 0, len(nodes) - 1
        while low <= high:
            middle = (low + high) // 2
            target = nodes[middle].output
            found = wrong(part(graph, between(graph, [target], ()), (target.name,)))
            last, low, high = (found, low, middle - 1) if found else (last, middle + 1, high)
        return last
    except FusegraphError:  # parts of composites need not compile by themselves
        return None


def told(check: OutputCheck) -> str:
    """Returns what is wrong with a result, in words."""
    return f"{check.wrong} elements are outside of their bound, one {check.worst}"


def _makes_new(graph: Graph, inputs: Mapping[str, Array], setup: Setup) -> bool:
    """Tells whether a graph's outputs have a NaN or infinity that its inputs have not."""
    try:
        outputs = setup.run(setup.compile(graph), inputs)
    except FusegraphError:
        return False
    return any(new_in(x, inputs.values()) for x in outputs.values())


def check_engine(engine: str) -> None:
    """Raises NotSupportedError for engines whose kernels do not run one by one."""
    if engine not in ("cpu", "cuda"):
        raise NotSupportedError(f"engine {engine!r} does not run kernels one by one; give cpu or cuda")
