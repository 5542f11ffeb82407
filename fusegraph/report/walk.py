"""A call's kernels one after the other, and what they read and write in terms of the graph that the user built."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator, Mapping
from typing import Any

from fusegraph.engines.base import Executable
from fusegraph.engines.stepping import steps_of
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.ops.base import Array
from fusegraph.passes.decompose import decompose
from fusegraph.plan import Kernel, Plan
from fusegraph.report.parts import between, part


@contextlib.contextmanager
def fixed_names(graph: Graph) -> Iterator[None]:
    """Keeps the names of a graph's tensors within the block: none yields to one that a composite's parts are given."""
    automatic, graph._automatic = graph._automatic, set()
    try:
        yield
    finally:
        graph._automatic = automatic


class Origins:
    """Which tensors of the graph as built, or of its composites written out, the tensors of a plan stand for."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self.graph, self.written_out = graph, decompose(graph).graph
        found: dict[str, dict[str, None]] = {}
        for old, new in plan.counterparts.items():
            if old.name in self.written_out.tensors:
                for place in (new, *plan.copies.get(new, ())):
                    found.setdefault(place.name, {})[old.name] = None
        self._names = {place: [name for name in names if self._is_last(name, names)] for place, names in found.items()}
        self._group = {t.name: g for g in plan.partition.groups for n in g.nodes for t in n.outputs}

    def _is_last(self, name: str, names: Container[str]) -> bool:
        """Tells whether a tensor is what those of some names became: an input, or one that none of them is made of.

        Of the nodes that a pass made one of, all are said to be where that is, but only the last has its result.
        """
        tensor = self.written_out.tensors[name]
        readers = (t for n in self.written_out.consumers(tensor) for t in n.outputs)
        return self.written_out.producer(tensor) is None or not any(t.name in names for t in readers)

    def names(self, tensor: Tensor) -> list[str]:
        """Returns the names of the graph's tensors that a tensor of the plan stands for."""
        own = ((name, self.written_out.tensors[name]) for name in self._names.get(tensor.name, ()))
        return [name for name, t in own if t.shape == tensor.shape and t.dtype == tensor.dtype]

    def read(self, kernel: Kernel) -> dict[str, None]:
        """Returns what a kernel reads, as names of the graph's tensors: where it begins.

        Of a view it is what it shows, too, and of what has no such name it is what was read to make it.
        """
        inside = {name for n in kernel.group.nodes for t in n.outputs for name in self.names(t)}
        found: dict[str, None] = {}
        stack, seen = list(kernel.group.reads), set[str]()
        while stack:
            tensor = stack.pop()
            if tensor.name in seen:
                continue
            seen.add(tensor.name)
            names = self.names(tensor) or self.names(tensor.base)
            group = self._group.get(tensor.name)
            found |= dict.fromkeys(names)
            if group is not None and group.family == "view":
                stack += [t for n in group.nodes for t in n.inputs]
            elif group is not None and not names:
                stack += group.reads
        return {name: None for name in found if name not in inside}

    def user_node(self, name: str) -> Node:
        """Returns the node of the graph as built that a tensor is a result of, or a part of the making of."""
        tensor = self.written_out.tensors[name]
        while tensor.name not in self.graph.tensors or self.graph.producer(self.graph.tensors[tensor.name]) is None:
            tensor = self.written_out.consumers(tensor)[0].output
        node = self.graph.producer(self.graph.tensors[tensor.name])
        assert node is not None
        return node


class Walk:
    """The kernels of a call, run one after the other, and what they wrote so far."""

    def __init__(self, executable: Executable, graph: Graph, inputs: Mapping[str, Array]) -> None:
        self.executable, self._graph, self._inputs = executable, graph, inputs
        assert executable.plan is not None
        self.origins = Origins(graph, executable.plan)
        #: As stored, by the names of the graph's tensors.
        self.values: dict[str, Array] = dict(inputs)
        #: The kernel that runs, or ran last, and its number.
        self.kernel: Kernel | None = None
        self.number = 0

    def behind(self, name: str, known: Mapping[str, Any]) -> tuple[Graph, dict[str, Array]]:
        """Returns the graph of the nodes behind a tensor, back to what is known, all results kept, and its inputs.

        It is of the graph as built if that has the tensor and all that is known; else composites are written out.
        """
        built, written_out = self._graph, self.origins.written_out
        graph = built if name in built.tensors and all(k in built.tensors for k in known) else written_out
        nodes = between(graph, [graph.tensors[name]], known)
        made = part(graph, nodes, [t.name for n in nodes for t in n.outputs])
        return made, {t.name: self.values[t.name] for t in made.inputs}

    def kernels(self) -> Iterator[tuple[Kernel, Mapping[str, Array]]]:
        """Yields each kernel after it ran, and what it read, by the graph's names.

        Raises `Overwritten` if what it reads is not what was written, and what running it raises.
        """
        written: dict[Tensor, Array] = {}
        for steps in steps_of(self.executable, self._inputs):
            for self.number, kernel in enumerate(steps.plan.kernels):
                self.kernel = kernel
                for tensor in kernel.group.reads:
                    if tensor in written and tensor.position is None:
                        now = steps.value(tensor)
                        if now.tobytes() != written[tensor].tobytes():
                            raise Overwritten(tensor)
                known = {n: self.values[n] for n in self.origins.read(kernel) if n in self.values}
                steps.run(self.number)
                for tensor in kernel.group.writes:
                    if tensor.position is None:
                        written[tensor] = steps.value(tensor)
                        self.values |= dict.fromkeys(self.origins.names(tensor), written[tensor])
                yield kernel, known


class Overwritten(Exception):
    """The memory of ``tensor`` changed before a kernel read it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
