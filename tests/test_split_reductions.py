"""Reductions with few results and many elements: split in two, so that all of a GPU works on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, compile_for, executables

import fusegraph as fg
from codegen import best_schedule
from codegen.target import target
from fusegraph.dtypes import float32
from fusegraph.lowering import parallelism
from fusegraph.lowering.base import Options
from fusegraph.ops.base import Role
from fusegraph.ops.modes import COMBINED, PARTS
from fusegraph.ops.partial import PARTIAL
from fusegraph.passes import split_reductions
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs, run


def reduced(shape: tuple[int, ...], axes: Any, mode: str = "add", dtype: str = "float32", **how: Any) -> fg.Graph:
    g = fg.Graph(f"{mode} {shape} {axes} {dtype}")
    x = g.tensor("x", shape, dtype, **how)
    g.output(g.reduction(x, mode, axes), name="y")
    return g


def kinds(graph: fg.Graph) -> list[list[str]]:
    return [[node.op.name for node in kernel.group.nodes] for kernel in plan(graph).kernels]


SPLIT = [["reduction_partial"], ["reduction"]]


@pytest.mark.parametrize(
    ("shape", "axes", "how", "expected"),
    [
        ((1 << 20,), None, {}, SPLIT),
        ((1 << 12,), None, {}, [["reduction"]]),
        ((8192, 8192), 1, {}, [["reduction"]]),
        ((8192, 8192), 0, {}, [["reduction"]]),
        ((8, 1 << 20), 1, {}, SPLIT),
        ((1 << 17, 64), 0, {}, SPLIT),
        ((64, 256, 56, 56), (0, 2, 3), {"layout": "NHWC"}, SPLIT),
        ((64, 256, 56, 56), (0, 2, 3), {}, [["reduction"]]),
        ((1 << 20, 0), 0, {}, [["reduction"]]),
    ],
)
def test_what_is_split(shape: tuple[int, ...], axes: Any, how: Any, expected: list[list[str]]) -> None:
    assert kinds(reduced(shape, axes, **how)) == expected


def normal(shape: tuple[int, ...], axis: int) -> fg.Graph:
    g = fg.Graph("normal")
    x = g.tensor("x", shape)
    g.output(x / g.reduction(x, "norm2", axis), name="y")
    return g


def test_rows_that_are_read_once_stay_whole() -> None:
    """16 rows and more, each kept on the chip by a cluster; fewer are read twice, by all of the GPU."""
    assert kinds(normal((64, 1 << 18), 1)) == [["reduction", "div"]]
    assert kinds(normal((4, 1 << 20), 1)) == [["reduction_partial"], ["reduction", "sqrt"], ["div"]]


def test_what_the_user_sees() -> None:
    g = reduced((1 << 20,), None, "avg", "bfloat16")
    found = plan(g)
    assert [n.name for k in found.kernels for n in k.group.nodes] == ["y parts", "y total", "y"]
    (first, second) = found.partition.decisions
    assert (first.producer, first.consumer, first.fused) == ("y parts", "y total", False)
    assert "needs all parts of 'y parts'" in first.reason
    assert second.fused
    assert found.counterparts[g.outputs[0]].dtype.name == "bfloat16"


@pytest.fixture
def eager_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits short reductions, too."""
    monkeypatch.setattr(split_reductions, "SHORT_BYTES", 512)
    monkeypatch.setattr(parallelism, "BLOCK_RATE", 1e-3)
    monkeypatch.setattr(split_reductions, "LEAST_PART_BYTES", 256)
    monkeypatch.setattr(split_reductions, "BUSY", 1 << 20)
    monkeypatch.setattr(split_reductions, "AS_LONG", 0.0)
    monkeypatch.setattr(split_reductions, "_returns", lambda *_: False)


def several(shape: tuple[int, ...], axes: Any, dtype: str = "float32", **how: Any) -> fg.Graph:
    """Builds all reductions, with pointwise nodes before and after."""
    g = fg.Graph(f"several {shape} {axes} {dtype}", compute_dtype=how.pop("compute_dtype", "float32"))
    x = g.tensor("x", shape, dtype, **how)
    keepdims = len(shape) % 2 == 0
    for mode in COMBINED.values():
        if x.dtype.is_float or not mode.floats:
            g.output(g.reduction(g.neg(x), mode.name, axes, keepdims) + 1, name=f"y {mode.name}")
    return g


@pytest.mark.usefixtures("eager_split")
def test_small_ones() -> None:
    graphs = [reduced((1003,), None, "avg"), reduced((2, 8, 10, 30), (0, 2, 3), "norm2", layout="NHWC")]
    assert all(k[0] == ["reduction_partial"] for k in map(kinds, graphs))
    check_all(graphs)


@pytest.mark.slow
@pytest.mark.usefixtures("eager_split")
def test_every_mode_and_dtype() -> None:
    graphs = [several((3, 700), 1, d) for d in ("bfloat16", "float64", "int8", "int64")]
    graphs += [several((1000, 5), 0, "float16"), several((2, 3, 40, 10), (0, 2, 3)), several((3, 500, 7), 1)]
    graphs += [several((40, 64), None, "float8_e5m2"), several((700,), 0, compute_dtype="float64")]
    graphs += [several((640, 40), 0, strides=(1, 700)), several((6, 400), 1, strides=(800, 2))]
    assert all("reduction_partial" in kinds(g)[0] for g in graphs)
    check_all(graphs)
    check_all(graphs[:4], fusion=False)


def standardized(shape: tuple[int, ...], axes: Any, **how: Any) -> fg.Graph:
    """Builds mean and variance, and ops on them and the tensor again."""
    g = fg.Graph("standardized")
    x = g.tensor("x", shape, **how)
    centred = x - g.reduction(x, "avg", axes, name="mean")
    variance = g.reduction(centred * centred, "avg", axes)
    g.output(variance, name="variance")
    g.output(g.relu(centred / g.sqrt(variance + 1e-5)), name="y")
    return g


def channels_norm(shape: tuple[int, ...], dtype: str = "bfloat16", *, back: bool = False) -> fg.Graph:
    """Returns a norm of channels, which come last, with what is around it in training; or its gradient."""
    g = fg.Graph(f"channels {shape} {dtype} {back}", io_dtype=dtype)
    x, other = (g.tensor(name, shape, layout="NHWC") for name in ("x", "other"))
    one = (1, shape[1], 1, 1)
    if not back:
        y, *kept = g.batchnorm(x, g.tensor("scale", one), g.tensor("bias", one))
        g.output(g.relu(y + other), name="y")
        for n, tensor in enumerate(kept):
            g.output(tensor, name=f"kept {n}")
        return g
    loss = g.tensor("loss", shape, layout="NHWC")
    loss = g.output(g.binary_select(loss, loss * 0.0, other > 0.0), name="passed on")
    scale, mean, inverse = (g.tensor(name, one, "float32") for name in ("scale", "mean", "inverse"))
    for n, tensor in enumerate(g.batchnorm_backward(loss, x, scale, mean, inverse)):
        g.output(tensor, name=f"gradient {n}")
    return g


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("shape", "kernels"),
    [((32, 96, 14, 14), 1), ((8, 16, 28, 28), 1), ((8, 384, 14, 14), 1), ((64, 256, 14, 14), 3), ((64, 64, 56, 56), 3)],
)
def test_norms_of_channels(shape: tuple[int, ...], kernels: int, back: bool) -> None:
    """One kernel, of clusters, where strips of channels stay on the chip; else both sums of parts, of all, results."""
    found = plan(channels_norm(shape, back=back), Options(target=target("h200")), choose=by_cost_model(target("h200")))
    assert len(found.kernels) == kernels
    first = found.kernels[0].source
    assert first.grid[0] >= 16


@pytest.mark.parametrize(("shape", "kernels"), [((64, 400, 28, 28), 3), ((2, 16, 6, 6), 1)])
def test_norms_that_turn_their_results(shape: tuple[int, ...], kernels: int) -> None:
    """Results that are written one by one take as long as sectors of memory: tiles turn them behind sums of parts."""
    graph = fg.Graph("turned")
    x = graph.tensor("x", shape, layout="NHWC")
    scale, bias = (graph.tensor(name, (1, shape[1], 1, 1)) for name in ("scale", "bias"))
    graph.output(graph.groupnorm(x, scale, bias, groups=4), name="y", layout="contiguous")
    found = plan(graph, Options(target=target("h200")), choose=by_cost_model(target("h200")))
    assert len(found.kernels) == kernels


def groups_norm(shape: tuple[int, ...], groups: int, dtype: str = "float32", layout: str = "NHWC") -> fg.Graph:
    """Returns a norm of groups of channels behind an addition, with its statistics."""
    g = fg.Graph(f"groups {shape} {groups} {dtype} {layout}", io_dtype=dtype)
    x, other = (g.tensor(name, shape, layout=layout) for name in ("x", "other"))
    one = (1, shape[1], 1, 1)
    scale, bias = (g.tensor(name, one) for name in ("scale", "bias"))
    y, *kept = g.groupnorm(x + other, scale, bias, groups=groups, norm_forward_phase="training")
    for n, tensor in enumerate((y, *kept)):
        g.output(tensor, name=f"y {n}")
    return g


@pytest.mark.parametrize(
    ("shape", "groups", "dtype", "along"),
    [
        ((8, 64, 56, 56), 32, "float32", (3, 4)),
        ((8, 64, 56, 56), 32, "bfloat16", (3, 4)),
        ((8, 96, 56, 56), 32, "bfloat16", (3, 4)),
        ((32, 64, 112, 112), 32, "float32", (3, 4)),
        # Runs of whole sectors, and so little that another kernel takes longer, stay whole.
        ((8, 64, 56, 56), 8, "float32", None),
        ((2, 64, 14, 14), 32, "float32", None),
    ],
)
def test_channels_of_groups_are_apart_in_parts(
    shape: tuple[int, ...], groups: int, dtype: str, along: tuple[int, ...] | None
) -> None:
    """Parts of short runs are of single channels, whose neighbours a kernel reads across; the groups come behind."""
    graph = groups_norm(shape, groups, dtype)
    found = plan(graph, Options(target=target("h200")), choose=by_cost_model(target("h200")))
    first, *others = found.kernels
    parts = [node for node in first.group.nodes if node.op is PARTIAL]
    assert len(found.kernels) == (1 if along is None else 3)
    assert {node.attributes["axes"] for node in parts} == (set() if along is None else {along})
    if along is not None:
        assert best_schedule(first.group.lowered.spec, target("h200")).across
        assert sum(node.op.role is Role.REDUCE for node in others[0].group.nodes) == 2


@pytest.mark.parametrize(
    ("channels", "groups", "axes", "expected"),
    [
        (64, 32, (2, 3, 4), (2,)),
        (96, 32, (2, 3, 4), (2,)),
        (64, 2, (2, 3, 4), ()),  # 128 bytes and more are long
        (64, 64, (2, 3, 4), ()),  # a channel a group: neighbours are of other rows anyway
        (6, 3, (2, 3, 4), ()),  # a warp has no more to read
        (64, 32, (2,), ()),  # nothing else is reduced
        (64, 32, (0, 1, 2, 3), ()),
    ],
)
def test_short_runs(channels: int, groups: int, axes: tuple[int, ...], expected: tuple[int, ...]) -> None:
    each, (height, width) = channels // groups, (5, 7)
    strides = (height * width * channels, each, 1, width * channels, channels)
    x = fg.Graph("g").tensor("x", (3, groups, each, height, width), strides=strides)
    assert parallelism.run(x, axes) == expected
    moved = parallelism.parallelism(x, axes).moved
    assert moved == (max(1.0, 32 / (4 * each)) if expected else 1.0)


@pytest.mark.usefixtures("eager_split")
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHWC", "NCHW"])
def test_norms_of_groups(layout: str, dtype: str) -> None:
    """One to eight channels a group, sizes that are multiples of nothing, numbers that are none."""
    graphs = [groups_norm((2, each * 5, 13, 29), 5, dtype, layout) for each in (1, 2, 3, 4, 8)]
    for graph in graphs:
        assert "reduction_partial" in kinds(graph)[0]
    check_all(graphs)
    check_all(graphs[1:2], inputs=lambda g: random_inputs(g, 1, special=1e-3))


@pytest.mark.usefixtures("eager_split")
@pytest.mark.parametrize("keepdims", [False, True])
def test_groups_of_channels_with_large_offsets(keepdims: bool) -> None:
    """Of numbers of mean 1e4 and spread 1, against NumPy's float64; the same bits each time."""
    shape, axes = (2, 8, 3, 21, 37), (2, 3, 4)
    g = fg.Graph("statistics")
    x = g.tensor("x", shape, strides=(21 * 37 * 24, 3, 1, 37 * 24, 24))
    mean = g.reduction(x, "avg", axes)
    centred = x - mean
    g.output(g.reduction(centred * centred, "avg", axes, keepdims), name="variance")
    g.output(g.reduction(x, "norm2", axes, keepdims), name="norm")
    parts = [n for n in plan(g).kernels[0].group.nodes if n.op is PARTIAL]
    assert parts
    assert all(n.attributes["axes"] == (3, 4) for n in parts)
    (executable,) = executables([g])
    random = np.random.default_rng(0).standard_normal((2, 21, 37, 8, 3)) + 1e4
    values = random.astype(np.float32).transpose(0, 3, 4, 1, 2)
    found, again = (run(executable, {"x": values}) for _ in range(2))
    exact = values.astype(np.float64)
    variance, norm = exact.var(axis=axes, keepdims=keepdims), np.sqrt((exact**2).sum(axis=axes, keepdims=keepdims))
    assert found["variance"].shape == variance.shape
    assert np.abs(found["variance"] / variance - 1).max() < 1e-4
    assert np.abs(found["norm"] / norm - 1).max() < 1e-6
    for name, value in found.items():
        np.testing.assert_array_equal(value, again[name])


@pytest.mark.usefixtures("eager_split")
def test_squares_about_means_of_others() -> None:
    """Means that broadcast along other axes than they are of are no means of what is squared."""
    g = fg.Graph("means of rows, taken from columns")
    x = g.tensor("x", (300, 300))
    centred = x - g.reduction(x, "avg", 1, keepdims=False)
    g.output(g.reduction(centred * centred, "avg", 1, keepdims=False), name="y")
    check_all([g])


@pytest.mark.slow
def test_clusters_of_strips_are_right() -> None:
    graphs = [channels_norm((3, 20, 19, 21), dtype, back=back) for dtype in ("float32", "bfloat16") for back in (0, 1)]
    g = fg.Graph("softmax of columns")
    g.output(g.softmax(g.tensor("x", (4099, 24)), 0), name="y")
    check_all([*graphs, g], arch="sm_90a")


def test_mode_var_reads_its_tensor_once() -> None:
    assert len(kinds(reduced((1 << 17, 64), 0, "var"))[0]) == 2


def test_a_variance_reads_its_tensor_once() -> None:
    """Statistics of channels: the parts of both at once, then both; and the tensor again for what is made of them."""
    graph = standardized((64, 256, 56, 56), (0, 2, 3), layout="NHWC")
    found = plan(graph).kernels
    assert kinds(graph)[0] == ["reduction_partial", "reduction_partial"]
    assert len(found) == 3
    (x,) = graph.inputs
    assert sum(t.name == x.name for k in found for t in k.group.reads) == 2
    # Channels first: a row is kept by a cluster, and read once for everything.
    assert len(plan(standardized((64, 256, 56, 56), (0, 2, 3))).kernels) == 1


@pytest.mark.usefixtures("eager_split")
@pytest.mark.parametrize(("shape", "axes"), [((1000, 24), 0), ((3, 1003), 1), ((2, 8, 30, 31), (0, 2, 3))])
def test_variances_with_large_offsets(shape: tuple[int, ...], axes: Any) -> None:
    """Of numbers of mean 1e4 and spread 1: as exact as the means of the parts are in float32."""
    graph = standardized(shape, axes, **({"layout": "NHWC"} if len(shape) == 4 else {}))
    assert kinds(graph)[0] == ["reduction_partial", "reduction_partial"]
    (executable,) = executables([graph])
    values = (np.random.default_rng(0).standard_normal(shape) + 1e4).astype(np.float32)
    if len(shape) == 4:
        values = np.ascontiguousarray(values.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    found = run(executable, {"x": values})["variance"]
    expected = values.astype(np.float64).var(axis=axes, keepdims=True)
    assert np.abs(found / expected - 1).max() < 1e-4


@pytest.mark.usefixtures("eager_split")
def test_special_values() -> None:
    graph = several((3, 700), 1)
    assert "reduction_partial" in kinds(graph)[0]
    check_all([graph], inputs=lambda g: random_inputs(g, 1, special=1e-3))


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize(("shape", "axes"), [((1003,), (0,)), ((5, 256, 3), (1,)), ((4, 3, 50), (0, 2))])
def test_parts_against_the_reference(shape: tuple[int, ...], axes: tuple[int, ...], keepdims: bool) -> None:
    """Every mode of the parts themselves, the last of which is shorter; large offsets cost no digits."""
    g = fg.Graph("parts")
    x = g.tensor("x", shape)
    for mode in PARTS:
        how = {"mode": mode, "axes": axes, "chunk": 64, "keepdims": keepdims, "dtype": float32}
        g.output(g.apply(PARTIAL, (x,), how), name=mode)
    (executable,) = executables([g])
    values = (np.random.default_rng(0).standard_normal(shape) + 100).astype(np.float32)
    found = run(executable, {"x": values})
    for node in g.nodes:
        expected = PARTIAL.reference(values, **node.attributes)
        if node.name != "mul":  # overflows
            np.testing.assert_allclose(found[node.name], expected, rtol=1e-5, err_msg=node.name)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    graphs = [reduced((1000003,), None), reduced((1 << 17, 64), 0, "avg", "bfloat16")]
    graphs += [several((64, 256, 56, 56), (0, 2, 3), "bfloat16", layout="NHWC")]
    assert [k.name for k in compile_for(arch, graphs) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    shapes: list[tuple[tuple[int, ...], Any]] = [((1000003,), None), ((1 << 17, 64), 0), ((3, 1 << 20), 1)]
    check_on_gpu([several(shape, axes, d) for shape, axes in shapes for d in ("float32", "bfloat16")])


@pytest.mark.gpu
@pytest.mark.parametrize(("io", "result"), [("int8", "int64"), ("bfloat16", "float32")])
def test_two_to_the_31_elements_on_the_gpu(io: str, result: str) -> None:
    """Positions beyond 31 bits: the sums of everything, of columns and of rows of 2^31 and more elements.  Sums of so
    small integers are exact in float32 too."""
    torch = large_memory(8)
    rows = 2**31 // 4096 + 3
    x = torch.randint(-3, 4, (rows, 4096), dtype=getattr(torch, io), device="cuda")
    g = fg.Graph("large", io_dtype=io)
    t = g.tensor("x", x.shape)
    for name, axes in (("sum", None), ("columns", 0), ("rows", 1)):
        g.output(g.reduction(t, "add", axes, dtype=result), name=name)
    total, columns, sums = g.compile("cuda")(x)
    expected, of_rows = torch.zeros(4096, dtype=torch.int64, device="cuda"), []
    for part in x.split(2**14):  # torch would convert all of it at once
        expected += part.sum(0, dtype=torch.int64)
        of_rows.append(part.sum(1, dtype=torch.int64))
    assert torch.equal(columns.reshape(-1).to(torch.int64), expected)
    assert int(total) == int(expected.sum())
    assert torch.equal(sums.reshape(-1).to(torch.int64), torch.cat(of_rows))


@pytest.mark.gpu
def test_a_norm_of_two_to_the_31_elements_on_the_gpu() -> None:
    torch = large_memory(12)
    rows = 2**31 // 4096 + 3
    x = torch.empty((rows, 4096), dtype=torch.bfloat16, device="cuda").normal_()
    g = fg.Graph("large", io_dtype="bfloat16")
    t, weights = g.tensor("x", x.shape), (g.tensor("scale", (4096,)), g.tensor("bias", (4096,)))
    g.output(g.gelu(g.layernorm(t, *weights)) + t, name="y")
    scale, bias = (torch.randn(4096, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    y = g.compile("cuda")(x, scale, bias)
    f = torch.nn.functional
    for row in (0, 2**18, 2**19 - 1, 2**19, rows - 1):  # 2^19 rows are 2^31 elements
        norm = f.layer_norm(x[row].double(), (4096,), scale.double(), bias.double())
        torch.testing.assert_close(y[row].double(), f.gelu(norm) + x[row].double(), rtol=2**-7, atol=2**-7)


def large_memory(gib: float) -> Any:
    """Returns torch if the GPU has so much memory; skips the test otherwise."""
    torch = pytest.importorskip("torch")
    have = torch.cuda.get_device_properties(0).total_memory / 2**30
    if have < gib * 1.25:
        pytest.skip(f"needs {gib:.0f} GiB of device memory, the GPU has {have:.0f}")
    return torch
