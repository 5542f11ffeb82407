"""``fusegraph doctor``: shows what is installed, and what to install."""

from __future__ import annotations

from fusegraph.cli.console import NOT_OK, columns, doing, print_json, say
from fusegraph.report.doctor import Diagnosis, Finding, diagnose
from fusegraph.report.explain import wrapped


def examine(*, as_json: bool) -> int:
    """Prints the diagnosis; returns 1 if kernels can be neither compiled nor run, else 0."""
    diagnosis = diagnose(lambda name: doing(f"looking for {name}"))
    if as_json:
        print_json(diagnosis.plain())
    else:
        _print(diagnosis)
    return 0 if diagnosis.ok else NOT_OK


def _print(diagnosis: Diagnosis) -> None:
    for finding in diagnosis.findings:
        say("\n".join(_lines(finding, columns())))
    say()
    for text, works in (
        ("compile kernels for GPUs", diagnosis.compiles),
        ("run them on a GPU here", diagnosis.runs_on_gpu),
        ("run them on the CPU here", diagnosis.runs_on_cpu),
    ):
        say(f"{'can' if works else 'cannot'} {text}")


def _lines(finding: Finding, width: int) -> list[str]:
    head = f"{'ok     ' if finding.found else 'missing'}  {finding.name}"
    lines = [f"{head}: {finding.version}" if finding.version else head]
    texts = [finding.path, finding.detail]
    if not finding.found:
        texts += [f"needed for {finding.needed}" if finding.needed else "", finding.install]
    for text in filter(None, texts):
        lines += wrapped(text, width, " " * 9)
    return lines
