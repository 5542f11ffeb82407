"""Products of 8-bit floats with scales for blocks of the sum on both sides, against NumPy in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import slow
from kernel_cases import Case, check_cases, executable
from test_contraction_wgmma import bias, everything, hopper, shape

import fusegraph as fg
from codegen import target
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

SIDES = "a", "w"


def blocks(
    sizes: tuple[int, int, int],
    of_a: tuple[int, int] = (1, 128),
    of_w: tuple[int, int] = (128, 128),
    *,
    batch: tuple[int, ...] = (),
    shared: bool = False,
    codes: str = "float8_e4m3",
    scale: str = "float32",
    dtype: str = "bfloat16",
    result: Any = None,
    compute: Any = None,
    epilogue: Callable[[fg.Graph, fg.Tensor], None] = lambda graph, y: graph.output(y, name="y"),
    **more: Any,
) -> Case:
    """Returns a product of a (M, K) and w (N, K), codes with a scale for each block of so many rows and terms.

    The operands are of ``dtype``.  With ``shared`` the whole batch has one w.
    """
    m, n, k = sizes
    graph, sides = fg.Graph("scaled", dtype), []
    for name, rows, block in zip(SIDES, (m, n), (of_a, of_w)):
        lead = () if shared and name == "w" else batch
        x = graph.tensor(name, (*lead, rows, k), codes)
        grid = (*lead, -(-rows // block[0]), -(-k // block[1]))
        sides.append(graph.block_scale_dequantize(x, graph.tensor(f"s{name}", grid, scale), block, dtype=dtype))
    turned = graph.transpose(sides[1], (*range(sides[1].rank - 2), -1, -2))
    epilogue(graph, graph.matmul(sides[0], turned, dtype=result, compute_dtype=compute))
    return Case(graph, "contraction", **more)


def scaled(groups: int = 0, cols: int = 0, split_k: int = 0) -> Any:
    """Returns a predicate for schedules that multiply codes, with the given fields (0: any)."""
    return lambda s: s.scales and shape(groups, cols, split_k)(s)


def given(case: Case) -> dict[str, Any]:
    """Returns codes of all magnitudes, and scales of several orders of magnitude."""
    r, found = np.random.default_rng(0), {}
    for t in case.graph.inputs:
        drawn = r.uniform(1, 2, t.shape) if t.name[0] == "s" else r.normal(0, 1, t.shape)
        reach = 5 if t.name[0] == "s" else 3
        found[t.name] = (drawn * np.exp2(r.integers(-reach, reach, t.shape))).astype(t.dtype.numpy)
    return found


def each(inputs: dict[str, Any], name: str, block: tuple[int, int]) -> Any:
    """Returns an operand in float64: codes times the scales of their blocks."""
    x, scale = inputs[name].astype(np.float64), inputs[f"s{name}"].astype(np.float64)
    for axis, size in zip((-2, -1), block):
        scale = np.take(np.repeat(scale, size, axis), range(x.shape[axis]), axis)
    return x * scale


def check(
    case: Case, of_a: tuple[int, int] = (1, 128), of_w: tuple[int, int] = (128, 128), kernels: int = 1, **inputs: Any
) -> None:
    """Runs a case whose result is float32, and compares it with NumPy.

    The tensor cores cut the sums of a stage off below 14 bits, so that a result is not off by 2**-9 of the sum of the
    terms' magnitudes, and half of the results by no more than 2**-14.
    """
    made, found = executable(case), given(case) | inputs
    assert made.plan is not None
    last = made.plan.kernels[-1]
    assert (len(made.plan.kernels), last.choice.schedule.scales) == (kernels, True)
    y = np.asarray(made(*(found[t.name] for t in case.graph.inputs)))
    a, w = each(found, "a", of_a), np.swapaxes(each(found, "w", of_w), -1, -2)
    exact, magnitudes = a @ w, np.abs(a) @ np.abs(w)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(exact))
    error = np.abs(y - exact)[~np.isnan(exact)] / magnitudes[~np.isnan(exact)]
    assert error.max() < 2.0**-9
    assert np.median(error) < 2.0**-14


@pytest.mark.parametrize(("sizes", "of_w"), [((70, 256, 384), (128, 128)), ((5, 72, 256), (1, 128))])
def test_products_of_codes_against_numpy(sizes: tuple[int, int, int], of_w: tuple[int, int]) -> None:
    """The operands are not rounded to bfloat16, which would be 2**-9."""
    check(hopper(blocks(sizes, of_w=of_w, result="float32"), scaled(1, 64)), of_w=of_w)


def test_scales_that_are_not_numbers_are_those_of_their_blocks() -> None:
    case = hopper(blocks((70, 256, 256), result="float32"), scaled(1, 192))
    sa, sw = (given(case)[name] for name in ("sa", "sw"))
    sa[3, 1] = sw[1, 0] = np.nan
    check(case, sa=sa, sw=sw)


def test_last_blocks_of_columns_that_are_not_whole() -> None:
    """Their scales are spread by a kernel of their own."""
    check(hopper(blocks((5, 200, 256), result="float32"), scaled(1, 64)), kernels=2)


def test_last_blocks_of_the_sum_that_are_not_whole() -> None:
    """The operands are dequantised."""
    (made,) = check_cases([blocks((5, 128, 200), arch="sm_90a")])
    assert made.plan is not None
    assert not any(getattr(k.choice.schedule, "scales", False) for k in made.plan.kernels)


@pytest.mark.slow
def test_every_form() -> None:
    cases = [
        hopper(blocks((136, 256, 384), epilogue=bias), scaled(2, 128), blocks=1),
        hopper(blocks((200, 384, 256), epilogue=everything), scaled(3, 128), blocks=1),
        hopper(blocks((70, 384, 256), epilogue=everything), scaled(1, 192)),
        hopper(blocks((70, 320, 256), of_w=(64, 128)), scaled(2, 160)),
        hopper(blocks((70, 40, 256), of_w=(1, 128), epilogue=bias), scaled(2, 32)),
        hopper(blocks((256, 128, 256), of_a=(128, 128), of_w=(1, 128)), scaled(2, 128), blocks=1),
        hopper(blocks((70, 128, 512), of_a=(1, 512), of_w=(128, 256)), scaled(3, 64)),
        hopper(blocks((70, 128, 208), of_a=(1, 208), of_w=(1, 208)), scaled(1, 128)),
        hopper(blocks((70, 128, 256), of_a=(70, 256), of_w=(128, 256)), scaled(1, 128)),
        hopper(blocks((70, 128, 1024)), scaled(1, 64, 2)),
        hopper(blocks((70, 128, 256), batch=(3,), dtype="float16", result="float32"), scaled(1, 64), blocks=2),
        hopper(blocks((70, 128, 256), batch=(2, 2), shared=True, codes="float8_e5m2"), scaled(1, 128), blocks=2),
        hopper(blocks((70, 128, 256), scale="float8_e8m0"), scaled(1, 128)),
        hopper(blocks((70, 128, 256), dtype="float32", compute="tf32"), scaled(1, 128)),
        hopper(blocks((1, 128, 128)), scaled(1, 16)),
    ]
    assert all(len(made.plan.kernels) == 1 for made in check_cases(cases, guard=True) if made.plan is not None)


def other(a: Callable[..., fg.Tensor], w: Callable[..., fg.Tensor]) -> Case:
    """Returns a product of operands that functions of a graph, codes and scales make."""
    graph = fg.Graph("written", "bfloat16")
    sides = [
        make(graph, graph.tensor(name, (128, 256), "float8_e4m3"), graph.tensor(f"s{name}", grid))
        for make, name, grid in zip((a, w), SIDES, ((128, 2), (1, 2)))
    ]
    graph.output(sides[0] @ sides[1].T, name="y")
    return Case(graph, "contraction")


def in_blocks(graph: fg.Graph, x: fg.Tensor, scale: fg.Tensor) -> fg.Tensor:
    return graph.block_scale_dequantize(x, scale, (x.shape[0] // scale.shape[0], 128), dtype="bfloat16")


def by_hand(graph: fg.Graph, x: fg.Tensor, scale: fg.Tensor) -> fg.Tensor:
    """Multiplies by two scales, one after the other, in dimensions of blocks."""
    rows = scale.shape[0]
    fine = graph.cast(x.reshape((rows, 128 // rows, 2, 128)), "bfloat16")
    twice = graph.exp2(scale.reshape((rows, 1, 2, 1))) * (fine * scale.reshape((rows, 1, 2, 1)))
    return graph.cast(twice.reshape((128, 256)), "bfloat16")


def plain(graph: fg.Graph, x: fg.Tensor, scale: fg.Tensor) -> fg.Tensor:
    return x


def shifted(graph: fg.Graph, x: fg.Tensor, scale: fg.Tensor) -> fg.Tensor:
    return in_blocks(graph, x, scale) + 1.0


@pytest.mark.parametrize(
    ("sides", "codes"),
    [
        ((by_hand, by_hand), True),
        ((in_blocks, shifted), False),
        *slow(((in_blocks, plain), True), ((plain, in_blocks), True)),
    ],
)
def test_how_it_is_written_does_not_matter(sides: tuple[Any, Any], codes: bool) -> None:
    made = executable(Case(other(*sides).graph, "contraction", arch="sm_90a"))
    assert made.plan is not None
    assert any(getattr(k.choice.schedule, "scales", False) for k in made.plan.kernels) == codes
    if codes:
        check_cases([Case(other(*sides).graph, "contraction", arch="sm_90a")])


@pytest.mark.parametrize(
    ("arch", "more", "options"),
    [
        ("sm_80", {}, {}),
        ("sm_120", {}, {}),
        ("sm_90a", {"of_w": (128, 64)}, {}),
        ("sm_90a", {"dtype": "float32"}, {}),
        ("sm_90a", {}, {"strict": True}),
    ],
)
def test_where_codes_are_not_multiplied(arch: str, more: dict[str, Any], options: dict[str, Any]) -> None:
    """Nor where float32 is to be exact, and where every intermediate is to be rounded."""
    graph = blocks((256, 256, 512), **more).graph
    planned = plan(graph, Options(target=target(arch), **options))
    assert not any(getattr(k.choice.schedule, "scales", False) for k in planned.kernels)


@pytest.mark.parametrize(
    "sizes", [(4096, 4096, 4096), (128, 2048, 7168), (8, 7168, 2048), (1, 2048, 7168), (70, 24, 128)]
)
def test_codes_are_multiplied_whatever_the_sizes(sizes: tuple[int, int, int]) -> None:
    graph = blocks(sizes, of_w=(128, 128) if sizes[1] % 128 == 0 else (1, 128)).graph
    (kernel,) = plan(graph, Options(target=target("sm_90a"))).kernels
    assert kernel.choice.schedule.scales


def test_scales_of_rows_or_one_for_all() -> None:
    for grids in (((64, 1), (32, 1)), ((), ()), ((64, 1), ())):
        graph = fg.Graph("rows", "bfloat16")
        codes = graph.tensor("a", (64, 256), "float8_e4m3"), graph.tensor("w", (32, 256), "float8_e5m2")
        every = (graph.tensor(f"s{n}", grid) for n, grid in zip(SIDES, grids))
        x, w = (graph.dequantize(*both, dtype="bfloat16") for both in zip(codes, every))
        graph.output(x @ w.T, name="y")
        (made,) = check_cases([Case(graph, "contraction", arch="sm_90a")])
        assert made.plan is not None
        assert [k.choice.schedule.scales for k in made.plan.kernels] == [True]


@pytest.mark.slow
def test_rows_of_any_number() -> None:
    graph = fg.Graph("any", "bfloat16")
    a = graph.tensor("a", (fg.Dim("m", 1, 300), 256), "float8_e4m3")
    sa = graph.tensor("sa", (a.shape[0], 2), "float32")
    w = graph.tensor("w", (128, 256), "float8_e4m3", parameter=True)
    sw = graph.tensor("sw", (1, 2), "float32", parameter=True)
    x, y = (graph.block_scale_dequantize(*s, b, dtype="bfloat16") for *s, b in ((a, sa, 128), (w, sw, (128, 128))))
    graph.output(x @ y.T, name="y", dtype="float32")
    made, r = graph.compile("cpu", target="sm_90a"), np.random.default_rng(0)
    codes, scale = r.normal(0, 1, (128, 256)).astype(ml_dtypes.float8_e4m3fn), np.float32([[0.5, 3]])
    for m in (1, 131):
        inputs = {"a": r.normal(0, 1, (m, 256)).astype(ml_dtypes.float8_e4m3fn), "w": codes, "sw": scale}
        inputs["sa"] = r.uniform(0.5, 2, (m, 2)).astype(np.float32)
        found = made(*(inputs[t.name] for t in graph.inputs))
        exact = each(inputs, "a", (1, 128)) @ each(inputs, "w", (128, 128)).T
        np.testing.assert_allclose(np.asarray(found, np.float64), exact, atol=2.0**-8 * np.abs(exact).max())
        (kernel,) = made.at({"m": m}).plan.kernels
        assert kernel.choice.schedule.scales


@pytest.mark.parametrize("sizes", [(0, 128, 256), (64, 0, 256), (64, 128, 0)])
def test_nothing_to_multiply(sizes: tuple[int, int, int]) -> None:
    check_cases([blocks(sizes, arch="sm_90a")])


@pytest.mark.slow
def test_kernels_compile_without_spills() -> None:
    """With the largest tiles, and results that take many registers."""
    sources = []
    for of_w in ((128, 128), (1, 128)):
        for groups, cols in ((2, 192), (3, 128), (1, 192)):
            case = blocks((4096, 4096, 4096), of_w=of_w, epilogue=everything)
            made = executable(hopper(case, scaled(groups, cols))).plan
            assert made is not None
            sources.append(made.kernels[0].source)
    kernels = nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache())
    assert [k.spill_bytes + k.stack_bytes for k in kernels] == [0] * len(sources)
