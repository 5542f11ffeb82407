"""Explains plans of graphs whose sizes vary: ranges, the kernels of each, and what is planned by size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from codegen import schedule_data, schedule_from_data, schedule_text
from codegen.sizes import Size, in_words
from codegen.spec import KernelSource, Scalar, TensorMap
from fusegraph.engines.sized import sources_of
from fusegraph.errors import GraphError, listed
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.passes.partition import Group
from fusegraph.ranges import SizedPlan, plan_ranges
from fusegraph.report.explain import MOST_LISTED, count_text, wrapped
from fusegraph.sized_graphs import OpenGraph
from fusegraph.tensor import Tensor
from fusegraph.variants import Variant


def ranges_of(graph: Graph, options: Options, fusion: bool) -> SizedPlan:
    """Returns the plans of a graph for all sizes.  Raises GraphError for one that has none, with the reason."""
    if isinstance(graph, OpenGraph):
        raise GraphError(f"{graph.name} is compiled for each choice of sizes: {graph.reason}; give sizes: --dim NAME=8")
    return plan_ranges(graph, options, fusion=fusion)


def describe_sized(planned: SizedPlan) -> dict[str, Any]:
    """Returns the plans of a graph for all sizes as plain data.

    name, inputs, outputs  the graph's name; ends with ``name``, ``shape`` (sizes that vary as text) and ``dtype``.
    ranges   each with ``sizes`` (name to least and largest) and ``groups`` in the order in which they run: ``nodes``,
             ``family``, ``reads`` and ``writes`` (as the ends, with ``strides`` in elements) and ``kernels``, of which
             one runs, each with ``name``, ``sizes``, ``schedule``, ``chosen_by`` and how it is launched: ``grid``,
             ``block``, ``dynamic_shared_bytes``, ``parameters`` (`_parameter`).  Sizes are texts in the symbols.
    packing  the names of kernels that make packed tensors of parameters.
    symbols  name to unit: a symbol stands for the size of its Dim, divided by that.
    by_size  ``sizes, reason``: what is planned for each choice of sizes when it comes.
    aligned  ``units`` (name to what sizes are multiples of) and ``plan``: the facts of sizes counted in them.  What is
             ``by_size`` there has the kernels of other sizes.
    """
    units = {name: unit for name, (unit, _, _) in sources_of(planned.graph).items()}
    return {
        "name": planned.graph.name,
        "inputs": [_end(t) for t in planned.graph.inputs],
        "outputs": [_end(t) for t in planned.graph.outputs],
        "symbols": units,
        "ranges": [
            {
                "sizes": _bounds(each.range, units),
                "groups": [_group(group, variants, units) for group, variants in each.kernels],
                "packing": [k.name for k in each.packing.kernels] if each.packing is not None else [],
            }
            for each in planned.plans
        ],
        "by_size": [
            {"sizes": _bounds(range_, units), "reason": in_words(reason)} for range_, reason in planned.by_size
        ],
        "aligned": [
            {"units": {n: k * units[n] for n, k in counted.items()}, "plan": describe_sized(other)}
            for counted, other in planned.aligned
        ],
    }


def _group(group: Group, variants: Sequence[Variant], units: Mapping[str, int]) -> dict[str, Any]:
    return {
        "nodes": [n.name for n in group.nodes],
        "family": group.family,
        "reads": [_end(t) | {"strides": _texts(t.strides)} for t in group.reads],
        "writes": [_end(t) | {"strides": _texts(t.strides)} for t in group.writes],
        "kernels": [
            {
                "name": v.source.name,
                "sizes": _bounds(v.range, units),
                "schedule": schedule_data(v.choice.schedule),
                "chosen_by": v.choice.reason,
                "grid": _texts(v.source.grid),
                "block": list(v.source.block),
                "dynamic_shared_bytes": _text(v.source.dynamic_shared_bytes),
                "parameters": [_parameter(p) for p in _parameters(v.source, group)],
            }
            for v in variants
        ],
    }


def _parameters(source: KernelSource, group: Group) -> Sequence[int | TensorMap | Scalar]:
    count = len(group.reads) + len(group.writes) + len(group.positions)
    return source.parameters if source.parameters is not None else range(count)


def _parameter(parameter: int | TensorMap | Scalar) -> dict[str, Any]:
    """Returns a parameter of a kernel: the address of an ``argument``, a number of a C type, or a tensor map."""
    if isinstance(parameter, Scalar):
        return {"ctype": parameter.ctype, "value": _text(parameter.value)}
    if isinstance(parameter, TensorMap):
        return {name: _texts(x) if isinstance(x, tuple) else _text(x) for name, x in vars(parameter).items()}
    return {"argument": parameter}


def _text(part: Any) -> Any:
    return part.written if isinstance(part, Size) else part


def _texts(sizes: Sequence[int]) -> list[Any]:
    return [_text(n) for n in sizes]


def _end(tensor: Tensor) -> dict[str, Any]:
    return {"name": tensor.name, "shape": _texts(tensor.shape), "dtype": tensor.dtype.name}


def _bounds(range_: Any, units: Mapping[str, int]) -> dict[str, list[int]]:
    return {name: [units[name] * n for n in bounds] for name, bounds in range_.bounds.items()}


def sized_text(facts: Mapping[str, Any], width: int = 80) -> str:
    """Formats the result of `describe_sized` as text in lines of at most ``width`` columns."""
    lines = [f"graph {facts['name']}", ""]
    for what in ("inputs", "outputs"):
        ends = ", ".join(f"{t['name']} {t['dtype']} [{', '.join(map(str, t['shape']))}]" for t in facts[what])
        lines += wrapped(f"{what}: {ends}", width, "  ", "    ")
    lines += _ranges(facts, width, "planned for each choice of sizes when it comes")
    for aligned in facts["aligned"]:
        units = ", ".join(f"{name} a multiple of {unit}" for name, unit in aligned["units"].items())
        named = {f"{name}_by_{unit // facts['symbols'][name]}": name for name, unit in aligned["units"].items()}
        lines += ["", f"  where {units}:", *_ranges(aligned["plan"], width, "as for other sizes", named)]
    return "\n".join(lines) + "\n"


def _ranges(facts: Mapping[str, Any], width: int, left: str, named: Mapping[str, str] | None = None) -> list[str]:
    """Returns lines on the ranges of a plan; ``left`` says what serves those that it has no kernels for.

    ``named`` are the names of Dims by symbols that count them in units.
    """

    def text(bounds: Mapping[str, Any]) -> str:
        return sizes_text({(named or {}).get(name, name): ends for name, ends in bounds.items()})

    lines: list[str] = []
    for each in facts["ranges"]:
        lines += ["", f"  {text(each['sizes'])}: {count_text(len(each['groups']), 'kernel')}"]
        for group in each["groups"]:
            lines += wrapped(f"{group['family']}: {listed(group['nodes'], MOST_LISTED)}", width, "    ", " " * 8)
            for kernel in group["kernels"]:
                schedule = schedule_text(schedule_from_data(kernel["schedule"]))
                sizes = f" for {text(kernel['sizes'])}" if kernel["sizes"] != each["sizes"] else ""
                lines += wrapped(f"{kernel['name']}{sizes}: {schedule}", width, " " * 6, " " * 10)
    if facts["by_size"]:
        lines += ["", f"  {left}:"]
    for each in facts["by_size"]:
        lines += wrapped(f"{text(each['sizes'])}: {each['reason']}", width, "    ", " " * 8)
    return lines


def sizes_text(bounds: Mapping[str, Any]) -> str:
    """Formats bounds of sizes by name."""
    return ", ".join(f"{n} = {low}" if low == high else f"{n} {low} to {high}" for n, (low, high) in bounds.items())
