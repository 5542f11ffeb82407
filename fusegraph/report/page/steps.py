"""The passes of a plan as data: the graph before and after each, line by line."""

from __future__ import annotations

from typing import Any

from fusegraph.graph import Graph
from fusegraph.plan import Plan
from fusegraph.report.explain import describe_decision
from fusegraph.report.passes import node_lines


def steps_facts(plan: Plan) -> dict[str, Any]:
    """Returns the passes that ran, in order, as plain data.

    lines   every line that a node of any of the graphs has.
    built   numbers of lines: the graph as it was built.
    steps   name, summary, decisions; ``after``: the graph behind the pass, None if it is as before.
    """
    numbers: dict[str, int] = {}

    def lines(graph: Graph) -> list[int]:
        return [numbers.setdefault(line, len(numbers)) for line in node_lines(graph)]

    built = lines(plan.graph)
    steps = [
        {
            "name": step.name,
            "summary": step.summary,
            "after": lines(step.rewritten.graph) if step.changed else None,
            "decisions": [describe_decision(d) for d in step.rewritten.decisions],
        }
        for step in plan.steps
    ]
    return {"lines": list(numbers), "built": built, "steps": steps}
