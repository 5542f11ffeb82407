"""``fusegraph explain``: shows the plan of each graph without compiling it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fusegraph.cli.console import columns, doing, print_json, progress, say
from fusegraph.cli.planning import planning
from fusegraph.errors import FileError
from fusegraph.loader import load_graphs
from fusegraph.plan import Plan
from fusegraph.ranges import SizedPlan
from fusegraph.report.artifacts import UniqueNames, prepare, write_folder
from fusegraph.report.explain import describe, explain_text
from fusegraph.report.explain_sized import describe_sized, ranges_of, sized_text
from fusegraph.report.passes import describe_steps, dump_files, steps_text
from fusegraph.sized_graphs import varies


def explain_file(
    file: str,
    *,
    kernel: str | None,
    passes: bool = False,
    dump: str | None = None,
    strict: bool,
    no_fusion: bool,
    target: str | None = None,
    as_json: bool,
    dims: Sequence[str] | None = None,
) -> int:
    """Prints `describe` of every graph; returns 0.

    kernel   print the source of the kernels of this name instead.  With ``as_json`` the object is ``kernels[]`` with
             ``graph, name, family, nodes, code``.  Raises FileError if no graph has such a kernel.
    passes   print `describe_steps` of every graph instead.
    dims     sizes of dimensions that vary (`load_graphs`).  Graphs whose sizes still vary are described by their ranges
             (`describe_sized`); for --passes and --dump their sizes are needed.
    dump     a folder in which each graph gets a folder of its own, with the graph as built and after each pass.
    """
    fusion = not no_fusion
    planned, options = planning(strict, fusion, target)
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=passes or dump is not None)
    varying, plans, sized = [graph for graph in graphs if varies(graph)], [], []
    step = progress(len(varying or graphs))
    for graph in varying or graphs:
        step(f"{graph.name}: planning")
        if varying:
            sized.append(ranges_of(graph, options, fusion))
        else:
            plans.append(planned(graph, options))
        step(graph.name, advance=1)
    if sized:
        return _explain_sized(file, sized, kernel, as_json)
    if dump is not None:
        _dump(plans, dump)
    if kernel is not None:
        found = [(p, k) for p in plans for k in p.kernels if k.name == kernel]
        if not found:
            known = ", ".join(dict.fromkeys(k.name for p in plans for k in p.kernels))
            raise FileError(f"no graph of {file} has a kernel {kernel!r}; the kernels are: {known}")
        if as_json:
            entries = [
                {
                    "graph": p.graph.name,
                    "name": k.name,
                    "family": k.group.family,
                    "nodes": [n.name for n in k.group.nodes],
                    "code": k.source.code,
                }
                for p, k in found
            ]
            print_json({"kernels": entries})
        else:
            say("\n\n".join(dict.fromkeys(k.source.code.rstrip() for _, k in found)))
        return 0
    if passes:
        steps = {p.graph.name: describe_steps(p) for p in plans}
        if as_json:
            print_json({"graphs": [{"name": name, "passes": found} for name, found in steps.items()]})
        else:
            say("\n".join(steps_text(name, found, columns()) for name, found in steps.items()).rstrip("\n"))
        return 0
    facts = [describe(p, options.target) for p in plans]
    if as_json:
        print_json({"graphs": facts})
    else:
        say("\n".join(explain_text(f, columns()) for f in facts).rstrip("\n"))
    return 0


def _explain_sized(file: str, plans: Sequence[SizedPlan], kernel: str | None, as_json: bool) -> int:
    """Prints `describe_sized` of graphs, or the source of the kernels of a name; returns 0."""
    if kernel is None:
        facts = [describe_sized(p) for p in plans]
        if as_json:
            print_json({"graphs": facts})
        else:
            say("\n".join(sized_text(f, columns()) for f in facts).rstrip("\n"))
        return 0
    found = [(p, source) for p in plans for source in p.sources if source.name == kernel]
    if not found:
        known = ", ".join(dict.fromkeys(source.name for p in plans for source in p.sources))
        raise FileError(f"no graph of {file} has a kernel {kernel!r}; the kernels are: {known}")
    if as_json:
        print_json({"kernels": [{"graph": p.graph.name, "name": s.name, "code": s.code} for p, s in found]})
    else:
        say("\n\n".join(source.code.rstrip() for _, source in found))
    return 0


def _dump(plans: Sequence[Plan], folder: str) -> None:
    """Writes a folder for each graph, with a text file for each pass."""
    out, names = prepare(Path(folder)), UniqueNames()
    for each in plans:
        write_folder(out / names.unique(each.graph.name), dump_files(each), {"graph": each.graph.name})
