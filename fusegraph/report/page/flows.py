"""The lines of the page: what nodes of one kernel, and kernels, give each other, and what was decided about each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fusegraph.graph import Node, Tensor
from fusegraph.passes.partition import Decision
from fusegraph.plan import Plan
from fusegraph.report.page.homes import Home, views

#: Nodes that were refused one kernel; what one kernel writes and another reads as it lies, or after a rewrite.
DECLINED, FLOW = "declined", "flow"


class Decided:
    """The decisions of a plan, by the nodes that they are about."""

    def __init__(self, plan: Plan) -> None:
        self._pairs: dict[tuple[str, str], Decision] = {}
        self._between: dict[tuple[int, int], list[Decision]] = defaultdict(list)
        kernels = {n.name: at for at, kernel in enumerate(plan.kernels) for n in kernel.group.nodes}
        shown = {n.name: at for n, at in views(plan).items()}
        kernels |= shown
        self._read_in_place: dict[str, str] = {}
        for decision in plan.partition.decisions:
            self._pairs.setdefault((decision.producer, decision.consumer), decision)
            if decision.consumer in shown:
                self._read_in_place.setdefault(decision.producer, decision.reason)
            ends = kernels.get(decision.producer), kernels.get(decision.consumer)
            if not decision.fused and ends[0] is not None and ends[1] is not None:
                self._between[ends[0], ends[1]].append(decision)

    def on(self, producer: str, consumer: str) -> Decision | None:
        """Returns the decision about two nodes."""
        return self._pairs.get((producer, consumer))

    def between(self, kernels: tuple[int, int], producer: str) -> tuple[str, str]:
        """Returns the state and the reason of what one kernel gives another: of the decision about this producer."""
        if found := self._between[kernels]:
            return DECLINED, next((d for d in found if d.producer == producer), found[0]).reason
        return FLOW, self._read_in_place.get(producer, "")


def within(
    plan: Plan, items: Mapping[Node, int], places: Mapping[Node, Home], decided: Decided
) -> list[dict[str, Any]]:
    """Returns the edges within kernels.

    from, to       numbers of items.
    tensor, bytes  what the first gives the second; ``saved`` bytes of traffic, and the ``reason`` of the decision.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for consumer in plan.graph.nodes:
        for tensor in dict.fromkeys(consumer.inputs):
            producer = plan.graph.producer(tensor)
            if producer is None or places[producer].kernel is None or items[producer] == items[consumer]:
                continue
            if places[producer].kernel == places[consumer].kernel:
                why = decided.on(_name(plan, producer), _name(plan, consumer))
                found.setdefault(
                    (items[producer], items[consumer]),
                    {
                        "from": items[producer],
                        "to": items[consumer],
                        "tensor": tensor.name,
                        "bytes": tensor.nbytes,
                        "reason": why.reason if why is not None and why.fused else "computed in one kernel",
                        "saved": why.bytes_saved if why is not None and why.fused else 0,
                    },
                )
    return [*found.values()]


def _name(plan: Plan, node: Node) -> str:
    """Returns the name that a node of the graph as built has where kernels are chosen."""
    made = plan.counterparts.get(node.output)
    maker = None if made is None else plan.simplified.producer(made)
    return node.name if maker is None else maker.name


def between(plan: Plan, decided: Decided) -> list[dict[str, Any]]:
    """Returns what kernels give each other in memory.

    from, to, tensor, bytes  positions of the kernels, and the tensor that one writes and the other reads.
    state, reason            why they are two kernels; "" where nothing was decided about them.
    producer                 the node that makes the tensor.
    """
    written: dict[Tensor, int] = {}
    found = []
    for at, kernel in enumerate(plan.kernels):
        for tensor in dict.fromkeys(t.base for t in (*kernel.group.reads, *kernel.group.positions)):
            if tensor in written and written[tensor] != at:
                maker = plan.simplified.producer(tensor)
                producer = tensor.name if maker is None else maker.name
                state, reason = decided.between((written[tensor], at), producer)
                found.append(
                    {
                        "from": written[tensor],
                        "to": at,
                        "tensor": tensor.name,
                        "bytes": tensor.nbytes,
                        "producer": producer,
                        "state": state,
                        "reason": reason,
                    }
                )
        written |= {t.base: at for t in kernel.group.writes}
    return found


def memory_facts(plan: Plan, written: Sequence[Sequence[Tensor]], read: Sequence[Sequence[Tensor]]) -> dict[str, Any]:
    """Returns what lies in the workspace while each kernel runs: ``tensors`` with places and times, ``alive`` bytes."""
    first: dict[Tensor, int] = {}
    last: dict[Tensor, int] = {}
    for at, (news, olds) in enumerate(zip(written, read)):
        for tensor in news:
            first.setdefault(tensor, at)
        for tensor in (*news, *olds):
            last[tensor] = at
    tensors = [t for t in plan.memory.offsets if t in first]
    alive = [sum(t.nbytes for t in tensors if first[t] <= at <= last[t]) for at in range(len(plan.kernels))]
    placed = [
        {"name": t.name, "bytes": t.nbytes, "offset": plan.memory.offsets[t], "born": first[t], "dies": last[t]}
        for t in tensors
    ]
    return {"workspace_bytes": plan.memory.size, "tensors": placed, "alive": alive}
