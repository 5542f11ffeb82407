"""Dtype conversions: the reference against independent rounding, the device header against the reference."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
from fractions import Fraction
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from fusegraph import dtypes as dt
from fusegraph.ops.convert import convert, from_reference, round_to, to_reference

HEADERS = Path(__file__).parents[1] / "codegen" / "device"
NARROW = (dt.float16, dt.bfloat16, dt.float8_e4m3, dt.float8_e5m2, dt.float8_e4m3fnuz, dt.float8_e5m2fnuz)
FLOATS = (dt.float64, dt.float32, *NARROW)


def all_values(dtype: dt.DType) -> np.ndarray:
    """Returns every bit pattern of a type of 16 bits or fewer."""
    count = 1 << (8 * dtype.itemsize)
    return np.arange(count, dtype=f"u{dtype.itemsize}").view(dtype.numpy)


def finite_values(dtype: dt.DType) -> np.ndarray:
    values = to_reference(all_values(dtype), dtype)
    return np.unique(values[np.isfinite(values)])


def sample(dtype: dt.DType) -> np.ndarray:
    """Returns values that exercise a conversion: all for types of up to 16 bits, else ties, limits, specials and random
    bits.
    """
    rng = np.random.default_rng(dtype.itemsize)
    if dtype.is_bool:
        return np.array([False, True])
    if dtype.itemsize <= 2:
        return all_values(dtype)
    near = np.concatenate([finite_values(d) for d in NARROW])
    limits = np.array([2.0**k for k in (7, 8, 24, 25, 31, 32, 53, 62, 63, 64)] + [65519.99, 65520, 464, 465, 61440])
    if dtype.is_int:
        info = np.iinfo(dtype.numpy)
        centres = np.concatenate([near[np.abs(near) < info.max], limits, -limits])
        around = [n for x in np.unique(np.trunc(centres)) for n in range(int(x) - 2, int(x) + 3)]
        around = np.array([n for n in around if info.min <= n <= info.max], dtype.numpy)
        random_ = rng.integers(info.min, info.max, 20000, dtype=dtype.numpy)
        shifted = random_ >> rng.integers(0, 8 * dtype.itemsize, random_.size, dtype=dtype.numpy)
        return np.concatenate([around, shifted, np.array([info.min, info.max], dtype.numpy)])
    with np.errstate(all="ignore"):
        ties = np.unique(near)
        ties = (ties[1:] + ties[:-1]) / 2
        base = np.concatenate([near, ties, limits, -limits]).astype(dtype.numpy)
        up, down = np.nextafter(base, dtype.numpy.type(np.inf)), np.nextafter(base, dtype.numpy.type(-np.inf))
        bits = rng.integers(0, 2**63, 20000, dtype=np.uint64) * 2 + 1
        random_ = bits.astype(f"u{dtype.itemsize}").view(dtype.numpy)
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, dtype.max, dtype.min], dtype=dtype.numpy)
    return np.concatenate([base, up, down, random_, special])


def nearest_even(x: float, grid: np.ndarray) -> float:
    """Returns the nearest of the sorted numbers; ties go to the one at an even position (0 is at an even position of
    `grid`).
    """
    upper = int(np.searchsorted(grid, x))
    if upper == 0 or upper == len(grid):
        return float(grid[min(upper, len(grid) - 1)])
    below, above = Fraction(float(x)) - Fraction(grid[upper - 1]), Fraction(grid[upper]) - Fraction(float(x))
    if below != above:
        return float(grid[upper - 1 if below < above else upper])
    return float(grid[upper if upper % 2 == 0 else upper - 1])


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_round_to_picks_the_nearest_value(dtype: dt.DType) -> None:
    positive = finite_values(dtype)
    positive = positive[positive >= 0]
    if dtype.itemsize > 1:  # what overflows rounds to the next power of two in size, which stands for infinity
        positive = np.append(positive, 2 * positive[-1] - positive[-2])
    rng = np.random.default_rng(0)
    ties = (positive[1:] + positive[:-1]) / 2
    chosen = rng.choice(len(ties), min(600, len(ties)), replace=False)
    values = np.concatenate([
        ties[chosen], np.nextafter(ties[chosen], 0), np.nextafter(ties[chosen], np.inf),
        np.exp2(rng.uniform(-30, 20, 500)), [ties[-1], np.nextafter(ties[-1], 0), ties[0], ties[0] / 2, 0.0],
    ])  # fmt: skip
    expected = np.array([nearest_even(x, positive) for x in values])
    expected = np.where(expected > dtype.max, np.inf, expected)
    np.testing.assert_array_equal(round_to(values, dtype), expected)
    np.testing.assert_array_equal(round_to(-values, dtype), -expected)
    assert np.signbit(round_to(np.array([-0.0, -1e-30]), dtype)).all() == dtype.has_negative_zero


def test_a_cast_through_float32_would_round_twice() -> None:
    x = np.array(1 + 2.0**-8 + 2.0**-40)
    assert round_to(x, dt.bfloat16) == 1 + 2.0**-7
    assert x.astype(np.float32).astype(ml_dtypes.bfloat16) == 1


@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_rounding_keeps_what_the_dtype_holds(dtype: dt.DType) -> None:
    values = to_reference(all_values(dtype), dtype)
    np.testing.assert_array_equal(round_to(values, dtype), values)
    np.testing.assert_array_equal(from_reference(values, dtype).astype(np.float64), values)


#: dtype -> what 1e300 and infinity become when a result is stored, when a cast saturates and when it does not.
OVERFLOW: dict[dt.DType, tuple[tuple[float, float], ...]] = {
    dt.float8_e4m3: ((448.0, 448.0), (448.0, 448.0), (np.nan, np.nan)),
    dt.float8_e5m2: ((57344.0, np.inf), (57344.0, 57344.0), (np.inf, np.inf)),
    dt.float8_e4m3fnuz: ((240.0, 240.0), (240.0, 240.0), (np.nan, np.nan)),
    dt.float8_e5m2fnuz: ((57344.0, 57344.0), (57344.0, 57344.0), (np.nan, np.nan)),
    dt.float16: 3 * ((np.inf, np.inf),),
    dt.bfloat16: 3 * ((np.inf, np.inf),),
    dt.float32: 3 * ((np.inf, np.inf),),
}


@pytest.mark.parametrize("dtype", OVERFLOW, ids=str)
def test_overflow(dtype: dt.DType) -> None:
    values = np.array([1e300, np.inf, -1e300, -np.inf, np.nan])
    for saturate, (large, infinite) in zip((None, True, False), OVERFLOW[dtype], strict=True):
        expected = [large, infinite, -large, -infinite, np.nan]
        np.testing.assert_array_equal(convert(values, dt.float64, dtype, saturate=saturate), expected)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (dt.int8, [1, -1, 127, -128, 127, -128, 0, 127]),
        (dt.uint8, [1, 0, 255, 0, 255, 0, 0, 128]),
        (dt.int16, [1, -1, 2**15 - 1, -(2**15), 2**15 - 1, -(2**15), 0, 128]),
        (dt.uint16, [1, 0, 2**16 - 1, 0, 2**16 - 1, 0, 0, 128]),
        (dt.uint32, [1, 0, 2**32 - 1, 0, 2**32 - 1, 0, 0, 128]),
        (dt.uint64, [1, 0, 2**63, 0, 2**64 - 1, 0, 0, 128]),
        (dt.int32, [1, -1, 2**31 - 1, -(2**31), 2**31 - 1, -(2**31), 0, 128]),
        (dt.int64, [1, -1, 2**63 - 1, -(2**63), 2**63 - 1, -(2**63), 0, 128]),
        (dt.bool_, [True] * 8),
    ],
    ids=str,
)
def test_float_to_integer_truncates_and_saturates(dtype: dt.DType, expected: list[int]) -> None:
    values = np.array([1.9, -1.9, 2.0**63, -(2.0**64), np.inf, -np.inf, np.nan, 128.5])
    result = convert(values, dt.float64, dtype)
    assert result.dtype == dtype.numpy
    np.testing.assert_array_equal(result, np.array(expected, dtype=dtype.numpy))


def test_integers_wrap_and_round_once() -> None:
    np.testing.assert_array_equal(convert(np.array([300, -1, 128]), dt.int64, dt.int8), np.array([44, -1, -128]))
    np.testing.assert_array_equal(convert(np.array([-1, 256], np.int32), dt.int32, dt.uint8), np.array([255, 0]))
    tie = 2**62 + 2**38  # halfway between two float32 numbers; float64 rounds tie + 1 to it
    given = np.array([tie, tie + 1, -tie - 1])
    np.testing.assert_array_equal(
        convert(given, dt.int64, dt.float32), [2.0**62, 2.0**62 + 2.0**39, -(2.0**62) - 2.0**39]
    )
    assert convert(np.array([True]), dt.bool_, dt.float16).dtype == np.float64


#: What the device header has in front of a cast, by `convert`'s argument.
LIMITS = {None: "{}", True: "saturating<{to}>({})", False: "overflowing<{to}>({})"}


@pytest.fixture(scope="module")
def device_convert(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The conversions of types.cuh compiled for the host: ``<source>_to_<target>_<saturate>(from, to, count)``."""
    folder = tmp_path_factory.mktemp("convert")
    lines = ['#include "types.cuh"']
    for a, b in itertools.product(dt.ALL, dt.ALL):
        for saturate, limit in LIMITS.items():
            if saturate is None or b.saturates:
                value = "x[i]" if saturate is None else limit.format("widen(x[i])", to=b.ctype)
                lines.append(
                    f'extern "C" void {a}_to_{b}_{saturate}(const {a.ctype}* x, {b.ctype}* y, int64 n) '
                    f"{{ for (int64 i = 0; i < n; i++) y[i] = convert<{b.ctype}>({value}); }}"
                )
    source, library = folder / "convert.cpp", folder / "convert.so"
    source.write_text("\n".join(lines))
    subprocess.run(
        ["g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-DFUSEGRAPH_CPU",
         "-D__device__=", "-D__forceinline__=inline", f"-I{HEADERS}", str(source), "-o", str(library)],
        check=True,
    )  # fmt: skip
    return ctypes.CDLL(str(library))


def same(result: np.ndarray, expected: np.ndarray, target: dt.DType) -> np.ndarray:
    """Tells where stored values equal those of a reference array, the sign of zero included."""
    if not target.is_float:
        return np.asarray(result == expected)
    seen = to_reference(result, target)
    return np.asarray(
        (seen == expected) & (np.signbit(seen) == np.signbit(expected)) | np.isnan(seen) & np.isnan(expected)
    )


@pytest.mark.slow
@pytest.mark.parametrize("source", dt.ALL, ids=str)
def test_device_conversions_equal_the_references(device_convert: ctypes.CDLL, source: dt.DType) -> None:
    values = sample(source)
    for target, saturate in itertools.product(dt.ALL, LIMITS):
        if saturate is not None and not target.saturates:
            continue
        result = np.empty(len(values), dtype=target.numpy)
        function = getattr(device_convert, f"{source}_to_{target}_{saturate}")
        function(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(result.ctypes.data), ctypes.c_int64(len(values)))
        expected = convert(to_reference(values, source), source, target, saturate=saturate)
        wrong = np.flatnonzero(~same(result, expected, target))
        assert not len(wrong), (
            f"{target} {saturate}: {values[wrong[:5]]} gives {result[wrong[:5]]}, not {expected[wrong[:5]]}"
        )
