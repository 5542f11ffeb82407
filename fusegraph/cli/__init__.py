"""The command line: ``fusegraph compile | run | explain | doctor``.

Commands import what they need when they run, so that ``--help`` answers at once.

Exit status: 0 done; 1 a check failed (`run --check`) or nothing can work (`doctor`); 2 an error in the command, the
file or the machine; 70 a defect of fusegraph, with a traceback; 130 interrupted; 141 the reader of stdout has gone.

With ``--json`` stdout holds exactly one object: the result, or ``{"error": {"type": ..., "message": ...}}``; messages
are on stderr either way.  Mistakes in the options themselves print usage on stderr and nothing on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

import typer

from fusegraph.cli.console import guarded

app = typer.Typer(
    name="fusegraph",
    help="A graph-API fusion compiler: operation graphs in Python, readable CUDA C out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


class Engine(StrEnum):
    cuda = "cuda"
    cpu = "cpu"
    reference = "reference"


File = Annotated[
    str,
    typer.Argument(
        metavar="FILE[:NAME]",
        help="Python file: every module-level Graph and every public function annotated '-> Graph' that needs no "
        "arguments; or the one named.",
        show_default=False,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Strict = Annotated[bool, typer.Option("--strict", help="Round every intermediate to its tensor's dtype.")]
NoFusion = Annotated[bool, typer.Option("--no-fusion", help="Make every node a kernel of its own.")]


def _version(wanted: bool) -> None:
    if wanted:
        import fusegraph

        print(f"fusegraph {fusegraph.__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command("compile")
@guarded
def compile_command(
    file: File,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ARCH[,ARCH...]",
            help="Target such as sm_90a; may be repeated. Default: the GPU's, sm_90a without a GPU.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What to compile for.")] = Engine.cuda,
    out: Annotated[str, typer.Option(metavar="DIR", help="Where a folder per graph is written.")] = "fusegraph_out",
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
) -> int:
    """Write the kernels as .cu and .cubin; needs no GPU."""
    from fusegraph.cli.compile import compile_file

    return compile_file(file, engine.value, arch or [], out=out, strict=strict, fusion=not no_fusion, as_json=as_json)


@app.command("run")
@guarded
def run_command(
    file: File,
    engine: Annotated[
        Engine | None,
        typer.Option(help="What to run on. Default: cuda if there is a GPU, else cpu.", show_default=False),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the reference; exit 1 if one differs.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the random inputs.")] = 0,
    out: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Save outputs as .npy files.", show_default=False),
    ] = None,
    as_json: Json = False,
    strict: Strict = False,
) -> int:
    """Run on random inputs, on the GPU or the CPU."""
    from fusegraph.cli.run import run_file

    return run_file(
        file, engine.value if engine else None, check=check, seed=seed, out=out, strict=strict, as_json=as_json
    )


@app.command("explain")
@guarded
def explain_command(
    file: File,
    kernel: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Show the source of this kernel.", show_default=False),
    ] = None,
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
) -> int:
    """Show what is fused, what is not, and why."""
    from fusegraph.cli.explain import explain_file

    return explain_file(file, kernel=kernel, strict=strict, fusion=not no_fusion, as_json=as_json)


@app.command("doctor")
@guarded
def doctor_command(as_json: Json = False) -> int:
    """Show what is installed, and what is missing."""
    from fusegraph.cli.doctor import examine

    return examine(as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's arguments); returns the exit status."""
    try:
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="fusegraph")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    return 0
