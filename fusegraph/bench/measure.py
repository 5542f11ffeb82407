"""Timing workloads on a GPU: ours and peers in one process, cold L2, random data, medians, against a measured floor.

The floor of a row is measured in the same run: the time of a device copy that moves as many bytes or, for workloads
bound by arithmetic, of as many operations at the rate of the library's own 8192^3 matrix product, whichever is longer.
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
#: Host time: batches of calls, at most so many calls a batch, of at most so many microseconds of work; and fewer
#: batches, but not under ten, where all of them would take longer than so many microseconds.
HOST_BATCHES, HOST_CALLS, HOST_BATCH_US, HOST_US = 40, 100, 20_000, 100_000
#: Runs that are not counted.
WARMUP = 3
#: An engine that is not built, or not timed, after so many seconds is passed over.
LIMIT_S = 60.0


@dataclass(frozen=True)
class _Built:
    """A workload built on an engine: a call, what runs, in how many kernels where that is known; ours also how to build
    it again and to record a call."""

    run: Callable[[], Any]
    note: str
    kernels: int | None = None
    again: Callable[[], Any] | None = None
    record: Callable[[], Callable[[], Any]] | None = None


class _Entry:
    """An engine on its way to a row of a workload.  What fails, or takes too long, leaves it with a reason."""

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
        """Does a part of what it takes to be ``doing`` ("built", "timed"): LIMIT_S seconds are for all parts."""
        began = time.perf_counter()
        try:
            with time_limit(max(LIMIT_S - self._spent.get(doing, 0.0), 1e-3)):
                return work(*arguments)
        except TooLong:
            with contextlib.suppress(FusegraphError):
                driver.synchronize(0, self._device)  # what it has queued is no part of the next row
            text = f"not {doing} within {LIMIT_S:g} s"
        except NotSupportedError as error:
            text = error.reason or str(error)
        except (NotImplementedError, FusegraphError) as error:
            text = str(error)
        except Exception as error:  # a peer's own failure is a row of the table, not ours
            text = f"{type(error).__name__}: {error}"
        finally:
            self._spent[doing] = self._spent.get(doing, 0.0) + time.perf_counter() - began
        self.built, self.reason = None, " ".join(text.split())[:300]
        return None


class Bench:
    """Times workloads on one device.  With ``autotune`` our kernels' schedules are timed as part of the build."""

    def __init__(self, device: int = 0, repeats: int = 15, *, autotune: bool = False) -> None:
        self.device, self.repeats, self._autotune = device, repeats, autotune
        self.timer = ColdTimer(device)
        self._loaded: set[str] = set()
        self._copies: dict[int, float] = {}
        self._rates: dict[str, float | None] = {}

    # ---- floors

    def copy_us(self, nbytes: int) -> float:
        """Returns microseconds of a device copy that reads and writes ``nbytes`` altogether."""
        half = max(nbytes // 2, 1)
        if half not in self._copies:
            source = random_array((half,), (1,), as_dtype("uint8"), self.device)
            target = driver.allocate(half, self.device)
            self._copies[half] = self.timer.median(
                lambda: driver.copy_on_device(target.pointer, source.pointer, half, self.device), self.repeats
            )
        return self._copies[half]

    def flops_per_us(self, unit: str) -> float | None:
        """Returns rate of torch's own matrix product of 8192 x 8192 x 8192; None without torch."""
        if unit not in self._rates:
            try:
                import torch
            except ImportError:
                self._rates[unit] = None
                return None
            torch.backends.cuda.matmul.allow_tf32 = unit == "tf32"
            kind = torch.bfloat16 if unit == "bf16" else torch.float32
            a, b = (torch.randn(8192, 8192, device=f"cuda:{self.device}", dtype=kind) for _ in range(2))
            self._rates[unit] = 2 * 8192**3 / self.timer.median(lambda: a @ b, self.repeats)
        return self._rates[unit]

    def floor_us(self, workload: AnyWorkload) -> float:
        floor = self.copy_us(workload.bytes)
        rate = self.flops_per_us(workload.unit) if workload.flops else None
        return max(floor, workload.flops / rate) if rate else floor

    # ---- rows

    def rows(self, workload: AnyWorkload, peers: Sequence[str]) -> Iterator[Row]:
        """Yields ours, then every peer, on the same inputs."""
        if "compile" in peers and "compile-max" not in peers:
            # Its pool of compilers, which one kernel does not need, would take the processors from those timed.
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
            # As "max-autotune", but a call reads and writes the given arrays: a captured graph would copy the inputs.
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
        """Loads an engine's libraries, once: no part of its first build.  What is missing is said by its row."""
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
        """Times engines in turns: a GPU that becomes hot, and slower, does so for all of them."""
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
        """Returns seconds of what ``work`` does and queues: the median of three."""
        times = []
        for _ in range(3):
            began = time.perf_counter()
            work()
            driver.synchronize(0, self.device)
            times.append(time.perf_counter() - began)
        return median(times)

    def _host_us(self, run: Callable[[], Any], us: float) -> float:
        """Returns microseconds until a call returns, its work, of ``us`` microseconds, still on the way: the least
        of batches.

        What else the machine does can only add to the host's work (as `timeit` has it).  A batch is too short to fill
        the driver's queue, in which calls would wait; it is drained before each.
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
        held = temporary.folder()  # as long as `build`
        folder = held.__enter__()  # empty: nothing that was built before is in it

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
        """Returns the workload's function of a table of `fusegraph.bench.peers`, and its operands."""
        try:
            import torch
        except ImportError as error:
            raise NotImplementedError(f"torch is not installed ({error})") from None
        from fusegraph.bench import peers

        function = getattr(peers, which)(torch).get(workload.torch)
        if function is None:
            raise NotImplementedError("no product or convolution with something after it")
        # float32 as this workload asks: tf32 only where the row says so.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = workload.unit == "tf32"
        torch.backends.cudnn.benchmark = True
        tensors = [torch.from_dlpack(a) for a in arrays]
        if hasattr(function, "prepare"):  # what depends on some operands alone and serves many calls
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

        with contextlib.suppress(AttributeError, ImportError):  # no table of every choice on stderr
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


def environment(device: int = 0) -> dict[str, Any]:
    """Returns what a result depends on besides the code: device, driver, versions, the commit."""
    properties = driver.properties(device)
    names = ("fusegraph", "cuda-bindings", "nvidia-cuda-nvrtc", "numpy", "torch", "triton", "nvidia-cudnn-frontend")
    return {
        "device": properties.name,
        "arch": properties.arch,
        "driver": ".".join(map(str, driver.driver_version())),
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
    """Returns the commit of the checkout this runs from, with "+" if it has changes beside results; None outside
    one.
    """
    folder = Path(__file__).parent
    changes = ["git", "status", "--porcelain", "-uno", "--", ":(top)", ":(top,exclude)benchmarks/results"]
    try:
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=folder, capture_output=True, text=True, check=True)
        status = subprocess.run(changes, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return head.stdout.strip()[:12] + ("+" if status.stdout.strip() else "")
