"""The command line: ``fusegraph compile | run | explain | report | compare | debug | reduce | profile | bench |
cache | doctor``.

Commands import what they need when they run, so that ``--help`` answers at once.

Exit status: 0 done; 1 a check failed (`run --check`, `compare`), a workload does not run (`bench`) or kernels can be
neither compiled nor run (`doctor`); 2 an error in the command, the file or the machine; 70 a defect of fusegraph, with
a traceback; 130 interrupted; 141 the reader of stdout has gone.

With ``--json`` stdout holds exactly one object: the result, or ``{"error": {"type": ..., "message": ...}}``; messages
are on stderr in any case.  Mistakes in the options themselves print usage on stderr and nothing on stdout.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from functools import cache
from typing import Annotated, Any

import typer

from fusegraph.cli.benchmarks import bench_command
from fusegraph.cli.console import guarded
from fusegraph.cli.options import (
    Against,
    Autotune,
    CacheAction,
    Cases,
    Dims,
    Engine,
    File,
    Inputs,
    Json,
    NoFusion,
    On,
    PlannedFor,
    Seed,
    Strict,
    Target,
)

app = typer.Typer(
    name="fusegraph",
    help="A graph-API fusion compiler: operation graphs in Python, readable CUDA C out.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


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
    verbose: Annotated[
        int,
        typer.Option(
            "--verbose", "-v", count=True, help="Log what is done on stderr; -vv: every compilation of kernels."
        ),
    ] = 0,
) -> None:
    if verbose:
        import logging

        logging.basicConfig(format="fusegraph: %(message)s", stream=sys.stderr)
        logging.getLogger("fusegraph").setLevel(logging.INFO if verbose == 1 else logging.DEBUG)


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a command as the function takes them that does what it says: words as text."""
    return {name: given.value if isinstance(given, Enum) else given for name, given in options.items()}


@app.command("compile")
@guarded
def compile_command(
    file: File,
    dims: Dims = None,
    targets: Annotated[
        list[str] | None,
        typer.Option(
            "--target",
            metavar="TARGET[,TARGET...]",
            help="Such as h200 or sm_90a; may be repeated. Default: the GPU's, sm_90a without a GPU.",
            show_default=False,
        ),
    ] = None,
    engine: Annotated[Engine, typer.Option(help="What to compile for.")] = Engine.cuda,
    out: Annotated[str, typer.Option(metavar="DIR", help="Where a folder per graph is written.")] = "fusegraph_out",
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    autotune: Autotune = None,
) -> int:
    """Write the kernels as .cu and .cubin; needs no GPU."""
    options = _given(locals())
    from fusegraph.cli.compile import compile_file

    return compile_file(**options)


@app.command("run")
@guarded
def run_command(
    file: File,
    dims: Dims = None,
    engine: Annotated[
        Engine | None, typer.Option(help="What to run on. Default: cuda if there is a GPU, else cpu.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with the reference; exit 1 if one differs.")] = False,
    seed: Seed = 0,
    out: Annotated[str | None, typer.Option(metavar="DIR", help="Save outputs as .npy files.")] = None,
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    autotune: Autotune = None,
) -> int:
    """Run on random inputs, on the GPU or the CPU."""
    options = _given(locals())
    from fusegraph.cli.run import run_file

    return run_file(**options)


@app.command("explain")
@guarded
def explain_command(
    file: File,
    dims: Dims = None,
    kernel: Annotated[str | None, typer.Option(metavar="NAME", help="Show the source of this kernel.")] = None,
    passes: Annotated[bool, typer.Option("--passes", help="Show what each pass rewrote, and why.")] = False,
    dump: Annotated[str | None, typer.Option(metavar="DIR", help="Write the graph after each pass.")] = None,
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    target: PlannedFor = None,
) -> int:
    """Show what is fused, what is not, and why; and which schedules the kernels have."""
    options = _given(locals())
    from fusegraph.cli.explain import explain_file

    return explain_file(**options)


@app.command("report")
@guarded
def report_command(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE[:NAME]", help="A file, as for explain; with --diff two reports, .html or .json."),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            "--out", "-o", metavar="FILE", help="Page to write, or its data: .json.", show_default="report.html"
        ),
    ] = None,
    diff: Annotated[bool, typer.Option("--diff", help="Show how two reports differ; -o also writes a page.")] = False,
    dims: Dims = None,
    target: PlannedFor = None,
    compiled: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernels, to show their registers.")
    ] = True,
    profile: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Times of kernels to show instead of estimates.")
    ] = None,
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
) -> int:
    """Write a page that shows the graph, its kernels and every decision."""
    options = _given(locals())
    from fusegraph.cli.report import report

    return report(**options)


@app.command("compare")
@guarded
def compare_command(
    file: File,
    dims: Dims = None,
    engines: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]", help="Of cuda, cudnn, torch (op by op), cpu, reference. Default: cuda,cudnn."
        ),
    ] = None,
    seed: Seed = 0,
    as_json: Json = False,
    partition: Annotated[
        bool, typer.Option("--partition", help="cudnn: run the largest pieces it takes of a graph it refuses whole.")
    ] = False,
    autotune: Annotated[
        bool, typer.Option("--autotune", help="Time several schedules (cuda) or all plans (cudnn), keep the fastest.")
    ] = False,
    strict: Strict = False,
) -> int:
    """Compare engines: results and times; exit 1 if one is wrong."""
    options = _given(locals())
    from fusegraph.cli.compare import compare_file

    return compare_file(**options)


@app.command("debug")
@guarded
def debug_command(
    file: File,
    dims: Dims = None,
    engine: On = None,
    against: Annotated[
        Against,
        typer.Option(
            help="What results are compared with; unfused: the same engine, a kernel a node; onnx: the model, run by "
            "onnxruntime or by ONNX's own evaluator, with the graph that it was read as."
        ),
    ] = Against.reference,
    nan: Annotated[bool, typer.Option("--nan", help="Find the first NaN or infinity instead.")] = False,
    reduce: Annotated[bool, typer.Option("--reduce", help="Make what fails as small as it can be made.")] = False,
    seed: Seed = 0,
    inputs: Inputs = None,
    out: Cases = "fusegraph_debug",
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    target: Target = None,
) -> int:
    """Find the first wrong node, its kernel and inputs, and write code that reproduces it; exit 1 if there is one."""
    options = _given(locals())
    from fusegraph.cli.debug import debug_file

    return debug_file(**options)


@app.command("reduce")
@guarded
def reduce_command(
    file: File,
    dims: Dims = None,
    engine: On = None,
    seed: Seed = 0,
    inputs: Inputs = None,
    out: Cases = "fusegraph_debug",
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    target: Target = None,
) -> int:
    """Shrink a graph that fails to the smallest that still does, and write it as code; exit 1 if one fails."""
    options = _given(locals())
    from fusegraph.cli.debug import reduce_file

    return reduce_file(**options)


@app.command("profile")
@guarded
def profile_command(
    file: File,
    dims: Dims = None,
    trace: Annotated[
        str | None, typer.Option(metavar="FILE.json", help="Write a trace that ui.perfetto.dev opens.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs, of which the median counts.")] = 15,
    seed: Seed = 0,
    as_json: Json = False,
    strict: Strict = False,
    no_fusion: NoFusion = False,
    target: Annotated[
        str | None,
        typer.Option(help="Estimate for this machine, such as h200, instead of measuring.", show_default=False),
    ] = None,
) -> int:
    """Time every kernel beside its floor; without a GPU, show what cost models estimate."""
    options = _given(locals())
    from fusegraph.cli.profile import profile_file

    return profile_file(**options)


app.command("bench")(guarded(bench_command))


@app.command("cache")
@guarded
def cache_command(
    action: Annotated[
        CacheAction, typer.Argument(help="show: folder, size and limit; size: bytes alone; clear: remove all entries.")
    ] = CacheAction.show,
    as_json: Json = False,
) -> int:
    """Show or clear the cache of compiled kernels and of plans."""
    from fusegraph.cli.cache import look

    return look(action.value, as_json=as_json)


@app.command("doctor")
@guarded
def doctor_command(as_json: Json = False) -> int:
    """Show what is installed, and what is missing."""
    from fusegraph.cli.doctor import examine

    return examine(as_json=as_json)


@cache
def command() -> Any:
    """Returns all commands as click runs them: typer reads their signatures each time that it is asked."""
    return typer.main.get_command(app)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line (default: the process's arguments) and returns the exit status."""
    try:
        command()(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="fusegraph")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except KeyboardInterrupt:
        return 130
    return 0
