"""Explains plans of graphs whose sizes vary: ranges, the kernels of each, and what is planned by size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from codegen import schedule_data, schedule_from_data, schedule_text
from codegen.sizes import Size
from fusegraph.engines.sized import sources_of
from fusegraph.errors import listed
from fusegraph.ranges import SizedPlan
from fusegraph.report.explain import MOST_LISTED, count_text, wrapped


def describe_sized(planned: SizedPlan) -> dict[str, Any]:
    """Returns the plans of a graph for all sizes as plain data.

    name, inputs, outputs  the graph's name; ends with ``name``, ``shape`` (sizes that vary as text) and ``dtype``.
    ranges   each with ``sizes`` (name to least and largest) and ``groups``: ``nodes``, ``family`` and ``kernels``, each
             with ``name``, ``sizes``, ``schedule`` and ``chosen_by``.
    by_size  ``sizes, reason``: what is planned for each choice of sizes when it comes.
    aligned  ``units`` (name to what sizes are multiples of) and ``plan``: the facts of sizes counted in them.
    """
    units = {name: unit for name, (unit, _, _) in sources_of(planned.graph).items()}
    return {
        "name": planned.graph.name,
        "inputs": [_end(t) for t in planned.graph.inputs],
        "outputs": [_end(t) for t in planned.graph.outputs],
        "ranges": [
            {
                "sizes": _bounds(each.range, units),
                "groups": [
                    {
                        "nodes": [n.name for n in group.nodes],
                        "family": group.family,
                        "kernels": [
                            {
                                "name": v.source.name,
                                "sizes": _bounds(v.range, units),
                                "schedule": schedule_data(v.choice.schedule),
                                "chosen_by": v.choice.reason,
                            }
                            for v in variants
                        ],
                    }
                    for group, variants in each.kernels
                ],
            }
            for each in planned.plans
        ],
        "by_size": [{"sizes": _bounds(range_, units), "reason": reason} for range_, reason in planned.by_size],
        "aligned": [{"units": dict(units), "plan": describe_sized(other)} for units, other in planned.aligned],
    }


def _end(tensor: Any) -> dict[str, Any]:
    shape = [str(n.expression) if isinstance(n, Size) else n for n in tensor.shape]
    return {"name": tensor.name, "shape": shape, "dtype": tensor.dtype.name}


def _bounds(range_: Any, units: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: [units[name] * n for n in bounds] for name, bounds in range_.bounds.items()}


def sized_text(facts: Mapping[str, Any], width: int = 80) -> str:
    """Formats the result of `describe_sized` as text in lines of at most ``width`` columns."""
    lines = [f"graph {facts['name']}", ""]
    for what in ("inputs", "outputs"):
        ends = ", ".join(f"{t['name']} {t['dtype']} [{', '.join(map(str, t['shape']))}]" for t in facts[what])
        lines += wrapped(f"{what}: {ends}", width, "  ", "    ")
    lines += _ranges(facts, width)
    for aligned in facts["aligned"]:
        units = ", ".join(f"{name} a multiple of {unit}" for name, unit in aligned["units"].items())
        lines += ["", f"  where {units}:", *_ranges(aligned["plan"], width)]
    return "\n".join(lines) + "\n"


def _ranges(facts: Mapping[str, Any], width: int) -> list[str]:
    lines: list[str] = []
    for each in facts["ranges"]:
        lines += ["", f"  {_sizes(each['sizes'])}: {count_text(len(each['groups']), 'kernel')}"]
        for group in each["groups"]:
            lines += wrapped(f"{group['family']}: {listed(group['nodes'], MOST_LISTED)}", width, "    ", " " * 8)
            for kernel in group["kernels"]:
                schedule = schedule_text(schedule_from_data(kernel["schedule"]))
                sizes = f" for {_sizes(kernel['sizes'])}" if kernel["sizes"] != each["sizes"] else ""
                lines += wrapped(f"{kernel['name']}{sizes}: {schedule}", width, " " * 6, " " * 10)
    if facts["by_size"]:
        lines += ["", "  planned for each choice of sizes when it comes:"]
    for each in facts["by_size"]:
        lines += wrapped(f"{_sizes(each['sizes'])}: {each['reason']}", width, "    ", " " * 8)
    return lines


def _sizes(bounds: Mapping[str, Any]) -> str:
    return ", ".join(f"{n} = {low}" if low == high else f"{n} {low} to {high}" for n, (low, high) in bounds.items())
