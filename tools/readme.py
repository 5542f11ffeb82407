"""Writes the parts of README.md that the program itself knows: the kernel shown, explain's output, the ops, the dtypes.

python tools/readme.py            brings README.md up to date
python tools/readme.py --check    exits with 1 and a difference if it is not
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import io
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fusegraph.dtypes import ALL
from fusegraph.graph import Graph
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Op
from fusegraph.plan import plan

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
_SECTION = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->\n)", re.DOTALL)


def kernel() -> str:
    """The CUDA C of examples/sigmoid_fma.py."""
    graph = runpy.run_path(str(ROOT / "examples" / "sigmoid_fma.py"))["graph"]
    (only,) = plan(graph).kernels
    return f"```cuda\n{only.source.code.rstrip()}\n```\n"


def explain() -> str:
    """What ``fusegraph explain examples/conv_bias_relu.py`` prints."""
    from fusegraph.cli import main

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.chdir(ROOT):
        status = main(["explain", "examples/conv_bias_relu.py"])
    assert status == 0
    text = "\n".join(line.rstrip() for line in printed.getvalue().strip().splitlines())
    return f"```console\n$ fusegraph explain examples/conv_bias_relu.py\n{text}\n```\n"


def dtypes() -> str:
    """The names of all dtypes."""
    return ", ".join(f"`{dtype}`" for dtype in ALL) + ".\n"


def ops() -> str:
    """The op table, one line a group of ops."""
    return "".join(f"- **{title}**: {', '.join(map(_op, group))}.\n" for title, group in _groups())


def _groups() -> Iterator[tuple[str, list[Op]]]:
    pointwise = [op for op in TABLE.values() if op.kind is Kind.POINTWISE]
    backward = [op for op in pointwise if op.name.endswith("_backward")]
    forward = [op for op in pointwise if op not in backward]
    yield "contractions", [op for op in TABLE.values() if op.kind is Kind.CONTRACTION]
    yield "one operand", [op for op in forward if len(op.operands) == 1]
    yield "two operands", [op for op in forward if len(op.operands) == 2]
    yield "three operands", [op for op in forward if len(op.operands) == 3]
    yield "gradients of activations (loss, input)", backward


def _op(op: Op) -> str:
    """Name and attributes of an op; its operands only where there are several kinds of them."""
    method: Any = getattr(Graph, op.name)
    parameters = list(inspect.signature(method).parameters.values())[1:]
    shown = [p for p in parameters if p.name != "name"]
    if op.kind is Kind.POINTWISE and len(op.operands) < 3:
        shown = [p for p in shown if p.name not in op.operands]
    plain = [str(p.replace(annotation=inspect.Parameter.empty)) for p in shown]
    star = "" if op.cudnn else "\\*"
    return f"`{op.name}({', '.join(plain)})`{star}" if plain else f"`{op.name}`{star}"


def updated(text: str) -> str:
    """README.md's text with every generated section as it should be."""
    makers = {maker.__name__: maker for maker in (kernel, explain, dtypes, ops)}
    return _SECTION.sub(lambda m: m[1] + makers[m[2]]() + m[4], text)


def main(arguments: list[str]) -> int:
    before = README.read_text()
    after = updated(before)
    if arguments == ["--check"]:
        sys.stdout.writelines(
            difflib.unified_diff(before.splitlines(True), after.splitlines(True), "README.md", "current")
        )
        return int(before != after)
    README.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
