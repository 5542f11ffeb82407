"""``fusegraph debug`` and ``reduce``: the first wrong node of each graph, and the smallest graph that fails."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fusegraph.cli.console import NOT_OK, doing, note, print_json, progress, say
from fusegraph.engines import default_engine
from fusegraph.errors import NotSupportedError
from fusegraph.graph import Graph
from fusegraph.loader import load_graphs, onnx_file
from fusegraph.ops.base import Array
from fusegraph.report import artifacts
from fusegraph.report.check import random_inputs
from fusegraph.report.debug import Finding, Setup, check_engine, first_not_finite, first_wrong
from fusegraph.report.parts import restored
from fusegraph.report.reduce import reduced
from fusegraph.report.reproducer import CODE, load_arrays, reproducer_files

_NOTHING = "every kernel's results are within their bounds"
_LIKE = "its graph computes what the model says"
_FINITE = "no kernel makes a NaN or an infinity"


def debug_file(
    file: str,
    engine: str | None,
    *,
    against: str,
    nan: bool,
    reduce: bool,
    seed: int,
    inputs: str | None,
    out: str,
    as_json: bool,
    strict: bool,
    no_fusion: bool,
    target: str | None,
    dims: Sequence[str] | None = None,
) -> int:
    """Prints the first wrong node of every graph of a file; returns 1 if there is any, else 0.

    With ``as_json`` the object is ``graphs[]``: ``name``; ``found`` (null if nothing is wrong) with ``kind, node, op,
    tensor, detail``, ``kernel, number, family, kernel_nodes`` of its kernel, and ``alone`` (whether the reproducer's
    graph fails); ``reproducer`` (the file, null if there is none), and with ``reduce`` the number of its ``nodes``.
    """
    setup = Setup(engine or default_engine(), strict, not no_fusion, target)
    check_engine(setup.engine)
    entries = []
    parent, names = artifacts.prepare(Path(out)), artifacts.UniqueNames()
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=True)
    step = progress(len(graphs))
    for graph in graphs:
        tell = partial(_tell, step, graph.name)
        given = _given(graph, seed, inputs)
        if nan:
            finding = first_not_finite(graph, given, setup, progress=tell)
        elif against == "onnx":
            finding = _unlike_model(file, graph, given)
        else:
            finding = first_wrong(graph, given, setup, against=against, progress=tell)
        folder = parent / names.unique(graph.name)
        entries.append(_entry(graph, finding, setup, folder, tell if reduce else None))
        step(graph.name, advance=1)
    if as_json:
        print_json({"graphs": entries})
    else:
        for entry in entries:
            _print(entry, _FINITE if nan else _LIKE if against == "onnx" else _NOTHING)
    return NOT_OK if any(e["found"] for e in entries) else 0


def _unlike_model(file: str, graph: Graph, inputs: Mapping[str, Array]) -> Finding | None:
    """Returns the first tensor that is not what the ONNX model of a file says."""
    path = onnx_file(file)
    if path is None:
        raise NotSupportedError(f"--against onnx runs an ONNX model beside its graph; {file} is none")
    from fusegraph.frontends.onnx.compared import first_unlike, model_values

    return first_unlike(graph, inputs, *model_values(path, inputs))


def reduce_file(
    file: str,
    engine: str | None,
    *,
    seed: int,
    inputs: str | None,
    out: str,
    as_json: bool,
    strict: bool,
    no_fusion: bool,
    target: str | None,
    dims: Sequence[str] | None = None,
) -> int:
    """Writes the smallest graph found that fails as each graph of a file does; returns 1 if one fails, else 0.

    With ``as_json`` the object is ``graphs[]``: ``name``; ``failure`` ("differs", "overwritten", the name of an
    exception, or null); ``nodes, tried`` (of the smallest graph, and how many were tried); ``reproducer``.
    """
    setup = Setup(engine or default_engine(), strict, not no_fusion, target)
    check_engine(setup.engine)
    parent, names = artifacts.prepare(Path(out)), artifacts.UniqueNames()
    entries = []
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=True)
    step = progress(len(graphs))
    for graph in graphs:
        tell = partial(_tell, step, graph.name)
        given = _given(graph, seed, inputs)
        entries.append(_smallest(graph, given, setup, parent / names.unique(graph.name), tell))
        step(graph.name, advance=1)
    if as_json:
        print_json({"graphs": entries})
    for entry in [] if as_json else entries:
        if entry["failure"] is None:
            say(f"{entry['name']}: does not fail")
        else:
            say(f"{entry['name']}: {entry['failure']}, with {entry['nodes']} nodes ({entry['tried']} graphs tried)")
            say(f"    run it: python {entry['reproducer']}")
    return NOT_OK if any(e["failure"] for e in entries) else 0


def _smallest(
    graph: Graph, given: Mapping[str, Array], setup: Setup, folder: Path, tell: Callable[[str], object]
) -> dict[str, Any]:
    """Writes the smallest graph that fails as this one does, and returns a graph's entry."""
    failure = _failure(graph, given, setup)
    if failure is None:
        return {"name": graph.name, "failure": None, "nodes": None, "tried": 1, "reproducer": None}
    found = reduced(graph, given, lambda g, x: _failure(g, x, setup) == failure, progress=tell)
    title = f"Graph {graph.name} fails on {setup.engine}: {failure}"
    file = _written(folder, found.graph, found.inputs, title, setup)
    counts = {"nodes": found.graph.node_count, "tried": found.tried}
    return {"name": graph.name, "failure": failure, **counts, "reproducer": file}


def _tell(step: Callable[..., None], name: str, text: str) -> None:
    step(f"{name}: {text}")


def _given(graph: Graph, seed: int, file: str | None) -> dict[str, Array]:
    """Returns the inputs of a graph: random ones, or those of an ``.npz`` file."""
    if file is None:
        return random_inputs(graph, seed)
    arrays = load_arrays(Path(file))
    return {t.name: restored(arrays, t) for t in graph.inputs}


def _failure(graph: Graph, inputs: Mapping[str, Array], setup: Setup) -> str | None:
    """Returns how a graph fails: at its outputs, or within, where bounds are tighter."""
    failure = setup.failure(graph, inputs)
    if failure is not None:
        return failure
    finding = first_wrong(graph, inputs, setup)
    return finding.kind if finding is not None else None


def _entry(
    graph: Graph, finding: Finding | None, setup: Setup, folder: Path, reduce: Callable[[str], object] | None
) -> dict[str, Any]:
    """Writes the reproducer of what was found, and returns a graph's entry."""
    if finding is None:
        return {"name": graph.name, "found": None, "reproducer": None}
    keys = ("kind", "node", "op", "tensor", "detail", "kernel", "number", "family", "kernel_nodes", "alone")
    entry: dict[str, Any] = {"name": graph.name, "found": {key: getattr(finding, key) for key in keys}}
    entry["reproducer"] = None
    if finding.part is None:
        return entry
    made, inputs = finding.part, finding.inputs
    if reduce is not None and finding.alone and finding.kind == "differs":
        small = reduced(made, inputs, lambda g, x: setup.failure(g, x) == "differs", progress=reduce)
        made, inputs = small.graph, small.inputs
        entry["nodes"] = made.node_count
    title = f"{finding.op} {finding.node}, {finding.kind}, on {setup.engine}: {finding.detail}"
    entry["reproducer"] = _written(folder, made, inputs, title, setup)
    return entry


def _written(folder: Path, graph: Graph, inputs: Mapping[str, Array], title: str, setup: Setup) -> str | None:
    """Writes a reproducer and returns its file; None if the graph cannot be written as code, which is said."""
    options: dict[str, Any] = {"engine": setup.engine, "strict": setup.strict, "fusion": setup.fusion}
    options = {key: value for key, value in options.items() if value != getattr(Setup(""), key)}
    options |= {"target": setup.target} if setup.target else {}
    try:
        files = reproducer_files(graph, inputs, title, options)
    except NotSupportedError as error:
        note(f"{graph.name}: no reproducer: {error}")
        return None
    artifacts.write_folder(folder, files, {"name": graph.name})
    return str(folder / CODE)


def _print(entry: Mapping[str, Any], nothing: str) -> None:
    found = entry["found"]
    if found is None:
        say(f"{entry['name']}: {nothing}")
        return
    say(f"{entry['name']}: {found['op']} {found['node']}: {found['kind']}")
    if found["tensor"] != found["node"]:
        say(f"    tensor  {found['tensor']}")
    say(f"    {found['detail']}")
    nodes = ", ".join(found["kernel_nodes"])
    if found["kernel"]:
        say(f"    kernel  {found['number']}: {found['kernel']} ({found['family']}): {nodes}")
    if entry["reproducer"] is not None:
        say(f"    inputs and code written; run it: python {entry['reproducer']}")
        if not found["alone"] and found["kernel"]:
            say("    these nodes do not fail by themselves: what is wrong needs the kernels around them")
