"""The options of ``fusegraph bench``, and which module runs a suite."""

from __future__ import annotations

from importlib import import_module
from inspect import signature
from typing import Annotated, Any

import typer

from fusegraph.cli.console import doing

#: Suites that are run in a way of their own -> the module with a function of its name; `bench` runs all others.
MODULES = {
    "sweep": "sweep",
    "zoo": "zoo",
    "training": "zoo",
    "decode": "zoo",
    "sizes": "sizes",
    "schedules": "schedules",
}


def bench_command(
    file: Annotated[
        str | None, typer.Argument(metavar="FILE[:NAME]", help="Python file or ONNX model to time.")
    ] = None,
    suite: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Workloads to time instead: board (the default), memory-bound, tensor-core, models, layers, layouts, "
            "calls, refused, attention; sweep: random layers of real networks beside torch and torch.compile; "
            "zoo: whole models of torchvision and transformers; training: steps of their training, and parts of them; "
            "decode: steps and prompts of Llama-like models with a cache, weights of 16, 8 and 4 bits; "
            "sizes: some of these, and graphs, compiled once and called at random sizes, without a GPU small ones; "
            "schedules: every candidate of the kernels of models and of the sweep's layers.",
        ),
    ] = None,
    only: Annotated[str | None, typer.Option(metavar="REGEX", help="Workloads whose name it is found in.")] = None,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Of cudnn, torch, compile, compile-max, cupy, plain, none. Default: all; for a file cudnn. "
            "decode: compile (the default) or none.",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Timed runs, of which the median counts.")] = 15,
    json_file: Annotated[str | None, typer.Option("--json", metavar="FILE", help="Write the rows to FILE.")] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", metavar="FILE.svg", help="Draw the rows as bars against the floor.")
    ] = None,
    commit: Annotated[
        str | None, typer.Option(metavar="HASH", help="Commit to record. Default: that of the checkout this runs from.")
    ] = None,
    autotune: Annotated[bool, typer.Option("--autotune", help="Time several schedules of our kernels first.")] = False,
    update: Annotated[
        bool, typer.Option("--update", help="Replace the rows of these workloads in --json's FILE, keep the others.")
    ] = False,
    names_only: Annotated[bool, typer.Option("--list", help="Show the workloads' names; needs no GPU.")] = False,
    count: Annotated[int, typer.Option(metavar="N", min=0, help="Cases of the sweep; sizes of each case.")] = 100,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="What they are drawn from.")] = 0,
    minutes: Annotated[float, typer.Option(metavar="N", min=0.1, help="Time that the suite may take.")] = 10.0,
    dtypes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="Of whole models: bf16 (the default), fp32 (torch's settings), tf32; of training also amp (autocast); "
            "of weights for decoding: bf16, int8, int4 (default: all).",
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(
            metavar="N[,N...]",
            help="Of whole models: numbers, or usual for each model's own. Default: 1,usual; training: usual; "
            "decode: 1,8,16.",
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME...]",
            help="training: train (dropout, statistics of the batch), eval (neither); decode: atN, a step with N "
            "tokens before, atNofM, in a cache of M, prefillN, a prompt. Default: both; at511,at8191,prefill2048.",
        ),
    ] = None,
    kernels: Annotated[
        bool,
        typer.Option(
            "--kernels", help="zoo, training, decode: show our kernels by time beside their memory floor instead."
        ),
    ] = False,
) -> int:
    """Time workloads on a GPU beside libraries, against the time of a device copy."""
    options: dict[str, Any] = {**locals()}
    doing(f"timing {file or suite or 'board'}")
    module = MODULES.get(suite or "", "bench")
    run = getattr(import_module(f"fusegraph.cli.{module}"), module)
    return int(run(**{name: options[name] for name in signature(run).parameters}))
