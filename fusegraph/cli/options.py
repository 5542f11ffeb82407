"""Arguments and options that several commands have, and the words that options may be."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer


class Engine(StrEnum):
    cuda = "cuda"
    cpu = "cpu"
    reference = "reference"


class Against(StrEnum):
    reference = "reference"
    unfused = "unfused"
    cpu = "cpu"
    torch = "torch"
    onnx = "onnx"


class CacheAction(StrEnum):
    show = "show"
    size = "size"
    clear = "clear"


File = Annotated[
    str,
    typer.Argument(
        metavar="FILE[:NAME]",
        help="Python file: every module-level Graph and every public function that needs no arguments and returns "
        "one; or the one named. Or an ONNX model, with sizes that it leaves open: model.onnx:batch=8,x=1x3x224x224.",
    ),
]
Dims = Annotated[
    list[str] | None,
    typer.Option(
        "--dim",
        metavar="NAME=SIZE",
        help="Size of a dimension that varies: batch=8; or its range: batch=1..64, batch=8..64:8 (multiples of 8). May "
        "be repeated.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Strict = Annotated[bool, typer.Option("--strict", help="Round every intermediate to its tensor's dtype.")]
Autotune = Annotated[
    bool | None,
    typer.Option(
        "--autotune/--no-autotune",
        help="Time several schedules of every kernel on the GPU and remember the fastest; or use none remembered.",
        show_default="those remembered are used",
    ),
]
PlannedFor = Annotated[
    str | None,
    typer.Option(help="Such as h200 or sm_90a. Default: the GPU's, sm_90a without a GPU.", show_default=False),
]
NoFusion = Annotated[bool, typer.Option("--no-fusion", help="Make every node a kernel of its own.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")]
Inputs = Annotated[
    str | None, typer.Option("--inputs", metavar="FILE.npz", help="Inputs by name, instead of random ones.")
]
On = Annotated[Engine | None, typer.Option("--engine", help="cuda or cpu. Default: cuda if there is a GPU, else cpu.")]
Target = Annotated[
    str | None, typer.Option(help="Whose kernels are run, such as h200.", show_default="the GPU's, or any")
]
Cases = Annotated[str, typer.Option("--out", metavar="DIR", help="Where a folder per failing graph is written.")]
