"""``fusegraph report``: writes a page that shows what became of the graphs of a file, or how two reports differ."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fusegraph.cli.console import columns, doing, note, print_json, progress, say
from fusegraph.cli.planning import planning
from fusegraph.errors import FileError
from fusegraph.loader import load_graphs
from fusegraph.origins import calling_line, written_for
from fusegraph.report.explain import count_text
from fusegraph.report.page.differences import differences, differences_text
from fusegraph.report.page.file import load, save, write


def report_file(
    file: str,
    *,
    out: str,
    dims: Sequence[str] | None,
    target: str | None,
    strict: bool,
    no_fusion: bool,
    compiled: bool,
    profile: str | None,
    as_json: bool,
) -> int:
    """Writes the page of a file's graphs; returns 0.

    compiled  compiles the kernels with NVRTC, to show registers and spills.
    profile   a file of measured times (`fusegraph.report.page.times`).
    """
    planned, options = planning(strict, not no_fusion, target)
    with written_for(calling_line):
        doing(f"reading {file}")
        graphs = load_graphs(file, dims, known=True)
    step = progress(len(graphs))
    plans = []
    for graph in graphs:
        step(graph.name)
        plans.append(planned(graph, options))
        step(graph.name, advance=1)
    title = graphs[0].name if len(graphs) == 1 else Path(file.partition(":")[0]).name
    doing(f"writing {out}")
    written = write(
        plans,
        options.target,
        out,
        title=title,
        compiled=compiled,
        profile=profile,
        fusion=not no_fusion,
        told=_Compiling(out),
    )
    if as_json:
        print_json({"report": str(written), "bytes": written.stat().st_size})
    else:
        kernels = sum(len(plan.kernels) for plan in plans)
        say(f"{count_text(len(plans), 'graph')}, {count_text(kernels, 'kernel')}: {written}")
    return 0


class _Compiling:
    """Shows which kernel has been compiled, and after the last that the page is written."""

    def __init__(self, out: str) -> None:
        self._out, self._done = out, 0
        self._step: Callable[..., None] | None = None

    def __call__(self, name: str, count: int) -> None:
        self._step = self._step or progress(count)
        self._step(f"compiled {name}", advance=1)
        self._done += 1
        if self._done == count:
            doing(f"writing {self._out}")


def compare_reports(before: str, after: str, *, out: str | None, as_json: bool = False) -> int:
    """Prints how two reports differ, and writes the page of the second one with that in front; returns 0."""
    doing(f"reading {before} and {after}")
    old, new = load(before), load(after)
    found = differences(old, new, before, after)
    if as_json:
        print_json(found)
    else:
        say(differences_text(found, columns()).rstrip("\n"))
    if out is not None:
        note(f"written to {save({**new, 'differences': found}, out)}")
    return 0


def report(files: Sequence[str], *, diff: bool, out: str | None, **how: Any) -> int:
    """Does what the command is asked for.  Raises FileError for a wrong number of files."""
    if len(files) != 1 + diff:
        raise FileError(f"{'--diff compares two reports' if diff else 'give one file'}, not {len(files)}")
    if diff:
        return compare_reports(*files, out=out, as_json=how["as_json"])
    return report_file(files[0], out=out or "report.html", **how)
