"""Weights of 8 and 4 bits: dequantised in the kernel of the product that they belong to, and nowhere else."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import ARCHS, check_all, check_on_gpu, compile_for, executables, quick, quick_dtypes, share, slow

import fusegraph as fg
from codegen.target import target
from fusegraph import dtypes as dt
from fusegraph.lowering.base import Options
from fusegraph.plan import plan

KINDS = tuple(
    dt.BY_NAME[n] for n in ("int8", "uint8", "int4", "uint4", "uint2", "float8_e4m3", "float8_e5m2", "float4_e2m1")
)
EACH = quick_dtypes(KINDS, "int8", "uint4", "float8_e4m3", "float4_e2m1")
#: (rows, columns, terms, terms of a group)
SIZES = ((1, 48, 128, 32), (17, 33, 96, 16), (3, 5, 60, 20))


def quantised(kind: dt.DType, shape: tuple[int, ...]) -> Any:
    rng = np.random.default_rng(1)
    if kind.is_int:
        return rng.integers(int(kind.min), int(kind.max), shape, endpoint=True).astype(kind.numpy)
    return rng.normal(0, 2, shape).astype(np.float32).astype(kind.numpy)


def layer(
    kind: dt.DType | str, sizes: tuple[int, int, int, int], *, across: bool = False, zeros: bool = False, **how: Any
) -> Any:
    """Returns the graph of a product with a weight (columns, terms), or ``across`` (terms, columns), in groups."""
    rows, columns, terms, group = sizes
    g = fg.Graph("layer", how.pop("io", "bfloat16"))
    shape, groups = (terms, columns), (terms // group, 1, columns)
    fine = (terms // group, group, columns)
    if not across:
        shape, groups, fine = shape[::-1], (columns, terms // group, 1), (columns, terms // group, group)
    x, w = g.tensor("x", (rows, terms)), g.tensor("w", shape, kind, **how)
    made = g.cast(w, g.io_dtype).reshape(*fine)
    scale = g.tensor("s", groups, **how)
    if zeros:
        made = made - g.tensor("z", groups, **how)
    made = (made * scale).reshape(*shape)
    g.output(x @ (made if across else made.T), name="y")
    return g


def run(executable: Any, kind: dt.DType) -> tuple[Any, Any]:
    """Returns the result of a layer, and that in float64."""
    rng, g = np.random.default_rng(0), executable.graph
    io = g.io_dtype.numpy
    given = {t.name: rng.normal(size=t.shape).astype(io) for t in g.inputs if t.name != "w"}
    given["w"] = quantised(kind, g.tensors["w"].shape)
    found = np.asarray(executable(*(given[t.name] for t in g.inputs))).astype(np.float64)
    wide = {k: v.astype(np.float64) for k, v in given.items()}
    groups = wide["s"].shape
    across = groups[1] == 1 and g.tensors["w"].shape[0] != groups[0]
    shape = g.tensors["w"].shape
    fine = (groups[0], shape[0] // groups[0], shape[1]) if across else (*groups[:2], shape[1] // groups[1])
    w = ((wide["w"].reshape(fine) - wide.get("z", 0)) * wide["s"]).reshape(shape)
    return found, wide["x"] @ (w if across else w.T)


@pytest.mark.slow
@pytest.mark.parametrize("zeros", [False, True], ids=["scales", "zeros"])
@pytest.mark.parametrize("across", [False, True], ids=["along", "across"])
@pytest.mark.parametrize("kind", EACH)
def test_groups_are_part_of_the_product(kind: dt.DType, across: bool, zeros: bool) -> None:
    cases = [(sizes, parameter) for sizes in SIZES for parameter in (False, True)]
    made = executables([layer(kind, s, across=across, zeros=zeros, parameter=p) for s, p in cases])
    for (sizes, parameter), executable in zip(cases, made):
        found, expected = run(executable, kind)
        split = across and sizes[1] % (8 // min(kind.bits, 8)) != 0  # a byte has elements of two rows
        if not split:
            assert (len(executable.plan.kernels), dict(executable.plan.packed)) == (1, {}), (sizes, parameter)
        np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())


@pytest.mark.parametrize("io", ["float16", "float32"])
def test_other_dtypes_of_the_product(io: str) -> None:
    for kind in (dt.int8, dt.int4):
        executable = layer(kind, SIZES[0], io=io, parameter=True).compile("cpu")
        found, expected = run(executable, kind)
        assert len(executable.plan.kernels) == 1
        np.testing.assert_allclose(found, expected, rtol=2**-9, atol=2**-9 * np.abs(expected).max())


@pytest.mark.parametrize("machine", quick("h200", "sm_80", "sm_120"))
@pytest.mark.parametrize("rows", [1, 16, 300, 4096])
def test_weights_stay_as_they_are_stored_for_all_rows(rows: int, machine: str) -> None:
    for kind in ("int8", "int4", "float4_e2m1"):
        for across in (False, True):
            g = layer(kind, (rows, 1024, 2048, 128), across=across, zeros=True, parameter=True)
            made = plan(g, Options(target=target(machine)))
            inner = [t for k in made.kernels for t in k.group.writes if t.name != "y" and t.dtype == dt.bfloat16]
            assert (inner, made.packing) == ([], None)


def test_long_sums_in_parts_are_whole_groups_or_parts_of_them() -> None:
    for group in (32, 512, 2048):
        g = layer("int4", (2, 64, 8192, group), parameter=True)
        made = plan(g, Options(target=target("h200")))
        assert made.packing is None
        assert not any(t.dtype == dt.bfloat16 and t.name != "y" for k in made.kernels for t in k.group.writes)
    executable = layer("int4", (2, 16, 4096, 512), parameter=True).compile("cpu")
    found, expected = run(executable, dt.int4)
    np.testing.assert_allclose(found, expected, rtol=2**-7, atol=2**-7 * np.abs(expected).max())
    assert dict(executable.plan.packed) == {}


def test_scales_of_columns_and_what_follows() -> None:
    """A weight (columns, terms) with a scale for each column, a bias and an activation: one kernel."""
    g = fg.Graph("columns", "float16")
    x, w = g.tensor("x", (5, 7, 40)), g.tensor("w", (24, 40), "int8", parameter=True)
    s, b = (g.tensor(n, n_shape, parameter=True) for n, n_shape in (("s", (24, 1)), ("b", (24,))))
    g.output(g.relu(x @ (g.cast(w, "float16") * s).T + b), name="y")
    rng = np.random.default_rng(0)
    given = [
        rng.normal(size=(5, 7, 40)).astype(np.float16),
        rng.integers(-128, 128, (24, 40)).astype(np.int8),
        rng.random((24, 1)).astype(np.float16),
        rng.normal(size=24).astype(np.float16),
    ]
    executable = g.compile("cpu")
    assert (len(executable.plan.kernels), dict(executable.plan.packed)) == (1, {})
    a, q, scale, bias = (v.astype(np.float64) for v in given)
    expected = np.maximum(a @ (q * scale).T + bias, 0)
    np.testing.assert_allclose(executable(*given).astype(np.float64), expected, rtol=2e-3, atol=0.5)


def test_what_is_no_number_stays_in_its_group() -> None:
    g = layer("float8_e5m2", (2, 6, 32, 16))
    w = np.ones((6, 32), ml_dtypes.float8_e5m2)
    s = np.ones((6, 2, 1), ml_dtypes.bfloat16)
    w[0, 3], w[1, 20], s[3, 1] = np.inf, np.nan, np.nan
    y = g.compile("cpu")(np.ones((2, 32), ml_dtypes.bfloat16), w, s).astype(np.float64)
    np.testing.assert_array_equal(y, np.tile([np.inf, np.nan, 32, np.nan, 32, 32], (2, 1)))


def test_products_with_several_weights_are_joined_as_codes() -> None:
    g = fg.Graph("several", "bfloat16")
    x = g.tensor("x", (4, 64))
    for name in "qkv":
        w, s = g.tensor(f"w{name}", (64, 64), "int8", parameter=True), g.tensor(f"s{name}", (64, 1), parameter=True)
        g.output((x @ (g.cast(w, "bfloat16") * s).T).reshape(4, 4, 16), name=name)
    made = plan(g, Options(target=target("h200")))
    assert len(made.kernels) == 2  # the product, and what copies its parts to the outputs
    assert [(t.shape, t.dtype.name) for t in made.packed] == [((192, 64), "int8"), ((192, 1), "bfloat16")]
    check_all([g])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["uint4", *quick("float4_e2m1", "int4", "uint2")])
def test_layers_that_are_alike_stay_as_they_are_stored(kind: str) -> None:
    """Common subexpressions make the shifts of all their bytes one tensor, as large as a weight: nothing reads it."""
    g = fg.Graph("layers", "bfloat16")
    x = g.tensor("x", (1, 128))
    for n in range(3):
        made = g.cast(g.tensor(f"w{n}", (128, 128), kind, parameter=True), "bfloat16").reshape(128, 2, 64)
        x = g.relu(x @ (made * g.tensor(f"s{n}", (128, 2, 1), parameter=True)).reshape(128, 128).T)
    g.output(x, name="y")
    for machine in ("h200", "sm_80"):
        made = plan(g, Options(target=target(machine)))
        assert (len(made.kernels), made.packing) == (3, None)
        weights = [max(k.group.reads, key=lambda t: t.nbytes) for k in made.kernels]
        assert [t.nbytes for t in weights] == [128 * 128 * dt.BY_NAME[kind].bits // 8] * 3
    check_all([g])


@pytest.mark.parametrize("io", ["float16", "bfloat16"])
def test_one_zero_point_of_codes(io: str) -> None:
    g = fg.Graph("one", io)
    codes, zero = g.tensor("w", (32, 64), "uint8"), g.tensor("z", (1, 1), "uint8")
    w = (g.cast(codes, io) - g.cast(zero, io)) * g.tensor("s", (1, 1))
    g.output(g.tensor("x", (1, 64)) @ w.T, name="y")
    check_all([g])


def pair(bits: int, rows: int, scaled: str, zero: bool) -> Any:
    """Returns the graph of a gated layer of two weights (128, 256) of so many bits, whose results meet."""
    g = fg.Graph("gated", "bfloat16")
    x, made = g.tensor("x", (rows, 256)), []
    for name in ("gate", "up"):
        codes = g.tensor(f"{name} codes", (128, 256 * bits // 8), "uint8", parameter=True)
        if bits == 4:
            both = [g.bitwise_and(codes, 15), g.shift_right(codes, 4)]
            codes = g.concatenate(*(c.reshape(128, 128, 1) for c in both), axis=2).reshape(128, 256)
        w = g.cast(codes, "bfloat16").reshape(128, 4, 64)
        w = w - (g.cast(g.tensor(f"{name} zero", (128, 4, 1), "uint8", parameter=True), "bfloat16") if zero else 8)
        if scaled != "none":
            w = w * g.tensor(f"{name} scale", (128, 4, 1) if scaled == "groups" else (), parameter=True)
        made.append(x @ w.reshape(128, 256).T)
    g.output(g.swish(made[0]) * made[1], name="y")
    return g


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bits", "scaled"), [(8, "groups"), (4, "none"), *slow((8, "all"), (8, "none"), (4, "groups"), (4, "all"))]
)
def test_two_weights_of_one_layer_are_one_kernel(bits: int, scaled: str) -> None:
    graphs = [pair(bits, rows, scaled, zero) for rows, zero in ((1, False), (5, True), (16, False), (40, True))]
    kernels = [len(plan(g, Options(target=target("h200"))).kernels) for g in graphs]
    assert kernels == [1, 1, 1, 2]  # more rows are multiplied by warpgroups, which decode one weight
    check_all(graphs, arch="sm_90a")


@pytest.mark.gpu
def test_two_weights_of_one_layer_on_a_gpu() -> None:
    check_on_gpu([pair(bits, rows, "groups", zero) for bits in (8, 4) for rows, zero in ((1, False), (16, True))])


def test_weights_that_are_decoded_otherwise_are_two_kernels() -> None:
    g = fg.Graph("gated", "bfloat16")
    x = g.tensor("x", (1, 256))
    a, b = (g.cast(g.tensor(name, (128, 256), "uint8", parameter=True), "bfloat16") for name in "ab")
    g.output(g.swish(x @ (a - 8).T) * (x @ (b - 7).T), name="y")
    assert len(plan(g, Options(target=target("h200"))).kernels) == 2
    check_all([g])


def test_a_weight_that_two_products_take_is_made_once() -> None:
    g = fg.Graph("tied", "bfloat16")
    w = g.cast(g.tensor("w", (32, 64), "int8"), "bfloat16") * g.tensor("s", (32, 1))
    for name in "ab":
        g.output(g.tensor(name, (4, 64)) @ w.T, name=f"y{name}")
    check_all([g])


def test_check_knows_them() -> None:
    check_all([layer(k, SIZES[1], zeros=True) for k in ("int8", "uint4")])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    graphs = [
        layer(kind, (rows, 512, 1024, 128), across=across, zeros=True, parameter=True)
        for kind in ("int8", "int4", "float4_e2m1")
        for rows in (1, 300)
        for across in (False, True)
    ]
    assert [k.name for k in compile_for(arch, share(arch, graphs)) if k.spill_bytes] == []
