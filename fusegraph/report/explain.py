"""Explains a plan: every kernel, what it reads, writes and saves, and every fusion made or declined with its reason."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from codegen import PORTABLE, declined, schedule_data, schedule_from_data, schedule_text
from codegen.target import Target
from fusegraph.errors import listed
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.choices import Choice
from fusegraph.passes.parameters import memory
from fusegraph.passes.partition import Decision
from fusegraph.plan import Kernel, Plan

#: How many names the text form lists in a row before it says how many more there are.
MOST_LISTED = 24


def describe(plan: Plan, target: Target = PORTABLE) -> dict[str, Any]:
    """Returns a plan as plain data for `fusegraph.report.artifacts.json_text`.

    ``target`` is the target that the plan's schedules were chosen for.

    name, inputs, outputs, nodes  as `describe_graph`, after simplification.
    simplified_away        nodes of the graph as built that need no computation any more.
    kernels                as `describe_kernel`, in the order in which they run.
    packed                 ``name, bytes, of``: what is computed of parameters when they change, and their names;
                           ``packing``: the same facts as these of the graph that computes it, None without one.
    views                  ``name, op, of``: results of movement that need no kernel, and the tensors they are views of.
    kernels_unfused        how many kernels there would be with one for each node of the graph as built.
    bytes_unfused          bytes that those would move through device memory; ``bytes_moved``: what the kernels move.
    decisions              as `describe_decision`, for every edge and every pair of siblings.
    algorithms             for each convolution: node, algorithm, reason.
    pruned                 ``node, removed``: nodes of 2:4 sparsity, and the share of the norm of a constant that is
                           lost by each; None of what only a call knows.
    choices                as `describe_choice`, for everything that was weighed.
    saved                  ``name, bytes, kernels, reason``: what is kept in memory for a backward pass, the numbers of
                           the kernels that read it, and why it is not computed again.
    workspace_bytes        device memory for intermediates; ``workspace`` maps each of them to ``offset`` and ``bytes``.
    in_donated             intermediates in the memory of donated inputs: their ``input``, and ``offset`` in bytes.
    """
    kernel_of = {n: (number, k.name) for number, k in enumerate(plan.kernels, start=1) for n in k.group.nodes}
    aside = plan.packing.simplified.nodes if plan.packing is not None else []
    kept = {node.name for node in (*plan.simplified.nodes, *aside)}
    return {
        **describe_graph(plan.simplified, kernel_of),
        "simplified_away": [n.name for n in plan.graph.nodes if n.name not in kept],
        "kernels": [describe_kernel(kernel, number, target) for number, kernel in enumerate(plan.kernels, start=1)],
        "packed": [{"name": t.name, "bytes": memory(t), "of": list(names)} for t, names in plan.packed.items()],
        "packing": None if plan.packing is None else describe(plan.packing, target),
        "views": [
            {"name": n.name, "op": n.op.name, "of": [t.name for t in n.inputs]}
            for group in plan.partition.groups
            for n in group.nodes
            if group.family == "view"
        ],
        "kernels_unfused": len(plan.graph.nodes),
        "bytes_unfused": unfused_bytes(plan.graph),
        "bytes_moved": traffic(plan),
        "decisions": [describe_decision(d) for d in plan.partition.decisions],
        "algorithms": [
            {"node": n, "algorithm": a.name + _parts(plan, n), "reason": a.reason} for n, a in plan.algorithms.items()
        ],
        "pruned": [{"node": n, "removed": share} for n, share in plan.pruned.items()],
        "choices": [describe_choice(c, target) for c in plan.choices],
        "saved": _kept(plan),
        "workspace_bytes": plan.memory.size,
        "workspace": {t.name: {"offset": at, "bytes": t.nbytes} for t, at in plan.memory.offsets.items()},
        "in_donated": {t.name: {"input": i.name, "offset": at} for t, (i, at) in plan.memory.hosted.items()},
    }


def _kept(plan: Plan) -> list[dict[str, Any]]:
    """Returns what is kept for a backward pass as plain data, with the numbers of the kernels that read it."""
    return [
        {
            "name": found.name,
            "bytes": found.nbytes,
            "kernels": [
                number
                for number, kernel in enumerate(plan.kernels, start=1)
                if any(t.base.name == found.name for t in kernel.group.reads)
            ],
            "reason": found.reason,
        }
        for found in plan.saved
    ]


def _parts(plan: Plan, name: str) -> str:
    """Returns " in N parts" for a convolution that is computed in parts, which its node adds up; else nothing."""
    output = plan.simplified.tensors.get(name)
    total = plan.simplified.producer(output) if output is not None else None
    before = plan.simplified.producer(total.inputs[0]) if total is not None else None
    parts = before.attributes.get("parts", 1) if before is not None else 1
    return f" in {parts} parts" if parts > 1 else ""


def describe_graph(graph: Graph, kernel_of: Mapping[Node, tuple[int, str]] | None = None) -> dict[str, Any]:
    """Returns a graph as plain data.

    name             the graph's name.
    inputs, outputs  each with ``name``, ``shape``, ``strides`` (in elements) and ``dtype``; those that lie in the
                     memory of an input with its name, ``overwrites``.
    nodes            each with ``name``, ``op``, ``inputs``, ``attributes``, ``shape``, ``dtype``, and the number and
                     name of the kernel that computes it: ``kernel`` and ``kernel_name``, both None for a view.

    ``kernel_of`` maps the nodes that have a kernel to its number and name.
    """
    kernels = kernel_of or {}
    return {
        "name": graph.name,
        "inputs": [_tensor(t) for t in graph.inputs],
        "outputs": [_tensor(t) | _overwritten(graph, t) for t in graph.outputs],
        "nodes": [_node(n, *kernels.get(n, (None, None))) for n in graph.nodes],
    }


def describe_kernel(kernel: Kernel, number: int, target: Target = PORTABLE) -> dict[str, Any]:
    """Returns a kernel as plain data.

    number           its number in the graph's order of execution, from 1.
    name             the name of its code, which kernels may share.
    family, nodes    its kernel family, and the names of its nodes.
    reads, writes    its tensors, each with ``name`` and ``bytes``.
    bytes_saved      the traffic saved against one kernel per node.
    grid, block, dynamic_shared_bytes  how it is launched.
    schedule         ``type`` and sizes of its schedule; ``chosen_by``: why this one.
    declined_forms   the faster forms that it does not have, by name, each with the reason.
    """
    group, source = kernel.group, kernel.source
    return {
        "number": number,
        "name": kernel.name,
        "family": group.family,
        "nodes": [n.name for n in group.nodes],
        "reads": [{"name": t.name, "bytes": t.nbytes} for t in group.reads],
        "writes": [{"name": t.name, "bytes": t.nbytes} for t in group.writes],
        "bytes_saved": group.bytes_saved,
        "grid": list(source.grid),
        "block": list(source.block),
        "dynamic_shared_bytes": source.dynamic_shared_bytes,
        "schedule": schedule_data(kernel.choice.schedule),
        "chosen_by": kernel.choice.reason,
        "declined_forms": declined(group.lowered.spec, kernel.choice.schedule, target),
    }


def describe_decision(decision: Decision) -> dict[str, Any]:
    """Returns a decision as plain data: ``producer, consumer, fused, reason, bytes_saved, shared_input``."""
    return asdict(decision)


def describe_choice(choice: Choice, target: Target = PORTABLE) -> dict[str, Any]:
    """Returns a choice as plain data.

    what, node    what is chosen, and the name of the node that it is about.
    taken         the alternative that the plan has; ``preferred``: the one that estimates choose.
    estimated_us  what each alternative is estimated to take where they differ, None where there is no estimate.
    measured_us   what was measured, in microseconds, by alternative; nothing if estimates decided.
    """
    clock = target.planned.clock
    return {
        "what": choice.what,
        "node": choice.node,
        "taken": choice.taken,
        "preferred": choice.preferred,
        "estimated_us": {name: None if n is None else round(n / clock, 2) for name, n in choice.cycles.items()},
        "measured_us": {name: round(us, 2) for name, us in choice.us.items()},
    }


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "strides": list(tensor.strides),
        "dtype": tensor.dtype.name,
    }


def _overwritten(graph: Graph, tensor: Tensor) -> dict[str, str]:
    return {"overwrites": graph.updates[tensor].name} if tensor in graph.updates else {}


def _node(node: Node, kernel: int | None, name: str | None) -> dict[str, Any]:
    return {
        "name": node.name,
        "op": node.op.name,
        "inputs": [t.name for t in node.inputs],
        "attributes": dict(node.attributes),
        "shape": list(node.output.shape),
        "dtype": node.output.dtype.name,
        "kernel": kernel,
        "kernel_name": name,
    }


def traffic(plan: Plan) -> int:
    """Returns how many bytes of device memory a plan's kernels read and write."""
    return sum(t.memory_bytes for kernel in plan.kernels for t in kernel.arguments)


def unfused_bytes(graph: Graph) -> int:
    return sum(t.memory_bytes for n in graph.nodes for t in (*n.outputs, *set(n.inputs)))


# --- text


def size_text(nbytes: int) -> str:
    """Formats a number of bytes: ``"512 B"``, ``"12.6 MB"`` (powers of 1000)."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB"]
    while abs(value) >= 999.95 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.0f} B" if units[0] == "B" else f"{value:.1f} {units[0]}"


def count_text(count: int, noun: str) -> str:
    """Returns a count with its noun: ``"1 kernel"``, ``"2 kernels"``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _in_donated(facts: Mapping[str, Any]) -> str:
    count = len(facts["in_donated"])
    return f", and {count_text(count, 'intermediate')} in the memory of donated inputs" if count else ""


def explain_text(facts: Mapping[str, Any], width: int = 80) -> str:
    """Formats the result of `describe` as text in lines of at most ``width`` columns (longer names are not broken)."""
    lines = [f"graph {facts['name']}", ""]
    kernels = facts["kernels"]
    before, after = facts["bytes_unfused"], facts["bytes_moved"]
    lines += wrapped(
        f"{count_text(facts['kernels_unfused'], 'node')} in {count_text(len(kernels), 'kernel')} (one a node would be "
        f"{facts['kernels_unfused']}). Device-memory traffic {size_text(after)} instead of {size_text(before)}, "
        f"{_saved(before - after)}. Workspace {size_text(facts['workspace_bytes'])}{_in_donated(facts)}.",
        width,
        "  ",
    )
    if facts["simplified_away"]:
        lines += wrapped(f"simplified away: {listed(facts['simplified_away'], MOST_LISTED)}", width, "  ", "    ")
    if facts["packed"]:
        count, nbytes = len(facts["packing"]["kernels"]), sum(t["bytes"] for t in facts["packed"])
        made = listed((f"{t['name']} ({size_text(t['bytes'])})" for t in facts["packed"]), MOST_LISTED)
        text = (
            f"{size_text(nbytes)} computed once, by {count_text(count, 'kernel')}, of parameters and constants: {made}"
        )
        lines += wrapped(text, width, "  ", "    ")
    if facts["views"]:
        views = ", ".join(f"{v['name']} = {v['op']}({', '.join(v['of'])})" for v in facts["views"])
        lines += wrapped(f"read or written in place, without a kernel: {views}", width, "  ", "    ")
    numbers: dict[str, int] = {}
    for kernel in kernels:
        number = kernel["number"]
        first = numbers.setdefault(kernel["name"], number)
        same = f", the same code as kernel {first}" if first != number else ""
        lines += ["", f"  kernel {number}: {kernel['name']} ({kernel['family']}){same}"]
        lines += wrapped(f"nodes   {listed(kernel['nodes'], MOST_LISTED)}", width, "    ", " " * 12)
        lines += wrapped(f"reads   {_tensors(kernel['reads'])}", width, "    ", " " * 12)
        lines += wrapped(f"writes  {_tensors(kernel['writes'])}", width, "    ", " " * 12)
        lines.append(f"    saves   {size_text(kernel['bytes_saved'])}")
        if same:
            continue
        schedule = f"{schedule_text(schedule_from_data(kernel['schedule']))} ({kernel['chosen_by']})"
        lines += wrapped(f"schedule {schedule}", width, "    ", " " * 12)
        for reason, forms in _by_reason(kernel["declined_forms"]).items():
            lines += wrapped(f"no {' or '.join(forms)}: {reason}", width, "    ", " " * 12)
    if facts["algorithms"]:
        lines += ["", "  convolutions:"]
    for (algorithm, reason), nodes in _by_algorithm(facts["algorithms"]).items():
        lines += wrapped(f"{listed(nodes, MOST_LISTED)}: {algorithm}", width, "    ")
        lines += wrapped(reason, width, "        ")
    if facts["pruned"]:
        lines += ["", "  pruned, two of every four neighbours:"]
    for found in facts["pruned"]:
        lost = "what is lost depends on the values of a call"
        if found["removed"] is not None:
            lost = f"{found['removed']:.1%} of the norm is lost"
        lines += wrapped(f"{found['node']}: {lost}", width, "    ")
    if facts["choices"]:
        lines += ["", "  choices:"]
    for (what, taken, weighed), nodes in _by_choice(facts["choices"]).items():
        lines += wrapped(f"{listed(nodes, MOST_LISTED)}: {what}: {taken}", width, "    ")
        lines += wrapped(weighed, width, "        ")
    if facts["saved"]:
        total = size_text(sum(t["bytes"] for t in facts["saved"]))
        lines += ["", f"  kept for the backward pass, {total}:"]
    for kept in facts["saved"]:
        read = ", ".join(map(str, kept["kernels"]))
        lines += wrapped(
            f"{kept['name']} {size_text(kept['bytes'])}, read by kernel {read}: {kept['reason']}", width, "    "
        )
    for title, fused in (("fused", True), ("declined", False)):
        chosen = [d for d in facts["decisions"] if d["fused"] is fused]
        lines += ["", f"  {title}: {len(chosen) or 'nothing'}"]
        for decision in chosen:
            lines += decision_lines(decision, width)
    if facts["workspace"]:
        lines += ["", "  workspace:"]
        for name, place in facts["workspace"].items():
            lines.append(f"    {name}: {size_text(place['bytes'])} at offset {place['offset']}")
    return "\n".join(lines) + "\n"


def _by_algorithm(choices: Iterable[Mapping[str, str]]) -> dict[tuple[str, str], list[str]]:
    """Groups convolutions: (algorithm, reason) -> names of the nodes."""
    result: dict[tuple[str, str], list[str]] = {}
    for choice in choices:
        result.setdefault((choice["algorithm"], choice["reason"]), []).append(choice["node"])
    return result


def _by_choice(choices: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str, str], list[str]]:
    """Groups choices: (what is chosen, the alternative taken, what was weighed) -> names of the nodes."""
    result: dict[tuple[str, str, str], list[str]] = {}
    for choice in choices:
        key = choice["what"], choice["taken"], _weighed(choice["estimated_us"], choice["measured_us"])
        result.setdefault(key, []).append(choice["node"])
    return result


def _weighed(estimated: Mapping[str, float | None], measured: Mapping[str, float]) -> str:
    """Formats what is known of alternatives: those that were measured, then the others."""
    texts = []
    for name in sorted(estimated, key=lambda name: name not in measured):
        us = estimated[name]
        texts.append(f"{name}: " + ("no estimate" if us is None else f"{us:.2f} us estimated"))
        texts[-1] += f", {measured[name]:.2f} us measured" if name in measured else ""
    return "; ".join(texts) + ("" if measured else "; not measured")


def _saved(nbytes: int) -> str:
    """Formats the bytes saved, or moved in addition if negative, as by Winograd's algorithm for fewer products."""
    return f"{size_text(abs(nbytes))} {'saved' if nbytes >= 0 else 'more'}"


def _by_reason(declined: Mapping[str, str]) -> dict[str, list[str]]:
    """Groups declined forms: reason -> names of the forms."""
    return {reason: [f for f, why in declined.items() if why == reason] for reason in declined.values()}


def decision_lines(decision: Mapping[str, Any], width: int) -> list[str]:
    """Formats the result of `describe_decision` as lines of at most ``width`` columns."""
    sign = "->" if decision["shared_input"] is None else "beside"
    saved = f" [{size_text(decision['bytes_saved'])}]" if decision["bytes_saved"] else ""
    head = f"{decision['producer']} {sign} {decision['consumer']}{saved}"
    return wrapped(head, width, "    ") + wrapped(decision["reason"], width, "        ")


def _tensors(tensors: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(f"{t['name']} ({size_text(t['bytes'])})" for t in tensors) or "nothing"


def wrapped(text: str, width: int, indent: str, further: str | None = None) -> list[str]:
    """Wraps text into lines of at most ``width`` columns.

    The first line begins with ``indent``, the others with ``further`` (default: the same).  Long words are not broken.
    """
    return textwrap.wrap(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=indent if further is None else further,
        break_long_words=False,
        break_on_hyphens=False,
    )
