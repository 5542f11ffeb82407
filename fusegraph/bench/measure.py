"""Times workloads on a GPU: fusegraph and peers in one process, cold L2, random data, medians, and a measured floor.

The floor of a row is measured in the same run.  It is the time of a device copy that moves as many bytes or, if longer,
the time of as many operations at the rate of torch's 8192^3 matrix product (for workloads bound by arithmetic).
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from fusegraph.bench.plot import PARTS
from fusegraph.bench.results import Row
from fusegraph.bench.time_limit import TooLong, time_limit
from fusegraph.bench.workload import AnyWorkload
from fusegraph.dtypes import as_dtype
from fusegraph.engines import compile as compile_graph
from fusegraph.engines.scratch import random_array
from fusegraph.errors import FusegraphError, NotSupportedError
from fusegraph.runtime import driver, nvrtc, temporary
from fusegraph.runtime.arrays import DeviceArray, to_device
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.timing import ColdTimer

_T = TypeVar("_T")

PEERS = ("cudnn", "torch", "compile", "compile-max", "cupy", *PARTS)
#: Host time: the number of batches, the most calls per batch, the most microseconds of device work per batch, and the
#: microseconds of device work of all batches beyond which there are fewer of them, but at least ten.
HOST_BATCHES, HOST_CALLS, HOST_BATCH_US, HOST_US = 40, 100, 20_000, 100_000
#: Runs that do not count.
WARMUP = 3
#: An engine that takes more seconds to build, or to time, is skipped.
LIMIT_S = 60.0


@dataclass(frozen=True)
class _Built:
    """A workload built on an engine.

    run      calls it.
    note     what runs; kernels: in how many kernels, if known.
    again    fusegraph only: builds and calls it again.
    record   fusegraph only: records a call as a CUDA graph and returns the function that replays it.
    """

    run: Callable[[], Any]
    note: str
    kernels: int | None = None
    again: Callable[[], Any] | None = None
    record: Callable[[], Callable[[], Any]] | None = None


class _Entry:
    """Collects an engine's measurements for a row.  If something fails or takes too long, it keeps the reason."""

    def __init__(self, engine: str, device: int) -> None:
        self.engine, self._device = engine, device
        self.built: _Built | None = None
        self.build_s = self.host_us = 0.0
        self.cached_s: float | None = None
        self.replay_us: float | None = None
        self.times: list[float] = []
        self.reason = ""
        self._spent: dict[str, float] = {}

    def attempt(self, doing: str, work: Callable[..., _T], *arguments: Any) -> _T | None:
        """Runs ``work`` as part of the phase ``doing`` ("built", "timed"), which has LIMIT_S seconds in all.

        Returns its result; None if it failed or took too long, and the reason is kept.
        """
        began = time.perf_counter()
        try:
            with time_limit(max(LIMIT_S - self._spent.get(doing, 0.0), 1e-3)):
                return work(*arguments)
        except TooLong:
            with contextlib.suppress(FusegraphError):
                driver.synchronize(0, self._device)  # the next row must not wait for what was queued
            text = f"not {doing} within {LIMIT_S:g} s"
        except NotSupportedError as error:
            text = error.reason or str(error)
        except (NotImplementedError, FusegraphError) as error:
            text = str(error)
        except Exception as error:  # a peer's failure is noted in its row
            text = f"{type(error).__name__}: {error}"
        finally:
            self._spent[doing] = self._spent.get(doing, 0.0) + time.perf_counter() - began
        self.built, self.reason = None, " ".join(text.split())[:300]
        return None


class Bench:
    """Times workloads on one device.  With ``autotune``, fusegraph's schedules are timed as part of the build."""

    def __init__(self, device: int = 0, repeats: int = 15, *, autotune: bool = False) -> None:
        self.device, self.repeats, self._autotune = device, repeats, autotune
        self.timer = ColdTimer(device)
        self._loaded: set[str] = set()
        self._copies: dict[int, float] = {}
        self._rates: dict[str, float | None] = {}

    # ---- floors

    def copy_us(self, nbytes: int) -> float:
        """Returns the microseconds of a device copy that reads and writes ``nbytes`` altogether."""
        half = max(nbytes // 2, 1)
        if half not in self._copies:
            source = random_array((half,), (1,), as_dtype("uint8"), self.device)
            target = driver.allocate(half, self.device)
            self._copies[half] = self.timer.median(
                lambda: driver.copy_on_device(target.pointer, source.pointer, half, self.device), self.repeats
            )
        return self._copies[half]

    def flops_per_us(self, unit: str) -> float | None:
        """Returns the rate of torch's own matrix product of 8192 x 8192 x 8192 (operations/us); None without torch."""
        if unit not in self._rates:
            try:
                import torch
            except ImportError:
                self._rates[unit] = None
                return None
            torch.backends.cuda.matmul.allow_tf32 = unit == "tf32"
            kind = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}.get(unit, torch.float32)
            a, b = (torch.randn(8192, 8192, device=f"cuda:{self.device}").to(kind) for _ in range(2))
            one = torch.ones((), device=a.device)
            scaled = partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
            product = scaled if unit == "fp8" else lambda: a @ b
            self._rates[unit] = 2 * 8192**3 / self.timer.median(product, self.repeats)
        return self._rates[unit]

    def floor_us(self, workload: AnyWorkload) -> float:
        floor = self.copy_us(workload.bytes)
        rate = self.flops_per_us(workload.unit) if workload.flops else None
        return max(floor, workload.flops / rate) if rate else floor

    # ---- rows

    def rows(self, workload: AnyWorkload, peers: Sequence[str]) -> Iterator[Row]:
        """Yields the row of fusegraph, then that of every peer, on the same inputs."""
        if "compile" in peers and "compile-max" not in peers:
            # torch.compile's pool of compile processes, not needed for one kernel, would compete for the processors.
            os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
        for engine in ("cuda", *peers):
            self._load(engine)
        floor = self.floor_us(workload)
        arrays = [
            random_array(t.shape, t.strides, t.dtype, self.device, seed=number)
            for number, t in enumerate(workload.graph().inputs)
        ]
        for number, told in enumerate(workload.inputs):
            if told.values:
                values = np.array(told.values, arrays[number].dtype.numpy).reshape(told.shape)
                arrays[number] = to_device(values, self.device)
        prepared: dict[str, Callable[..., _Built]] = {
            "cuda": self._ours,
            "cudnn": self._cudnn,
            "torch": self._eager,
            "compile": partial(self._inductor, mode="default"),
            # Like "max-autotune", but a call reads the given arrays: a captured CUDA graph would copy the inputs.
            "compile-max": partial(self._inductor, mode="max-autotune-no-cudagraphs"),
            "plain": partial(self._eager, which="alone", note="eager, the product or convolution alone"),
            "cupy": self._cupy,
        }
        entries = [_Entry(engine, self.device) for engine in ("cuda", *peers)]
        for entry in entries:
            entry.attempt("built", self._build, entry, prepared[entry.engine], workload, arrays)
        self._time(entries)
        for entry in entries:
            yield self._row(workload, entry, floor)

    def _load(self, engine: str) -> None:
        """Loads an engine's libraries once, so that its first build does not.  Its row tells if one is missing."""
        if engine in self._loaded:
            return
        self._loaded.add(engine)
        with contextlib.suppress(Exception):
            if engine == "cuda":
                nvrtc.nvrtc_version()
            elif engine == "cudnn":
                from fusegraph.engines.cudnn import device_handle

                device_handle(self.device)
            elif engine in ("torch", "plain", "compile", "compile-max"):
                import torch

                one = torch.zeros(1, device=f"cuda:{self.device}")
                if engine.startswith("compile"):
                    torch.compile(lambda x: x + 1)(one)
            elif engine == "cupy":
                import cupy

                cupy.zeros(1)

    def _build(
        self, entry: _Entry, prepare: Callable[..., _Built], workload: AnyWorkload, arrays: Sequence[DeviceArray]
    ) -> None:
        began = time.perf_counter()
        built = prepare(workload, arrays)
        built.run()
        driver.synchronize(0, self.device)
        entry.built, entry.build_s = built, time.perf_counter() - began

    def _time(self, entries: Sequence[_Entry]) -> None:
        """Times engines in turns, so that a GPU that gets hot and slow slows all of them."""
        self.timer.reset()
        for repeat in range(WARMUP + self.repeats):
            for entry in entries:
                if entry.built is not None:
                    us = entry.attempt("timed", self.timer.once, entry.built.run)
                    entry.times += [us] if repeat >= WARMUP and us is not None else []

    def _row(self, workload: AnyWorkload, entry: _Entry, floor: float) -> Row:
        if entry.built is not None:
            entry.attempt("timed", self._on_the_host, entry)
        built = entry.built
        if built is None:
            return Row(workload.name, entry.engine, None, floor, None, None, None, entry.reason)
        us = median(entry.times)
        measured = (us, floor, floor / us, entry.build_s, entry.host_us)
        more = (built.note, entry.cached_s, entry.replay_us, built.kernels)
        return Row(workload.name, entry.engine, *measured, *more)

    def _on_the_host(self, entry: _Entry) -> None:
        built, us = entry.built, median(entry.times)
        assert built is not None
        entry.host_us = self._host_us(built.run, us)
        entry.cached_s = None if built.again is None else self._seconds(built.again)
        entry.replay_us = None if built.record is None else self._host_us(built.record(), us)

    def _seconds(self, work: Callable[[], Any]) -> float:
        """Returns the seconds until ``work`` and the work that it queues are done: the median of three."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            driver.synchronize(0, self.device)
            times.append(time.perf_counter() - began)
        return median(times)

    def _host_us(self, run: Callable[[], Any], us: float) -> float:
        """Returns the microseconds until a call returns, without waiting for its ``us`` microseconds of device work.

        It is the least of several batches, since other load on the machine can only add to it (as `timeit` argues).  A
        batch is too short to fill the driver's queue, which would block; the queue is drained before each batch.
        """
        calls = max(5, min(HOST_CALLS, int(HOST_BATCH_US / us)))
        times = []
        for _ in range(max(10, min(HOST_BATCHES, int(HOST_US / (calls * us))))):
            driver.synchronize(0, self.device)
            began = time.perf_counter()
            for _ in range(calls):
                run()
            times.append((time.perf_counter() - began) * 1e6 / calls)
        driver.synchronize(0, self.device)
        return min(times)

    def _ours(self, workload: AnyWorkload, arrays: Sequence[DeviceArray]) -> _Built:
        held = temporary.folder()  # kept as long as `build`
        folder = held.__enter__()  # empty, so nothing that was built before is cached

        def build(_: Any = held) -> Any:
            cache = DiskCache(folder)
            return compile_graph(workload.graph(), "cuda", device=self.device, cache=cache, autotune=self._autotune)

        executable = build()
        out = executable(*arrays)
        kernels = executable.plan.kernels if executable.plan else ()
        names = ", ".join(f"{k.name} ({k.choice.reason})" if self._autotune else k.name for k in kernels)
        return _Built(
            lambda: executable(*arrays, out=out),
            names,
            len(kernels) if executable.plan else None,
            lambda: build()(*arrays, out=out),
            lambda: executable.record(*arrays, out=out)[1],
        )

    def _cudnn(self, workload: AnyWorkload, arrays: Sequence[DeviceArray]) -> _Built:
        if workload.torch:
            from fusegraph.bench import cudnn_peers

            if workload.torch in cudnn_peers.functions():
                run, name = cudnn_peers.functions()[workload.torch](workload, arrays, self.timer)
                return _Built(run, name, 1)
        executable = compile_graph(workload.graph(), "cudnn", device=self.device, autotune=True)
        out = executable(*arrays)
        plans = executable.plans  # type: ignore[attr-defined]
        return _Built(lambda: executable(*arrays, out=out), ", ".join(p.name for p in plans), len(plans))

    def _torch_call(
        self, workload: AnyWorkload, arrays: Sequence[DeviceArray], which: str = "functions"
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Returns the workload's function from the table ``which`` of `fusegraph.bench.peers`, and its operands.

        Raises NotImplementedError without torch, and for a workload that is not in the table.
        """
        try:
            import torch
        except ImportError as error:
            raise NotImplementedError(f"torch is not installed ({error})") from None
        from fusegraph.bench import peers

        function = getattr(peers, which)(torch).get(workload.torch)
        if function is None:
            raise NotImplementedError("no product or convolution with something after it")
        # tf32 only if the workload says so.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = workload.unit == "tf32"
        torch.backends.cudnn.benchmark = True
        tensors = [torch.from_dlpack(a) for a in arrays]
        if hasattr(function, "prepare"):  # computes once what many calls share
            function.prepare(*tensors)
        return function, tensors

    def _eager(
        self, workload: AnyWorkload, arrays: Sequence[DeviceArray], which: str = "functions", note: str = "eager"
    ) -> _Built:
        function, tensors = self._torch_call(workload, arrays, which)
        return _Built(lambda: function(*tensors), note)

    def _inductor(self, workload: AnyWorkload, arrays: Sequence[DeviceArray], mode: str) -> _Built:
        function, tensors = self._torch_call(workload, arrays)
        import torch

        with contextlib.suppress(AttributeError, ImportError):  # keeps tables of autotuning choices off stderr
            import torch._inductor.config as settings

            settings.autotune_num_choices_displayed = 0
        torch._dynamo.reset()
        compiled = torch.compile(function, mode=mode)
        return _Built(lambda: compiled(*tensors), f"torch.compile, {mode} mode")

    def _cupy(self, workload: AnyWorkload, arrays: Sequence[DeviceArray]) -> _Built:
        if workload.torch != "sigmoid_fma" or workload.dtype != "float32":
            raise NotImplementedError("no CuPy version of this workload")
        try:
            import cupy
        except ImportError as error:
            raise NotImplementedError(f"CuPy is not installed ({error})") from None
        kernel = cupy.ElementwiseKernel("T a, T b, T c", "T y", "y = 1 / (1 + exp(-(a + b * c)))", "sigmoid_fma")
        operands = [cupy.from_dlpack(a) for a in arrays]
        out = cupy.empty_like(operands[0])
        return _Built(lambda: kernel(*operands, out), "ElementwiseKernel")


def environment(device: int | None = 0) -> dict[str, Any]:
    """Returns what a result depends on, and when it was measured: device, driver, versions, commit, date.

    Without a device it is the cpu engine's.
    """
    there: dict[str, Any] = {"device": "cpu engine", "arch": None, "driver": None}
    if device is not None:
        properties, version = driver.properties(device), ".".join(map(str, driver.driver_version()))
        there = {"device": properties.name, "arch": properties.arch, "driver": version}
    names = ("fusegraph", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "torch", "triton", "nvidia-cudnn-frontend")
    return {
        **there,
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
        "commit": _commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return getattr(sys.modules.get(package), "__version__", None)


def _commit() -> str | None:
    """Returns the commit of the checkout that this runs from; None outside one.

    It ends with "+" if the checkout has changes outside benchmarks/results.
    """
    folder = Path(__file__).parent
    changes = ["git", "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)benchmarks/results"]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        status = subprocess.run(changes, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+" if status.stdout.strip() else "")
