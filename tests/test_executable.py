"""Executables: how they are called, what they refuse, and missing or damaged surroundings."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import executables

import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.errors import ArgumentError, CompileError, DeviceError, FusegraphError, ToolchainError
from fusegraph.plan import Plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.cache import DiskCache

Array = np.ndarray[Any, Any]
F32 = np.float32

needs_no_driver = pytest.mark.skipif(driver.available(), reason="there is a GPU")


@pytest.fixture(scope="module")
def two() -> CpuExecutable:
    """Two inputs, two outputs: total = a + b, scaled = 2 a."""
    g = fg.Graph("two")
    a, b = g.tensor("a", (4, 6)), g.tensor("b", (6,))
    g.output(a + b, name="total")
    g.output(a * 2, name="scaled")
    return executables([g])[0]


@pytest.fixture(scope="module")
def one() -> CpuExecutable:
    g = fg.Graph("one")
    g.output(-g.tensor("x", (4, 6)), name="y")
    return executables([g])[0]


@pytest.fixture
def ab() -> tuple[Array, Array]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((4, 6)).astype(F32), rng.standard_normal(6).astype(F32)


# ---- calls


def test_inputs_by_position_and_by_name(two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    a, b = ab
    for total, scaled in (two(a, b), two(a=a, b=b), two(b=b, a=a), two(a, b=b)):
        np.testing.assert_array_equal(total, a + b)
        np.testing.assert_array_equal(scaled, a * 2)


def test_one_output_is_an_array_several_are_a_tuple(one: CpuExecutable, two: CpuExecutable, ab: Any) -> None:
    assert isinstance(one(ab[0]), np.ndarray)
    results = two(*ab)
    assert isinstance(results, tuple)
    assert [r.dtype for r in results] == [F32, F32]


def test_out_is_written_and_returned(one: CpuExecutable, two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    a, b = ab
    y = np.zeros((4, 6), F32)
    assert one(a, out=y) is y
    np.testing.assert_array_equal(y, -a)
    total, scaled = np.zeros((4, 6), F32), np.zeros((4, 6), F32)
    for out in ((total, scaled), [total, scaled], {"scaled": scaled, "total": total}):
        total[...] = scaled[...] = 0
        results = two(a, b, out=out)
        assert results[0] is total
        assert results[1] is scaled
        np.testing.assert_array_equal(total, a + b)
        np.testing.assert_array_equal(scaled, a * 2)


def test_names_that_are_no_python_arguments_can_be_given(ab: tuple[Array, Array]) -> None:
    g = fg.Graph("names")
    names = ("out", "stream", "self", "x [0]")
    tensors = [g.tensor(n, (6,)) for n in names]
    g.output(tensors[0] - tensors[1] * tensors[2] + tensors[3], name="y")
    (executable,) = executables([g])
    b = ab[1]
    np.testing.assert_array_equal(executable(b, b, b, **{"x [0]": b}), b - b * b + b)
    np.testing.assert_array_equal(executable(b, b, self=b, **{"x [0]": b}), b - b * b + b)
    assert check_executable(executable).ok


def test_no_inputs() -> None:
    g = fg.Graph("constant")
    g.output(g.constant(np.arange(3.0)) * 2, name="y")
    (executable,) = executables([g])
    np.testing.assert_array_equal(executable(), [0, 2, 4])


def test_a_constant_is_read_from_memory() -> None:
    table = np.random.default_rng(1).standard_normal((50, 40)).astype(F32)
    g = fg.Graph("table")
    x = g.tensor("x", (50, 40))
    g.output(x * g.constant(table), name="y")
    table_before = table.copy()
    (executable,) = executables([g])
    table[...] = 0
    ones = np.ones((50, 40), F32)
    for _ in range(2):
        np.testing.assert_array_equal(executable(ones), table_before)


def test_layouts_of_results() -> None:
    g = fg.Graph("layouts")
    x = g.tensor("x", (2, 3, 4, 5), layout="NHWC")
    g.output(-x, name="like the input")
    g.output(abs(x), name="nchw", layout="NCHW")
    g.output(x * 2, name="padded", strides=(96, 32, 8, 1))
    results = executables([g])[0](random_inputs(g)["x"])
    assert [tuple(s // 4 for s in r.strides) for r in results] == [t.strides for t in g.outputs]


def test_dimensions_of_one_may_have_any_stride(one: CpuExecutable) -> None:
    g = fg.Graph("ones")
    g.output(-g.tensor("x", (1, 6, 1)), name="y")
    (executable,) = executables([g])
    with pytest.raises(ArgumentError, match="strides"):
        executable(np.zeros((1, 12, 1), F32)[:, ::2])
    y = np.arange(6, dtype=F32).reshape(1, 6, 1)
    odd = np.lib.stride_tricks.as_strided(y, (1, 6, 1), (4000, 4, 12))
    np.testing.assert_array_equal(executable(odd), -y)


def test_every_dtype_comes_back() -> None:
    graphs = []
    for dtype in fg.dtypes.ALL:
        g = fg.Graph("identity", io_dtype=dtype)
        g.output(g.tensor("x", (17,)), name="y")
        graphs.append(g)
    for executable in executables(graphs):
        x = random_inputs(executable.graph)["x"]
        y = executable(x)
        assert y.dtype == x.dtype
        assert y.tobytes() == x.tobytes()


def test_the_same_bits_twice(two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    assert [r.tobytes() for r in two(*ab)] == [r.tobytes() for r in two(*ab)]


class Exported:
    """An array known by its DLPack methods only."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def __dlpack__(self, **arguments: Any) -> Any:
        return self.array.__dlpack__(**arguments)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()  # type: ignore[no-any-return]


def test_dlpack_inputs(two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    a, b = ab
    total, _ = two(Exported(a), Exported(b))
    np.testing.assert_array_equal(np.asarray(total), a + b)


def test_torch_inputs(two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(x) for x in ab)
    total, _ = two(a, b)
    assert isinstance(total, torch.Tensor)
    torch.testing.assert_close(total, a + b)
    out = torch.empty_like(a), torch.empty_like(a)
    assert two(a, b, out=out)[1] is out[1]
    torch.testing.assert_close(out[1], a * 2)


def test_calls_from_several_threads(two: CpuExecutable) -> None:
    failures: list[str] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(30):
            a, b = rng.standard_normal((4, 6)).astype(F32), rng.standard_normal(6).astype(F32)
            total, scaled = two(a, b)
            if not (np.array_equal(total, a + b) and np.array_equal(scaled, a * 2)):
                failures.append(f"thread {seed}")

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not failures


def test_building_a_variant_from_several_threads() -> None:
    """The first calls with arrays that are not aligned arrive together; the kernels are built once."""
    g = fg.Graph("variant")
    g.output(-g.tensor("x", (1024,)), name="y")
    (executable,) = executables([g])
    builds: list[Plan] = []
    build = executable._build

    def counted(plan: Plan) -> Any:
        builds.append(plan)
        return build(plan)

    executable._build = counted  # type: ignore[method-assign]
    x = np.zeros(1025, F32)[1:]
    assert x.ctypes.data % 16
    threads = [threading.Thread(target=executable, args=(x,)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert len(builds) == 1


# ---- refusals


def a(**changes: Any) -> Array:
    array = np.zeros(changes.get("shape", (4, 6)), changes.get("dtype", F32))
    return array[changes["index"]] if "index" in changes else array


B = np.zeros(6, F32)
CALLS: list[tuple[type[Exception], str, Callable[[CpuExecutable], Any]]] = [
    (ArgumentError, r"graph 'two' needs 'a', 'b'", lambda e: e()),
    (ArgumentError, r"graph 'two' needs 'b'", lambda e: e(a())),
    (ArgumentError, r"graph 'two' needs 'a'", lambda e: e(b=B)),
    (ArgumentError, r"graph 'two' takes 2 arrays \(a, b\), got 3", lambda e: e(a(), B, B)),
    (ArgumentError, r"graph 'two' has no input 'c'; it has a, b", lambda e: e(a(), c=B)),
    (ArgumentError, r"input 'a' of graph 'two' was given twice", lambda e: e(a(), B, a=a())),
    (ArgumentError, r"input 'a' of graph 'two' has shape \[6, 4\], the graph was built for \[4, 6\]",
     lambda e: e(a(shape=(6, 4)), B)),
    (ArgumentError, r"input 'b' of graph 'two' has shape \[6, 1\].*\[6\]", lambda e: e(a(), a(shape=(6, 1)))),
    (ArgumentError, r"input 'a' of graph 'two' has dtype float64, the graph was built for float32",
     lambda e: e(a(dtype=np.float64), B)),
    (ArgumentError, r"input 'a' of graph 'two' has dtype bfloat16", lambda e: e(a(dtype=ml_dtypes.bfloat16), B)),
    (ArgumentError, r"input 'a' has dtype complex64, which fusegraph does not have", lambda e: e(a(dtype="c8"), B)),
    (ArgumentError, r"input 'a' has dtype object", lambda e: e(a(dtype=object), B)),
    (ArgumentError, r"input 'a' has dtype >f4, of foreign byte order", lambda e: e(a(dtype=">f4"), B)),
    (ArgumentError, r"input 'a' of graph 'two' has strides \[1, 4\] \(elements\), the graph was built for \[6, 1\]",
     lambda e: e(a(shape=(6, 4)).T, B)),
    (ArgumentError, r"input 'b' has a negative stride \(-4 bytes\) on axis 0; pass np.ascontiguousarray",
     lambda e: e(a(), B[::-1])),
    (ArgumentError, r"input 'b' of graph 'two' has strides \[2\]", lambda e: e(a(), np.zeros(12, F32)[::2])),
    (ArgumentError, r"input 'b' is of type builtins.list, which is not an array", lambda e: e(a(), [0.0] * 6)),
    (ArgumentError, r"input 'b' is of type builtins.float", lambda e: e(a(), 1.0)),
    (ArgumentError, r"input 'b' is of type builtins.NoneType", lambda e: e(a(), None)),
    (ArgumentError, r"input 'b' is a masked array", lambda e: e(a(), np.ma.masked_array(B, B > 0))),
    (ArgumentError, r"input 'b' lies at address 0x\w+, not a multiple of its 4-byte elements",
     lambda e: e(a(), np.zeros(28, np.uint8)[1:25].view(F32))),
    (ArgumentError, r"output 'total' of graph 'two' has shape \[6\]", lambda e: e(a(), B, out=(B, a()))),
    (ArgumentError, r"output 'scaled' of graph 'two' has dtype int32", lambda e: e(a(), B, out=(a(), a(dtype="i4")))),
    (ArgumentError, r"output 'scaled' of graph 'two' has strides \[12, 1\]",
     lambda e: e(a(), B, out=(a(), a(shape=(4, 12))[:, :6]))),
    (ArgumentError, r"graph 'two' has 2 outputs .*'total', 'scaled'.*, out= has 1", lambda e: e(a(), B, out=a())),
    (ArgumentError, r"graph 'two' .*one array for each of \['total', 'scaled'\], got \['total'\]",
     lambda e: e(a(), B, out={"total": a()})),
    (ArgumentError, r"graph 'two' .*got \['total', 'scaled', 'other'\]",
     lambda e: e(a(), B, out={"total": a(), "scaled": a(), "other": a()})),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "call"), CALLS, ids=[c[1][:40] for c in CALLS])
def test_refused_calls(
    two: CpuExecutable, error: type[Exception], text: str, call: Callable[[CpuExecutable], Any]
) -> None:
    with pytest.raises(error) as raised:
        call(two)
    assert re.search(text, str(raised.value)), str(raised.value)


def test_read_only_and_overlapping_outputs(one: CpuExecutable, two: CpuExecutable, ab: tuple[Array, Array]) -> None:
    x, b = ab
    frozen = np.zeros((4, 6), F32)
    frozen.setflags(write=False)
    with pytest.raises(ArgumentError, match="output 'y' of graph 'one' is read-only"):
        one(x, out=frozen)
    one(frozen)  # as an input it may be
    memory = np.zeros(40, F32)
    first, last = memory[:24].reshape(4, 6), memory[16:].reshape(4, 6)
    with pytest.raises(ArgumentError, match="output 'y' of graph 'one' overlaps input 'x'"):
        one(first, out=last)
    with pytest.raises(ArgumentError, match="output 'scaled' of graph 'two' overlaps output 'total'"):
        two(x, b, out=(first, last))
    with pytest.raises(ArgumentError, match="output 'scaled' of graph 'two' overlaps output 'total'"):
        two(x, b, out=(first, first))
    side_by_side = np.zeros(48, F32)
    one(side_by_side[:24].reshape(4, 6), out=side_by_side[24:].reshape(4, 6))
    assert (memory == 0).all()


class OnGpu:
    """What looks like a CUDA array through DLPack."""

    def __dlpack__(self, **_: Any) -> Any:
        raise RuntimeError("no such device")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def test_arrays_of_another_device(one: CpuExecutable) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        with pytest.raises(DeviceError, match="input 'x' of graph 'one' is on cuda:0, but engine 'cpu' runs on cpu"):
            one(torch.zeros(4, 6, device="cuda"))


def test_a_device_array_is_refused_by_the_cpu_engine(one: CpuExecutable) -> None:
    """Told from its interface; no driver is asked."""
    array = object.__new__(fg.DeviceArray)
    vars_ = {"pointer": 4096, "shape": (4, 6), "strides": (6, 1), "dtype": fg.float32, "stream": 0}
    from fusegraph.runtime.device import cuda_device

    for key, value in {**vars_, "device": cuda_device(0)}.items():
        object.__setattr__(array, key, value)
    with pytest.raises(DeviceError, match=r"input 'x' of graph 'one' is on cuda:0, but engine 'cpu' runs on cpu.*copy"):
        one(array)


def test_unreadable_arrays_name_the_input(one: CpuExecutable) -> None:
    with pytest.raises(ArgumentError, match=r"input 'x' \(OnGpu\) cannot be read through DLPack: no such device"):
        one(OnGpu())


# ---- engines


def test_engine_names() -> None:
    g = fg.Graph("engines")
    g.output(-g.tensor("x", (3,)), name="y")
    x = np.ones(3, F32)
    for engine in ("cpu", "reference"):
        executable = g.compile(engine)
        assert executable.engine == engine
        np.testing.assert_array_equal(executable(x), -x)
    with pytest.raises(FusegraphError, match=r"unknown engine 'tpu'; there are .*cuda, cpu"):
        g.compile("tpu")
    if not driver.available():
        assert g.compile().engine == "cpu"


def test_reference_engine_checks_its_arrays_too() -> None:
    g = fg.Graph("checked")
    g.output(-g.tensor("x", (3,)), name="y")
    executable = g.compile("reference")
    with pytest.raises(ArgumentError, match=r"input 'x' of graph 'checked' has shape \[4\]"):
        executable(np.ones(4, F32))
    assert executable.workspace_bytes == 0


@needs_no_driver
def test_without_a_driver() -> None:
    g = fg.Graph("no driver")
    x = g.tensor("x", (64, 64))
    g.output(g.exp(x @ x), name="y")
    with pytest.raises(DeviceError, match="driver"):
        g.compile("cuda")
    executable = g.compile("cuda", target="sm_90a")
    assert [k.arch for k in executable.kernels] == ["sm_90a"]  # type: ignore[attr-defined]
    assert executable.kernels[0].cubin.startswith(b"\x7fELF")  # type: ignore[attr-defined]
    with pytest.raises(DeviceError, match=r"input 'x' of graph 'no driver' is on cpu|driver"):
        executable(np.zeros((64, 64), F32))


def test_compiling_while_the_caller_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``wait`` compile returns before NVRTC is done; what NVRTC says comes when kernels are needed."""
    g = fg.Graph("waiting")
    x = g.tensor("x", (8, 8))
    g.output(g.relu(x), name="y")
    go_on, compiled = threading.Event(), nvrtc._compile

    def held(unit: Any, cache: Any) -> Any:
        assert go_on.wait(60)
        return compiled(unit, cache)

    monkeypatch.setattr(nvrtc, "_compile", held)
    executable: Any = fg.compile(g, "cuda", target="sm_90a", cache=DiskCache(tmp_path), wait=False)
    go_on.set()
    assert executable.kernels[0].cubin.startswith(b"\x7fELF")
    executable = fg.compile(g, "cuda", target="sm_90a", cache=DiskCache(tmp_path), wait=False)
    assert executable.kernels[0].cached

    def broken(unit: Any, cache: Any) -> Any:
        raise CompileError("broken")

    monkeypatch.setattr(nvrtc, "_compile", broken)
    executable = fg.compile(g, "cuda", target="sm_80", cache=DiskCache(tmp_path), wait=False)
    with pytest.raises(CompileError, match="broken"):
        executable.kernels  # noqa: B018
    with pytest.raises(CompileError, match="broken"):
        fg.compile(g, "cuda", target="sm_80", cache=DiskCache(tmp_path))


def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("FUSEGRAPH_CXX", "CXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    g = fg.Graph("no compiler")
    g.output(-g.tensor("x", (3,)), name="y")
    with pytest.raises(ToolchainError, match=r"no C\+\+ compiler: looked for g\+\+, clang\+\+"):
        g.compile("cpu", cache=DiskCache(tmp_path / "cache"))
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ToolchainError, match="CXX names 'no-such-compiler'"):
        g.compile("cpu", cache=DiskCache(tmp_path / "cache"))


def test_damaged_cache_entries_are_rebuilt(tmp_path: Path) -> None:
    g = fg.Graph("damaged")
    g.output(g.tensor("x", (3,)) * 1.25, name="y")
    x = np.ones(3, F32)
    g.compile("cpu", cache=DiskCache(tmp_path))
    entries = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert entries
    for harm in (lambda d: d[: len(d) // 2], lambda d: b"", lambda d: d[:100] + b"?" + d[101:]):
        for path in entries:
            path.write_bytes(harm(path.read_bytes()))
        np.testing.assert_array_equal(g.compile("cpu", cache=DiskCache(tmp_path))(x), x * F32(1.25))
        again: Any = g.compile("cpu", cache=DiskCache(tmp_path))
        assert again._built[16].module.cached
