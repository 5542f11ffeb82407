"""``fusegraph profile``: the time of every kernel beside its floor, measured on a GPU or else estimated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import fusegraph
from fusegraph.cli.console import doing, print_json, print_table, progress, say
from fusegraph.graph import Graph
from fusegraph.loader import load_graphs
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report import artifacts
from fusegraph.report.check import random_inputs
from fusegraph.report.profile import KernelTime, Profile, estimated
from fusegraph.report.profile_gpu import measured
from fusegraph.runtime import driver
from fusegraph.runtime.targets import named, present


def profile_file(
    file: str,
    *,
    trace: str | None,
    repeats: int,
    seed: int,
    as_json: bool,
    strict: bool,
    no_fusion: bool,
    target: str | None,
    dims: Sequence[str] | None = None,
) -> int:
    """Prints the profile of every graph of a file; returns 0.

    With ``as_json`` the object has ``graphs[]``, each its ``name`` and what `Profile.data` tells but for the kernels,
    and ``kernels[]``, those of all graphs.
    """
    path = artifacts.prepare_file(Path(trace)) if trace is not None else None
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=True)
    found: list[tuple[str, Profile]] = []
    step = progress(len(graphs))
    for graph in graphs:
        step(f"{graph.name}: profiling")
        found.append((graph.name, _profiled(graph, repeats, seed, strict, not no_fusion, target)))
        step(graph.name, advance=1)
    if path is not None:
        artifacts.write_file(path, _joined([one for _, one in found]).trace())
    if as_json:
        data = [(name, one.data()) for name, one in found]
        graphs_data = [{"name": name, **{k: v for k, v in d.items() if k != "kernels"}} for name, d in data]
        print_json({"graphs": graphs_data, "kernels": [k for _, d in data for k in d["kernels"]]})
        return 0
    for name, one in found:
        say(f"{name}: {one.summary()}")
        headings, rows, nodes = one.table()
        print_table(headings, rows, right=(1, 2, 3, 4, 5, 7, 8, 9), details=nodes)
    return 0


def _profiled(graph: Graph, repeats: int, seed: int, strict: bool, fusion: bool, target: str | None) -> Profile:
    if target is None and driver.available():
        executable = fusegraph.compile(graph, "cuda", strict=strict, fusion=fusion)
        return measured(executable, random_inputs(graph, seed), repeats)
    machine = present() if target is None else named(target)
    return estimated(plan(graph, Options(strict=strict, target=machine), fusion=fusion), machine)


def _joined(profiles: Sequence[Profile]) -> Profile:
    """Returns profiles one after the other, as one."""
    kernels: list[KernelTime] = []
    start = 0.0
    for one in profiles:
        kernels += [replace(k, start_us=k.start_us + start) for k in one.kernels]
        start += one.step_us
    return replace(profiles[0], kernels=kernels, step_us=start)
