"""The op table's CUDA expressions and the device headers: run on the host against the references, compiled by NVRTC.

Float results are measured in units in the last place (ulps) against the float64 reference of the same operands.  The
functions of math.cuh that use approximate instructions are also swept over the whole range of float32, with those
instructions erring as much as PTX lets them.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import QUICK_ARCHS
from test_convert import sample
from test_ops_pointwise import CASES

from codegen.expr import literal
from fusegraph import dtypes as dt
from fusegraph.ops import TABLE, Op, TensorType
from fusegraph.ops.convert import convert, to_reference
from fusegraph.runtime import driver

HEADERS = Path(__file__).parents[1] / "codegen" / "device"
TYPES = (dt.float32, dt.float64, dt.int8, dt.uint8, dt.int32, dt.int64, dt.bool_)
#: In gradients that cross zero the terms cancel: their error is in units of the loss.
CANCELLING = {"gelu_backward", "gelu_approx_tanh_backward", "swish_backward"}
#: The references' own error in double, where it is large: that of the rounded arguments of erfc and exp.
REFERENCE_ULPS = {"gelu": 3000.0, "gelu_approx_tanh": 3000.0}
#: Operands that are not the op's only source of error: x - lower_clip is as large as lower_clip.
FIXED_SCALE = {"relu": 3.0}


@dataclass(frozen=True)
class Variant:
    """An op with attributes, for one operand dtype; `symbol` is its C function."""

    symbol: str
    op: Op
    attributes: dict[str, Any]
    dtype: dt.DType

    @property
    def types(self) -> tuple[TensorType, ...]:
        return tuple(TensorType((1,), dt.bool_ if k in self.op.masks else self.dtype) for k in self.op.operands)

    @property
    def result(self) -> dt.DType:
        return self.op.infer(self.types, self.attributes).dtype

    def statement(self) -> str:
        """Returns ``y[i] = expression;`` for operands ``operand[i]``."""
        fields = {k: literal(v, self.dtype.compute) for k, v in self.attributes.items() if isinstance(v, (int, float))}
        fields |= {k: f"{k}[i]" for k in self.op.operands}
        fields["compute"] = self.dtype.compute
        return f"y[i] = {self.op.expression(self.dtype.kind, self.attributes).format(**fields)};"

    def parameters(self) -> str:
        inputs = [f"const {t.dtype.ctype}* {k}" for k, t in zip(self.op.operands, self.types)]
        return ", ".join([*inputs, f"{self.result.ctype}* y"])


def variants() -> Iterator[Variant]:
    for name, cases in CASES.items():
        op = TABLE[name]
        for dtype in TYPES:
            if dtype.kind not in op.cuda or (name == "narrow" and dtype == dt.float64):  # that would round
                continue
            for number, (given, _) in enumerate(cases):
                if dtype.is_int and any(isinstance(v, float) and v != int(v) for v in given.values()):
                    continue
                if dtype == dt.uint8 and any(isinstance(v, (int, float)) and v < 0 for v in given.values()):
                    continue
                types = tuple(TensorType((1,), dt.bool_ if k in op.masks else dtype) for k in op.operands)
                assert op.normalize is not None
                attributes = op.normalize(types, {**op.attributes, **given})
                yield Variant(f"{name}_{dtype}_{number}", op, attributes, dtype)


VARIANTS = list(variants())


def build(
    folder: Path, name: str, *flags: str, headers: Path = HEADERS, chosen: Sequence[Variant] = VARIANTS
) -> ctypes.CDLL:
    """Compiles variants for the host as ``symbol(operands..., y, count)``."""
    lines = ['#include "math.cuh"']
    for v in chosen:
        loop = f"for (int64 i = 0; i < n; i++) {v.statement()}"
        lines.append(f'extern "C" void {v.symbol}({v.parameters()}, int64 n) {{ {loop} }}')
    source, library = folder / f"{name}.cpp", folder / f"{name}.so"
    source.write_text("\n".join(lines))
    subprocess.run(
        ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-float-equal",
         "-DFUSEGRAPH_CPU", "-D__device__=", "-D__forceinline__=inline", *flags, f"-I{headers}", str(source), "-o",
         str(library), "-lm"],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("math"), "exact")


@pytest.fixture(scope="module")
def host_approximate(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build(tmp_path_factory.mktemp("math"), "approximate", "-DAPPROXIMATE_MATH")


def operands(variant: Variant) -> list[np.ndarray]:
    """Returns operand values: specials, ordinary and extreme magnitudes of both signs, and all pairs of the interesting
    ones.
    """
    dtype, rng = variant.dtype, np.random.default_rng(1)
    arity = len(variant.op.operands)
    if dtype.is_bool:
        values = np.array([False, True])
    elif dtype.is_int:
        info = np.iinfo(dtype.numpy)
        values = np.array([info.min, info.max, info.min + 1, info.max - 1, 0, 1, 2, 3, 7, 100], dtype=dtype.numpy)
        values = np.concatenate([values, -values, rng.integers(info.min, info.max, 40, dtype=dtype.numpy)])
    else:
        largest = 1e150 if dtype == dt.float64 and variant.op.name == "add_square" else dtype.max  # b * b in NumPy
        special = [0.0, -0.0, 1, -1, 0.5, -0.5, 2.5, -2.5, 3, -3, 6, np.inf, -np.inf, np.nan, largest, -largest]
        if arity == 1 or variant.op.name.endswith("_backward"):
            rest = [np.linspace(-15, 15, 3001), np.linspace(-110, 110, 2003), np.linspace(-0.01, 0.01, 401)]
        else:
            rest = [rng.uniform(-20, 20, 60)]
        size = 2000 if arity == 1 else 40
        rest.append(rng.choice([-1, 1], size) * np.exp2(rng.uniform(-140, 127, size)))
        values = np.concatenate([special, *rest]).astype(dtype.numpy)
    if arity == 1:
        return [values]
    if variant.op.name.endswith("_backward"):
        return [np.resize(np.array([1.0, -1.7, 1e-3], dtype=dtype.numpy), values.size), values]
    pair = [x.ravel().copy() for x in np.meshgrid(values, values)]
    return pair if arity == 2 else [*pair, rng.integers(0, 2, pair[0].size).astype(bool)]


def call(library: ctypes.CDLL, variant: Variant, arrays: list[np.ndarray]) -> np.ndarray:
    result = np.empty(arrays[0].size, dtype=variant.result.numpy)
    pointers = [ctypes.c_void_p(a.ctypes.data) for a in (*arrays, result)]
    getattr(library, variant.symbol)(*pointers, ctypes.c_int64(result.size))
    return result


def reference(variant: Variant, arrays: list[np.ndarray]) -> np.ndarray:
    given = [to_reference(a, t.dtype) for a, t in zip(arrays, variant.types)]
    return variant.op.reference(*given, **variant.attributes)


def ulps(
    variant: Variant, arrays: list[np.ndarray], result: np.ndarray, expected: np.ndarray, approximate: bool
) -> np.ndarray:
    """Returns the error in units in the last place; 0 where both are NaN or the same infinity, infinite where only one
    is.

    If approximate, in units of 2**-23 of the value.  Of subnormal results only that they are tiny is asked: approximate
    functions flush them to zero.
    """
    subnormal = 2.0**7 if approximate else 2.0**-10
    info = np.finfo(variant.dtype.numpy)
    seen = result.astype(np.float64)
    with np.errstate(all="ignore"):
        scale = np.abs(expected)
        if variant.op.name in CANCELLING or (variant.op.name == "add_square" and variant.dtype == dt.float64):
            scale = np.maximum(scale, np.abs(to_reference(arrays[0], variant.dtype)))
        scale = np.maximum(scale, FIXED_SCALE.get(variant.op.name, 0.0))
        scale = np.clip(scale, info.smallest_subnormal, info.max).astype(variant.dtype.numpy)
        unit = scale * float(info.eps) if approximate else np.spacing(scale).astype(float)
        error = np.abs(seen - expected) / unit
        rounded = expected.astype(variant.dtype.numpy).astype(np.float64)
        border = np.isinf(seen) & (np.abs(expected) > float(info.max) * (1 - variant.op.ulps * float(info.eps)))
        tiny = (np.abs(expected) < 2.0**7 * float(info.tiny)) & (np.abs(seen - expected) < float(info.tiny) * subnormal)
    same = tiny | (seen == rounded) | (np.isnan(seen) & np.isnan(expected)) | border
    return np.where(
        same, np.where(np.isfinite(error), np.minimum(error, 0.5), 0), np.where(np.isnan(error), np.inf, error)
    )


def failure(
    variant: Variant,
    arrays: list[np.ndarray],
    result: np.ndarray,
    approximate: bool,
    expected: np.ndarray | None = None,
) -> list[str]:
    """Returns what is wrong with a result: a list of one line, or an empty one.

    Approximate results are within 2**-15 of the value, an eighth of what rounding to float16 may change.
    """
    expected = reference(variant, arrays) if expected is None else expected
    if variant.result.is_float:
        error = ulps(variant, arrays, result, expected, approximate)
        bound = max(variant.op.ulps, 0.5)
        if approximate:
            bound = max(bound, 2.0**8)
        elif variant.dtype == dt.float64:  # the reference has an error of its own
            bound = REFERENCE_ULPS.get(variant.op.name, 2 * variant.op.ulps + 2)
    else:
        error, bound = (result != expected).astype(float), 0.0
    if error.max() <= bound:
        return []
    i = int(np.argmax(error))
    given = ", ".join(f"{k} = {a[i]!r}" for k, a in zip(variant.op.operands, arrays))
    return [f"{variant.symbol}: {given} gives {result[i]!r}, not {expected[i]!r}: {error[i]:.3g} ulps, {bound} allowed"]


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.symbol)
def test_expression_on_the_host(host: ctypes.CDLL, variant: Variant) -> None:
    arrays = operands(variant)
    failures = failure(variant, arrays, call(host, variant, arrays), approximate=False)
    assert not failures, failures[0]


@pytest.mark.slow
@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.dtype == dt.float32], ids=lambda v: v.symbol)
def test_approximate_expression_on_the_host(host_approximate: ctypes.CDLL, variant: Variant) -> None:
    arrays = operands(variant)
    failures = failure(variant, arrays, call(host_approximate, variant, arrays), approximate=True)
    assert not failures, failures[0]


# ---- float functions made of approximate instructions, over all of float32

#: Those of math.cuh and, as long as they are cheap to sweep, those made of them.
SWEPT = [
    v
    for v in VARIANTS
    if v.dtype == dt.float32
    and v.op.name.removesuffix("_backward") in {
        "elu", "erf", "exp", "expm1", "gelu", "gelu_approx_tanh", "mish", "sigmoid", "softplus", "swish", "tanh",
    }
]  # fmt: skip
#: Where the headers use an instruction or function whose error on a GPU differs from the host's.
INEXACT = {
    "__builtin_exp2f(x)": "ex2",
    "exp2(exponent)": "ex2",
    "1 / x)": "rcp",
    "C_LIBRARY(expf)(x)": "expf",
    "__builtin_log2f(x)": "lg2",
}
#: Errors in ulps (lg2: in units of 2**-22), as PTX ISA and the CUDA C++ Programming Guide bound them.
ERRORS = [
    {"ex2": ex2, "rcp": rcp, "expf": ex2, "lg2": lg2}
    for ex2, rcp, lg2 in ((0, 0, 0), (2, 1, 1), (2, -1, -1), (-2, 1, -1), (-2, -1, 1))
]


def inexact_headers(folder: Path) -> Path:
    """Writes device headers whose functions, exact on the host, add errors given by global variables."""
    found = set()
    for path in HEADERS.glob("*.cuh"):
        text = path.read_text()
        if path.name.startswith("math"):
            for place, kind in INEXACT.items():
                whole = f"flushed({place}" if kind == "rcp" else place
                if whole in text:
                    found.add(place)
                    moved = f"moved_{kind}({place[:-1] if kind == 'rcp' else place})"
                    text = text.replace(whole, f"flushed({moved})" if kind == "rcp" else moved)
        if path.name == "types.cuh":
            text += """
            extern "C" { int ex2, rcp, expf_, lg2; }
            static float moved(float y, int ulps) {
              return y > 0x1p-126f && y < 0x1p126f ? bits_float(float_bits(y) + ulps) : y;
            }
            static float moved_ex2(float y) { return moved(y, ex2); }
            static float moved_rcp(float y) { return moved(y, rcp); }
            static float moved_expf(float y) { return moved(y, expf_); }
            static float moved_lg2(float y) {
              const float size = __builtin_fabsf(y);
              return y + lg2 * 0x1p-22f * (size > 1 ? size : 1);
            }"""
        (folder / path.name).write_text(text)
    assert found == set(INEXACT), f"not in the headers: {set(INEXACT) - found}"
    return folder


def sweep(variant: Variant, stride: int) -> list[np.ndarray]:
    """Returns every ``stride``-th float32 except NaN as the last operand, and 1 as the loss of a gradient."""
    values = np.arange(0, 2**32, stride, dtype=np.uint64).astype(np.uint32).view(np.float32)
    values = values[~np.isnan(values)]
    return [np.ones_like(values)] * (len(variant.op.operands) - 1) + [values]


def sweep_failures(library: ctypes.CDLL, approximate: bool, stride: int) -> list[str]:
    failures = []
    for variant in SWEPT:
        if variant.op.name == "exp" and not approximate:
            continue  # its error is that of the C library's
        arrays = sweep(variant, stride)
        with np.errstate(all="ignore"):
            expected = reference(variant, arrays)
        for errors in ERRORS:
            for kind, value in errors.items():
                ctypes.c_int.in_dll(library, "expf_" if kind == "expf" else kind).value = value
            found = failure(variant, arrays, call(library, variant, arrays), approximate, expected)
            failures += [f"{line}; errors {errors}" for line in found]
    return failures


@pytest.mark.parametrize("stride", [300007, pytest.param(20011, marks=pytest.mark.slow)])
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
def test_float_functions_with_inexact_instructions(tmp_path: Path, approximate: bool, stride: int) -> None:
    (tmp_path / "device").mkdir()
    flags = ["-DAPPROXIMATE_MATH"] * approximate + ["-Wno-unused-function"]
    library = build(tmp_path, "inexact", *flags, headers=inexact_headers(tmp_path / "device"), chosen=SWEPT)
    failures = sweep_failures(library, approximate, stride)
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["elu", "erf", "gelu", "swish", "tanh", "expm1", "gelu_approx_tanh", "mish"])
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
def test_zero_keeps_its_sign(host: ctypes.CDLL, host_approximate: ctypes.CDLL, name: str, approximate: bool) -> None:
    variant = next(v for v in SWEPT if v.op.name == name)
    result = call(host_approximate if approximate else host, variant, [np.array([-0.0, 0.0], np.float32)])
    assert list(np.signbit(result)) == [True, False]
    assert not result.any()


# ---- NVRTC


def nvrtc_compile(source: str, *options: str) -> tuple[str, bytes]:
    """Compiles with NVRTC; returns PTX and machine code (empty for a virtual architecture).

    The headers are passed by name, in memory.
    """
    from cuda.bindings import nvrtc

    headers = {path.name: path.read_bytes() for path in HEADERS.glob("*.cuh")}
    error, program = nvrtc.nvrtcCreateProgram(
        source.encode(), b"k.cu", len(headers), list(headers.values()), [name.encode() for name in headers]
    )
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS
    flags = [option.encode() for option in ("-std=c++17", "-default-device", *options)]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(flags), flags)

    def fetch(name: str) -> bytes:
        _, size = getattr(nvrtc, f"nvrtcGet{name}Size")(program)
        data = bytearray(size)  # written in place: Python shares short bytes objects
        getattr(nvrtc, f"nvrtcGet{name}")(program, data)
        return bytes(data)

    log = fetch("ProgramLog").decode()
    assert error == nvrtc.nvrtcResult.NVRTC_SUCCESS, log
    assert "warning" not in log, log
    ptx, cubin = fetch("PTX").decode(), fetch("CUBIN")
    nvrtc.nvrtcDestroyProgram(program)
    return ptx, cubin


def kernel(variant: Variant) -> str:
    head = f'extern "C" __global__ void {variant.symbol}({variant.parameters()}, unsigned n)'
    return f"{head} {{ const unsigned i = blockIdx.x * 256u + threadIdx.x; if (i < n) {variant.statement()} }}"


def conversion(a: dt.DType, b: dt.DType) -> str:
    head = f'extern "C" __global__ void {a}_to_{b}(const {a.ctype}* x, {b.ctype}* y, unsigned n)'
    body = f"const unsigned i = blockIdx.x * 256u + threadIdx.x; if (i < n) y[i] = convert<{b.ctype}>(x[i]);"
    return f"{head} {{ {body} }}"


def entry(ptx: str, symbol: str) -> str:
    """Returns the body of a kernel in PTX."""
    match = re.search(rf"\.entry {symbol}\(.*?\n}}", ptx, re.DOTALL)
    assert match is not None, symbol
    return match[0]


def compile_variants(chosen: list[Variant], arch: str, approximate: bool) -> tuple[str, bytes]:
    source = "\n".join(['#include "math.cuh"', *map(kernel, chosen)])
    return nvrtc_compile(source, f"--gpu-architecture={arch}", *["-DAPPROXIMATE_MATH"] * approximate)


def compile_conversions(arch: str) -> tuple[str, bytes]:
    source = "\n".join(['#include "types.cuh"', *(conversion(a, b) for a in dt.ALL for b in dt.ALL)])
    return nvrtc_compile(source, f"--gpu-architecture={arch}")


@pytest.mark.slow
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_nvrtc_compiles_every_expression(arch: str, approximate: bool) -> None:
    chosen = [v for v in VARIANTS if not approximate or v.dtype == dt.float32]
    ptx, _ = compile_variants(chosen, arch.replace("sm", "compute"), approximate)
    for variant in chosen:
        # For huge arguments, CUDA's own sinf, cosf and tanf multiply by pi / 2 in double.
        if variant.dtype == dt.float32 and variant.op.name not in ("sin", "cos", "tan"):
            assert ".f64" not in entry(ptx, variant.symbol), variant.symbol
    for variant in chosen:
        if variant in SWEPT and (approximate or variant.op.name != "expm1"):
            branches = entry(ptx, variant.symbol).count("bra")
            assert branches == 1, f"{variant.symbol} has {branches - 1} branches besides i < n"


@pytest.mark.slow
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120"])
def test_nvrtc_assembles_every_expression(arch: str, approximate: bool) -> None:
    chosen = [v for v in VARIANTS if not approximate or v.dtype == dt.float32]
    _, cubin = compile_variants(chosen, arch, approximate)
    assert cubin.startswith(b"\x7fELF")


@pytest.mark.slow
@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_nvrtc_assembles_every_conversion(arch: str) -> None:
    """To machine code, and with the hardware's 8-bit conversions where there are any."""
    ptx, cubin = compile_conversions(arch)
    assert cubin.startswith(b"\x7fELF")
    assert ("cvt.rn.satfinite.e4m3x2.f32" in ptx) == (arch != "sm_80")
    for name in ("float16_to_bfloat16", "float8_e4m3_to_float32", "bfloat16_to_int8"):
        assert ".f64" not in entry(ptx, name)


# ---- on a GPU


class Module:
    """A loaded cubin: `run` launches one of its kernels on host arrays."""

    def __init__(self, cubin: bytes) -> None:
        self.module = driver.call("cuModuleLoadData", cubin, doing="load the kernels under test")

    def run(self, symbol: str, arrays: list[np.ndarray], dtype: dt.DType) -> np.ndarray:
        function = driver.call("cuModuleGetFunction", self.module, symbol.encode(), doing=f"find {symbol}")
        result = np.empty(arrays[0].size, dtype=dtype.numpy)
        buffers = [driver.allocate(a.nbytes) for a in (*arrays, result)]
        for array, buffer in zip(arrays, buffers):
            driver.copy_to_device(buffer.pointer, array.ctypes.data, array.nbytes)
        values = (*(b.pointer for b in buffers), result.size)
        ctypes_of = (*(ctypes.c_void_p for _ in buffers), ctypes.c_uint)
        grid = (result.size + 255) // 256
        driver.call("cuLaunchKernel", function, grid, 1, 1, 256, 1, 1, 0, 0, (values, ctypes_of), 0, doing=symbol)
        driver.copy_to_host(result.ctypes.data, buffers[-1].pointer, result.nbytes)
        return result


on_gpu = pytest.mark.skipif(not driver.available(), reason="no CUDA driver or no GPU")


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("approximate", [False, True], ids=["exact", "approximate"])
def test_expressions_on_the_gpu(approximate: bool) -> None:
    chosen = [v for v in VARIANTS if not approximate or v.dtype == dt.float32]
    failures = []
    with driver.using(0):
        module = Module(compile_variants(chosen, driver.properties(0).arch, approximate)[1])
        for variant in chosen:
            arrays = operands(variant)
            result = module.run(variant.symbol, arrays, variant.result)
            failures += failure(variant, arrays, result, approximate)
        for variant in SWEPT:
            arrays = sweep(variant, stride=20011)
            failures += failure(variant, arrays, module.run(variant.symbol, arrays, variant.result), approximate)
    assert not failures, "\n".join(failures)


@pytest.mark.gpu
@on_gpu
def test_conversions_on_the_gpu() -> None:
    failures = []
    with driver.using(0):
        module = Module(compile_conversions(driver.properties(0).arch)[1])
        for source in dt.ALL:
            values = sample(source)
            for target in dt.ALL:
                result = to_reference(module.run(f"{source}_to_{target}", [values], target), target)
                expected = convert(to_reference(values, source), source, target)
                wrong = np.flatnonzero((result != expected) & ~((result != result) & (expected != expected)))
                if len(wrong):
                    i = wrong[0]
                    failures.append(f"{source} {values[i]!r} to {target}: {result[i]!r}, not {expected[i]!r}")
    assert not failures, "\n".join(failures)
