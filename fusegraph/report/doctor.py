"""Finds out what this machine has that fusegraph can use, and what to install if something is missing."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from codegen.spec import KernelSource
from fusegraph.errors import DeviceError, FusegraphError
from fusegraph.installation import codegen_folder
from fusegraph.report.explain import size_text
from fusegraph.runtime import driver, host_compiler, nvrtc
from fusegraph.runtime.cache import default_cache
from fusegraph.version import __version__

_PROBE = KernelSource(
    "fusegraph_doctor",
    'extern "C" __global__ void fusegraph_doctor(int* x)\n{\n    x[threadIdx.x] = threadIdx.x;\n}\n',
    grid=(1, 1, 1),
    block=(4, 1, 1),
)
_PIP_NVRTC = "pip install 'cuda-python>=13,<14' 'nvidia-cuda-nvrtc>=13,<14'"
_PIP_CUDNN = "optional: pip install 'fusegraph[cudnn]'"
_FOR_BINDINGS, _FOR_CUDNN = "NVRTC and the CUDA driver", "comparing with cuDNN"
_GET_COMPILER = "apt install g++ (Debian, Ubuntu), dnf install gcc-c++ (Fedora), or name one in FUSEGRAPH_CXX"


@dataclass(frozen=True)
class Finding:
    """One thing that fusegraph can use.

    name     what it is.  found: whether it is there and works.  version, path: empty if unknown.
    detail   further information, or why it is missing.
    needed   what fusegraph uses it for.  install: what to do if it is missing, else empty.
    """

    name: str
    found: bool
    version: str = ""
    path: str = ""
    detail: str = ""
    needed: str = ""
    install: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the conclusions from them: compiles, runs_on_gpu, runs_on_cpu, ok."""

    findings: tuple[Finding, ...]

    def _found(self, name: str) -> bool:
        return any(f.found for f in self.findings if f.name == name)

    @property
    def compiles(self) -> bool:
        """Whether cubins can be compiled."""
        return self._found("NVRTC")

    @property
    def runs_on_gpu(self) -> bool:
        return self.compiles and self._found("CUDA driver")

    @property
    def runs_on_cpu(self) -> bool:
        """Whether the emitted CUDA C can be run on this machine's CPU."""
        return self._found("C++ compiler")

    @property
    def ok(self) -> bool:
        """Whether kernels can be compiled, or run on the CPU."""
        return self.compiles or self.runs_on_cpu

    def plain(self) -> dict[str, Any]:
        """Converts the diagnosis to plain data for JSON."""
        verdicts = {name: getattr(self, name) for name in ("ok", "compiles", "runs_on_gpu", "runs_on_cpu")}
        return {**verdicts, "findings": [asdict(f) for f in self.findings]}


def diagnose(progress: Callable[[str], object] = lambda _: None) -> Diagnosis:
    """Probes everything, and says what is next.  A failure becomes a finding; nothing is raised."""
    probes: list[tuple[str, Callable[[], list[Finding]]]] = [
        ("Python", _python),
        ("cuda-bindings", partial(_distribution, "cuda-bindings", "cuda-bindings", _FOR_BINDINGS, _PIP_NVRTC)),
        ("NVRTC", _nvrtc),
        ("CUDA driver", _driver),
        ("C++ compiler", _compiler),
        ("cuDNN frontend", partial(_distribution, "cuDNN frontend", "nvidia-cudnn-frontend", _FOR_CUDNN, _PIP_CUDNN)),
        ("cuDNN library", _cudnn_library),
        ("cache folder", _cache),
    ]
    findings: list[Finding] = []
    for name, probe in probes:
        progress(name)
        try:
            findings += probe()
        except Exception as error:  # a broken installation may fail in any way; the other findings still count
            findings.append(Finding(name, False, detail=f"{type(error).__name__}: {error}"))
    return Diagnosis(tuple(findings))


def _python() -> list[Finding]:
    return [
        Finding("Python", True, platform.python_version(), needed="everything"),
        Finding("fusegraph", True, __version__, str(Path(__file__).parents[1]), needed="everything"),
        Finding("codegen", True, path=codegen_folder(), detail="the one that came with fusegraph", needed="everything"),
    ]


def _nvrtc() -> list[Finding]:
    needed = "engine cuda and cubins for any GPU; needs no driver"
    try:
        version = ".".join(map(str, nvrtc.nvrtc_version()))
        archs = nvrtc.supported_archs()
        nvrtc.compile_kernels([_PROBE], "sm_90a" if "sm_90a" in archs else archs[-1])
    except FusegraphError as error:
        return [Finding("NVRTC", False, detail=str(error), needed=needed, install=_PIP_NVRTC)]
    return [Finding("NVRTC", True, version, nvrtc.library_path(), f"compiles for {', '.join(archs)}", needed)]


def _driver() -> list[Finding]:
    needed = "running kernels on a GPU"
    install = "install NVIDIA's driver for CUDA 13 (release 580 or newer) on a machine with a GPU; or use --engine cpu"
    reason = driver.unavailable_reason()
    if reason is not None:
        return [Finding("CUDA driver", False, detail=reason, needed=needed, install=install)]
    findings = [Finding("CUDA driver", True, ".".join(map(str, driver.driver_version())), needed=needed)]
    for index in range(driver.device_count()):
        try:
            gpu = driver.properties(index)
            target = gpu.target
        except DeviceError as error:
            findings.append(Finding(f"GPU {index}", False, detail=str(error), needed=needed))
            continue
        capability = "compute capability {}.{}".format(*gpu.compute_capability)
        figures = f"{target.arch}, {gpu.sm_count} SMs, {size_text(gpu.total_memory)}"
        detail = f"{capability}, {figures}; target {target}: {target.origins}"
        findings.append(Finding(f"GPU {index}", True, gpu.name, detail=detail, needed=needed))
    return findings


def _compiler() -> list[Finding]:
    needed = "engine cpu: running the emitted CUDA C without a GPU"
    try:
        compiler = host_compiler.find_compiler()
        host_compiler.build([_PROBE], cache=default_cache())
    except FusegraphError as error:
        return [Finding("C++ compiler", False, detail=str(error), needed=needed, install=_GET_COMPILER)]
    result = subprocess.run([*compiler.command, "--version"], capture_output=True, text=True, errors="replace")
    return [Finding("C++ compiler", True, result.stdout.partition("\n")[0], " ".join(compiler.command), "", needed)]


def _cudnn_library() -> list[Finding]:
    """Finds the library in its Python package, else by the system's loader."""
    name, needed = "cuDNN library", _FOR_CUDNN
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        package = importlib.metadata.distribution("nvidia-cudnn-cu13")
        library = next((f for f in package.files or () if f.name.startswith("libcudnn.so")), None)
        path = str(Path(str(package.locate_file(library))).resolve()) if library else ""
        return [Finding(name, True, package.version, path, needed=needed)]
    try:
        version = ctypes.CDLL("libcudnn.so.9").cudnnGetVersion()
    except (OSError, AttributeError) as error:
        return [Finding(name, False, detail=str(error), needed=needed, install=_PIP_CUDNN)]
    return [Finding(name, True, f"{version // 10000}.{version // 100 % 100}.{version % 100}", needed=needed)]


def _distribution(name: str, package: str, needed: str, install: str) -> list[Finding]:
    """Finds an installed Python distribution."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return [Finding(name, False, detail=f"{package} is not installed", needed=needed, install=install)]
    return [Finding(name, True, found.version, needed=needed)]


def _cache() -> list[Finding]:
    cache, needed = default_cache(), "keeping compiled kernels"
    if cache.folder is None:
        install = "set FUSEGRAPH_CACHE_DIR to a folder that can be written"
        return [Finding("cache folder", False, detail="no home directory to put it in", needed=needed, install=install)]
    place = cache.folder
    while not place.exists() and place != place.parent:
        place = place.parent
    writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    detail = f"{size_text(cache.size())} of at most {size_text(cache.limit_bytes)}"
    install = "" if writable else f"{place} cannot be written; set FUSEGRAPH_CACHE_DIR to a folder that can"
    return [Finding("cache folder", writable, path=str(cache.folder), detail=detail, needed=needed, install=install)]
