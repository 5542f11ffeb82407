"""Kernels on the CPU: compiles the emitted CUDA C with a host C++ compiler, loads it, and runs it thread for thread.

The library of a set of kernels is a pure function of what its cache key holds: the translation unit, every header it
may include, the flags, and the compiler's path and version.  The same holds for the runtime, which all kernels share.

Results differ from a GPU's by rounding.  The host's C library computes exp and similar functions.  Products are not
contracted into fused multiply-adds, unlike in NVRTC: a processor without FMA could not do it, and results should not
depend on the processor.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal, get_args

from codegen.cpu import CPU_DIR, DEVICE_DIR, describe_address, headers, translation_unit
from codegen.spec import KernelSource, Scalar, TensorMap
from fusegraph.errors import CompileError, KernelError, ToolchainError, listed, shown
from fusegraph.runtime import temporary
from fusegraph.runtime.cache import DiskCache, digest
from fusegraph.runtime.tensor_map import encode_for_cpu

_logger = logging.getLogger(__name__)

Order = Literal["forward", "reverse", "late"]
Dim3 = tuple[int, int, int]

# Flags of both the runtime and the kernels.  No fortification: it takes leaving a fiber by longjmp for an attack.
_COMMON_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE")
_RUNTIME_FLAGS = (*_COMMON_FLAGS, "-O2", "-pthread")
# No aliasing or overflow rules beyond CUDA's; no errno.  Stack-clash protection makes a large local array touch its
# pages in order, so that it cannot skip the guard page below a fiber's stack.
_KERNEL_FLAGS = (
    *_COMMON_FLAGS,
    "-fno-strict-aliasing",
    "-fwrapv",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fstack-clash-protection",
    "-fno-exceptions",
    "-fno-rtti",
    "-w",
    "-Wno-psabi",  # the alignment of a tensor map
    "-DFUSEGRAPH_CPU",
)
_CANDIDATES = ("g++", "clang++", "c++")
_INSTALL = (
    "install g++ (Debian, Ubuntu: apt install g++; Fedora: dnf install gcc-c++) or name a compiler in FUSEGRAPH_CXX"
)
_POISON = 0xFF  # NaN in every float type, -1 in integers

# CUDA's limits for one launch (compute capability 9.0).
_MOST_GRID: Dim3 = (2**31 - 1, 65535, 65535)
_MOST_BLOCK: Dim3 = (1024, 1024, 64)
_MOST_THREADS = 1024
_MOST_SHARED_BYTES = 227 * 1024
_MOST_CLUSTER = 16

_FAILED, _INTERRUPTED = 1, 2


@dataclass(frozen=True)
class Compiler:
    """A host C++ compiler: the command that starts it, and what identifies it in cache keys."""

    command: tuple[str, ...]
    version: str

    @property
    def libraries(self) -> tuple[str, ...]:
        """The linker flags of kernels: all libraries but that of C++, which would take half of the link time."""
        return ("-nostdlib++", "-lm") if "clang" in self.version else ("-nodefaultlibs", "-lm", "-lc", "-lgcc")


def find_compiler() -> Compiler:
    """Returns the C++ compiler named by ``FUSEGRAPH_CXX`` or ``CXX``, else the first of g++, clang++, c++ on the path.

    Raises ToolchainError if a variable names something that cannot be run, and if no compiler is found.
    """
    for variable in ("FUSEGRAPH_CXX", "CXX"):
        value = os.environ.get(variable, "").strip()
        if value:
            try:
                command = shlex.split(value)
            except ValueError as error:
                raise ToolchainError(f"{variable}={value!r} is no command: {error}") from None
            program = shutil.which(command[0])
            if program is None:
                raise ToolchainError(f"{variable} names {command[0]!r}, which is not found on the path; {_INSTALL}")
            return _identify((program, *command[1:]), _stamp(program))
    for name in _CANDIDATES:
        program = shutil.which(name)
        if program is not None:
            return _identify((program,), _stamp(program))
    raise ToolchainError(
        f"no C++ compiler: looked for {', '.join(_CANDIDATES)} on the path ({os.environ.get('PATH', '')}); {_INSTALL}"
    )


def _stamp(program: str) -> tuple[str, int, int]:
    path = os.path.realpath(program)
    status = os.stat(path)
    return path, status.st_mtime_ns, status.st_size


@functools.lru_cache(maxsize=16)
def _identify(command: tuple[str, ...], stamp: tuple[str, int, int]) -> Compiler:
    try:
        result = subprocess.run([*command, "--version"], capture_output=True, text=True, errors="replace", timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ToolchainError(f"the C++ compiler {shlex.join(command)} does not run: {error}; {_INSTALL}") from None
    if result.returncode:
        said = result.stderr.strip() or f"exit status {result.returncode}"
        raise ToolchainError(f"{shlex.join(command)} --version failed: {said}; {_INSTALL}")
    return Compiler(command, "\n".join((*map(str, stamp), os.uname().machine, result.stdout)))


def host_threads() -> int:
    """Returns how many host threads a launch uses at most: ``FUSEGRAPH_CPU_THREADS``, else the number of processors.

    Raises ToolchainError if the variable is not an integer from 1 to 65536.
    """
    value = os.environ.get("FUSEGRAPH_CPU_THREADS", "").strip()
    if not value:
        return os.cpu_count() or 1
    if not re.fullmatch(r"[0-9]{1,5}", value) or not 0 < int(value) <= 65536:
        raise ToolchainError(f"FUSEGRAPH_CPU_THREADS is {shown(value)}; an integer from 1 to 65536 is expected")
    return int(value)


def build(kernels: Sequence[KernelSource], *, cache: DiskCache, ucontext: bool = False) -> CpuModule:
    """Compiles ``kernels`` in one call of the compiler, or takes them from ``cache``, and loads them.

    ucontext    switches stacks by ucontext, as on processors for which the runtime has no code of its own; several
                times slower.

    Raises ToolchainError without a compiler, CompileError if it rejects the source, ValueError for kernel names and
    includes that ``codegen.cpu.translation_unit`` refuses.
    """
    started = time.perf_counter()
    compiler = find_compiler()
    source = translation_unit(kernels)
    contents = [part for path in headers() for part in (path.name, path.read_bytes())]
    flags = [*_KERNEL_FLAGS, _optimization(kernels)]
    names = listed(kernel.name for kernel in kernels)

    def compile_kernels() -> bytes:
        includes = ["-include", "cuda_on_cpu.h", "-I", str(DEVICE_DIR), "-I", str(CPU_DIR)]
        return _compile(compiler, source, [*flags, *includes], compiler.libraries, f"kernels {names}")

    key = digest("cpu kernels", source, *contents, *flags, *compiler.libraries, *compiler.command, compiler.version)
    library, cached = cache.get_or_build(key, compile_kernels)
    runtime = _runtime(compiler, ucontext, cache)
    seconds = time.perf_counter() - started
    _logger.debug("kernels %s %s, %.2f s", names, "from the cache" if cached else "compiled", seconds)
    return CpuModule(tuple(kernels), _Library(library, names), runtime, cached, seconds)


def _optimization(kernels: Sequence[KernelSource]) -> str:
    """Returns the optimization flag: to compile takes a fifth longer with -Og than with -O0, four times with -O2, for
    code twice and up to four times as fast.

    They pay off from some 10^4 and 10^5 threads per kernel, a tenth of that if they are fibers (kernels with barriers).
    """
    work = sum(int(prod(k.grid)) * prod(k.block) * (16 if k.uses_barriers else 1) for k in kernels)
    each = work / max(len(kernels), 1)
    return "-O0" if each <= 2**13 else "-Og" if each <= 2**18 else "-O2"


@contextlib.contextmanager
def _temporary_files() -> Iterator[None]:
    """Turns errors of the file system into a ToolchainError that names the temporary folder."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ToolchainError(
            f"no file can be written to the temporary folder: {reason}; name another one in TMPDIR"
        ) from None


@_temporary_files()
def _compile(compiler: Compiler, source: str, flags: Sequence[str], libraries: Sequence[str], what: str) -> bytes:
    """Compiles ``source`` and returns the shared library.

    Raises CompileError if the compiler rejects the source, ToolchainError if it does not run.
    """
    with temporary.folder() as folder:
        unit, output = Path(folder, "unit.cpp"), Path(folder, "unit.so")
        unit.write_text(source, encoding="utf-8")
        command = [*compiler.command, *flags, str(unit), "-o", str(output), *libraries]
        try:
            result = subprocess.run(
                command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, cwd=folder
            )
        except OSError as error:
            raise ToolchainError(f"the C++ compiler {compiler.command[0]} does not run: {error}") from None
        if result.returncode == 0 and output.is_file():
            return output.read_bytes()
    kept = Path(tempfile.mkdtemp(prefix="fusegraph-failed-"))
    (kept / "unit.cpp").write_text(source, encoding="utf-8")
    (kept / "log.txt").write_text(f"{shlex.join(command)}\n{result.stderr}", encoding="utf-8")
    raise CompileError(
        f"{compiler.command[0]} rejected the CPU code of {what} (exit status {result.returncode}); "
        f"source and log are kept in {kept}\n{result.stderr.strip()}"
    )


class _Library:
    """A loaded shared library; unloaded when nothing refers to this object any more."""

    def __init__(self, data: bytes, what: str) -> None:
        with _temporary_files(), temporary.file(data) as path:  # the mapping keeps its contents
            self.cdll = _loaded(path, what)
        weakref.finalize(self, _dlclose, self.cdll._handle).atexit = False


def _loaded(path: Path, what: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(path), mode=os.RTLD_NOW | os.RTLD_LOCAL)
    except OSError as error:
        raise ToolchainError(
            f"the library of {what} cannot be loaded from {path.parent}: {error}; where that folder is mounted noexec, "
            "name another in TMPDIR"
        ) from None


def _dlclose(handle: int) -> None:
    ctypes.CDLL(None).dlclose(ctypes.c_void_p(handle))


class _Kernel(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("run", ctypes.c_void_p),
        ("run_block", ctypes.c_void_p),
        ("parameter_count", ctypes.c_uint),
        ("parameter_sizes", ctypes.POINTER(ctypes.c_uint)),
    )


class _Module(ctypes.Structure):
    _fields_ = (
        ("kernels", ctypes.POINTER(_Kernel)),
        ("kernel_count", ctypes.c_uint),
        ("slot", ctypes.c_void_p),
    )


class _Interpreter(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("ensure", "release", "check_signals", "fetch"))


@functools.cache
def _interpreter() -> _Interpreter:
    """Returns the C functions by which the runtime lets Python handle signals during a launch.

    A Python function would not do: a signal would interrupt its own first instruction, and the exception would be lost.
    """
    api = ctypes.pythonapi
    functions = (api.PyGILState_Ensure, api.PyGILState_Release, api.PyErr_CheckSignals, api.PyErr_Fetch)
    return _Interpreter(*(ctypes.cast(function, ctypes.c_void_p).value for function in functions))


class _Request(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_void_p),
        ("slot", ctypes.c_void_p),
        ("args", ctypes.POINTER(ctypes.c_void_p)),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("cluster", ctypes.c_uint * 3),
        ("dynamic_shared_bytes", ctypes.c_uint),
        ("host_threads", ctypes.c_uint),
        ("order", ctypes.c_int),
        ("poison", ctypes.c_int),
        ("python", ctypes.c_void_p),
    )


class _Report(ctypes.Structure):
    _fields_ = (
        ("has_address", ctypes.c_int),
        ("address", ctypes.c_ulonglong),
        ("exception", ctypes.c_void_p * 3),
        ("message", ctypes.c_char * 4096),
    )


class Runtime:
    """The loaded runtime library, which starts launches."""

    def __init__(self, library: _Library) -> None:
        self._library = library
        self.launch = library.cdll.fusegraph_cpu_launch
        self.launch.argtypes = (ctypes.POINTER(_Request), ctypes.POINTER(_Report))
        self.launch.restype = ctypes.c_int
        kind = library.cdll.fusegraph_cpu_context_kind
        kind.restype = ctypes.c_char_p
        self.context_kind: str = kind().decode()
        """How the runtime switches stacks: ``"x86-64"`` or ``"ucontext"``."""


_runtimes: dict[str, Runtime] = {}
_runtimes_lock = threading.Lock()


def _runtime(compiler: Compiler, ucontext: bool, cache: DiskCache) -> Runtime:
    """Returns the runtime, built once per compiler and loaded once per process, as its signal handlers are global."""
    source = (CPU_DIR / "runtime.cpp").read_text(encoding="utf-8")
    flags = [*_RUNTIME_FLAGS, *(["-DFUSEGRAPH_CPU_UCONTEXT"] if ucontext else [])]
    contents = [part for path in headers() if path.parent == CPU_DIR for part in (path.name, path.read_bytes())]
    key = digest("cpu runtime", *contents, *flags, *compiler.command, compiler.version)
    with _runtimes_lock:
        if key not in _runtimes:
            library, _ = cache.get_or_build(
                key, lambda: _compile(compiler, source, [*flags, "-I", str(CPU_DIR)], (), "the runtime")
            )
            _runtimes[key] = Runtime(_Library(library, "the runtime"))
        return _runtimes[key]


class CpuModule:
    """Loaded kernels.

    kernels         the sources it was built from; a kernel's position is its index.
    cached          whether the library came from the cache.
    build_seconds   the time of building the library, or finding it in the cache, and loading it.
    """

    def __init__(
        self, kernels: tuple[KernelSource, ...], library: _Library, runtime: Runtime, cached: bool, build_seconds: float
    ) -> None:
        self.kernels = kernels
        self.cached = cached
        self.build_seconds = build_seconds
        self.runtime = runtime
        self._library = library  # keeps the code loaded
        self._module = _Module.in_dll(library.cdll, "fusegraph_cpu_module")
        self._sizes = [
            tuple(entry.parameter_sizes[: entry.parameter_count])
            for entry in self._module.kernels[: self._module.kernel_count]
        ]

    def launch(
        self,
        kernel: int | str,
        args: Sequence[Any],
        *,
        grid: Dim3 | None = None,
        block: Dim3 | None = None,
        shared_bytes: int | None = None,
        order: Order = "forward",
        poison: bool = True,
        source: KernelSource | None = None,
    ) -> None:
        """Runs one kernel to its end; ``grid``, ``block`` and ``shared_bytes`` default to the KernelSource's.

        source  the KernelSource at known sizes, of a kernel that was built for all.

        kernel  an index into ``kernels``, or a name that only one of them (or several equal ones) has.
        args    one value per parameter: an int for a pointer or an integer parameter, else a ctypes value of the
                parameter's size.  If the KernelSource has ``parameters``: the addresses of its arguments.
        order   the order in which threads of a block, and blocks, take turns; with "late", the last warp of every four
                runs only when no other can.  A kernel whose result depends on the order lacks a barrier.
        poison  fills shared memory with 0xff bytes (NaN in every float dtype) before each block.

        Raises KernelError for arguments and dimensions that CUDA would refuse, and for errors of the kernel: a
        deadlock, or an access that is out of bounds or misaligned.  The arrays then hold what was written so far.  A
        signal that arrives meanwhile is handled between blocks; an exception of its handler (KeyboardInterrupt) ends
        the launch.
        """
        index = self._index(kernel)
        source = source or self.kernels[index]
        grid, block = grid or source.grid, block or source.block
        shared_bytes = source.dynamic_shared_bytes if shared_bytes is None else shared_bytes
        if order not in (orders := get_args(Order)):
            raise KernelError(f"kernel {source.name}: order is {order!r}; one of {', '.join(orders)} is expected")
        _check_dimensions(source, grid, block, shared_bytes)
        if 0 in grid:
            return
        for argument, nbytes in source.zeroed:
            ctypes.memset(args[argument], 0, nbytes)
        args = _parameters(source, args)
        if len(args) != len(sizes := self._sizes[index]):
            raise KernelError(f"kernel {source.name} takes {len(sizes)} arguments; {len(args)} were given")
        values = [_value(source.name, i, arg, size) for i, (arg, size) in enumerate(zip(args, sizes))]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*map(ctypes.addressof, values))
        request = _Request(
            ctypes.addressof(self._module.kernels[index]),
            self._module.slot,
            pointers,
            grid,
            block,
            source.cluster,
            shared_bytes,
            host_threads(),
            orders.index(order),
            _POISON if poison else -1,
            ctypes.addressof(_interpreter()),
        )
        report = _Report()
        status = self.runtime.launch(ctypes.byref(request), ctypes.byref(report))
        if status == _INTERRUPTED:
            ctypes.pythonapi.PyErr_Restore(*map(ctypes.c_void_p, report.exception))  # raises what the handler raised
        if status == _FAILED:
            place = describe_address(report.address) if report.has_address else None
            raise KernelError(report.message.decode("utf-8", "replace") + (f": {place}" if place else ""))

    def _index(self, kernel: int | str) -> int:
        if isinstance(kernel, str):
            found = [i for i, source in enumerate(self.kernels) if source.name == kernel]
            if len({self.kernels[i] for i in found}) != 1:
                names = listed(source.name for source in self.kernels)
                raise KernelError(f"{len(found)} kernels are called {kernel!r}; the module has {names}")
            return found[0]
        if not 0 <= kernel < len(self.kernels):
            raise KernelError(f"kernel {kernel} of a module of {len(self.kernels)}")
        return kernel


def _check_dimensions(source: KernelSource, grid: Dim3, block: Dim3, shared_bytes: int) -> None:
    name, cluster = source.name, source.cluster
    if len(grid) != 3 or any(not 0 <= size <= most for size, most in zip(grid, _MOST_GRID)):
        raise KernelError(f"kernel {name}: grid {grid}; CUDA takes up to {_MOST_GRID} blocks")
    threads = block[0] * block[1] * block[2] if len(block) == 3 else 0
    if not 0 < threads <= _MOST_THREADS or any(not 0 < size <= most for size, most in zip(block, _MOST_BLOCK)):
        raise KernelError(f"kernel {name}: block {block}; CUDA takes 1 to {_MOST_THREADS} threads, up to {_MOST_BLOCK}")
    if not 0 <= shared_bytes <= _MOST_SHARED_BYTES:
        raise KernelError(
            f"kernel {name}: {shared_bytes} bytes of dynamic shared memory; 0 to {_MOST_SHARED_BYTES} fit"
        )
    blocks = cluster[0] * cluster[1] * cluster[2] if len(cluster) == 3 else 0
    if not 0 < blocks <= _MOST_CLUSTER or min(cluster) < 1:
        raise KernelError(f"kernel {name}: clusters of {cluster} blocks; CUDA takes up to {_MOST_CLUSTER}")
    if any(size % step for size, step in zip(grid, cluster)):
        raise KernelError(f"kernel {name}: grid {grid} is no multiple of the cluster, {cluster}")


def _parameters(source: KernelSource, args: Sequence[Any]) -> Sequence[Any]:
    """Returns the values of the parameters, made from the arguments' addresses if the source has ``parameters``."""
    if source.parameters is None:
        return args
    numbers = [p.argument if isinstance(p, TensorMap) else p for p in source.parameters if not isinstance(p, Scalar)]
    count = max(numbers, default=-1) + 1
    if len(args) < count or any(not isinstance(arg, int) for arg in args):
        raise KernelError(f"kernel {source.name} takes the addresses of {count} arguments; {list(args)} were given")
    values: list[Any] = []
    for parameter in source.parameters:
        if isinstance(parameter, TensorMap):
            encoded = encode_for_cpu(parameter, args[parameter.argument] + parameter.offset, source.name)
            values.append((ctypes.c_ubyte * len(encoded)).from_buffer_copy(encoded))
        else:
            values.append(parameter.value if isinstance(parameter, Scalar) else args[parameter])
    return values


def _value(name: str, position: int, arg: Any, size: int) -> Any:
    """Returns the argument as a ctypes value of ``size`` bytes."""
    if isinstance(arg, int):
        if size not in (1, 2, 4, 8) or not -(1 << (8 * size - 1)) <= arg < 1 << (8 * size):
            raise KernelError(f"kernel {name}: argument {position} is {arg}, the parameter has {size} bytes")
        return (ctypes.c_ubyte * size).from_buffer_copy((arg % (1 << (8 * size))).to_bytes(size, sys.byteorder))
    try:
        given = ctypes.sizeof(arg)
    except TypeError:
        raise KernelError(
            f"kernel {name}: argument {position} is a {type(arg).__name__}; an int or a ctypes value is expected"
        ) from None
    if given != size:
        raise KernelError(f"kernel {name}: argument {position} has {given} bytes, the parameter {size}")
    return arg
