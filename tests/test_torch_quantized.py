"""Products with weights of few bits, as programs of torch write them: one kernel, no other weight, torch's numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from graphs import ARCHS, compile_for, quick, share  # noqa: E402
from torch_weights import EIGHT, FEW, ORDERED, K, N, Weight, floats, integers  # noqa: E402

import fusegraph.torch  # noqa: E402
from codegen.target import target  # noqa: E402
from fusegraph.frontends.torch.exported import import_module  # noqa: E402
from fusegraph.lowering.base import Options  # noqa: E402
from fusegraph.plan import plan  # noqa: E402

WAYS: Mapping[str, Mapping[str, Weight]] = {"8 bits": EIGHT, "fewer bits": FEW}


class Products(torch.nn.Module):  # type: ignore[misc]
    """All ways to write a product of one input."""

    def __init__(self, ways: Mapping[str, Weight]) -> None:
        super().__init__()
        self._ways = [*ways.values()]
        for number, way in enumerate(self._ways):
            for name, value in way.buffers.items():
                self.register_buffer(f"{name}{number}", value.clone())

    def forward(self, x: Any) -> list[Any]:
        each = [[getattr(self, f"{name}{n}") for name in way.buffers] for n, way in enumerate(self._ways)]
        return [way.product(x, *given) for way, given in zip(self._ways, each)]


def given(rows: int, dtype: Any) -> Any:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(dtype)


def compiled(module: Any, *inputs: Any) -> tuple[list[Any], Any]:
    """Returns the results of a module on the cpu engine, and the report of the one function."""
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    with torch.no_grad():
        found = torch.compile(module, backend="fusegraph", fullgraph=True)(*inputs)
    (report,) = fusegraph.torch.report()
    return [*found], report


def check(ways: Mapping[str, Weight], rows: int, dtype: Any, packed: int = 0) -> None:
    x, unit = given(rows, dtype), torch.finfo(dtype).eps
    found, report = compiled(Products(ways), x)
    assert (report.kernels, report.left) == (len(ways), ())
    assert report.packed <= N * x.element_size() + packed  # no more than scales in another dtype
    for (name, way), y in zip(ways.items(), found):
        w = way.meant(*way.buffers.values())
        expected = x.double() @ w.t()
        # each weight is rounded a few times, the sum once
        bound = 3 * unit * (x.double().abs() @ w.abs().t()) + unit * expected.abs() + 1e-4
        assert y.dtype == dtype, name
        assert bool(((y.double() - expected).abs() <= bound).all()), name


@pytest.mark.slow
@pytest.mark.parametrize("ways", quick("fewer bits", "8 bits"))
def test_numbers(ways: str) -> None:
    check(WAYS[ways], 3, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("ways", WAYS)
def test_numbers_of_more_rows(ways: str, rows: int) -> None:
    check(WAYS[ways], rows, torch.bfloat16)


@pytest.mark.slow
@pytest.mark.parametrize("rows", quick(4, 512))
@pytest.mark.parametrize("ways", quick("fewer bits", "8 bits"))
def test_no_weight_is_written_for_a_gpu(ways: str, rows: int) -> None:
    (graph,) = import_module(Products(WAYS[ways]), given(rows, torch.bfloat16)).graphs
    made = plan(graph, Options(target=target("h200")))
    assert made.packing is None
    results = {t.name for t in made.partition.graph.outputs}
    assert [t.name for k in made.kernels for t in k.group.writes if t.name not in results] == []
    assert len(made.kernels) == len(WAYS[ways])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile(arch: str) -> None:
    modules = [Products(dict(share(arch, [*ways.items()]))) for ways in WAYS.values()]
    graphs = [import_module(m, given(rows, torch.bfloat16)).graphs[0] for m in modules for rows in (4, 512)]
    kernels = compile_for(arch, graphs, target=target(arch))
    assert [k.name for k in kernels if k.spill_bytes] == []


def test_numbers_that_an_index_puts_in_order() -> None:
    """The tensor of the index is none of the graph's constants: numbers are put in order once, in a byte each."""
    check(ORDERED, 3, torch.bfloat16, packed=2 * N * K)


def test_other_dtypes_of_the_input() -> None:
    ways = {name: EIGHT[name] for name in ("_weight_int8pack_mm", "groups with zero points, in float32")}
    check(ways, 3, torch.float16)
    check(ways, 3, torch.float32)


# ---- 8 bits on both sides


#: Whether torch's tracer takes `torch.nn.functional.scaled_mm`, which torch 2.11 has but does not trace.
TRACES_SCALED = torch.torch_version.TorchVersion(torch.__version__) >= "2.12"


def scaled(x: Any, w: Any, a: Any, b: Any, bias: Any) -> list[Any]:
    """Products of 8-bit floats with one scale each, with one for each row and column, and with a bias."""
    f, q = torch.nn.functional, x.to(torch.float8_e4m3fn)
    found = [
        torch._scaled_mm(q, w.t(), a[0, 0], b[0, 0], out_dtype=torch.bfloat16),
        torch._scaled_mm(q, w.t(), a, b, bias=bias, out_dtype=torch.bfloat16, use_fast_accum=True),
        torch._scaled_mm(q, w.t(), a[0], b[:, 0], out_dtype=torch.float32),
    ]
    if TRACES_SCALED:
        rows, single = f.ScalingType.RowWise, f.ScalingType.TensorWise
        found += [
            f.scaled_mm(q, w.t(), a, rows, b, rows, output_dtype=torch.bfloat16),
            f.scaled_mm(q, w.t(), a[0], single, b[0, :1], single, bias=bias, output_dtype=torch.bfloat16),
        ]
    return found


def test_scaled_products_of_8_bit_floats() -> None:
    x, w, bias = given(5, torch.bfloat16), floats(N, K), torch.linspace(-3, 3, N).bfloat16()
    a, b = torch.rand(5, 1) + 0.5, torch.rand(1, N) + 0.5
    module = type("Scaled", (torch.nn.Module,), {"forward": lambda self, *given: scaled(*given)})()
    found, report = compiled(module, x, w, a, b, bias)
    assert report.left == ()
    assert report.kernels <= 2  # the sums of all; x may be rounded before
    sums = x.to(torch.float8_e4m3fn).double() @ w.double().t()
    one, each = sums * a[0, 0].double() * b[0, 0].double(), sums * a.double() * b.double()
    wanted = (one, each + bias.double(), one, each, one + bias.double())
    for y, expected in zip(found, wanted[: None if TRACES_SCALED else 3], strict=True):
        torch.testing.assert_close(y.double(), expected, rtol=torch.finfo(y.dtype).eps, atol=1e-4)


@pytest.mark.slow
def test_scaled_blocks_of_8_bit_floats() -> None:
    """1x128 on the left, 128x128 or 1x128 on the right, in the orders in which torch takes them."""
    f, call = torch.nn.functional, torch.ops.aten._scaled_mm.default
    row, square = f.ScalingType.BlockWise1x128, f.ScalingType.BlockWise128x128

    def products(x: Any, w: Any, a: Any, b: Any, c: Any, padded: Any, bias: Any) -> list[Any]:
        return [
            call(x, w.t(), a, b, out_dtype=torch.bfloat16),
            call(x, w.t(), a, c.t(), bias, out_dtype=torch.float32),
            f.scaled_mm(x, w.t(), a, row, padded, square, output_dtype=torch.float32),
            f.scaled_mm(x, w.t(), a, row, c, row, bias=bias, output_dtype=torch.bfloat16),
        ]

    x, w, bias = floats(5, 384), floats(256, 384), torch.linspace(-3, 3, 256).bfloat16()
    a, b, c = torch.rand(3, 5).t() + 0.5, torch.rand(3, 2) + 0.5, torch.rand(3, 256).t() + 0.5
    padded = torch.cat([b.t(), torch.full((2, 1), torch.nan)], 1).t()
    module = type("Blocks", (torch.nn.Module,), {"forward": lambda self, *given: products(*given)})()
    found, report = compiled(module, x, w, a, b, c, padded, bias)
    assert report.left == ()
    left = x.double() * a.double().repeat_interleave(128, 1)
    squares = b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    one, each = left @ (w.double().t() * squares), left @ (w.double() * c.double().repeat_interleave(128, 1)).t()
    each = each + bias.double()
    for y, expected in zip(found, (one, each, one, each), strict=True):
        size = float(expected.abs().max())
        torch.testing.assert_close(y.double(), expected, rtol=2**-8, atol=size * 2**-8)


def test_scaled_blocks_of_fewer_columns() -> None:
    """The last block of columns is not whole."""
    x, w, a, b = floats(5, 256), floats(208, 256), torch.rand(5, 2) + 0.5, torch.rand(2, 2) + 0.5

    def products(x: Any, w: Any, a: Any, b: Any) -> list[Any]:
        return [torch.ops.aten._scaled_mm.default(x, w.t(), a, b, out_dtype=torch.bfloat16)]

    module = type("Ragged", (torch.nn.Module,), {"forward": lambda self, *given: products(*given)})()
    (found,), report = compiled(module, x, w, a, b)
    assert report.left == ()
    squares = b.double().repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :208]
    expected = (x.double() * a.double().repeat_interleave(128, 1)) @ (w.double().t() * squares)
    torch.testing.assert_close(found.double(), expected, rtol=2**-8, atol=float(expected.abs().max()) * 2**-8)


def test_scaled_blocks_in_plain_operators_are_one_kernel() -> None:
    def product(x: Any, w: Any, a: Any, b: Any) -> list[Any]:
        left = x.bfloat16().view(256, 4, 128) * a[..., None].bfloat16()
        right = (w.float().view(3, 128, 4, 128) * b[:, None, :, None]).view(384, 512).bfloat16()
        return [left.view(256, 512) @ right.t()]

    module = type("Plain", (torch.nn.Module,), {"forward": lambda self, *given: product(*given)})()
    given = floats(256, 512), floats(384, 512), torch.rand(256, 4), torch.rand(3, 4)
    report = fusegraph.torch.explain(module, *given, target="sm_90a")
    assert (report.kernels, report.left) == (1, ())


def test_integers_on_both_sides() -> None:
    """As a linear layer is quantised row by row while it runs: rounding and scales are part of the product."""
    x, w, s = given(20, torch.float32), integers(torch.int8, N, K), torch.rand(N)

    def layer(x: Any, w: Any, s: Any) -> list[Any]:
        q = (x * 20).round().clamp(-128, 127).to(torch.int8)
        return [torch._int_mm(q, w.t()).float() * s]

    module = type("Integers", (torch.nn.Module,), {"forward": lambda self, *given: layer(*given)})()
    (found,), report = compiled(module, x, w, s)
    assert (report.kernels, report.left) == (1, ())
    sums = (x * 20).round().clamp(-128, 127).double() @ w.double().t()
    torch.testing.assert_close(found.double(), sums * s.double(), rtol=1e-6, atol=0)


def test_integers_wrap_around_in_nothing() -> None:
    """The largest sums of products of int8 fit in int32."""
    a, b = torch.full((17, 4096), -128, dtype=torch.int8), torch.full((4096, 8), -128, dtype=torch.int8)
    module = type("Largest", (torch.nn.Module,), {"forward": lambda self, a, b: [torch._int_mm(a, b)]})()
    (found,), _ = compiled(module, a, b)
    assert found.dtype == torch.int32
    assert found.unique().tolist() == [4096 * 128 * 128]


def test_what_is_left_to_torch() -> None:
    """Scales of blocks of 32, in an order of their own, and of the result."""
    x, w = floats(128, 256), floats(128, 256)
    blocks = (torch.ones(1024).to(torch.float8_e8m0fnu),) * 2

    def products(x: Any, w: Any, a: Any, b: Any, one: Any) -> list[Any]:
        return [
            torch._scaled_mm(x, w.t(), one, one, scale_result=one, out_dtype=torch.float8_e4m3fn),
            torch.ops.aten._scaled_mm.default(x, w.t(), a, b, out_dtype=torch.bfloat16),
        ]

    module = type("Left", (torch.nn.Module,), {"forward": lambda self, *given: products(*given)})()
    report = fusegraph.torch.explain(module, x, w, *blocks, torch.tensor(0.5))
    reasons = sorted(why for _, _, why in report.left)
    assert [r[:8] for r in reasons] == ["a scale ", "scales o"], reasons


# ---- powers of 2, the scales of MX formats

POWER = getattr(torch, "float8_e8m0fnu", None)
HARD = [
    1,
    2.9999,
    1.5,
    3,
    -3,
    0,
    -0.0,
    1e-40,
    2**-127,
    1.3 * 2**-127,
    2**-126,
    3.4e38,
    2.5e38,
    float("inf"),
    float("nan"),
]
POWERS = {
    "cast": lambda x: [x.to(POWER)],
    "cast of float64": lambda x: [x.double().to(POWER)],
    "cast of bfloat16": lambda x: [x.bfloat16().to(POWER), x.abs()],
    "moved": lambda x: [x.to(POWER).reshape(3, 5).t().contiguous().t()],
    "made by torch": lambda x: [x.to(POWER).view(torch.uint8).view(POWER).float() * 2, x.to(POWER).view(torch.uint8)],
    "without inputs": lambda x: [torch.full((3, 5), 2.0, dtype=POWER)],
}


@pytest.mark.skipif(POWER is None, reason="torch has no float8_e8m0fnu")
@pytest.mark.parametrize("name", ["cast", *(pytest.param(n, marks=pytest.mark.slow) for n in POWERS if n != "cast")])
def test_powers_of_2_are_those_of_torch(name: str) -> None:
    x, way = torch.tensor(HARD), POWERS[name]
    found, _ = compiled(way, x)
    for ours, theirs in zip(found, way(x), strict=True):
        assert (ours.dtype, ours.shape, ours.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        ours, theirs = (t.view(torch.uint8) if t.dtype == POWER else t for t in (ours, theirs))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@pytest.mark.skipif(POWER is None, reason="torch has no float8_e8m0fnu")
def test_inputs_that_are_powers_of_2_have_strides() -> None:
    codes = torch.arange(24, dtype=torch.uint8).reshape(4, 6).view(POWER)
    for x in (codes.t(), codes[:, ::2], codes[1:, 1:]):
        (found,), _ = compiled(lambda x: [x.float()], x)
        assert torch.equal(found, x.float())


# ---- training of what is beside such a weight


class Adapted(torch.nn.Module):  # type: ignore[misc]
    """A layer whose weight of 4 bits is frozen, and what is trained beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("p", integers(torch.uint8, N, K // 2))
        self.register_buffer("s", torch.rand(N, 1, generator=torch.Generator().manual_seed(0)) / 8)
        self.down = torch.nn.Parameter(torch.linspace(-1, 1, 4 * K).reshape(4, K))
        self.up = torch.nn.Parameter(torch.linspace(-1, 1, 4 * N).reshape(N, 4))

    def forward(self, x: Any) -> Any:
        linear = torch.nn.functional.linear
        w = (torch.stack([self.p & 15, self.p >> 4], -1).reshape(N, K).to(x.dtype) - 8) * self.s.to(x.dtype)
        return linear(x, w) + linear(linear(x, self.down.to(x.dtype)), self.up.to(x.dtype))


def test_a_training_step_keeps_no_unpacked_weight() -> None:
    """The backward pass unpacks it again, in the kernel of the product that is the gradient of the input."""
    module, x = Adapted(), given(5, torch.float32).requires_grad_()
    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    torch.compile(module, backend="fusegraph", fullgraph=True)(x).square().sum().backward()
    found = [x.grad, module.down.grad, module.up.grad]
    plans = [p.planned() for r in fusegraph.torch.report() for p in r.pieces]
    assert len(plans) == 2
    for made in plans:
        assert made is not None
        assert [t.name for k in made.kernels for t in k.group.writes if t.shape in ((N, K), (K, N))] == []
    exact, wide = Adapted().double(), x.detach().double().requires_grad_()
    exact(wide).square().sum().backward()
    for gradient, expected in zip(found, (wide.grad, exact.down.grad, exact.up.grad), strict=True):
        torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


# ---- the operators of exported programs


def test_operators_of_exported_quantised_programs() -> None:
    """A linear layer with its weight in groups, its input rounded to 8 bits; and all operators against torch's own."""
    pytest.importorskip("torch.ao.quantization.fx._decomposed", reason="torch has no quantized_decomposed")
    q = torch.ops.quantized_decomposed
    w, s, z = integers(torch.int8, N, K), torch.rand(N, K // 32) / 8 + 0.01, integers(torch.int8, N, K // 32).int()
    rows, x = torch.rand(N) / 8 + 0.01, given(N, torch.float32)
    zeros = torch.arange(N) - 30

    def every(x: Any, w: Any, s: Any, z: Any, rows: Any, zeros: Any) -> list[Any]:
        made = [
            q.quantize_per_tensor(x, 0.03, 5, -128, 127, torch.int8),
            q.quantize_per_tensor.tensor(x, rows[0], zeros[0], 0, 255, torch.uint8),
            q.quantize_per_channel(x, rows, zeros, 0, -128, 127, torch.int8),
            q.quantize_per_channel_group(x, s, z, -8, 7, torch.int8, 32),
            q.quantize_per_token(x, rows[:, None], zeros[:, None], -128, 127, torch.int8),
        ]
        made += [
            q.dequantize_per_tensor(w, 0.03, 5, -128, 127, torch.int8),
            q.dequantize_per_tensor.tensor(w, rows[0], zeros[0], -128, 127, torch.int8, out_dtype=torch.float32),
            q.dequantize_per_channel(w, rows, zeros, 0, -128, 127, torch.int8),
            q.dequantize_per_channel_group(w, s, z, -128, 127, torch.int8, 32, torch.float32),
            q.dequantize_per_token(w, rows[:, None], zeros[:, None], -128, 127, torch.int8, torch.float32),
        ]
        return made

    with torch.no_grad():
        found, report = compiled(
            type("Every", (torch.nn.Module,), {"forward": lambda m, *a: every(*a)})(), x, w, s, z, rows, zeros
        )
    assert report.left == ()
    for number, (a, b) in enumerate(zip(found, every(x, w, s, z, rows, zeros), strict=True)):
        assert a.dtype == b.dtype
        # 1 / scale may be rounded otherwise, which moves numbers halfway between two
        torch.testing.assert_close(a.double(), b.double(), rtol=1e-6, atol=1.01 if number < 5 else 1e-6)
        assert (a != b).double().mean() < 0.01 or number >= 5

    class Layer(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            for name, value in {"w": w, "s": s, "z": z}.items():
                self.register_buffer(name, value)

        def forward(self, x: Any) -> list[Any]:
            w = q.dequantize_per_channel_group(self.w, self.s, self.z, -128, 127, torch.int8, 32, torch.float32)
            return [torch.nn.functional.linear(x, w)]

    (y,), report = compiled(Layer(), x)
    assert (report.kernels, report.packed, report.left) == (1, 0, ())
    wide = ((w.double().reshape(N, -1, 32) - z[..., None]) * s.double()[..., None]).reshape(N, K)
    torch.testing.assert_close(y.double(), x.double() @ wide.t(), rtol=1e-5, atol=1e-3)
