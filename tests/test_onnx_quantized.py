"""Quantised products of ONNX models and of onnxruntime's: numbers as their documents say, and what becomes kernels."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import quick, slow

onnx = pytest.importorskip("onnx", reason="onnx is not installed")

from onnx import TensorProto, helper  # noqa: E402
from onnx_models import built, error, model, tensor, value  # noqa: E402

from codegen.target import target  # noqa: E402
from fusegraph.errors import ModelError, UnsupportedModelError  # noqa: E402
from fusegraph.lowering.base import Options  # noqa: E402
from fusegraph.plan import plan  # noqa: E402

MICROSOFT = "com.microsoft"
FLOATS = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
Given = dict[str, Any]


def planned(made: Any) -> tuple[int, list[tuple[int, ...]]]:
    """Returns how many kernels a GPU's plan has, and the shapes of what it packs."""
    found = plan(made.graph, Options(target=target("h200")))
    packed = () if found.packing is None else found.packing.graph.outputs
    return len(found.kernels), [t.shape for t in packed]


def run(made: Any, *arrays: Any) -> Any:
    return np.asarray(made.graph.compile("cpu")(*arrays))


# ---- MatMulNBits


def numbers(packed: Any, bits: int) -> Any:
    """The numbers in the bytes of the last dimension, the lowest bits first, element by element."""
    each = 8 // bits
    found = np.zeros((*packed.shape[:-1], packed.shape[-1] * each), np.int64)
    for place in np.ndindex(found.shape):
        byte = int(packed[(*place[:-1], place[-1] // each)])
        found[place] = byte >> (place[-1] % each * bits) & (2**bits - 1)
    return found


def weight(given: Given, terms: int, block: int, bits: int) -> Any:
    """The weight (N, K) in float64, as the document of MatMulNBits says."""
    b, columns = given["B"], given["B"].shape[0]
    blocks = -(-terms // block)
    q = numbers(b, bits).reshape(columns, -1)[:, :terms].astype(np.float64)
    s = given["scales"].reshape(columns, blocks).astype(np.float64)
    z = given.get("zero_points", np.full((columns, blocks), 2.0 ** (bits - 1)))
    z = numbers(z.reshape(columns, -1), bits)[:, :blocks] if z.dtype == np.uint8 else z.reshape(columns, blocks)
    group = given.get("g_idx", np.arange(terms) // block)[:terms]
    return (q - z[:, group]) * s[:, group]


def n_bits(
    shape: tuple[Any, ...],
    columns: int,
    block: int,
    bits: int = 4,
    zeros: str = "",
    dtype: str = "float32",
    *,
    bias: bool = False,
    groups: Any = None,
    flat: bool = False,
    inputs: tuple[str, ...] = (),
    **attributes: int,
) -> tuple[Any, Given]:
    """Returns a model of one MatMulNBits, and its inputs but A; those of ``inputs`` are no constants."""
    rng, kind, terms = np.random.default_rng(bits), np.dtype(dtype), shape[-1]
    blocks = -(-terms // block)
    given: Given = {
        "B": rng.integers(0, 256, (columns, blocks, block * bits // 8), np.uint8),
        "scales": (rng.random((columns, blocks)) / 16).astype(kind),
    }
    if zeros == "packed":
        given["zero_points"] = rng.integers(0, 256, (columns, -(-blocks * bits // 8)), np.uint8)
    elif zeros:
        given["zero_points"] = (rng.random((columns, blocks)) * 2**bits).astype(zeros)
    if flat:
        given |= {name: x.reshape(-1) for name, x in given.items() if name != "B"}
    if groups is not None:
        given["g_idx"] = np.asarray(groups, np.int32)
    if bias:
        given["bias"] = rng.normal(size=columns).astype(kind)
    names = ["A", *(n if n in given else "" for n in ("B", "scales", "zero_points", "g_idx", "bias"))]
    attributes = {"K": terms, "N": columns, "block_size": block, "bits": bits, **attributes}
    node = helper.make_node("MatMulNBits", names, ["Y"], domain=MICROSOFT, **attributes)
    elements = [TensorProto.INT32 if x.dtype == np.int32 else TensorProto.UINT8 for x in given.values()]
    proto = model(
        [node],
        [value("A", shape, FLOATS[dtype])]
        + [
            value(n, x.shape, e if x.dtype.kind != "f" else FLOATS[dtype])
            for (n, x), e in zip(given.items(), elements)
            if n in inputs
        ],
        [value("Y", None, FLOATS[dtype])],
        [tensor(n, x) for n, x in given.items() if n not in inputs],
        opsets=[helper.make_opsetid(MICROSOFT, 1)],
    )
    return proto, given


def check(proto: Any, given: Given, a: Any, block: int, bits: int = 4) -> None:
    inputs = [given[v.name] for v in proto.graph.input if v.name != "A"]
    found = run(built(proto), a, *inputs)
    w = weight(given, a.shape[-1], block, bits)
    expected = a.astype(np.float64) @ w.T + given.get("bias", np.zeros(1)).astype(np.float64)
    unit = float(np.finfo(a.dtype).eps)
    bound = 2 * unit * (np.abs(a).astype(np.float64) @ np.abs(w).T) + unit * np.abs(expected) + 1e-6
    assert found.dtype == a.dtype
    np.testing.assert_array_less(np.abs(found.astype(np.float64) - expected), bound)


def rows(*shape: int, dtype: str = "float32") -> Any:
    return np.random.default_rng(7).normal(size=shape).astype(dtype)


@pytest.mark.parametrize(
    ("bits", "zeros"),
    [
        *((4, "packed"), (8, "float32"), (2, "packed")),
        *slow((4, ""), (8, ""), (2, ""), (8, "packed"), (4, "float32"), (2, "float32")),
    ],
)
def test_blocks_of_few_bits_are_one_kernel(bits: int, zeros: str) -> None:
    for shape, columns, block, bias in (((3, 96), 20, 16, True), ((2, 3, 128), 12, 64, False)):
        proto, given = n_bits(shape, columns, block, bits, zeros, bias=bias)
        check(proto, given, rows(*shape), block, bits)
        assert planned(built(proto)) == (1, [])


@pytest.mark.parametrize("block", [16, 32, 64, 128, 256])
@pytest.mark.parametrize("rows", quick(1, 400))
def test_all_sizes_of_blocks_are_one_kernel(rows: int, block: int) -> None:
    for zeros in ("packed", "float16"):
        proto, _ = n_bits((rows, 1024), 512, block, 4, zeros, "float16")
        assert planned(built(proto)) == (1, []), zeros


def test_the_last_block_is_padded() -> None:
    """What a weight has behind K changes nothing; rows are padded, in a kernel of their own, the weight is not."""
    for bits, zeros in ((4, "packed"), (8, "")):
        proto, given = n_bits((5, 93), 24, 32, bits, zeros)
        check(proto, given, rows(5, 93), 32, bits)
        assert planned(built(proto)) == (2, [])
    proto, given = n_bits((2, 3), 4, 16)  # fewer terms than a block
    check(proto, given, rows(2, 3), 16)


def test_odd_numbers_of_packed_zero_points() -> None:
    for bits, blocks in ((4, 3), (2, 5)):
        proto, given = n_bits((3, 16 * blocks), 10, 16, bits, "packed")
        check(proto, given, rows(3, 16 * blocks), 16, bits)
        assert planned(built(proto)) == (1, [])


def test_halves_one_row_and_vectors() -> None:
    proto, given = n_bits((17, 64), 33, 32, 4, "packed", "float16", bias=True)
    check(proto, given, rows(17, 64, dtype="float16"), 32)
    proto, given = n_bits((64,), 8, 32)
    check(proto, given, rows(64), 32)
    proto, given = n_bits((0, 64), 8, 32)
    assert run(built(proto), rows(0, 64)).shape == (0, 8)


def test_older_models_write_scales_as_one_line() -> None:
    proto, given = n_bits((3, 64), 8, 16, 4, "packed", flat=True)
    check(proto, given, rows(3, 64), 16)


def test_weights_that_are_inputs() -> None:
    names = ("B", "scales", "zero_points")
    proto, given = n_bits((3, 48), 8, 16, 4, "packed", inputs=names)  # an odd number of zero points
    check(proto, given, rows(3, 48), 16)


def test_groups_that_an_index_names() -> None:
    """In order they are the blocks; else scales are gathered, and the weight is made when they change."""
    order = np.random.default_rng(0).permutation(64) // 16
    for zeros in ("", "packed"):
        proto, given = n_bits((3, 64), 8, 16, 4, zeros, groups=np.arange(64) // 16)
        check(proto, given, rows(3, 64), 16)
        assert planned(built(proto)) == (1, [])
        proto, given = n_bits((3, 64), 8, 16, 4, zeros, groups=order)
        check(proto, given, rows(3, 64), 16)
        assert planned(built(proto))[0] == 1
    proto, given = n_bits((3, 60), 8, 16, groups=order[:60] % 4)
    check(proto, given, rows(3, 60), 16)


@pytest.mark.slow
def test_numbers_of_rows_that_vary() -> None:
    proto, given = n_bits(("rows", 64), 8, 32, 4, "packed")
    executable = built(proto).compile("cpu")
    for count in (1, 5):
        a = rows(count, 64)
        expected = a.astype(np.float64) @ weight(given, 64, 32, 4).T
        np.testing.assert_allclose(executable(a), expected, rtol=1e-5, atol=1e-5)


def test_what_is_refused() -> None:
    def said(shape: tuple[int, ...] = (3, 64), block: int = 16, kind: Any = UnsupportedModelError, **how: Any) -> str:
        return error(n_bits(shape, 8, block, **how)[0], kind)

    assert "numbers of 3 bits" in said(bits=3)
    assert "packed for one kind of GPU" in said(weight_prepacked=1)
    assert "zero points of float32 beside float16" in said(zeros="float32", dtype="float16")
    assert "power of 2 of at least 16, got 24" in said((3, 48), 24, ModelError)
    assert "B has the shape [8, 4, 8], got [8, 8, 4]" in said(block=8, kind=ModelError, block_size=16)
    assert "A has K = 32 elements" in said(kind=ModelError, K=32)
    assert "g_idx names the group" in said(kind=ModelError, groups=np.zeros(60))


# ---- DequantizeLinear in front of a product

KINDS = {"int8": np.int8, "uint8": np.uint8, "int4": ml_dtypes.int4, "uint4": ml_dtypes.uint4}
ELEMENTS = {**{k: getattr(TensorProto, k.upper()) for k in KINDS}, "float8_e4m3fn": TensorProto.FLOAT8E4M3FN}


def dequantized(
    kind: str, operator: str, axis: int, block: int | None, domain: str = "", zeros: bool = True, m: int = 3
) -> tuple[Any, Any]:
    """Returns a model of x (m, 64) times a weight of 64 x 24 numbers, and the weight in float64."""
    rng, shape = np.random.default_rng(3), (24, 64) if operator in ("transposed", "transB") else (64, 24)
    least, most = (-8, 7) if kind.endswith("t4") else (-128, 127)
    shift = -least if kind.startswith("u") else 0
    q = rng.integers(least, most, shape, endpoint=True) + shift
    grid = tuple(n // block if d == axis else n for d, n in enumerate(shape)) if block else (shape[axis],)
    s, z = (rng.random(grid) / 8).astype(np.float16), rng.integers(0, 7, grid) + shift
    floats = kind.startswith("float")
    q = q / 64 if floats else q
    packed = helper.make_tensor("q", ELEMENTS[kind], shape, q.reshape(-1).tolist())
    given = [packed, tensor("s", s)]
    if zeros and not floats:
        given.append(helper.make_tensor("z", ELEMENTS[kind], grid, z.reshape(-1).tolist()))
    attributes = {"axis": axis} | ({"block_size": block} if block else {})
    node = helper.make_node("DequantizeLinear", [t.name for t in given], ["w"], domain=domain, **attributes)
    nodes: list[Any] = [node]
    if operator == "transposed":
        nodes += [("Transpose", "w", "t"), ("MatMul", "x t", "y")]
    else:
        nodes += [("Gemm", "x w", "y", {"transB": 1}) if operator == "transB" else (operator, "x w", "y")]
    element = TensorProto.FLOAT16
    imports = [helper.make_opsetid(MICROSOFT, 1)] if domain else []
    proto = model(nodes, [value("x", (m, 64), element)], [value("y", None, element)], given, 23, opsets=imports)
    exact = q.astype(ml_dtypes.float8_e4m3fn).astype(np.float64) if floats else q.astype(np.float64)

    def wide(x: Any) -> Any:
        if block:
            return np.repeat(x.astype(np.float64), block, axis)
        return x.astype(np.float64).reshape([-1 if d == axis else 1 for d in range(2)])

    w = (exact - (wide(z) if len(given) > 2 else 0)) * wide(s)
    return proto, w.T if operator in ("transposed", "transB") else w


@pytest.mark.parametrize("kind", quick("int4", "uint4", "int8", "uint8", "float8_e4m3fn"))
def test_dequantised_weights_are_part_of_their_product(kind: str) -> None:
    x = rows(3, 64, dtype="float16")
    ways = [("MatMul", 0, 16), ("Gemm", 0, 32), ("transposed", 1, 32), ("transB", 1, 16), ("MatMul", 1, 8)]
    for operator, axis, block in (*ways, ("MatMul", 1, None)):
        proto, w = dequantized(kind, operator, axis, block)
        expected = x.astype(np.float64) @ w
        np.testing.assert_allclose(run(built(proto), x), expected, rtol=2e-3, atol=2e-3 * np.abs(expected).max())
        assert planned(built(proto)) == (1, []), (operator, axis, block)


def test_onnxruntimes_own_dequantisation() -> None:
    x = rows(3, 64, dtype="float16")
    for axis, block in ((0, 16), (1, None)):
        proto, w = dequantized("uint4", "MatMul", axis, block, MICROSOFT)
        np.testing.assert_allclose(run(built(proto), x), x.astype(np.float64) @ w, rtol=2e-3, atol=2e-2)


# ---- integers on both sides

SIGNS = {"uint8": TensorProto.UINT8, "int8": TensorProto.INT8}


@pytest.mark.parametrize("kinds", quick("uint8 int8", "int8 int8", "int8 uint8", "uint8 uint8"))
def test_products_of_integers_with_all_kinds_of_zero_points(kinds: str) -> None:
    kind, other = kinds.split()
    rng = np.random.default_rng(5)
    a, b = (rng.integers(np.iinfo(k).min, np.iinfo(k).max, s, k, True) for k, s in ((kind, (6, 40)), (other, (40, 9))))
    for a_shape, b_shape in ((None, None), ((), None), (None, ()), ((6,), (9,)), ((6, 1), (1, 9)), ((1,), (1,))):
        given, names = [tensor("b", b)], ["a", "b"]
        zeros: list[Any] = [0, 0]
        for n, (name, shape, k) in enumerate((("az", a_shape, kind), ("bz", b_shape, other))):
            names.append("" if shape is None else name)
            if shape is not None:
                zeros[n] = rng.integers(1, 100, shape).astype(k)
                given.append(tensor(name, zeros[n]))
        while not names[-1]:
            names.pop()
        node = helper.make_node("MatMulInteger", names, ["y"])
        proto = model([node], [value("a", a.shape, SIGNS[kind])], [value("y", None, TensorProto.INT32)], given)
        made = built(proto)
        za = np.asarray(zeros[0], np.int64)
        expected = (a.astype(np.int64) - (za.reshape(-1, 1) if za.ndim == 1 else za)) @ (
            b.astype(np.int64) - np.asarray(zeros[1], np.int64)
        )
        np.testing.assert_array_equal(run(made, a), expected)
        count, packed = planned(made)
        assert count == 1 + (b_shape is not None)  # sums of rows
        assert all(np.prod(shape) <= 40 * 9 for shape in packed)


def test_zero_points_of_zero_cost_nothing() -> None:
    given = [tensor("b", np.ones((64, 16), np.int8)), tensor("az", np.uint8(0)), tensor("bz", np.zeros(16, np.int8))]
    node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
    made = built(model([node], [value("a", (8, 64), TensorProto.UINT8)], [value("y", None, TensorProto.INT32)], given))
    (kernel,) = plan(made.graph).kernels
    assert [n.op.name for n in kernel.group.nodes] == ["matmul"]


def test_vectors_and_batches_of_integers() -> None:
    rng = np.random.default_rng(6)
    for first, second in (((5,), (5, 3)), ((4, 5), (5,)), ((5,), (5,)), ((2, 1, 4, 5), (3, 5, 6))):
        a, b = rng.integers(0, 255, first, np.uint8), rng.integers(-128, 127, second, np.int8)
        node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
        proto = model(
            [node],
            [value("a", first, TensorProto.UINT8), value("b", second, TensorProto.INT8)],
            [value("y", None, TensorProto.INT32)],
            [tensor("az", np.uint8(7)), tensor("bz", np.int8(-3))],
        )
        expected = np.matmul(a.astype(np.int64) - 7, b.astype(np.int64) + 3)
        np.testing.assert_array_equal(run(built(proto), a, b), expected)


def test_sums_wrap_around_in_32_bits() -> None:
    """Terms of the zero points do so as well, and what they add up to is right again."""
    terms = 40_000
    given = [tensor("b", np.full((terms, 8), -128, np.int8)), tensor("az", np.uint8(255)), tensor("bz", np.int8(127))]
    node = helper.make_node("MatMulInteger", ["a", "b", "az", "bz"], ["y"])
    proto = model([node], [value("a", (1, terms), TensorProto.UINT8)], [value("y", None, TensorProto.INT32)], given)
    found = run(built(proto), np.zeros((1, terms), np.uint8))
    np.testing.assert_array_equal(found, np.full((1, 8), (terms * 255 * 255 + 2**31) % 2**32 - 2**31))


@pytest.mark.parametrize("columns", [1, 9])
def test_quantised_results(columns: int) -> None:
    """Scales, rounding to even and the zero point of the result are part of the product."""
    rng = np.random.default_rng(8)
    a, b = rng.integers(0, 255, (6, 40), np.uint8), rng.integers(-128, 127, (40, 9), np.int8)
    sb = (rng.random(columns) / 64).astype(np.float32)
    zb = np.zeros(columns, np.int8)
    given = {"as": np.float32(0.05), "az": np.uint8(120), "b": b, "bs": sb, "bz": zb}
    given |= {"ys": np.float32(0.5), "yz": np.uint8(100)}
    node = helper.make_node("QLinearMatMul", ["a", *given], ["y"])
    made = built(
        model(
            [node],
            [value("a", a.shape, TensorProto.UINT8)],
            [value("y", None, TensorProto.UINT8)],
            [tensor(n, x) for n, x in given.items()],
        )
    )
    sums = (a.astype(np.int64) - 120) @ b.astype(np.int64)
    units = sums * (np.float64(given["as"]) * sb.astype(np.float64)) / 0.5
    expected = np.clip(np.round(units) + 100, 0, 255)
    found = run(made, a).astype(np.float64)
    near = np.abs(units - np.floor(units) - 0.5) < 1e-4  # float32 may round these to the other side
    np.testing.assert_array_equal(found[~near], expected[~near])
    np.testing.assert_allclose(found, expected, atol=1)
    assert planned(made)[0] == 1


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["up", "down", "nearest"])
@pytest.mark.parametrize("source", ["float32", "float16"])
def test_powers_of_two(source: str, mode: str) -> None:
    """The scales of MX formats, rounded as Cast's table and its round_mode say."""
    x = np.array([0.0, 0.124, 0.25, 0.3, 0.375, 0.5, 1.0, 1.1, 1.5, 1.75, 2.0, 3.0, np.nan, np.inf, 1000.0], source)
    if source == "float32":
        tiny = np.array([2.0**-127, 1.2 * 2.0**-127, 1.6 * 2.0**-127, 2.0**-126, 2.0**-130, 2.0**127], source)
        x = np.concatenate([x, tiny, np.nextafter(tiny[[3, 5]], np.float32(np.inf))])
    expected = []
    for v in map(float, x):
        below = int(np.floor(np.log2(min(max(v, 2.0**-127), 2.0**127)))) if v == v else 0
        above = below + (2.0**below < v)
        near = above if v - 2.0**below >= 2.0**below / 2 else below
        code = {"up": above, "down": below, "nearest": near}[mode]
        expected.append(255 if v != v else min(code, 127) + 127)
    node = helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT8E8M0, round_mode=mode)
    proto = model([node], [value("x", x.shape, FLOATS[source])], [value("y", None, TensorProto.FLOAT8E8M0)], opset=25)
    np.testing.assert_array_equal(run(built(proto), x).view(np.uint8), expected)
