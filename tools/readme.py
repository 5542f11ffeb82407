"""Writes the generated sections of README.md, docs and codegen/HOPPER.md, and draws the pictures of benchmarks/results.

python tools/readme.py            brings the pages and the pictures up to date
python tools/readme.py --check    exits with 1 and a difference if they are not
"""

from __future__ import annotations

import ast
import contextlib
import difflib
import inspect
import io
import json
import os
import re
import runpy
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import exp, fsum, log
from pathlib import Path
from statistics import median
from typing import Any

from codegen.target import MIB, TARGETS
from fusegraph.bench.plot import OURS, PARTS, Standing, standings, svg
from fusegraph.bench.results import when
from fusegraph.dtypes import ALL, PACKED
from fusegraph.graph import Graph
from fusegraph.methods import METHODS
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op
from fusegraph.plan import plan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"
TORCH = RESULTS / "torch"
OVERVIEW = "overview.svg"
_SECTION = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def kernel() -> str:
    """Returns the CUDA C of examples/sigmoid_fma.py."""
    graph = runpy.run_path(str(ROOT / "examples" / "sigmoid_fma.py"))["graph"]
    (only,) = plan(graph).kernels
    return f"```cuda\n{only.source.code.rstrip()}\n```\n"


def explain() -> str:
    """Returns the output of ``fusegraph explain examples/conv_bias_relu.py --target sm_90a``, with nothing tuned."""
    from fusegraph.cli import main

    command = ["explain", "examples/conv_bias_relu.py", "--target", "sm_90a"]
    printed, before = io.StringIO(), os.environ.get("FUSEGRAPH_AUTOTUNE")
    os.environ["FUSEGRAPH_AUTOTUNE"] = "0"
    try:
        with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
            status = main(command)
    finally:
        del os.environ["FUSEGRAPH_AUTOTUNE"]
        if before is not None:
            os.environ["FUSEGRAPH_AUTOTUNE"] = before
    assert status == 0
    text = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"```console\n$ fusegraph {' '.join(command)}\n{text}\n```\n"


def dtypes() -> str:
    """Returns the names of the dtypes that are computed with, and of the packed ones."""
    return "".join(f"- {what}: {', '.join(f'`{dtype}`' for dtype in names)}.\n"
                   for what, names in (("computed with", ALL), ("packed, moved and cast", PACKED)))  # fmt: skip


def targets() -> str:
    """Returns the table of `codegen.target`: the figures of every machine, and their origins."""
    heads = ("target", "device", "arch", "SMs", "L2 MiB", "GB/s", "MHz", "mma", "wgmma", "fma", "figures")
    lines = [_cells(heads), _cells("---" for _ in heads)]
    for t in TARGETS.values():
        sizes = (t.sms, t.l2_bytes // MIB, t.memory_rate / 1e3, t.clock, t.mma, t.wgmma, t.fma)
        lines.append(_cells([f"`{t}`", t.title, f"`{t.arch}`", *(f"{x:g}" for x in sizes), t.origins]))
    return "\n".join(lines) + "\n"


def ops() -> str:
    """Returns the op table, group by group: how each op is called, and the first sentence of what it computes."""
    heads = (f"### {title[0].upper()}{title[1:]}\n\n| op | result |\n| --- | --- |\n" for title, _ in _groups())
    rows = (
        "".join(f"{_cells([_op(op), _sentence(getattr(Graph, op.name))])}\n" for op in group) for _, group in _groups()
    )
    return "\n" + "\n".join(head + lines for head, lines in zip(heads, rows)) + "\n"


def functions() -> str:
    """Returns the table of the methods of Graph that write several nodes, as `ops` does."""
    lines = ["| function | result |", "| --- | --- |"]
    for name, method in sorted(METHODS.items()):
        if name not in TABLE:
            shown = list(inspect.signature(method).parameters.values())[1:]
            plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in shown if p.name != "name"]
            lines.append(_cells([f"`{name}({', '.join(plain)})`", _sentence(method)]))
    return "\n".join(lines) + "\n"


def _sentence(method: Callable[..., Any]) -> str:
    """Returns the first sentence of a docstring, with Markdown's special characters escaped."""
    paragraph = " ".join((inspect.getdoc(method) or "").partition("\n\n")[0].splitlines())
    parts = re.split(r"(?<=\.)  ", paragraph)[0].replace("``", "`").split("`")
    parts[::2] = [re.sub(r"([*_\[\]])", r"\\\1", part).replace("<", "&lt;") for part in parts[::2]]
    return "`".join(parts)


def _groups() -> Iterator[tuple[str, list[Op]]]:
    pointwise = [op for op in TABLE.values() if op.kind is Kind.POINTWISE]
    backward = [op for op in pointwise if op.name.endswith("_backward")]
    random = [op for op in pointwise if op.integers]
    forward = [op for op in pointwise if op not in (*backward, *random)]
    yield "contractions", [op for op in TABLE.values() if op.kind is Kind.CONTRACTION]
    yield "movement", [op for op in TABLE.values() if op.kind in (Kind.MOVEMENT, Kind.SCATTER)]
    yield "reductions", [op for op in TABLE.values() if op.kind in (Kind.REDUCTION, Kind.SCAN)]
    yield "sorting", [op for op in TABLE.values() if op.kind is Kind.SORT]
    windows = [op for op in TABLE.values() if op.kind is Kind.POOLING]
    yield "pooling", [op for op in windows if "backward" not in op.name]
    yield "gradients of pooling", [op for op in windows if "backward" in op.name]
    yield "made of others", [op for op in TABLE.values() if op.kind is Kind.COMPOSITE]
    yield "one operand", [op for op in forward if len(op.operands) == 1]
    yield "two operands", [op for op in forward if len(op.operands) == 2]
    yield "three operands", [op for op in forward if len(op.operands) == 3]
    yield "gradients of activations (loss, input)", backward
    yield "random numbers", random


def _op(op: Op) -> str:
    """Returns an op's name and parameters, without the operands of pointwise ops of one or two; * if cuDNN lacks it."""
    method: Any = getattr(Graph, op.name)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    shown = [p for p in parameters if p.name != "name"]
    if op.kind is Kind.POINTWISE and len(op.operands) < 3:
        shown = [p for p in shown if p.name not in op.operands]
    plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in shown]
    star = "" if op.cudnn else "\\*"
    return f"`{op.name}({', '.join(plain)})`{star}" if plain else f"`{op.name}`{star}"


# --- ONNX's node tests


def onnx() -> str:
    """Returns the table of tests/onnx_node_tests.json: passed and failed on each engine, skipped by reason."""
    found = json.loads((ROOT / "tests" / "onnx_node_tests.json").read_text("utf-8"))
    engines, skipped = found["engines"], found["skipped"]
    columns = [{"cpu": "kernels (`cpu`)", "reference": "NumPy (`reference`)"}[name] for name in engines]
    rare = [reason for reason, count in skipped.items() if count < 5]
    rows = [
        ["**passed**", *(f"**{e['passed']}**" for e in engines.values())],
        ["(of these against ONNX's evaluator in float64)", *(str(len(e["exact"])) for e in engines.values())],
        ["**failed**", *(f"**{len(e['failed'])}**" for e in engines.values())],
        ["**skipped**", *[f"**{sum(skipped.values())}**"] * len(engines)],
        *([reason, *[str(count)] * len(engines)] for reason, count in skipped.items() if reason not in rare),
        [f"others: {', '.join(rare)}", *[str(sum(skipped[reason] for reason in rare))] * len(engines)],
    ]
    table = [_cells([f"node tests of onnx {found['onnx']}", *columns]), _cells(["---", *["---:"] * len(engines)])]
    return "\n".join([*table, *map(_cells, rows)]) + "\n"


def cudnn_tests() -> str:
    """Returns the table of tests/cudnn_frontend_tests.json: tests and graphs of each file, and refusals by reason."""
    found = json.loads((ROOT / "tests" / "cudnn_frontend_tests.json").read_text("utf-8"))
    columns = ("passed", "failed", "graphs", "served", "right")
    files: dict[str, Any] = {name: of for name, of in found["files"].items() if of["graphs"]}
    rows = [[f"`{name}`", *(str(of[key]) for key in columns)] for name, of in files.items()]
    rows.append(["**all**", *(f"**{sum(of[key] for of in files.values())}**" for key in columns)])
    refused: Counter[str] = sum((Counter(of["refused"]) for of in files.values()), Counter())
    reasons = "; ".join(f"{reason} ({count})" for reason, count in refused.most_common()) or "nothing"
    headings = [f"tests of cudnn-frontend {found['cudnn-frontend']}, engine `{found['engine']}`", *columns]
    table = map(_cells, [headings, ["---", *["---:"] * len(columns)], *rows])
    return "\n".join(table) + f"\n\nRefused: {reasons}.\n"


# --- models through torch.compile


def left_to_torch() -> str:
    """Returns the list of operators that are left to torch, from the docstring of fusegraph.torch."""
    text = ast.get_docstring(ast.parse((ROOT / "fusegraph" / "torch.py").read_text("utf-8"))) or ""
    return "\n".join(re.findall(r"^(?:- |  ).*", text[text.index("\n- ") :], re.MULTILINE)).replace("``", "`") + "\n"


def torch() -> str:
    """Returns the tables of benchmarks/results/torch: kernels and traffic of each model, and times on GPUs."""
    found = json.loads((TORCH / "fusion.json").read_text("utf-8"))
    headings = [
        "model, bf16",
        "operators",
        "kernels",
        "MB, a kernel an operator",
        "MB moved",
        "pairs fused",
        "declined",
    ]
    lines = [_cells(headings), _cells(["---", *["---:"] * 6])]
    reasons: dict[str, int] = {}
    pairs: dict[str, str] = {}
    for row in found["rows"]:
        size = "x".join(map(str, row["shape"]))
        declined = {d["reason"]: d["count"] for d in row["declined"]}
        megabytes = [f"{row[key] / 1e6:.0f}" for key in ("bytes_unfused", "bytes_moved")]
        counts = [str(n) for n in (row["operators"], row["kernels"])]
        ends = [str(row["fused"]), str(sum(declined.values()))]
        lines.append(_cells([f"{row['model']} {size}", *counts, *megabytes, *ends]))
        reasons = {r: reasons.get(r, 0) + declined.get(r, 0) for r in (*reasons, *declined)}
        pairs = {d["reason"]: f"`{d['pair']}` of the {row['model']}" for d in row["declined"]} | pairs
    lines += [
        "",
        f"Planned for {found['arch']}, traced by torch {found['torch'].partition('+')[0]}. Pairs declined, by reason:",
        "",
        *(f"- {n} x {why}: {pairs[why]}" for why, n in sorted(reasons.items(), key=lambda x: -x[1])),
        "",
    ]
    for path in sorted(TORCH.glob("*.json")):
        lines += _torch_times(json.loads(path.read_text("utf-8"))) if path.stem != "fusion" else []
    return "\n".join([*lines, *_TORCH_COMMANDS]) + "\n"


_TORCH_COMMANDS = (
    "```sh",
    "python -m benchmarks.torch_bench --fusion --json benchmarks/results/torch/fusion.json   # needs no GPU",
    "python -m benchmarks.torch_bench --json benchmarks/results/torch/h200.json",
    "python -m benchmarks.torch_bench --json benchmarks/results/torch/h200.json --only ResNet-50 --dtypes bf16 "
    "--engines fusegraph,fusegraph-tuned,eager,compile,compile-max && python tools/readme.py",
    "```",
)


def _torch_times(document: Mapping[str, Any]) -> list[str]:
    """Returns the lines of a run's table: for each model and dtype a row for each engine."""
    versions = document["versions"]
    known = "".join(f", {name} {versions[name]}" for name in ("torch", "triton") if versions.get(name))
    lines = [
        f"**{document['device']}, {document['date']}**: commit `{(document['commit'] or 'unknown')[:12]}`{known}. "
        "`device` are microseconds with a cold L2 cache, "
        "`ratio` how many times as many as fusegraph's, `call` those of a call among many, `first` the seconds of the "
        "first call, nothing being cached; `error` the largest, relative to the largest result, against float64; "
        "convolutions in float32 are tf32, torch's default. `compile` is torch.compile's default, `compile-max` its "
        "mode max-autotune-no-cudagraphs.",
        "",
        _cells(["model", "dtype", "engine", "device us", "ratio", "call us", "first s", "kernels", "error"]),
        _cells(["---", "---", "---", *["---:"] * 6]),
    ]
    rows = {(r["model"], r["dtype"], r["engine"]): r for r in document["rows"]}
    for (model, dtype, engine), r in rows.items():
        ours = rows.get((model, dtype, "fusegraph"), r)["device_us"]
        if r["device_us"] is None:
            lines.append(_cells([model, dtype, engine, f"failed: {_one_line(r['note'])}", *["-"] * 5]))
            continue
        ratio = "-" if ours is None else f"{r['device_us'] / ours:.2f}"
        times = [f"{r['device_us']:.0f}", ratio, f"{r['call_us']:.0f}", f"{r['first_s']:.2f}"]
        lines.append(_cells([model, dtype, engine, *times, str(r["kernels"]), f"{r['error']:.1e}"]))
    return [*lines, ""]


def _one_line(text: str, most: int = 100) -> str:
    """Returns a text on one line, shortened to at most ``most`` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[: most - 3]}..."


# --- what was measured


def results(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """Yields every result file, in the order of names, with its contents.  Raises ValueError for an interrupted run."""
    for path in sorted(folder.glob("*.json")):
        document = json.loads(path.read_text("utf-8"))
        if not document["complete"]:
            raise ValueError(f"{path} is of a run that was interrupted; measure it again, or move it away")
        yield path, document


_summary = runpy.run_path(str(ROOT / "benchmarks" / "summary.py"))


def _suites() -> dict[str, tuple[float, float, float, str]]:
    """Returns for every run the geometric mean, worst and best ratio to the fastest peer, and its rows and peers."""
    found = {}
    for path, document in results(RESULTS):
        ran = [ratio for ratio in _summary["ratios"](document["rows"]).values() if ratio]
        if ran:
            timed = (row["engine"] for row in document["rows"] if row["median_us"] is not None)
            peers = [name for name in dict.fromkeys(timed) if name not in (OURS, *PARTS)]
            beside = f"{len(ran)} rows; {', '.join(peers)}"
            found[path.stem] = exp(fsum(map(log, ran)) / len(ran)), min(ran), max(ran), beside
    return found


def picture(root: str = "") -> str:
    """Returns the picture of all runs; ``root`` leads from the page to the repository's root."""
    every = ", ".join(f"{name} {mean:.2f}" for name, (mean, *_) in _suites().items())
    return f"![Speed relative to the fastest peer, by run: {every}]({root}benchmarks/{OVERVIEW})\n"


def measurements(root: str = "") -> str:
    """Returns a table for each result file: fusegraph, the fastest peer, the floor.  ``root`` is as for `picture`."""
    sections = [_measured(path, document, root) for path, document in results(RESULTS)]
    return "\n".join(sections) or (
        "Nothing has been measured yet: there are no files in `benchmarks/results`. On a machine with a GPU:\n\n"
        + _how_to("board", "--suite board")
    )


def _measured(path: Path, document: Mapping[str, Any], root: str) -> str:
    every = standings(document["rows"])
    options = document.get("options", "--suite board")
    parts = any(s.part is not None for s in every)
    folder = f"{root}benchmarks/results"
    versions = [f"{name} {version}" for name, version in document["versions"].items() if version is not None]
    headings = ["workload", "fusegraph us", "fastest peer", "its us", "ratio", "of the floor"]
    rules = ["---", "---:", "---", "---:", "---:", "---:"]
    if parts:
        headings.append("product alone us")
        rules.append("---:")
    date, commits = when(document, "`")
    lines = [
        f"**{document['device']}, {date}** ([`{path.name}`]({folder}/{path.name})): {commits}, {document['arch']}, "
        f"driver {document['driver']}, Python {document['python']}, {', '.join(versions)}. "
        f"Medians of {document['repeats']} runs.",
        "",
        f"![Bars of the table below]({folder}/{path.stem}.svg)",
        "",
        *(_call_table(document["rows"]) if "--suite calls" in options else []),
    ]
    if "--suite refused" in options:
        lines += _answers(every, document["rows"])
    else:
        lines += [_cells(headings), _cells(rules), *(_table_row(s, parts) for s in every), ""]
    ran = [s.ours for s in every if s.ours is not None]
    if ran:
        ratios = _summary["sentence"](document["rows"])
        build = median(row["build_s"] for row in ran)
        host = median(row["host_us"] for row in ran)
        lines += [f"Over the {len(ran)} rows of fusegraph the median cold build took {build:.2f} s, the median call "
                  f"kept the host for {host:.1f} us. {ratios}".rstrip(), ""]  # fmt: skip
    return "\n".join(lines) + "\n" + _how_to(path.stem, options)


def _call_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of what building and calling cost the host, on every engine that ran."""
    columns = {
        "build s": ("build_s", ".3f"),
        "from the disk cache s": ("cached_s", ".4f"),
        "host us a call": ("host_us", ".1f"),
        "replay us": ("replay_us", ".1f"),
    }
    lines = [_cells(["workload", "engine", *columns]), _cells(["---", "---", *["---:"] * len(columns)])]
    for row in rows:
        if row["median_us"] is not None:
            shown = ["-" if row.get(key) is None else format(row[key], digits) for key, digits in columns.values()]
            lines.append(_cells([row["workload"], row["engine"], *shown]))
    return [*lines, ""]


_NO_ENGINE = "No valid engine configs"
_NO_PLAN = "proposes plans, but none of them builds and runs"
_LONGEST_REASON = 120


def _reason(note: str) -> str:
    """Returns cuDNN's reason in a few words; if it found no engine, what is not supported instead of every engine."""
    if _NO_PLAN in note:
        return _NO_PLAN
    if _NO_ENGINE in note:
        causes = dict.fromkeys(re.findall(r"CUDNN_STATUS_NOT_SUPPORTED_(\w+)", note))
        words = [c.lower().replace("_", " ") for c in causes if not c.startswith("ARCH")]
        return _NO_ENGINE.lower() + (f" (not supported: {', '.join(words)})" if words else "")
    return note if len(note) <= _LONGEST_REASON else note[:_LONGEST_REASON].rpartition(" ")[0] + " ..."


def _answers(every: Sequence[Standing], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table of cuDNN's answer to each graph, and of fusegraph's kernels and times."""
    told = {row["workload"]: row for row in rows if row["engine"] == "cudnn"}
    headings = ["graph", "cuDNN's answer", "kernels here", "fusegraph us", "floor us", "of the floor"]
    lines = [_cells(headings), _cells(["---", "---", *["---:"] * 4])]
    for standing in every:
        ours, answer = standing.ours, told.get(standing.workload)
        if answer is None:
            said = "not asked"
        elif answer["median_us"] is not None:
            said = f"runs: {answer['median_us']:.1f} us"
        else:
            said = f"refused: {_reason(answer['note'])}"
        cells = ["-"] * 4
        if ours is not None:
            count = "-" if ours.get("kernels") is None else str(ours["kernels"])
            cells = [
                count,
                f"{ours['median_us']:.1f}",
                f"{ours['floor_us']:.1f}",
                f"{ours['floor_fraction']:.2f}",
            ]
        lines.append(_cells([standing.workload, said, *cells]))
    return [*lines, ""]


def _table_row(standing: Standing, parts: bool) -> str:
    """Returns a workload's row; the ratio is the peer's time over fusegraph's: above 1, it is faster than all peers."""
    ours, peer, part = standing.ours, standing.peer, standing.part
    cells = [
        standing.workload,
        f"{ours['median_us']:.1f}" if ours else "-",
        peer["engine"] if peer else "-",
        f"{peer['median_us']:.1f}" if peer else "-",
        f"{peer['median_us'] / ours['median_us']:.2f}" if ours and peer else "-",
        f"{ours['floor_fraction']:.2f}" if ours else "-",
    ]
    if parts:
        cells.append(f"{part['median_us']:.1f}" if part else "-")
    return _cells(cells)


def _cells(texts: list[str]) -> str:
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"


def _how_to(name: str, options: str) -> str:
    return (
        "```sh\n"
        "pip install '.[cudnn]' torch    # the peers; one that is missing is a row that says so\n"
        f"fusegraph bench {options} --json benchmarks/results/{name}.json && python tools/readme.py\n"
        "```\n"
    )


def pictures(folder: Path) -> dict[Path, str]:
    """Returns path -> picture, for every result file and for the overview of all of them."""
    found = {path.with_suffix(".svg"): svg(document) for path, document in results(folder)}
    if found:
        devices = sorted({document["device"] for _, document in results(folder)})
        draw = runpy.run_path(str(ROOT / "tools" / "overview.py"))["overview"]
        found[folder.parent / OVERVIEW] = draw(_suites(), f"{', '.join(devices)}; docs/benchmarks.md has every row")
    return found


# --- files

Makers = Mapping[str, Callable[[], str]]

_of_suites = runpy.run_path(str(ROOT / "tools" / "suites.py"))
_hopper = runpy.run_path(str(ROOT / "tools" / "hopper.py"))


def readme_makers(_: str, root: str = "") -> Makers:
    """Returns the functions that make the sections of README.md and docs, by name; ``root`` is as for `picture`."""
    makers = (kernel, explain, dtypes, targets, ops, functions, onnx, cudnn_tests, torch, left_to_torch)
    linked = {maker.__name__: partial(maker, root) for maker in (picture, measurements)}
    linked |= {name: partial(_of_suites[name], RESULTS, root) for name in _of_suites["SECTIONS"]}
    return {maker.__name__.replace("_", "-"): maker for maker in makers} | linked


PAGES: dict[Path, Callable[[str], Makers]] = {
    README: readme_makers,
    **{page: partial(readme_makers, root="../") for page in sorted(DOCS.glob("*.md"))},
    _hopper["HOPPER"]: _hopper["hopper_makers"],
}


def updated(text: str, makers: Makers) -> str:
    """Returns a page's text with every generated section made anew."""
    return _SECTION.sub(lambda m: m[1] + makers[m[2]]() + m[4], text)


def pages() -> dict[Path, str]:
    """Returns page -> the text that it should have."""
    return {path: updated(path.read_text(), makers(path.read_text())) for path, makers in PAGES.items()}


def main(arguments: list[str]) -> int:
    wanted = {**pages(), **pictures(RESULTS), **_of_suites["pictures"](RESULTS)}
    stale = [picture for picture in sorted(RESULTS.rglob("*.svg")) if picture not in wanted]
    if arguments == ["--check"]:
        before = {path: path.read_text() if path.exists() else "" for path in wanted}
        for path, text in wanted.items():
            lines = difflib.unified_diff(before[path].splitlines(True), text.splitlines(True), path.name, "current")
            sys.stdout.writelines(lines)
        for picture in stale:
            print(f"{picture.name}: there is no {picture.stem}.json")
        return int(before != wanted or bool(stale))
    for path, text in wanted.items():
        path.write_text(text)
    for picture in stale:
        picture.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
