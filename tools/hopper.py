"""Makes the parts of kernels that codegen/HOPPER.md shows; tools/readme.py writes them into the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import dedent
from typing import Any

from codegen.contraction.wgmma_layout import WgmmaSchedule
from fusegraph.graph import Graph
from fusegraph.plan import Choice, plan

HOPPER = Path(__file__).resolve().parent.parent / "codegen" / "HOPPER.md"

#: The schedule of the kernels that the page shows.
SCHEDULE = WgmmaSchedule(groups=2, tile_n=256, stages=4, split_k=1, raster_group=8, blocks=132)

#: Parts of the first kernel on the page -> how the first line of each begins; it is the next such line after the
#: beginning of the part before.
PARTS = {
    "head": "// ",
    "shared": "struct Shared",
    "barriers": "if (threadIdx.x == 0) {",
    "producer": "if (group < 0) {",
    "products": "} else {",
    "epilogue": "#pragma unroll\n            for (int chunk",
    "stores": "fence_async_shared();",
}


def page_graph(text: str) -> Graph:
    """Returns the graph in the page's Python block."""
    (block,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(block, HOPPER.name, "exec"), names)
    graph: Graph = names["graph"]
    return graph


def convolution() -> Graph:
    """Returns the convolution whose windows the page shows."""
    graph = Graph("conv", io_dtype="bfloat16")
    x, w = graph.tensor("x", (64, 256, 56, 56), layout="NHWC"), graph.tensor("w", (256, 256, 3, 3), layout="KRSC")
    graph.output(graph.relu(graph.conv_fprop(x, w, padding=1)), name="y")
    return graph


def has_prologue() -> Graph:
    """Returns the product whose operand A is computed."""
    graph = Graph("prologue", io_dtype="bfloat16")
    x, w = graph.tensor("x", (4096, 4096)), graph.tensor("w", (4096, 256))
    scale, bias = (graph.tensor(name, (4096,), "float32") for name in ("scale", "bias"))
    graph.output(graph.cast(graph.relu(x * scale + bias), "bfloat16") @ w, name="y")
    return graph


def hopper(graph: Graph, *, computes: bool = False) -> str:
    """Returns the CUDA C of a graph's only kernel with `SCHEDULE`."""
    (only,) = plan(graph, choose=lambda *_: Choice(replace(SCHEDULE, computes=computes))).kernels
    return only.source.code


def parts(code: str) -> dict[str, str]:
    """Cuts the text of a kernel into `PARTS`: name -> text.  Raises ValueError if a part is missing."""
    starts = [0]
    for name, first in PARTS.items():
        match = re.compile(rf"^ *{re.escape(first)}", re.MULTILINE).search(code, starts[-1] + (len(starts) > 1))
        if match is None:
            raise ValueError(f"the kernel of {HOPPER.name} has no line {first!r}, with which part {name!r} begins")
        starts.append(match.start())
    return {name: code[start:end] for name, start, end in zip(PARTS, starts[1:], [*starts[2:], len(code)])}


def excerpt(code: str, first: str, last: str) -> str:
    """Returns the lines from one that begins with ``first`` to the next that begins with ``last``, as a code block.

    Raises ValueError if there are none.
    """
    match = re.search(rf"^ *{re.escape(first)}(?s:.*?)^ *{re.escape(last)}.*?\n", code, re.MULTILINE)
    if match is None:
        raise ValueError(f"a kernel of {HOPPER.name} has no lines from {first!r} to {last!r}")
    return _cuda(match[0])


def _cuda(text: str) -> str:
    return f"```cuda\n{dedent(text).strip(chr(10))}\n```\n"


def hopper_makers(text: str) -> Mapping[str, Callable[[], str]]:
    """Returns the functions that make the sections of codegen/HOPPER.md, by name; ``text`` is the page's."""
    cut = parts(hopper(page_graph(text)))
    windows = partial(excerpt, hopper(convolution()), "const int t0", "tma_load(shared.b")
    fragments = partial(excerpt, hopper(has_prologue(), computes=True), "for (int kk = 0", "previous = stage.index")
    return {**{name: partial(_cuda, cut[name]) for name in cut}, "windows": windows, "fragments": fragments}
