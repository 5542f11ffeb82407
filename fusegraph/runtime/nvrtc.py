"""Compiles kernels with NVRTC: CUDA C in, cubin and resource use out.  Needs no GPU and no driver.

A compilation is a pure function of what its cache key holds: the source, the device headers it includes, the options,
the architecture and the NVRTC build.  To ensure this, headers are passed in memory, NVRTC gets no folder to search, and
options that would make it read or write files are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import re
import struct
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypedDict, Unpack

import codegen
from codegen.spec import KernelSource
from fusegraph.errors import CompileError, ToolchainError
from fusegraph.runtime.cache import DiskCache, digest
from fusegraph.runtime.resources import resources_in_log, resources_of_cubin

HEADER_FOLDER = Path(codegen.__file__).parent / "device"
CACHE_FORMAT = "1"

# -v makes ptxas report resources; --no-cache because the cache here also keeps those; --no-source-include because NVRTC
# would otherwise look for headers in the working directory; --minimal omits declarations of the CUDA runtime API, which
# kernels do not use, and saves some 10 % of a small kernel's compile time.
BASE_OPTIONS = (
    "--std=c++17",
    "--ptxas-options=-v",
    "--no-cache",
    "--no-source-include",
    "--minimal",
    "--device-as-default-execution-space",
)
_REFUSED_OPTION = re.compile(
    r"-I|-include|--?(include-path|pre-include|pch|use-pch|create-pch|pch-dir|gpu-architecture|arch|gpu-code|code|options-file"
    r"|time|fdevice-time-trace|relocatable-device-code|rdc|device-c|dc|dlink-time-opt|dlto|gen-opt-lto|optix-ir|ptx)\b|-?-?@"
)
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([A-Za-z0-9_.-]+)[>"]', re.MULTILINE)
_REFUSED_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*(?:[<"]/|[^<"\s]).*', re.MULTILINE)  # absolute or a macro
_ENTRY = struct.Struct("<I")
_logger = logging.getLogger(__name__)

_SUCCESS, _INVALID_OPTION, _COMPILATION = 0, 5, 6

_INSTALL = "install both PyPI packages: pip install 'nvidia-cuda-nvrtc>=13,<14' 'cuda-python>=13,<14'"


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel's machine code and its resource use.

    name, arch    the ``extern "C"`` symbol, and the architecture, such as ``"sm_90a"``.
    cubin         the ELF image that the driver loads.
    registers     32-bit registers of a thread.
    spill_bytes   bytes of a thread's spill stores and loads, as ptxas counts the instructions; ``stack_bytes`` if
                  ptxas did not report them.
    shared_bytes  static shared memory of a block, in bytes.
    stack_bytes   local memory of a thread in bytes, spills included.
    compile_ms    the milliseconds that compiling it, or reading it from the cache, took this time.
    cached        whether it came from the cache.
    log           NVRTC's log of the compilation.
    warnings      ptxas' advice numbered C75xx: a wgmma pipeline serialized, a wait inserted, a setmaxnreg ignored.
    """

    name: str
    arch: str
    cubin: bytes = field(repr=False)
    registers: int
    spill_bytes: int
    shared_bytes: int
    stack_bytes: int
    compile_ms: float
    cached: bool
    log: str = field(repr=False)
    warnings: tuple[str, ...]


#: Called with each source as its kernel is done.
Progress = Callable[[KernelSource, CompiledKernel], None]


@dataclass(frozen=True)
class _Unit:
    """Everything a compilation depends on."""

    source: KernelSource
    headers: dict[str, str]
    arch: str
    options: tuple[str, ...]

    @functools.cached_property
    def key(self) -> str:
        headers = [part for name in sorted(self.headers) for part in (name, self.headers[name])]
        toolchain = ("nvrtc", CACHE_FORMAT, *(f.name for f in dataclasses.fields(CompiledKernel)), *_build())
        counts = f"{len(toolchain)} {len(self.options)} {len(headers)}"
        return digest(counts, *toolchain, *self.options, self.arch, self.source.name, self.source.code, *headers)


def nvrtc_version() -> tuple[int, int]:
    """Returns NVRTC's version, such as ``(13, 0)``.  Raises ToolchainError if it cannot be loaded."""
    major, minor = _call(_bindings().nvrtcVersion)
    return int(major), int(minor)


def supported_archs() -> tuple[str, ...]:
    """Returns the architectures of NVRTC, ``a`` ones included.  Raises ToolchainError if it cannot be loaded."""
    (numbers,) = _call(_bindings().nvrtcGetSupportedArchs)
    return tuple(f"sm_{number}{suffix}" for number in numbers for suffix in (("", "a") if number >= 90 else ("",)))


class How(TypedDict, total=False):
    """How kernels are compiled.

    ``cache`` is asked first, and stores what is compiled (None: always compile).  ``options`` are NVRTC's, appended to
    ``BASE_OPTIONS``.  At most ``jobs`` threads compile at once, by default one per processor; NVRTC releases the GIL.
    """

    cache: DiskCache | None
    options: Sequence[str]
    jobs: int | None


def compile_kernels(
    sources: Sequence[KernelSource], arch: str, *, progress: Progress | None = None, **how: Unpack[How]
) -> list[CompiledKernel]:
    """Compiles kernels for ``arch`` (``"sm_90a"``) and returns them in the order given; equal ones are compiled once.

    ``progress`` is called in the calling thread for each source as it is done, in no particular order.

    Raises CompileError for the first kernel that does not compile, for an architecture that NVRTC does not know, and
    for an option that would make it read or write files; ToolchainError if NVRTC cannot be loaded.
    """
    return start(sources, arch, **how).kernels(progress)


#: What is being compiled now, by the cache that it is for and its key.
_UNDER_WAY: dict[tuple[DiskCache | None, str], Future[CompiledKernel]] = {}
_UNDER_WAY_LOCK = threading.Lock()


def _forget(entry: tuple[DiskCache | None, str], _: Future[CompiledKernel]) -> None:
    _UNDER_WAY.pop(entry, None)


class Compilation:
    """Kernels that threads compile, in the order in which they were asked for."""

    def __init__(
        self, sources: Sequence[KernelSource], keys: Mapping[int, str], done: dict[str, CompiledKernel]
    ) -> None:
        """keys: the key of each source, by its identity; done: the kernels that need no compilation, by key."""
        self._sources, self._keys, self._done = sources, keys, done
        self._futures: dict[Future[CompiledKernel], tuple[str, _Unit]] = {}
        self._cache: DiskCache | None = None

    def _compile(self, units: Mapping[str, _Unit], cache: DiskCache | None, jobs: int | None) -> None:
        """Starts to compile units, the longest first; waits for what others compile already."""
        if not units:
            return
        self._cache = cache
        workers = min(jobs or len(os.sched_getaffinity(0)), len(units))
        pool = ThreadPoolExecutor(workers, thread_name_prefix="nvrtc")
        for key in sorted(units, key=lambda key: -len(units[key].source.code)):
            with _UNDER_WAY_LOCK:
                future = _UNDER_WAY.get((cache, key))
                if future is None:
                    future = _UNDER_WAY[cache, key] = pool.submit(_compile, units[key], cache)
                    future.add_done_callback(functools.partial(_forget, (cache, key)))
            self._futures[future] = key, units[key]
        pool.shutdown(wait=False)

    def kernels(self, progress: Progress | None = None) -> list[CompiledKernel]:
        """Waits for all kernels and returns them.  ``progress`` and what this raises: see `compile_kernels`."""
        for key in list(self._done):
            self._tell(key, progress)
        try:
            for future in as_completed(self._futures):
                key, unit = self._futures[future]
                # Who had begun to compile it may have given up.
                self._done[key] = _compile(unit, self._cache) if future.cancelled() else future.result()
                self._tell(key, progress)
        except BaseException:
            for future in self._futures:
                future.cancel()
            raise
        return [self._done[self._keys[id(source)]] for source in self._sources]

    def _tell(self, key: str, progress: Progress | None) -> None:
        if progress is not None:
            for source in self._sources:
                if self._keys[id(source)] == key:
                    progress(source, self._done[key])


def start(sources: Sequence[KernelSource], arch: str, **how: Unpack[How]) -> Compilation:
    """Starts to compile kernels as `compile_kernels` does, and returns without waiting.

    Raises CompileError for an architecture or option that is refused; ToolchainError if NVRTC cannot be loaded.
    """
    if arch not in supported_archs():
        version = ".".join(map(str, nvrtc_version()))
        raise CompileError(f"NVRTC {version} does not compile for {arch!r}; it knows {', '.join(supported_archs())}")
    keys: dict[int, str] = {}  # by identity of the source, which equal layers of a network share
    units: dict[str, _Unit] = {}
    all_options, library = _checked_options(how.get("options", ())), dict[str, str | None]()
    for source in sources:
        if id(source) not in keys:
            unit = _Unit(_checked_source(source), headers_of(source.code, library), arch, all_options)
            keys[id(source)], units[unit.key] = unit.key, unit
    cache, jobs = how.get("cache"), how.get("jobs")
    done = {key: kernel for key, unit in units.items() if (kernel := _load(unit, cache) if cache else None) is not None}
    compilation = Compilation(sources, keys, done)
    compilation._compile({key: unit for key, unit in units.items() if key not in done}, cache, jobs)
    return compilation


# --- one compilation


def _compile(unit: _Unit, cache: DiskCache | None) -> CompiledKernel:
    start = time.perf_counter()
    with _program(unit) as (nvrtc, program):
        status, log = _run(nvrtc, program, (*unit.options, f"--gpu-architecture={unit.arch}"))
        if status in (_INVALID_OPTION, _COMPILATION):
            raise CompileError(_failure(unit, log))
        if status != _SUCCESS:
            raise ToolchainError(
                f"NVRTC failed on kernel {unit.source.name!r} ({_reason(nvrtc, status)}): {log or 'no log'}"
            )
        cubin = _fetch(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN)
    in_cubin = resources_of_cubin(cubin, unit.source.name)
    if in_cubin is None:
        raise CompileError(
            f'the source of kernel {unit.source.name!r} defines no extern "C" __global__ function of that name'
        )
    resources = in_cubin | resources_in_log(log, unit.source.name)
    resources.setdefault("spill_bytes", resources["stack_bytes"])
    kernel = CompiledKernel(
        name=unit.source.name,
        arch=unit.arch,
        cubin=cubin,
        **resources,
        compile_ms=(time.perf_counter() - start) * 1e3,
        cached=False,
        log=log,
        warnings=tuple(dict.fromkeys(re.findall(r"\(C75\d\d\).*\S", log))),
    )
    _logger.debug("kernel %s for %s compiled, %.0f ms", kernel.name, kernel.arch, kernel.compile_ms)
    if cache:
        cache.put(unit.key, _encode(kernel))
    return kernel


@contextmanager
def _program(unit: _Unit) -> Iterator[tuple[Any, Any]]:
    nvrtc = _bindings()
    names = [name.encode() for name in unit.headers]
    texts = [text.encode() for text in unit.headers.values()]
    file_name = f"{unit.source.name}.cu".encode()
    (program,) = _call(nvrtc.nvrtcCreateProgram, unit.source.code.encode(), file_name, len(names), texts, names)
    try:
        yield nvrtc, program
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _run(nvrtc: Any, program: Any, options: Sequence[str]) -> tuple[int, str]:
    status, *_ = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    log = _fetch(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
    return int(status), log.rstrip(b"\0").decode("utf-8", "replace").strip()


def _fetch(program: Any, size_of: Callable[..., Any], read: Callable[..., Any]) -> bytes:
    (size,) = _call(size_of, program)
    # A bytearray, as NVRTC writes into it: Python shares short bytes objects.
    buffer = bytearray(size)
    _call(read, program, buffer)
    return bytes(buffer)


# --- cache entries: length of the JSON header, the header, the cubin


def _encode(kernel: CompiledKernel) -> bytes:
    fields = {f.name: getattr(kernel, f.name) for f in dataclasses.fields(kernel) if f.name != "cubin"}
    header = json.dumps(fields).encode()
    return _ENTRY.pack(len(header)) + header + kernel.cubin


def _load(unit: _Unit, cache: DiskCache) -> CompiledKernel | None:
    start = time.perf_counter()
    entry = cache.get(unit.key)
    if entry is None:
        return None
    end = _ENTRY.size + _ENTRY.unpack_from(entry)[0]
    fields = json.loads(entry[_ENTRY.size : end])
    fields["warnings"] = tuple(fields["warnings"])
    fields["cached"] = True
    fields["compile_ms"] = (time.perf_counter() - start) * 1e3
    return CompiledKernel(cubin=entry[end:], **fields)


# --- what goes in


def _checked_source(source: KernelSource) -> KernelSource:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", source.name):
        raise CompileError(f"kernel name {source.name!r} is no C identifier")
    if "\0" in source.code:
        raise CompileError(
            f"the source of kernel {source.name!r} holds a NUL character, where NVRTC would stop reading"
        )
    return source


def _checked_options(options: Sequence[str]) -> tuple[str, ...]:
    for option in options:
        if _REFUSED_OPTION.match(option) or "\0" in option:
            raise CompileError(
                f"NVRTC option {option!r} is refused: files it reads or writes are not part of a kernel's cache key; "
                f"headers belong in codegen/device, the architecture in arch"
            )
    return (*BASE_OPTIONS, *options)


def headers_of(code: str, library: dict[str, str | None] | None = None) -> dict[str, str]:
    """Returns the device headers that ``code`` includes, transitively: name -> text.

    It is a superset, as conditions are not evaluated.  Other names are left to NVRTC, which fails on them unless they
    stand in a branch that is not taken, such as one for the CPU.  Raises CompileError for an absolute path or a macro
    as the name, which NVRTC might open.  ``library`` remembers the headers that have been read between calls.
    """
    library = {} if library is None else library
    if refused := _REFUSED_INCLUDE.search(code):
        raise CompileError(f"{refused[0].strip()!r} is refused: give the plain name of a device header")
    found: dict[str, str] = {}
    pending = _INCLUDE.findall(code)
    while pending:
        name = pending.pop()
        if name not in library:
            path = HEADER_FOLDER / name
            library[name] = path.read_text("utf-8") if path.suffix == ".cuh" and path.is_file() else None
        text = library[name]
        if text is not None and name not in found:
            found[name] = text
            pending += _INCLUDE.findall(text)
    return found


# --- failures


def _failure(unit: _Unit, log: str) -> str:
    """Returns the message for a rejected source: errors, the lines they point at, and where the source is kept."""
    name = unit.source.name
    folder = _keep(unit)
    lines = [f"kernel {name!r} does not compile for {unit.arch} with NVRTC {'.'.join(map(str, nvrtc_version()))}"]
    lines += _trimmed(log)
    if located := re.search(rf"^{re.escape(name)}\.cu\((\d+)\): (?:catastrophic )?error", log, re.MULTILINE):
        lines += _excerpt(f"{name}.cu", unit.source.code, int(located[1]))
    elif located := re.search(r"ptxas .*?line (\d+); (?:error|fatal)", log):
        ptx = _ptx(unit)
        if folder:
            (folder / f"{name[:100]}.ptx").write_text(ptx)
        lines += _excerpt("the PTX", ptx, int(located[1]))
    if "could not open source file" in log:
        lines.append(
            f"device headers that can be included: {', '.join(sorted(p.name for p in HEADER_FOLDER.glob('*.cuh')))}"
        )
    kept = f"the source and its headers are kept in {folder}"
    lines.append(kept if folder else "the source could not be kept: no temporary folder")
    return "\n".join(lines)


def _trimmed(log: str, limit: int = 40) -> list[str]:
    """Returns the log without its warnings and remarks, at most ``limit`` lines of 200 characters."""
    blocks = [
        block for block in re.split(r"\n\s*\n", log) if "warning #" not in block and not block.startswith("Remark:")
    ]
    lines = [f"  {line[:200]}" for block in blocks for line in block.splitlines() if line.strip()]
    more = len(lines) - limit
    return lines if more <= 0 else [*lines[:limit], f"  ... {more} more lines"]


def _excerpt(title: str, text: str, line: int, around: int = 2) -> list[str]:
    lines = text.splitlines()
    if not 1 <= line <= len(lines):
        return []
    numbers = range(max(1, line - around), min(len(lines), line + around) + 1)
    return [f"{title}, line {line}:"] + [f"{'>' if n == line else ' '}{n:5} | {lines[n - 1][:200]}" for n in numbers]


def _ptx(unit: _Unit) -> str:
    """Returns the PTX of a source that ptxas rejected, whose lines are shown; empty if NVRTC makes none."""
    with _program(unit) as (nvrtc, program):
        options = (*unit.options, f"--gpu-architecture={unit.arch.replace('sm_', 'compute_')}")
        if _run(nvrtc, program, options)[0] != _SUCCESS:
            return ""
        return _fetch(program, nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX).rstrip(b"\0").decode("utf-8", "replace")


def _keep(unit: _Unit) -> Path | None:
    name = unit.source.name[:100]
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"fusegraph-{name}-"))
        (folder / f"{name}.cu").write_text(unit.source.code, "utf-8")
        for header, text in unit.headers.items():
            (folder / header).write_text(text, "utf-8")
    except OSError:
        return None
    return folder


# --- the library


def _bindings() -> Any:
    """Returns ``cuda.bindings.nvrtc``, imported on first use: that takes some 70 ms, and fusegraph works without it."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise ToolchainError(f"NVRTC cannot be used, as cuda.bindings does not import ({error}); {_INSTALL}") from error
    return nvrtc


def _call(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Returns the results of an NVRTC call without its status.

    Raises ToolchainError if the call fails or the library does not load.
    """
    try:
        status, *results = function(*arguments)
    except (OSError, RuntimeError) as error:  # cuda.bindings loads the library at its first call
        reason, *_ = str(error).split("\n")
        raise ToolchainError(f"NVRTC cannot be loaded ({reason}); {_INSTALL}") from error
    if int(status) != _SUCCESS:
        raise ToolchainError(f"NVRTC's {function.__name__} failed: {_reason(_bindings(), int(status))}")
    return list(results)


def _reason(nvrtc: Any, status: int) -> str:
    _, text = nvrtc.nvrtcGetErrorString(nvrtc.nvrtcResult(status))
    return str(text.decode())


@functools.cache
def _build() -> tuple[str, ...]:
    """Returns what identifies the NVRTC build: its version, and the library's size, as updates change ptxas."""
    version, path = ".".join(map(str, nvrtc_version())), library_path()
    return version, str(os.stat(path).st_size) if os.path.isfile(path) else ""


def library_path() -> str:
    """Returns the path of NVRTC's library; empty for a system installation that only the loader finds."""
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return str(load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception:  # its place is unknown, but it may work
        return ""
