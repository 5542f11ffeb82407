"""``fusegraph compare``: runs each graph on several engines with the same inputs; compares results and times."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fusegraph.cli.console import NOT_OK, doing, note, print_json, print_table, progress, say
from fusegraph.errors import FusegraphError
from fusegraph.loader import load_graphs
from fusegraph.report.compare import ENGINES, Comparison, EngineResult, compare_engines, plain
from fusegraph.report.explain import size_text


def compare_file(
    file: str,
    engines: Sequence[str] | None,
    *,
    seed: int,
    strict: bool,
    partition: bool,
    autotune: bool,
    as_json: bool,
    dims: Sequence[str] | None = None,
) -> int:
    """Compares every graph of a file; returns 1 if an engine gave a wrong result or failed while running, else 0.

    With ``as_json`` the object is ``graphs[]`` with

    ``name, seed``       the graph, and the seed of its inputs.
    ``ok``               null if all engines refused, else whether all others ran and are right.
    ``engines[]``        one for each engine asked for, in that order: ``engine``; ``status`` ("ran", "refused" or
                         "failed"); ``ok`` (null if refused); ``reason`` (why it did not run, else ""); ``us``
                         (microseconds of a call), ``timing`` (how they were measured); ``build_s``; ``kernels[]``
                         (names of fusegraph's kernels, cuDNN's plans, or the ops that torch ran); ``workspace_bytes``;
                         ``note`` (results that depend on the order of threads); ``outputs[]``: ``name, max_abs_error,
                         rel_error, undecided, wrong, worst, ok``, compared with the reference.  Unknown numbers are
                         null; texts and lists of an engine that did not run are empty.
    ``differences[]``    for each pair of engines that ran and each output: ``output, engines`` (the two), ``max_abs,
                         rel`` (of finite elements), ``unequal`` (number of elements).
    """
    names = chosen(engines or ("cuda", "cudnn"))
    doing(f"reading {file}")
    graphs = load_graphs(file, dims, known=True)
    comparisons = []
    step = progress(len(graphs) * len(names))
    for graph in graphs:
        for_one = _Steps(step, graph.name)
        comparisons.append(
            compare_engines(
                graph, names, seed=seed, strict=strict, partition=partition, autotune=autotune, progress=for_one
            )
        )
        for_one.done()
    if as_json:
        print_json({"graphs": [plain(c) for c in comparisons]})
    else:
        for number, comparison in enumerate(comparisons):
            if number:
                say()
            _print(comparison)
    for comparison in comparisons:
        if comparison.ok is None:
            note(f"{comparison.graph}: no engine ran, so nothing was compared")
    wrong = [c.graph for c in comparisons if c.ok is False]
    if wrong:
        note(f"{len(wrong)} of {len(comparisons)} graphs are wrong on an engine: {', '.join(wrong)}")
    return NOT_OK if wrong else 0


def chosen(texts: Sequence[str]) -> list[str]:
    """Returns the engines given by ``--engines``, each once.  Raises FusegraphError for an unknown one."""
    names = [part.strip() for text in texts for part in text.split(",")]
    for name in names:
        if name not in ENGINES:
            raise FusegraphError(f"--engines: {name!r} is none of {', '.join(ENGINES)}")
    return list(dict.fromkeys(names))


class _Steps:
    """Tells the progress bar which engine is running a graph."""

    def __init__(self, step: Callable[..., None], name: str) -> None:
        self._step, self._name, self._engine = step, name, ""

    def __call__(self, engine: str) -> None:
        self.done()
        self._engine = engine
        self._step(f"{self._name}: {engine}")

    def done(self) -> None:
        if self._engine:
            self._step(f"{self._name}: {self._engine}", advance=1)


def _print(comparison: Comparison) -> None:
    say(f"{comparison.graph}, inputs of seed {comparison.seed}")
    first = next((e.us for e in comparison.engines if e.us is not None), None)
    headings = ("engine", "us", "ratio", "build s", "workspace", "max abs error", "rel error", "ok")
    rows = [_row(result, first) for result in comparison.engines]
    print_table(headings, rows, right=range(1, 7), details=[_detail(result) for result in comparison.engines])
    for result in comparison.engines:
        for output in result.outputs:
            if output.wrong:
                say(f"{result.engine}, {output.name}: {output.wrong} elements outside their bound, one {output.worst}")
        if result.note:
            say(f"{result.engine}: {result.note}")
    if comparison.differences:
        say("between engines:")
        print_table(
            ("output", "engines", "max abs", "rel", "unequal"),
            [(d.output, " - ".join(d.engines), f"{d.max_abs:.3g}", f"{d.rel:.3g}", str(d.unequal)) for d in
             comparison.differences],
            right=range(2, 5),
        )  # fmt: skip


def _row(result: EngineResult, first: float | None) -> tuple[str, ...]:
    verdict = {None: "-", True: "yes", False: "NO"}[result.ok]
    if result.status != "ran" or result.us is None or first is None:
        return (result.engine, *["-"] * 6, verdict if result.status == "failed" else result.status)
    return (
        result.engine,
        f"{result.us:.1f}",
        f"{result.us / first:.2f}",
        f"{result.build_s:.3f}",
        "-" if result.workspace_bytes is None else size_text(result.workspace_bytes),
        f"{max((o.max_abs_error for o in result.outputs), default=0.0):.3g}",
        f"{max((o.rel_error for o in result.outputs), default=0.0):.3g}",
        verdict,
    )


def _detail(result: EngineResult) -> str:
    if result.status != "ran":
        return f"{result.status}: {result.reason}"
    return "; ".join(part for part in (result.timing, ", ".join(result.kernels)) if part)
