"""Whole models through torch.compile: what is fused, and how long they take.

python -m benchmarks.torch_bench --fusion [--json FILE]      kernels and traffic of each model; needs no GPU
python -m benchmarks.torch_bench [--json FILE] [--only TEXT] [--dtypes bf16,fp32] [--engines fusegraph,eager,...]

The second form needs a GPU and measures model by model in one process.  Each engine compiles with empty disk caches
(after it has compiled something else) and is called.  A row has the seconds of the first call, the microseconds on the
device with a cold L2 cache, those of a call among many, the number of kernels, and the largest error against the model
in float64, relative to the largest result.  The engines fusegraph-tuned and compile-max time candidates, which takes
minutes, and must be asked for.  Rows of another run on the same device and commit are kept in the file.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.torch_models import MODELS, Model
from fusegraph.errors import FileError
from fusegraph.frontends.torch.exported import explain
from fusegraph.frontends.torch.report import FunctionReport
from fusegraph.report import artifacts

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
ENGINES = ("fusegraph", "eager", "compile")
ARCH = "sm_90a"
CALLS = 30
#: A result's error may be this many times that of eager torch, plus about one rounding of its dtype.
SLACK = {"bf16": (2.0, 2**-8), "fp32": (8.0, 2**-11)}


# ---- what is fused


def fusion(models: Sequence[Model] = MODELS) -> Iterator[dict[str, Any]]:
    """Yields for each model, in bfloat16 at full size, what the backend makes of it; see `facts`."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    for model in models:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        module, x = model.module(torch.bfloat16), model.input(torch.bfloat16)
        with mode:
            report = explain(module, mode.from_tensor(x), target=ARCH)
        yield facts(model, report)


def facts(model: Model, report: FunctionReport) -> dict[str, Any]:
    """Returns a report as plain data; declined pairs are counted by reason, without names and shapes."""
    example: dict[str, str] = {}
    counts: Counter[str] = Counter()
    for decision in report.declined:
        reason = re.sub(r"(\w+ )?'[^']*'( \[[^]]*\])?|\[[^]]*\]", "…", decision.reason)
        counts[reason] += 1
        example.setdefault(reason, f"{decision.producer} -> {decision.consumer}")
    return {
        "model": model.name,
        "shape": list(model.shape),
        "operators": report.operators,
        "pieces": len(report.pieces),
        "kernels": report.kernels,
        "bytes_unfused": report.bytes_unfused,
        "bytes_moved": report.bytes_moved,
        "fused": report.fused,
        "declined": [{"reason": r, "count": n, "pair": example[r]} for r, n in counts.most_common()],
        "left": [list(each) for each in report.left],
    }


# ---- how long it takes


@dataclass(frozen=True)
class Row:
    """One engine on one model; if it failed, the note says why, and the numbers are None."""

    model: str
    dtype: str
    engine: str
    device_us: float | None = None
    call_us: float | None = None
    first_s: float | None = None
    kernels: int | None = None
    error: float | None = None
    note: str = ""


#: The options of torch.compile for each engine.
_MODES: dict[str, dict[str, Any]] = {
    "fusegraph": {"backend": "fusegraph"},
    "fusegraph-tuned": {"backend": "fusegraph", "mode": "max-autotune"},
    "compile": {},
    "compile-max": {"mode": "max-autotune-no-cudagraphs"},
}


def _engine(name: str, module: Any, x: Any) -> Callable[[], Any]:
    """Returns a function that calls a model on an engine; it is compiled at the first call."""
    made = module if name == "eager" else torch.compile(module, **_MODES[name])
    return lambda: made(x)


def _start(engines: list[str]) -> None:
    """Makes every engine do what it does once per process: load libraries, start compile processes."""
    import fusegraph.torch  # noqa: F401 - makes the backend known where fusegraph is not installed

    x = torch.ones(64, 64, device="cuda")
    for engine in engines:
        torch._dynamo.reset()
        with torch.no_grad():
            _engine(engine, torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda(), x)()
    torch.cuda.synchronize()


def _kernels(call: Callable[[], Any]) -> int:
    """Returns how many kernels a call launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as found:
        call()
        torch.cuda.synchronize()
    cuda = torch.autograd.DeviceType.CUDA
    return sum(e.device_type == cuda and not e.name.lower().startswith("mem") for e in found.events())


def _call_us(call: Callable[[], Any]) -> float:
    """Returns the microseconds of a call among many, until the device is done."""
    call()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(CALLS):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / CALLS * 1e6


def _empty_cache(folder: str) -> None:
    """Gives fusegraph a new, empty cache in a folder, so that engines do not find each other's kernels."""
    from fusegraph.runtime.cache import default_cache

    os.environ["FUSEGRAPH_CACHE_DIR"] = tempfile.mkdtemp(dir=folder)
    default_cache.cache_clear()


def measure(model: Model, dtype: str, engines: list[str], cache: str) -> Iterator[Row]:
    """Yields one row per engine; ``cache`` is the folder for their caches."""
    from fusegraph.runtime.timing import ColdTimer

    timer = ColdTimer()
    with torch.no_grad():
        module, x = model.module(DTYPES[dtype], "cuda"), model.input(DTYPES[dtype], "cuda")
        exact = copy.deepcopy(module).double()(x.double())
        scale = exact.abs().max().item()

        def error(y: Any) -> float:
            return float((y.double() - exact).abs().max().item()) / scale

        allowed = SLACK[dtype][0] * error(module(x)) + SLACK[dtype][1]
        for engine in engines:
            torch._dynamo.reset()
            _empty_cache(cache)
            try:
                began = time.perf_counter()
                call = _engine(engine, module, x)
                y = call()
                torch.cuda.synchronize()
                first = time.perf_counter() - began
                if error(y) > allowed:
                    raise ArithmeticError(f"wrong by {error(y):.2e}, {allowed:.2e} is allowed")
                yield Row(
                    *(model.name, dtype, engine, timer.median(call), _call_us(call), first, _kernels(call), error(y))
                )
            except Exception as failure:  # noted in the row; the others are still wanted
                yield Row(model.name, dtype, engine, note=f"{type(failure).__name__}: {failure}"[:500])


def earlier(file: Path, now: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns a file's rows if they were measured on the device and commit of ``now``, else none.

    Raises FileError for a file that cannot be read or is not a run's.
    """
    try:
        before = json.loads(file.read_text("utf-8"))
        rows = [asdict(Row(**row)) for row in before["rows"]]
        same = (before["device"], before["commit"]) == (now["device"], now["commit"])
        known = {row["model"] for row in rows} <= {model.name for model in MODELS}
    except OSError as error:
        raise FileError(f"{file} cannot be read: {error.strerror or error}") from None
    except (ValueError, TypeError, LookupError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise FileError(f"{file} is no run of benchmarks.torch_bench: {reason}; give another name") from None
    if same and not known:
        raise FileError(f"{file} has models that benchmarks.torch_bench has not; give another name")
    return rows if same else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 2 if the --json file is not a run's or cannot be written, else 0."""
    try:
        return _run(arguments)
    except FileError as error:
        print(error, file=sys.stderr)
        return 2


def _run(arguments: Sequence[str] | None) -> int:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--fusion", action="store_true")
    options.add_argument("--json", type=Path)
    options.add_argument("--only", default="")
    options.add_argument("--dtypes", default="bf16,fp32")
    options.add_argument("--engines", default=",".join(ENGINES))
    options.add_argument("--commit", help="for a copy of the tree that is no checkout")
    given = options.parse_args(arguments)
    target = None if given.json is None else artifacts.prepare_file(given.json)
    began = time.perf_counter()
    rows: list[dict[str, Any]] = []
    document: dict[str, Any] = {"arch": ARCH, "torch": torch.__version__, "rows": rows}
    if not given.fusion:
        from fusegraph.bench.measure import environment

        document = {**environment(), "complete": False, "rows": rows}
        document["commit"] = given.commit or document["commit"]
        if target is not None and target.exists():
            rows += earlier(target, document)

    def save() -> None:
        if target is not None:
            artifacts.write_file(target, json.dumps(document, indent=1, ensure_ascii=False) + "\n")

    def keep(row: dict[str, Any]) -> None:
        rows[:] = [r for r in rows if given.fusion or any(r[k] != row[k] for k in ("model", "dtype", "engine"))]
        rows.append(row)
        rows.sort(key=lambda r: ([m.name for m in MODELS].index(r["model"]), r.get("dtype", "")))
        print(f"{time.perf_counter() - began:.0f} s: {json.dumps(row)}", flush=True)
        save()

    if given.fusion:
        for row in fusion():
            keep(row)
        return 0
    engines = given.engines.split(",")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # compile processes may still write to it
        for variable in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
            os.environ[variable] = str(Path(cache) / variable.lower())
        _empty_cache(cache)
        _start(engines)
        for model in MODELS:
            for dtype in given.dtypes.split(",") if given.only in model.name else ():
                for result in measure(model, dtype, engines, cache):
                    keep(asdict(result))
    document["complete"] = True
    save()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
