"""``fusegraph explain``: what each graph becomes, without compiling it."""

from __future__ import annotations

from fusegraph.cli.console import columns, print_json, say
from fusegraph.engines.cuda import nvrtc_options
from fusegraph.errors import FileError
from fusegraph.loader import load_graphs
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime.autotune import choosers
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.environment import check_environment
from fusegraph.runtime.targets import named, present


def explain_file(
    file: str, *, kernel: str | None, strict: bool, fusion: bool, target: str | None = None, as_json: bool
) -> int:
    """Prints what `describe` says of every graph; with ``kernel`` the source of the kernels of that name instead.

    With both ``kernel`` and ``as_json`` the object is ``kernels[]`` with ``graph, name, family, nodes, code``.  Raises
    FileError if no graph has such a kernel.
    """
    check_environment()
    options = Options(strict=strict, target=present() if target is None else named(target))
    choose, _ = choosers(options.target, 0, None, default_cache(), nvrtc_options(options))
    plans = [plan(graph, options, fusion=fusion, choose=choose) for graph in load_graphs(file)]
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
    facts = [describe(p, options.target) for p in plans]
    if as_json:
        print_json({"graphs": facts})
    else:
        say("\n".join(explain_text(f, columns()) for f in facts).rstrip("\n"))
    return 0
