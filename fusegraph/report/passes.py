"""Shows what each pass did to a graph: ``fusegraph explain --passes`` and ``--dump``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusegraph.graph import Graph
from fusegraph.lowering.program import describe as describe_node
from fusegraph.passes.pipeline import Step
from fusegraph.plan import Plan
from fusegraph.report.explain import MOST_LISTED, count_text, decision_lines, describe_decision, wrapped


def describe_steps(plan: Plan) -> list[dict[str, Any]]:
    """Returns the passes that ran on a plan's graph, in order, as plain data.

    name, summary   the pass, and what it does.
    nodes           how many nodes there are after it.
    removed, added  nodes that only the graph before it has, and only the one after it, as text.
    decisions       as `describe_decision`: what was rewritten, what was not, and why.
    """
    return [_step(step) for step in plan.steps]


def _step(step: Step) -> dict[str, Any]:
    after = step.rewritten.graph
    old, new = (dict.fromkeys(node_lines(graph) if step.changed else ()) for graph in (step.before, after))
    return {
        "name": step.name,
        "summary": step.summary,
        "nodes": len(after.nodes),
        "removed": [line for line in old if line not in new],
        "added": [line for line in new if line not in old],
        "decisions": [describe_decision(d) for d in step.rewritten.decisions],
    }


def node_lines(graph: Graph) -> list[str]:
    """Returns a line for each node: its results, op, operands and attributes."""
    return [describe_node(node) for node in graph.nodes]


def graph_text(graph: Graph) -> str:
    """Returns a graph as text: its inputs and constants, a line for each node, its outputs."""
    given = [t for t in graph.tensors.values() if graph.producer(t) is None]
    lines = [f"graph {graph.name}"]
    for tensor in given:
        what = "constant" if tensor.is_constant else "input"
        lines.append(f"{what} {tensor.name}: {tensor.dtype} {list(tensor.shape)} strides {list(tensor.strides)}")
    for node in graph.nodes:
        results = ", ".join(f"{t.dtype} {list(t.shape)}" for t in node.outputs)
        lines.append(f"{describe_node(node)}: {results}")
    lines += [f"output {t.name}: strides {list(t.own_strides or t.strides)}" for t in graph.outputs]
    return "\n".join(lines) + "\n"


def dump_files(plan: Plan) -> dict[str, bytes]:
    """Returns the files of ``--dump``, by name: the graph as built, and after each pass."""
    graphs = {"as built": plan.graph, **{step.name: step.rewritten.graph for step in plan.steps}}
    return {
        f"{number:02}-{name.replace(' ', '-').replace(chr(39), '')}.txt": graph_text(graph).encode()
        for number, (name, graph) in enumerate(graphs.items())
    }


def steps_text(name: str, steps: Sequence[Mapping[str, Any]], width: int = 80) -> str:
    """Formats the result of `describe_steps` as text in lines of at most ``width`` columns.

    Passes that changed and decided nothing are named at the end.
    """
    lines, idle = [f"graph {name}"], []
    for step in steps:
        if not (step["removed"] or step["added"] or step["decisions"]):
            idle.append(step["name"])
            continue
        lines += ["", f"  {step['name']}: {count_text(step['nodes'], 'node')} behind it"]
        lines += wrapped(step["summary"], width, "    ")
        for sign, nodes in (("-", step["removed"]), ("+", step["added"])):
            for line in nodes[:MOST_LISTED]:
                lines += wrapped(line, width, f"    {sign} ", "        ")
            if len(nodes) > MOST_LISTED:
                lines.append(f"    {sign} and {len(nodes) - MOST_LISTED} more")
        for decision in step["decisions"]:
            lines += decision_lines(decision, width)
    if idle:
        lines += ["", *wrapped(f"nothing to do for: {', '.join(idle)}", width, "  ", "    ")]
    return "\n".join(lines) + "\n"
