"""Plans on disk: a graph that was planned once is not planned again, by whatever process.

An entry holds the pickled plan under a key of all that it depends on: the graph as it was given, the options, how
schedules are chosen, and the sources of fusegraph and codegen.  What is the caller's own graph in a plan is not written
but found again by name; where passes have put its tensors is.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import codegen
from codegen.size_expressions import expression
from codegen.sizes import Bounds, Size
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import Options
from fusegraph.ops.base import EVERY, Op
from fusegraph.passes.pipeline import Steps
from fusegraph.phases import phase
from fusegraph.plan import Chooser, Plan, by_cost_model, plan
from fusegraph.ranges import SizedPlan, plan_ranges
from fusegraph.runtime.cache import DiskCache, digest

#: The largest entry, in bytes; a plan with larger constants of its own is made anew.
MOST_BYTES = 16 * 10**6
FORMAT = "3"
#: What an entry may raise that another release of numpy wrote, say.
_UNREADABLE = (pickle.UnpicklingError, AttributeError, ImportError, LookupError, TypeError, ValueError, EOFError)

#: Makes the plan of a graph with options.
Planner = Callable[[Graph, Options], Plan]


def planner(
    fusion: bool,
    choose: Chooser | None,
    cache: DiskCache | None = None,
    chosen: str = "",
    then: Callable[[Plan], None] = lambda _: None,
) -> Planner:
    """Returns what plans a graph, or takes its plan from a cache.

    ``chosen`` says how ``choose`` chooses schedules, and what its choices depend on beside the kernels.  ``then`` gets
    a plan before it is written to the cache.
    """
    if cache is None:
        return lambda graph, options: plan(graph, options, fusion=fusion, choose=choose)

    def planned(graph: Graph, options: Options) -> Plan:
        with phase("cache of plans"):
            key = graph_key(graph, options, fusion, chosen)
            found = _loaded(cache.get(key), graph) if key is not None else None
            if found is not None:
                return found
            found = plan(graph, options, fusion=fusion, choose=choose)
            then(found)
            if key is not None and (entry := _dumped(found, graph)) is not None:
                cache.put(key, entry)
            return found

    return planned


def sized_planner(
    fusion: bool, choose: Chooser | None, cache: DiskCache, chosen: str = ""
) -> Callable[[Graph, Options], SizedPlan]:
    """Returns what plans a graph for all sizes, or takes its plans from a cache; ``chosen`` as for `planner`."""

    def planned(graph: Graph, options: Options) -> SizedPlan:
        with phase("cache of plans"):
            key = graph_key(graph, options, fusion, chosen, "sized")
            entry = cache.get(key) if key is not None else None
            if entry is not None and (found := _sized(entry, graph, options, choose)) is not None:
                return found
            made = plan_ranges(graph, options, fusion=fusion, choose=choose)
            written = _pickled(_finals(made), graph)
            if key is not None and written is not None and len(written) <= MOST_BYTES:
                cache.put(key, written)
            return made

    return planned


def _finals(made: SizedPlan) -> SizedPlan:
    """Returns plans of all sizes without functions."""
    plans = [replace(p, steps=_ended(p.steps), packing=p.packing and _final(p.packing)) for p in made.plans]
    aligned = [(units, _finals(other)) for units, other in made.aligned]
    return replace(made, plans=plans, aligned=aligned, choose=None)  # type: ignore[arg-type]


def _sized(entry: bytes, graph: Graph, options: Options, choose: Chooser | None) -> SizedPlan | None:
    """Returns the plans of an entry; None if it cannot be read here."""
    try:
        found = _Unpickler(io.BytesIO(entry), graph).load()
    except _UNREADABLE:
        return None
    assert isinstance(found, SizedPlan)
    for each in (found, *(other for _, other in found.aligned)):
        each.choose = choose or by_cost_model(options.target)
    return found


@functools.cache
def _sources() -> str:
    """Returns a digest of the modules that plans come from, and of the device library."""
    parts: list[str | bytes] = []
    for folder in (Path(__file__).parents[1], Path(codegen.__file__).parent):
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.cuh")]):
            parts += [file.relative_to(folder).as_posix(), file.read_bytes()]
    return digest(*parts)


def graph_key(graph: Graph, options: Options, *more: object) -> str | None:
    """Returns the key of what follows from a graph, options, the sources and ``more``.

    None is for a graph that holds what cannot be written down.
    """
    settings = (options, *more, sys.version_info[:2])
    written = _pickled((described(graph), settings), None)
    return None if written is None else digest("plan", FORMAT, _sources(), written)


def described(graph: Graph) -> tuple[Any, ...]:
    """Returns all that a graph is, for comparisons with others."""
    tensors = [
        (
            t.name,
            t.shape,
            t.own_strides or t.strides,
            t.dtype.name,
            None if t.value is None else t.value.tobytes(),
            t in graph._automatic,
            t in graph.parameters,
            t in graph.donated,
        )
        for t in graph.tensors.values()
    ]
    nodes = [
        (n.op, [t.name for t in n.inputs], dict(n.attributes), [t.name for t in n.outputs], n.name) for n in graph.nodes
    ]
    several = (graph.inputs, graph.outputs, graph.updates, graph.updates.values(), graph.losses)
    ends = [[t.name for t in ends] for ends in several]
    return tensors, nodes, ends, (graph.name, graph.io_dtype.name, graph.compute_dtype.name)


class _Pickler(pickle.Pickler):
    """Writes what plans are made of; the tensors and nodes of a graph are written as their names."""

    def __init__(self, file: io.BytesIO, graph: Graph | None) -> None:
        super().__init__(file, protocol=5)
        self._graph = graph

    def reducer_override(self, found: Any) -> Any:
        graph = self._graph
        if graph is not None:
            if found is graph:
                return _graph, ()
            if type(found) is Tensor and graph.tensors.get(name := found.name) is found:
                return _tensor, (name,)
            if type(found) is Node and graph.producer(made := found.output) is found:
                return _node, (made.name,)
        if isinstance(found, Size):
            return _size, (int(found), found.written, tuple((n, tuple(b)) for n, b in found.dims.items()))
        if isinstance(found, MappingProxyType):
            return _mapping, (dict(found),)
        if isinstance(found, Op) and EVERY.get(found.name) is found:
            return _op, (found.name,)
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, graph: Graph) -> None:
        super().__init__(file)
        self._of_graph = {
            _graph.__name__: lambda: graph,
            _tensor.__name__: graph.tensors.__getitem__,
            _node.__name__: lambda name: graph.producer(graph.tensors[name]),
        }

    def find_class(self, module: str, name: str) -> Any:
        return (
            self._of_graph[name] if module == __name__ and name in self._of_graph else super().find_class(module, name)
        )


def _graph() -> Graph:
    """Stands in an entry for the graph that it is read for, as the next two do for its tensors and nodes."""
    raise NotImplementedError


def _tensor(name: str) -> Tensor:
    raise NotImplementedError


def _node(name: str) -> Node:
    raise NotImplementedError


def _mapping(items: dict[str, Any]) -> MappingProxyType[str, Any]:
    return MappingProxyType(items)


def _size(number: int, written: str, dims: tuple[tuple[str, tuple[int, int]], ...]) -> Size:
    return Size(number, expression(written, tuple(name for name, _ in dims)), {n: Bounds(*b) for n, b in dims})


def _op(name: str) -> Op:
    return EVERY[name]


def _pickled(value: Any, graph: Graph | None) -> bytes | None:
    """Returns a value as bytes; None if it holds something that has no name, such as a function in a function."""
    file = io.BytesIO()
    try:
        _Pickler(file, graph).dump(value)
    except (pickle.PicklingError, AttributeError, TypeError, RecursionError):
        return None
    return file.getvalue()


def _places(graph: Graph) -> Iterator[tuple[Tensor, tuple[Any, ...]]]:
    """Yields the tensors of a graph that passes have put elsewhere, and where they lie."""
    for t in graph.tensors.values():
        yield t, (t.strides, t.own_strides, t.base, t.start, t.position)


def _dumped(made: Plan, graph: Graph) -> bytes | None:
    """Returns a plan as an entry of the cache; None if it cannot be one."""
    entry = _pickled((list(_places(graph)), _final(made)), graph)
    return entry if entry is not None and len(entry) <= MOST_BYTES else None


def _final(made: Plan) -> Plan:
    """Returns a plan, and that of its packing, without the functions that could have declined it."""
    packing = None if made.packing is None else _final(made.packing)
    return replace(made, steps=_ended(made.steps), packing=packing)


def _ended(made: Steps) -> Steps:
    """Returns steps without functions, and without the counterparts of tensors in graphs that stayed as they were."""
    steps = []
    for step in made:
        kept = step.rewritten.counterparts if step.changed else {}
        steps.append(replace(step, rewritten=replace(step.rewritten, counterparts=kept, declined=None)))
    return Steps(tuple(steps), made.options)


def _loaded(entry: bytes | None, graph: Graph) -> Plan | None:
    """Returns the plan of an entry, for this graph; None without one, or if it cannot be read here."""
    if entry is None:
        return None
    try:
        places, found = _Unpickler(io.BytesIO(entry), graph).load()
    except _UNREADABLE:
        return None
    for tensor, place in places:
        tensor.strides, tensor.own_strides, tensor.base, tensor.start, tensor.position = place
    assert isinstance(found, Plan)
    return found
