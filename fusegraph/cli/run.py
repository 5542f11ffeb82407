"""``fusegraph run``: runs each graph on random inputs, and checks it against the reference if asked."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import fusegraph
from fusegraph.cli.console import NOT_OK, check_autotune, doing, note, print_json, print_table, progress, say
from fusegraph.engines import default_engine
from fusegraph.engines.arguments import with_own_memory
from fusegraph.engines.base import Executable
from fusegraph.engines.sized import SizedExecutable, sizes_given
from fusegraph.graph import Graph
from fusegraph.loader import load_graphs
from fusegraph.ops.base import Array
from fusegraph.ops.convert import to_reference
from fusegraph.report import artifacts
from fusegraph.report.check import CheckResult, check_executable, random_inputs, run
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import to_device
from fusegraph.sized_graphs import OpenGraph

_TIMED_CALLS = 10


def run_file(
    file: str,
    engine: str | None,
    *,
    check: bool,
    seed: int,
    out: str | None,
    strict: bool,
    no_fusion: bool,
    autotune: bool | None = None,
    as_json: bool,
    dims: Sequence[str] | None = None,
) -> int:
    """Runs every graph of a file; returns 1 if a check failed, else 0.

    ``out`` gets one folder per graph with its outputs as ``.npy`` files.  Values of dtypes that NumPy alone cannot load
    (bfloat16, floats of 8 bits, packed dtypes) are saved as float32.
    """
    engine = engine or default_engine()
    check_autotune(engine, autotune)
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=out is not None)
    folders: list[Path | None] = [None] * len(graphs)
    if out is not None:
        parent, names = artifacts.prepare(Path(out)), artifacts.UniqueNames()
        folders = [parent / names.unique(f"{artifacts.safe_name(g.name)}-outputs") for g in graphs]
        for folder in folders:
            assert folder is not None
            artifacts.check_replaceable(folder)
    entries = []
    step = progress(len(graphs))
    for graph, folder in zip(graphs, folders):
        step(f"{graph.name}: building for {engine}")
        executable = fusegraph.compile(graph, engine, strict=strict, fusion=not no_fusion, autotune=autotune)
        for sizes, each in _of_sizes(executable):
            step(f"{graph.name}: running on {engine}")
            inputs = random_inputs(each.graph, seed)
            outputs, milliseconds = _timed(each, inputs)
            result = None
            if check:
                step(f"{graph.name}: comparing with the reference")
                result = check_executable(each, inputs, outputs=outputs, strict=strict)
            files = _save(folder, graph, engine, seed, outputs) if folder else {}
            entries.append(_entry(each.graph, engine, seed, milliseconds, outputs, files, result) | sizes)
        step(graph.name, advance=1)
    if as_json:
        print_json({"graphs": entries})
    else:
        for number, entry in enumerate(entries):
            if number:
                say()
            _print(entry)
    failed = [e["name"] for e in entries if e["ok"] is False]
    if failed:
        note(f"{len(failed)} of {len(entries)} graphs differ from the reference: {', '.join(failed)}")
    return NOT_OK if failed else 0


def _of_sizes(executable: Executable) -> Iterator[tuple[dict[str, Any], Executable]]:
    """Yields what runs, and at which sizes, for some sizes if they vary; says so if each is compiled by itself."""
    if not isinstance(executable, SizedExecutable):
        yield {}, executable
        return
    if isinstance(executable.graph, OpenGraph):
        note(f"{executable.graph.name} is compiled for each choice of sizes: {executable.graph.reason}")
    for sizes in executable.samples():
        each = executable.at(sizes)
        yield {"sizes": sizes_given(executable.graph, sizes)}, each


def _timed(executable: Executable, inputs: Mapping[str, Array]) -> tuple[dict[str, Array], float]:
    """Returns the outputs and the milliseconds of one call; on a GPU the mean of several, without copying arrays."""
    start = time.perf_counter()
    outputs = run(executable, inputs)
    elapsed = (time.perf_counter() - start) * 1e3
    device = executable.device
    if not device.is_cuda:
        return outputs, elapsed
    arrays = [to_device(array, device.index) for array in inputs.values()]
    results = with_own_memory(executable.graph, executable(*arrays, stream=0))
    first, last = driver.Event(device.index), driver.Event(device.index)
    first.record()
    for _ in range(_TIMED_CALLS):
        executable(*arrays, out=results, stream=0)
    last.record()
    last.synchronize()
    return outputs, last.elapsed_ms(first) / _TIMED_CALLS


def _save(folder: Path, graph: Graph, engine: str, seed: int, outputs: Mapping[str, Array]) -> dict[str, str]:
    """Writes the outputs; returns output name -> file."""
    names = artifacts.UniqueNames()
    paths = {name: f"{names.unique(name)}.npy" for name in outputs}
    contents = {}
    for name, array in outputs.items():
        buffer = io.BytesIO()
        known = array.dtype.kind in "fiub"  # the dtypes that ml_dtypes adds are of kind V
        np.save(buffer, array if known else array.astype(np.float32), allow_pickle=False)
        contents[paths[name]] = buffer.getvalue()
    manifest = {"name": graph.name, "engine": engine, "seed": seed, "outputs": paths}
    artifacts.write_folder(folder, contents, manifest)
    return {name: str(folder / path) for name, path in paths.items()}


def _entry(
    graph: Graph,
    engine: str,
    seed: int,
    milliseconds: float,
    outputs: Mapping[str, Array],
    files: Mapping[str, str],
    result: CheckResult | None,
) -> dict[str, Any]:
    """Returns a graph's entry in ``run --json``; what only ``--check`` finds out is None without it."""
    checks = {c.name: c for c in result.outputs} if result else {}
    verdict = ("max_abs_error", "rel_error", "wrong", "undecided", "worst", "ok")
    entries = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "dtype": tensor.dtype.name,
            **_summary(to_reference(outputs[tensor.name], tensor.dtype)),
            "file": files.get(tensor.name),
            **{key: getattr(checks.get(tensor.name), key, None) for key in verdict},
        }
        for tensor in graph.outputs
    ]
    return {
        "name": graph.name,
        "engine": engine,
        "ok": result.ok if result else None,
        "note": result.note if result else None,
        "seed": seed,
        "ms": milliseconds,
        "outputs": entries,
    }


def _summary(array: Array) -> dict[str, Any]:
    """Returns the least, largest and mean finite value (None without any), and how many values are not finite."""
    values = np.asarray(array, np.float64)
    finite = values[np.isfinite(values)]
    none = finite.size == 0
    return {
        "min": None if none else float(finite.min()),
        "max": None if none else float(finite.max()),
        "mean": None if none else float(finite.mean()),
        "nonfinite": int(values.size - finite.size),
    }


def _print(entry: Mapping[str, Any]) -> None:
    verdict = "" if entry["ok"] is None else ", equals the reference" if entry["ok"] else ", DIFFERS from the reference"
    sizes = ", ".join(f"{name} = {size}" for name, size in entry.get("sizes", {}).items())
    say(f"{entry['name']}{f' at {sizes}' if sizes else ''} on {entry['engine']}: {entry['ms']:.3g} ms{verdict}")
    checked = entry["ok"] is not None
    headings = ["output", "shape", "dtype", "min", "max", "mean"]
    headings += ["max abs error", "rel error", "ok"] if checked else []
    rows = []
    for output in entry["outputs"]:
        row = [output["name"], "x".join(map(str, output["shape"])) or "scalar", output["dtype"]]
        row += [_number(output[key]) for key in ("min", "max", "mean")]
        if checked:
            row += [_number(output["max_abs_error"]), _number(output["rel_error"]), "yes" if output["ok"] else "NO"]
        rows.append(row)
    print_table(headings, rows, right=range(3, 8) if checked else range(3, 6))
    for output in entry["outputs"]:
        if output["nonfinite"]:
            say(f"{output['name']}: {output['nonfinite']} elements are not finite")
        if output["wrong"]:
            say(f"{output['name']}: {output['wrong']} elements outside their bound, one {output['worst']}")
        if output["file"]:
            say(f"{output['name']} saved as {output['file']}")
    if entry["note"]:
        say(entry["note"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
