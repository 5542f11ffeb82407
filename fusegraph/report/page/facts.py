"""Plans as the data of the page."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen import schedule_text
from codegen.canonical import canonical
from codegen.target import Target
from fusegraph.engines.owners import owners
from fusegraph.graph import Node
from fusegraph.lowering.program import describe as describe_node
from fusegraph.origins import Origin
from fusegraph.plan import Kernel, Plan
from fusegraph.report.explain import describe_choice, describe_decision, describe_kernel, unfused_bytes
from fusegraph.report.page.alike import repeats
from fusegraph.report.page.figures import kernel_figures
from fusegraph.report.page.flows import Decided, between, memory_facts, within
from fusegraph.report.page.homes import COMPUTED, Home, homes
from fusegraph.report.page.lines import lines_of_nodes, marked
from fusegraph.report.page.steps import steps_facts
from fusegraph.version import __version__

#: What readers of the data may count on.
FORMAT = 1


@dataclass
class Sources:
    """The distinct sources of kernels, and what is known of each once it is compiled."""

    entries: list[dict[str, Any]] = field(default_factory=list)
    numbers: dict[str, int] = field(default_factory=dict)

    def number(self, kernel: Kernel, compiled: Mapping[str, Mapping[str, Any]]) -> int:
        """Returns the number of a kernel's source, which is added if it is new."""
        code = kernel.source.code
        if code not in self.numbers:
            self.numbers[code] = len(self.entries)
            facts = compiled.get(code, {})
            lines = lines_of_nodes(kernel.source, kernel.group.nodes)
            self.entries.append({**marked(kernel.source), **facts, "lines": lines})
        return self.numbers[code]


def facts_of(
    plans: Sequence[Plan],
    target: Target,
    *,
    title: str,
    compiled: Mapping[str, Mapping[str, Any]] | None = None,
    left: Sequence[tuple[str, str, str]] = (),
    fusion: bool = True,
) -> dict[str, Any]:
    """Returns plans as plain data, which `fusegraph.report.page.file` writes.

    title     of the page.
    compiled  code of a kernel -> what is known of it compiled: registers, spill_bytes, shared_bytes.
    left      nodes that torch computes: (name, operator, reason).
    fusion    whether kernels were fused.
    """
    sources = Sources()
    machine = target.planned
    graphs = [_graph(plan, target, sources, compiled or {}) for plan in _every(plans)]
    return {
        "format": FORMAT,
        "generator": "fusegraph",
        "version": __version__,
        "title": title,
        "target": {
            "name": target.name,
            "title": machine.title,
            "bytes_per_us": machine.memory_share * machine.memory_rate,
            "launch_us": machine.launch_us,
            "tensor_per_us": 2 * max(machine.wgmma, machine.mma) * machine.sms * machine.clock,
            "threads_per_us": 2 * machine.fma * machine.sms * machine.clock,
        },
        "options": {"strict": any(plan.steps.options.strict for plan in plans), "fusion": fusion},
        "left": [{"name": name, "op": op, "reason": reason} for name, op, reason in left],
        "sources": sources.entries,
        "graphs": graphs,
    }


def _every(plans: Sequence[Plan]) -> Iterator[Plan]:
    for plan in plans:
        yield plan
        if plan.packing is not None:
            yield plan.packing


def _graph(plan: Plan, target: Target, sources: Sources, compiled: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Returns a plan as plain data.

    items     what users wrote, as `_item`; nodes that passes made, of kernels without any of the former, are ``made``.
    kernels   as `_kernel`; rows are the numbers of their items, owners those of the items of their nodes.
    within, between  the lines (`fusegraph.report.page.flows`).
    repeats   layers that are alike: position of the first kernel, how many a layer has, how many layers.
    passes, memory, decisions, choices  as `steps_facts`, `memory_facts`, `describe_decision`, `describe_choice`.
    algorithms  of convolutions: node, algorithm, reason.
    pruned    nodes of 2:4 sparsity: node, the share of the norm that it removes, or None.
    """
    places, owned, decided = homes(plan), owners(plan), Decided(plan)
    items, numbers, rows = _items(plan, places)
    kernels = [
        {
            **_kernel(kernel, number, target),
            "rows": rows[number],
            "source": sources.number(kernel, compiled),
            "owners": [numbers.get(n, numbers.get(owned[n]) if n in owned else None) for n in kernel.group.nodes],
        }
        for number, kernel in enumerate(plan.kernels)
    ]
    return {
        "name": plan.graph.name,
        "inputs": [_tensor(t) for t in plan.graph.inputs if t not in plan.graph.parameters],
        "parameters": len(plan.graph.parameters),
        "outputs": [_tensor(t) for t in plan.graph.outputs],
        "items": items,
        "kernels": kernels,
        "within": within(plan, numbers, places, decided),
        "between": between(plan, decided),
        "entering": _entering(plan),
        "repeats": [[r.first, r.length, r.count] for r in repeats([_alike(k) for k in plan.kernels])],
        "passes": steps_facts(plan),
        "decisions": [describe_decision(d) for d in plan.partition.decisions],
        "choices": [describe_choice(c, target) for c in plan.choices],
        "algorithms": [{"node": n, "algorithm": a.name, "reason": a.reason} for n, a in plan.algorithms.items()],
        "pruned": [{"node": n, "removed": share} for n, share in plan.pruned.items()],
        "packed": [{"name": t.name, "bytes": t.nbytes, "of": list(of)} for t, of in plan.packed.items()],
        "nodes_built": len(plan.graph.nodes),
        "bytes_unfused": unfused_bytes(plan.graph),
        "bytes_moved": sum(kernel["bytes"] for kernel in kernels),
        "memory": memory_facts(
            plan,
            [[t.base for t in k.group.writes] for k in plan.kernels],
            [[t.base for t in (*k.group.reads, *k.group.positions)] for k in plan.kernels],
        ),
    }


def _items(plan: Plan, places: Mapping[Node, Home]) -> tuple[list[dict[str, Any]], dict[Node, int], list[list[int]]]:
    """Returns items, the numbers of those of nodes, and of those in each kernel.

    Items are what users wrote, and what passes made in kernels that have nothing of that.
    """
    groups = _groups(plan, places)
    containers = {prefix for origin in plan.graph.origins.values() for prefix in _prefixes(origin.scope)}
    items = [_item(plan, nodes, places[nodes[-1]], containers) for nodes in groups]
    numbers = {node: at for at, nodes in enumerate(groups) for node in nodes}
    rows: list[list[int]] = [[] for _ in plan.kernels]
    for at, item in enumerate(items):
        if item["kernel"] is not None:
            rows[item["kernel"]].append(at)
    for number, kernel in enumerate(plan.kernels):
        for node in kernel.group.nodes if not rows[number] else ():
            numbers[node] = len(items)
            items.append({**_item(plan, [node], Home(number, COMPUTED), containers), "made": True})
        rows[number] = rows[number] or [*range(len(items) - len(kernel.group.nodes), len(items))]
    return items, numbers, rows


def _groups(plan: Plan, places: Mapping[Node, Home]) -> list[list[Node]]:
    """Returns the nodes of the graph as built, those together that one operator of a model became in one kernel.

    What an importer wrote for an operator ahead belongs to it.
    """
    graph, keys = plan.graph, dict[Node, object]()
    for node in reversed(graph.nodes):
        origin, kernel = graph.origins.get(node), places[node].kernel
        readers = {keys[r] for t in node.outputs for r in graph.consumers(t) if places[r].kernel == kernel}
        if origin is not None:
            keys[node] = (origin, kernel) if origin.name else node
        else:
            keys[node] = readers.pop() if graph.origins and len(readers) == 1 else node
    found: dict[object, list[Node]] = {}
    for node in graph.nodes:
        found.setdefault(keys[node], []).append(node)
    order = {node: at for at, node in enumerate(graph.nodes)}
    return sorted(found.values(), key=lambda nodes: order[nodes[-1]])


def _alike(kernel: Kernel) -> str:
    """Returns a text that kernels share if they compute the same of other tensors."""
    return repr(canonical(kernel.group.lowered.spec))


def _prefixes(scope: str) -> list[str]:
    """Returns the modules around a module: of ``a.b.c`` these are ``a`` and ``a.b``."""
    parts = scope.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def _item(plan: Plan, nodes: Sequence[Node], home: Home, containers: Container[str]) -> dict[str, Any]:
    """Returns what users wrote, and became ``nodes``, as plain data; ``containers`` are modules with others in them.

    name, op, scope, place  its names in the model, the module and the line of source, as far as they are known.
    names, parts   names of the nodes, and a line for each.
    shape, dtype   of the result; ``output`` tells whether it leaves the graph.
    kernel, state  the position of its kernel, and what becomes of it (`fusegraph.report.page.homes`).
    """
    last = nodes[-1]
    origin = plan.graph.origins.get(last, Origin())
    module = "" if origin.scope in containers else origin.scope.rpartition(".")[2]
    return {
        "name": (module or origin.name) if origin.name else last.name,
        "op": origin.op or last.op.name,
        "scope": origin.scope,
        "place": origin.place,
        "names": [node.name for node in nodes],
        "parts": [describe_node(node) for node in nodes],
        "shape": list(map(int, last.output.shape)),
        "dtype": last.output.dtype.name,
        "output": any(t in plan.graph.outputs for node in nodes for t in node.outputs),
        "kernel": home.kernel,
        "state": home.state,
    }


def _kernel(kernel: Kernel, number: int, target: Target) -> dict[str, Any]:
    """Returns a kernel: also its nodes as lines (``parts``), its schedule as text, and `kernel_figures`."""
    known = describe_kernel(kernel, number + 1, target)
    return {
        **{key: known[key] for key in ("number", "name", "family", "grid", "block", "dynamic_shared_bytes")},
        **{key: known[key] for key in ("chosen_by", "declined_forms", "bytes_saved")},
        "reads": [_tensor(t) for t in kernel.group.reads],
        "writes": [_tensor(t) for t in kernel.group.writes],
        "parts": [describe_node(n) for n in kernel.group.nodes],
        "schedule": schedule_text(kernel.choice.schedule),
        **kernel_figures(kernel, target),
    }


def _tensor(tensor: Any) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(map(int, tensor.shape)),
        "strides": list(map(int, tensor.strides)),
        "dtype": tensor.dtype.name,
        "bytes": tensor.memory_bytes,
    }


def _entering(plan: Plan) -> list[list[int]]:
    """Returns (number of an input that is no parameter, position of a kernel that reads it)."""
    inputs = [t for t in plan.graph.inputs if t not in plan.graph.parameters]
    now = {plan.counterparts.get(t, t): at for at, t in enumerate(inputs)}
    return [
        [now[tensor], at]
        for at, kernel in enumerate(plan.kernels)
        for tensor in dict.fromkeys(t.base for t in kernel.group.reads)
        if tensor in now
    ]
