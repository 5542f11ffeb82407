"""Compiling with NVRTC: cubins and their resources, cache keys, and what is said when a kernel does not compile."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from codegen.spec import KernelSource
from fusegraph.errors import CompileError, ToolchainError
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.nvrtc import CompiledKernel, compile_kernels, nvrtc_version, supported_archs
from fusegraph.runtime.resources import resources_in_log, resources_of_cubin

SCALE = """
extern "C" __global__ void __launch_bounds__(256) NAME(const float* __restrict__ x, float* __restrict__ y, unsigned n) {
  __shared__ float tile[100];
  tile[threadIdx.x % 100] = x[threadIdx.x];
  __syncthreads();
  unsigned i = blockIdx.x * 256u + threadIdx.x;
  if (i < n) y[i] = FACTORf * x[i] + tile[(threadIdx.x + 1) % 100];
}
"""

SPILLS = """
extern "C" __global__ void __launch_bounds__(1024) NAME(const float* x, float* y) {
  float r[96];
  #pragma unroll
  for (int j = 0; j < 96; j++) r[j] = x[j * 1024 + threadIdx.x];
  __syncthreads();
  #pragma unroll
  for (int j = 0; j < 96; j++) r[j] = r[j] * r[(j + 7) % 96] + r[(j * 3 + 1) % 96];
  #pragma unroll
  for (int j = 0; j < 96; j++) y[j * 1024 + threadIdx.x] = r[j];
}
"""

# Two wgmma on one accumulator with arithmetic on it between them and no wait: ptxas must serialise.
SERIALISED = """
extern "C" __global__ void __launch_bounds__(128) NAME(float* y, unsigned long long d) {
  float a[4] = {y[0], y[1], y[2], y[3]};
  asm volatile("wgmma.fence.sync.aligned;");
#define STEP                                                                                              \\
  asm volatile("{ .reg .pred p; setp.ne.b32 p, 1, 0;"                                                      \\
               "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, %4, %4, p, 1, 1, 0, 0; }" \\
               : "+f"(a[0]), "+f"(a[1]), "+f"(a[2]), "+f"(a[3]) : "l"(d))
  STEP;
  a[0] = a[0] * 2.0f;
  STEP;
  asm volatile("wgmma.commit_group.sync.aligned;");
  asm volatile("wgmma.wait_group.sync.aligned 0;");
  y[threadIdx.x] = a[0] + a[1] + a[2] + a[3];
}
"""


def kernel(code: str, name: str = "scale", factor: float = 2.0) -> KernelSource:
    return KernelSource(name, code.replace("NAME", name).replace("FACTOR", str(float(factor))), (1, 1, 1), (256, 1, 1))


def compile_one(source: KernelSource, arch: str = "sm_90a", **rest: Any) -> CompiledKernel:
    (compiled,) = compile_kernels([source], arch, **rest)
    return compiled


@pytest.fixture
def headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A device library made by this test."""
    folder = tmp_path / "device"
    folder.mkdir()
    monkeypatch.setattr(nvrtc, "HEADER_FOLDER", folder)
    return folder


@pytest.fixture(autouse=True)
def _kept_sources_in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


# --- what comes out


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles(arch: str) -> None:
    compiled = compile_one(kernel(SCALE), arch)
    assert compiled.cubin[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", compiled.cubin, 18)[0] == 190, "e_machine is EM_CUDA"
    assert (compiled.name, compiled.arch) == ("scale", arch)
    assert 4 <= compiled.registers <= 32
    assert compiled.shared_bytes == 400
    assert compiled.spill_bytes == compiled.stack_bytes == 0
    assert not compiled.cached
    assert compiled.compile_ms > 1
    assert compiled.warnings == ()
    assert f"for '{arch}'" in compiled.log


def test_version_and_archs() -> None:
    assert nvrtc_version() >= (13, 0)
    assert {"sm_80", "sm_90", "sm_90a", "sm_120"} <= set(supported_archs())
    assert "sm_80a" not in supported_archs()


@pytest.mark.slow
def test_every_supported_arch_compiles() -> None:
    for arch in supported_archs():
        assert compile_one(kernel(SCALE), arch).registers > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_spills_are_reported(arch: str) -> None:
    compiled = compile_one(kernel(SPILLS, "spills"), arch)
    assert compiled.registers == 64, "1024 threads leave 64 registers each"
    assert compiled.spill_bytes > 0
    assert compiled.stack_bytes > 0
    relaxed = compile_one(kernel(SPILLS.replace("1024) NAME", "256) NAME"), "spills"), arch)
    assert relaxed.spill_bytes == relaxed.stack_bytes == 0
    assert relaxed.registers > 64
    unbounded = kernel(SPILLS.replace("__launch_bounds__(1024) ", ""), "spills")
    pressed = compile_one(unbounded, arch, options=["--maxrregcount=40"])
    assert pressed.registers <= 40
    assert pressed.spill_bytes > compiled.spill_bytes


def test_spills_of_a_called_function_count() -> None:
    body = SPILLS.replace(
        'extern "C" __global__ void __launch_bounds__(1024) NAME', "__device__ __noinline__ void helper"
    )
    caller = 'extern "C" __global__ void __launch_bounds__(1024) NAME(const float* x, float* y) { helper(x, y); }'
    assert compile_one(kernel(body + caller, "caller")).spill_bytes > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_log_and_cubin_agree(arch: str) -> None:
    """Two kernels in one source, each with resources of its own: what ptxas printed is what the ELF image holds."""
    for code, name in ((SCALE, "scale"), (SPILLS, "spills")):
        other = SPILLS if code is SCALE else SCALE
        source = kernel(code.replace("NAME", name) + other.replace("NAME", "other"), name)
        compiled = compile_one(source, arch)
        in_cubin = resources_of_cubin(compiled.cubin, name)
        in_log = resources_in_log(compiled.log, name)
        assert in_cubin == {key: in_log[key] for key in ("registers", "stack_bytes", "shared_bytes")}
        assert (compiled.shared_bytes, compiled.spill_bytes > 0) == ((400, False) if name == "scale" else (0, True))


def test_resources_without_a_log(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = compile_one(kernel(SPILLS, "spills"))
    monkeypatch.setattr(nvrtc, "BASE_OPTIONS", tuple(o for o in nvrtc.BASE_OPTIONS if o != "--ptxas-options=-v"))
    silent = compile_one(kernel(SPILLS, "spills"))
    assert "registers" not in silent.log
    assert (silent.registers, silent.stack_bytes) == (expected.registers, expected.stack_bytes)
    assert silent.spill_bytes == silent.stack_bytes


def test_serialised_wgmma_is_a_warning(tmp_path: Path) -> None:
    cache = DiskCache(tmp_path / "cache")
    compiled = compile_one(kernel(SERIALISED, "mma"), cache=cache)
    assert any(re.match(r"\(C75\d\d\) .*serialized", warning) for warning in compiled.warnings)
    assert compile_one(kernel(SERIALISED, "mma"), cache=DiskCache(tmp_path / "cache")).warnings == compiled.warnings


# --- several at once


@pytest.mark.parametrize("jobs", [None, 1, 2, 5])
def test_order_progress_and_duplicates(jobs: int | None) -> None:
    sources = [kernel(SCALE, f"scale{index % 4}", factor=index % 4) for index in range(6)]
    seen = []
    compiled = compile_kernels(sources, "sm_80", jobs=jobs, progress=lambda source, done: seen.append((source, done)))
    assert [each.name for each in compiled] == [source.name for source in sources]
    assert sorted(source.name for source, _ in seen) == sorted(source.name for source in sources)
    assert all(source.name == done.name for source, done in seen)
    assert compiled[0] is compiled[4], "equal sources are compiled once"
    assert len({each.cubin for each in compiled}) == 4


def test_what_is_being_compiled_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, let_go, compiled = threading.Event(), threading.Event(), list[str]()
    compile_it = nvrtc._compile

    def slow(unit: nvrtc._Unit, cache: DiskCache | None) -> CompiledKernel:
        compiled.append(unit.source.name)
        begun.set()
        assert let_go.wait(60)
        return compile_it(unit, cache)

    monkeypatch.setattr(nvrtc, "_compile", slow)
    first = nvrtc.start([kernel(SCALE, "one"), kernel(SCALE, "two")], "sm_80", jobs=1)
    second = nvrtc.start([kernel(SCALE, "two"), kernel(SCALE, "three")], "sm_80", jobs=1)
    assert begun.wait(60)
    for future, (_, unit) in first._futures.items():  # the first gives up, as where one of its kernels fails
        assert future.cancel() == (unit.source.name == "two")
    let_go.set()
    assert [each.name for each in second.kernels()] == ["two", "three"]
    assert sorted(compiled) == ["one", "three", "two"]
    assert not nvrtc._UNDER_WAY


def test_nothing_to_compile() -> None:
    assert compile_kernels([], "sm_90a") == []


@pytest.mark.parametrize("jobs", [1, 3])
def test_one_failure_among_several(jobs: int) -> None:
    sources = [kernel(SCALE, f"fine{index}") for index in range(3)]
    sources.insert(1, kernel('extern "C" __global__ void NAME() { nonsense; }', "broken"))
    with pytest.raises(CompileError, match="'broken'"):
        compile_kernels(sources, "sm_80", jobs=jobs)


# --- the cache


def test_cached_flag_and_times(tmp_path: Path) -> None:
    first = compile_one(kernel(SCALE), cache=DiskCache(tmp_path))
    cache = DiskCache(tmp_path)
    seen = []
    second = compile_one(kernel(SCALE), cache=cache, progress=lambda source, done: seen.append((source, done)))
    assert (first.cached, second.cached) == (False, True)
    assert second.compile_ms < first.compile_ms / 4
    assert seen == [(kernel(SCALE), second)]
    for name in ("name", "arch", "cubin", "registers", "spill_bytes", "shared_bytes", "stack_bytes", "log", "warnings"):
        assert getattr(first, name) == getattr(second, name)


def test_mixed_hits_and_misses_keep_their_order(tmp_path: Path) -> None:
    sources = [kernel(SCALE, f"scale{index}", factor=index) for index in range(4)]
    compile_kernels(sources[1:3], "sm_80", cache=DiskCache(tmp_path))
    compiled = compile_kernels(sources, "sm_80", cache=DiskCache(tmp_path))
    assert [(each.name, each.cached) for each in compiled] == [
        ("scale0", False),
        ("scale1", True),
        ("scale2", True),
        ("scale3", False),
    ]


def test_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    first = compile_one(kernel(SCALE), cache=DiskCache(tmp_path))
    (path,) = tmp_path.glob("*.entry")
    raw = path.read_bytes()
    for damaged in (raw[: len(raw) // 2], raw[:-1] + bytes([raw[-1] ^ 1]), b""):
        path.write_bytes(damaged)
        again = compile_one(kernel(SCALE), cache=DiskCache(tmp_path))
        assert not again.cached
        assert again.cubin == first.cubin
        assert path.read_bytes() != damaged
    assert compile_one(kernel(SCALE), cache=DiskCache(tmp_path)).cached


def test_what_the_key_depends_on(tmp_path: Path, headers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (headers / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    (headers / "inner.cuh").write_text("#pragma once\n#define FROM_INNER 1\n")
    (headers / "unused.cuh").write_text("#error never included\n")
    source = kernel('#include "outer.cuh"\n#if FROM_INNER\n' + SCALE + "#endif\n")
    folder = tmp_path / "cache"

    def cached(source: KernelSource = source, arch: str = "sm_80", **rest: Any) -> bool:
        return compile_one(source, arch, cache=DiskCache(folder), **rest).cached

    assert not cached()
    assert cached()
    (headers / "unused.cuh").write_text("#error changed\n")
    assert cached(), "a header that is not included does not matter"
    (headers / "inner.cuh").write_text("#pragma once\n#define FROM_INNER 2\n")
    assert not cached(), "one that is included by another does"
    assert cached()
    assert not cached(arch="sm_86")
    assert not cached(options=["-DMORE"])
    assert not cached(options=["-DMORE", "-DAND=1"])
    assert cached(options=["-DMORE"])
    assert not cached(kernel(source.code, factor=3.0).__class__("scale", source.code + "// x", (1, 1, 1), (256, 1, 1)))
    assert cached(KernelSource("scale", source.code, (9, 9, 9), (64, 1, 1), 1024)), "how it is launched does not matter"
    monkeypatch.setattr(nvrtc, "CACHE_FORMAT", "next")
    assert not cached()
    monkeypatch.setattr(nvrtc, "_build", lambda: ("99.9", "1"))
    assert not cached()


def test_without_a_cache_nothing_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAPH_CACHE_DIR", str(tmp_path / "cache"))
    assert not compile_one(kernel(SCALE)).cached
    assert not compile_one(kernel(SCALE)).cached
    assert not (tmp_path / "cache").exists()


# --- headers


def test_headers_of_the_device_library_are_found() -> None:
    code = '#include "types.cuh"\nextern "C" __global__ void NAME(bfloat16* y) { y[0].bits = sizeof(uint16); }'
    assert compile_one(kernel(code)).registers > 0


def test_unknown_header(headers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (headers / "known.cuh").write_text("")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "stray.cuh").write_text("")
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(elsewhere)
    for name in ("stray.cuh", "../stray.cuh"):
        with pytest.raises(CompileError, match=r"could not open source file(.|\n)*can be included: known\.cuh"):
            compile_one(kernel(f'#include "{name}"\n' + SCALE))


@pytest.mark.parametrize("line", ['#include "{}"', "# include <{}>", '#define HEADER "{}"\n#include HEADER'])
def test_headers_past_the_library_are_refused(tmp_path: Path, line: str) -> None:
    """NVRTC opens absolute paths; what it finds there is not part of the cache key."""
    (tmp_path / "stray.cuh").write_text("")
    with pytest.raises(CompileError, match=r"include .*is refused"):
        compile_one(kernel(line.format(tmp_path / "stray.cuh") + "\n" + SCALE))


def test_header_in_a_branch_not_taken(headers: Path) -> None:
    code = "#ifdef FUSEGRAPH_CPU\n#include <cmath>\n#endif\n" + SCALE
    assert compile_one(kernel(code)).registers > 0


# --- failures


def test_compile_error_text(tmp_path: Path) -> None:
    source = kernel(
        '#include "types.cuh"\nextern "C" __global__ void NAME(float* y) {\n  int idle;\n  y[0] = undefined_name;\n}\n',
        "broken",
    )
    with pytest.raises(CompileError) as caught:
        compile_one(source, cache=DiskCache(tmp_path / "cache"))
    text = str(caught.value)
    assert text.startswith(f"kernel 'broken' does not compile for sm_90a with NVRTC {nvrtc_version()[0]}.")
    assert 'broken.cu(4): error: identifier "undefined_name" is undefined' in text
    assert ">    4 |   y[0] = undefined_name;" in text
    assert "never referenced" not in text, "warnings do not hide the error"
    folder = Path(re.search(r"kept in (.*)$", text)[1])  # type: ignore[index]
    assert (folder / "broken.cu").read_text() == source.code
    assert "struct bfloat16" in (folder / "types.cuh").read_text()
    assert not (tmp_path / "cache").exists(), "a failure is not cached"


def test_ptxas_error_shows_the_ptx() -> None:
    with pytest.raises(CompileError, match=r">\s+\d+ \| \tbogus\.f32 %f1;") as caught:
        compile_one(kernel('extern "C" __global__ void NAME() { asm volatile("bogus.f32 %f1;"); }'))
    folder = Path(re.search(r"kept in (.*)$", str(caught.value))[1])  # type: ignore[index]
    assert "bogus.f32" in (folder / "scale.ptx").read_text()


def test_long_logs_are_trimmed() -> None:
    body = "".join(f"  missing{index} = {index};\n" for index in range(90))
    with pytest.raises(CompileError) as caught:
        compile_one(kernel(f'extern "C" __global__ void NAME() {{\n{body}}}'))
    assert len(str(caught.value).splitlines()) < 60
    assert re.search(r"\.\.\. \d+ more lines", str(caught.value))


def test_source_that_cannot_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(CompileError, match=r"undefined(.|\n)*could not be kept"):
        compile_one(kernel('extern "C" __global__ void NAME() { nothing; }'))


def test_source_without_the_kernel() -> None:
    with pytest.raises(CompileError, match=r"'absent' defines no extern \"C\""):
        compile_one(KernelSource("absent", kernel(SCALE).code, (1, 1, 1), (1, 1, 1)))


@pytest.mark.parametrize("name", ["", "a b", "1st", "x;y", "../x", "ünïcode", "x\n"])
def test_names_are_identifiers(name: str) -> None:
    with pytest.raises(CompileError, match="C identifier"):
        compile_one(KernelSource(name, "", (1, 1, 1), (1, 1, 1)))


def test_source_with_a_nul() -> None:
    with pytest.raises(CompileError, match="NUL"):
        compile_one(kernel(SCALE + "\0 nonsense"))


@pytest.mark.parametrize("arch", ["sm_50", "sm_80a", "90a", "compute_90", "", "sm_90a -I/"])
def test_unknown_arch(arch: str) -> None:
    with pytest.raises(CompileError, match=r"does not compile for .*sm_80, .*sm_90a"):
        compile_one(kernel(SCALE), arch)


REFUSED = """-I/usr/include -I --include-path=/x -include=x.h --pre-include=x -arch=sm_80 --gpu-architecture=sm_80 --pch
-rdc=true --dlink-time-opt --time=x.csv --fdevice-time-trace=x --options-file=x @x -DX\0-I/"""


@pytest.mark.parametrize("option", REFUSED.split())
def test_refused_options(option: str) -> None:
    with pytest.raises(CompileError, match="is refused"):
        compile_one(kernel(SCALE), options=[option])


def test_unknown_option() -> None:
    with pytest.raises(CompileError, match=r"unrecognized option"):
        compile_one(kernel(SCALE), options=["--no-such-thing"])


# --- no NVRTC


def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    for call in (nvrtc_version, supported_archs, lambda: compile_one(kernel(SCALE))):
        with pytest.raises(ToolchainError, match=r"cuda\.bindings does not import.*nvidia-cuda-nvrtc.*cuda-python"):
            call()


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuda.bindings looks for the library at its first call, and raises a RuntimeError of several lines."""
    from cuda.bindings import nvrtc as bindings

    def fail() -> None:
        raise RuntimeError('Failure finding "libnvrtc.so.13"\n  listdir("/lib"):\n    libc.so')

    monkeypatch.setattr(bindings, "nvrtcGetSupportedArchs", fail)
    with pytest.raises(ToolchainError, match=r'libnvrtc\.so\.13"\); install .*nvidia-cuda-nvrtc') as caught:
        compile_one(kernel(SCALE))
    assert "listdir" not in str(caught.value)


def test_import_is_lazy() -> None:
    code = "import sys, fusegraph, fusegraph.runtime.nvrtc; sys.exit('cuda.bindings' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
