"""Measured times of kernels, from a profile in a file, in place of estimates."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from fusegraph.errors import FileError
from fusegraph.report.artifacts import read_file


def with_times(facts: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """Returns the data of a report with the times of a profile.

    The file is JSON: an object whose ``kernels`` is a list, in the order of launches, of objects with ``name``, ``us``
    (microseconds) and, if it is known, ``start_us``.  Others between ours are passed over.  A kernel that is launched
    more often than it is listed has the mean of what is listed under its name.  Raises FileError for any other file,
    and for one that has no kernel of the report.
    """
    text = read_file(Path(path))
    try:
        listed = json.loads(text)["kernels"]
        events = [(str(e["name"]), float(e["us"]), e.get("start_us")) for e in listed]
    except (ValueError, TypeError, KeyError, AttributeError):
        raise FileError(f'{path} is no profile: {{"kernels": [{{"name": "...", "us": 1.5}}, ...]}} is one') from None
    known: dict[str, list[tuple[float, Any]]] = defaultdict(list)
    for name, us, start in events:
        known[name].append((us, start))
    kernels = [kernel for graph in facts["graphs"] for kernel in graph["kernels"]]
    if not any(kernel["name"] in known for kernel in kernels):
        names = ", ".join(dict.fromkeys(k["name"] for k in kernels[:3]))
        raise FileError(f"{path} has no kernel of this report, whose kernels are {names}, ...")
    wanted: dict[str, int] = defaultdict(int)
    for kernel in kernels:
        wanted[kernel["name"]] += 1
    seen: dict[str, int] = defaultdict(int)
    return {**facts, "graphs": [_timed(graph, known, wanted, seen) for graph in facts["graphs"]]}


def _timed(
    graph: dict[str, Any], known: dict[str, list[tuple[float, Any]]], wanted: dict[str, int], seen: dict[str, int]
) -> dict[str, Any]:
    """Returns a graph's data with the times of its kernels; several calls in one profile are averaged."""
    kernels = []
    for kernel in graph["kernels"]:
        name = kernel["name"]
        its, each = known.get(name, []), wanted[name]
        if its:
            mine = its[seen[name] :: each] if len(its) % each == 0 else its
            start = mine[0][1] if len(mine) == 1 else None
            kernel = {**kernel, "measured_us": sum(us for us, _ in mine) / len(mine)}
            kernel |= {} if start is None else {"start_us": float(start)}
            seen[name] += 1
        kernels.append(kernel)
    return {**graph, "kernels": kernels}
