"""Products with 2:4 sparse weights: on sparse warpgroup products where these are, else with the zeros."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import QUICK_ARCHS, are_right, executables, quick
from sparse_kernels import arguments, source, words
from test_sparse_2_4 import pruned

import fusegraph as fg
from codegen import best_schedule
from codegen.contraction import FAMILY
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.spec import ContractionSpec, KernelSpec
from codegen.target import Target, target
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.errors import KernelError
from fusegraph.lowering.base import Options
from fusegraph.ops.base import EVERY, Role
from fusegraph.passes import sparse_products
from fusegraph.plan import Choice, Chooser, Plan, plan
from fusegraph.report.check import check_executable, random_inputs
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.host_compiler import build
from fusegraph.runtime.nvrtc import compile_kernels

Array = np.ndarray[Any, Any]
HOPPER = Options(target=target("h200"))


def layer(
    rows: int, cols: int, terms: int, dtype: str = "bfloat16", *, given: bool = False, end: str = "bias", batch: int = 0
) -> fg.Graph:
    """Returns a product with a pruned parameter, or with one that is ``given`` compressed, and what follows it."""
    g = fg.Graph(f"layer {rows} {cols} {terms} {dtype} {given} {end} {batch}", io_dtype=dtype)
    x = g.tensor("x", (batch, rows, terms) if batch else (rows, terms))
    if given:
        values = g.tensor("values", (cols, terms // 2), parameter=True)
        w = g.sparse_2_4(values, g.constant(some_places(cols, terms), "places"))
    else:
        w = g.sparse_2_4(g.tensor("w", (cols, terms), parameter=True))
    if end.startswith("first"):
        y = w @ x.T
        g.output(g.relu(y + g.tensor("bias", (cols, 1))) if end.endswith("bias") else y, name="y")
        return g
    y = x @ w.T
    if end == "bias":
        y = g.gelu(y + g.tensor("bias", (cols,)))
    if end == "float":
        y = g.matmul(x, w.T, dtype="float32") * 2.0
    if end == "residual":
        y = y + g.tensor("residual", y.shape)
    g.output(y, name="y")
    return g


def some_places(rows: int, terms: int) -> Array:
    pairs = np.array([(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)], np.int8)
    return pairs[np.random.default_rng(terms).integers(0, 6, (rows, terms // 4))].reshape(rows, terms // 2)


@pytest.fixture
def preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has products be sparse that are too small for that to be faster."""
    monkeypatch.setattr(sparse_products, "MARGIN", 0)


def sparse(planned: Plan) -> int:
    """Returns how many kernels multiply sparsely."""
    return sum(any(n.op.role is Role.SPARSE_MATMUL for n in k.group.nodes) for k in planned.kernels)


def test_layers_are_sparse_on_hopper_alone() -> None:
    graph = layer(2048, 2048, 2048)
    for name, wanted in (("h200", 1), ("sm_80", 0), ("sm_120", 0)):
        planned = plan(graph, Options(target=target(name)))
        assert (sparse(planned), len(planned.kernels)) == (wanted, 1), name
        assert planned.packing is not None


def test_large_products_have_large_tiles() -> None:
    (kernel,) = plan(layer(8192, 8192, 8192), HOPPER).kernels
    assert "tile 256 x 192 x 64 a block" in kernel.source.code
    assert "(m64n192k32)" in kernel.source.code
    check_golden("sparse_hopper", kernel.source.code)


@pytest.mark.parametrize("shape", [(70, 100, 136), *quick((3, 24, 148), (7, 40, 64), (65, 64, 72))], ids=str)
@pytest.mark.usefixtures("preferred")
def test_ragged_layers(shape: tuple[int, int, int]) -> None:
    graph = layer(*shape)
    (made,) = executables([graph], arch="sm_90a")
    assert sparse(made.plan) == (shape[2] % 8 == 0)
    result = check_executable(made, random_inputs(graph))
    assert result.ok, result


@pytest.mark.slow
@pytest.mark.usefixtures("preferred")
def test_every_kind_of_layer() -> None:
    graphs = [
        layer(70, 96, 128, "float16"),
        layer(33, 72, 96, given=True),
        layer(20, 40, 24, "float16", given=True),
        layer(34, 72, 64, end="first"),
        layer(35, 40, 64, end="first and bias"),
        layer(40, 136, 64, end="float"),
        layer(9, 72, 64, end="residual", batch=3),
    ]
    made = executables(graphs, arch="sm_90a")
    assert [sparse(e.plan) for e in made] == [1] * len(graphs)
    are_right(made)


@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("arch", QUICK_ARCHS)
def test_other_layers_multiply_zeros(arch: str) -> None:
    graphs = [layer(5, 8, 12, "int8", end=""), layer(6, 8, 16, "float8_e4m3", end=""), layer(9, 12, 20, "float32")]
    graphs += [layer(0, 8, 64), layer(3, 8, 20, given=True), layer(2, 1, 4, end="")]
    made = executables(graphs, arch=arch)
    assert not any(sparse(e.plan) for e in made)
    are_right(made)


def test_no_parameter_is_pruned_in_every_call() -> None:
    g = fg.Graph("activations", io_dtype="bfloat16")
    x, w = g.tensor("x", (64, 128)), g.tensor("w", (64, 128))
    g.output(x @ g.sparse_2_4(w).T)
    planned = plan(g, HOPPER)
    assert sparse(planned) == 0
    assert any("would be packed in every call" in d.reason for d in planned.partition.decisions)
    assert sparse(plan(layer(64, 64, 128), Options(target=target("h200"), strict=True))) == 0
    assert sparse(plan(layer(64, 64, 128), Options(target=target("h200"), prepack=0))) == 0


@pytest.mark.slow
@pytest.mark.usefixtures("preferred")
def test_a_block_of_layers() -> None:
    g = fg.Graph("block", io_dtype="bfloat16")
    x, scale = g.tensor("x", (2, 20, 64)), g.tensor("scale", (64,), parameter=True)
    w = [g.sparse_2_4(g.tensor(f"w{n}", s, parameter=True)) for n, s in enumerate(((96, 64), (96, 64), (64, 96)))]
    normal = g.rmsnorm(x, scale, axes=2, epsilon=1e-5)
    gated = g.swish(normal @ w[0].T) * (normal @ w[1].T)
    g.output(x + gated @ w[2].T, name="y")
    made = executables([g], arch="sm_90a")
    assert (sparse(made[0].plan), len(made[0].plan.kernels)) == (3, 4)
    are_right(made)


@pytest.mark.slow
def test_sizes_that_vary_multiply_zeros() -> None:
    g = fg.Graph("varies", io_dtype="bfloat16")
    x, w = g.tensor("x", (fg.Dim("n", 1, 64), 64)), g.tensor("w", (24, 64), parameter=True)
    g.output(x @ g.sparse_2_4(w).T, name="y")
    executable = g.compile("cpu", target="sm_90a")
    random = np.random.default_rng(0)
    for rows in (3, 40):
        arrays = [random.standard_normal(shape).astype("bfloat16") for shape in ((rows, 64), (24, 64))]
        wanted = arrays[0].astype(np.float64) @ np.asarray(pruned(arrays[1])).astype(np.float64).T
        found = np.asarray(executable(x=arrays[0], w=arrays[1])).astype(np.float64)
        np.testing.assert_allclose(found, wanted, rtol=0.01, atol=0.05)


#: Ways to share the tiles of a sparse product.
KINDS = ("split", "pingpong", "two", "three", "doubled")


def is_kind(s: Any, kind: str) -> bool:
    """Tells whether a schedule shares tiles in one of the ways."""
    if not isinstance(s, WgmmaSchedule):
        return False
    alone = not (s.pingpong or s.doubled or s.split_k > 1)
    what = {"split": s.split_k > 1, "pingpong": s.pingpong, "doubled": s.doubled}
    return what.get(kind, alone and s.groups == {"two": 2, "three": 3}.get(kind))


def chooser(kind: str, machine: Target) -> Chooser:
    """Returns what chooses the first schedule of a kind for contractions that have one."""

    def chosen(spec: KernelSpec, _: Any) -> Choice:
        every = FAMILY.schedules(spec, machine) if isinstance(spec, ContractionSpec) else ()
        return Choice(next((s for s in every if is_kind(s, kind)), None) or best_schedule(spec, machine))

    return chosen


@pytest.mark.slow
@pytest.mark.usefixtures("preferred")
@pytest.mark.parametrize("kind", ["split", "pingpong", *quick("doubled", "two", "three")])
def test_schedules_of_every_kind(kind: str) -> None:
    terms, multiprocessors = (640, 132) if kind == "split" else (256, 3)
    graph, few = layer(150, 300, terms), Options(target=replace(target("sm_90a"), sms=multiprocessors))
    choose = chooser(kind, few.target)
    made = CpuExecutable(graph, few, order="late", planner=lambda g, o: plan(g, o, choose=choose))
    assert is_kind(made.plan.kernels[0].choice.schedule, kind)
    result = check_executable(made, random_inputs(graph))
    assert result.ok, result


def test_reports_tell_what_is_lost() -> None:
    g = fg.Graph("told", io_dtype="bfloat16")
    x = g.tensor("x", (2048, 1024))
    w = g.constant(np.tile(np.array([[4, 3, 2, 1]], "bfloat16"), (1024, 256)), "w")
    g.output(x @ g.sparse_2_4(w, name="kept").T, name="y")
    g.output(x @ g.sparse_2_4(g.tensor("v", (1024, 1024), parameter=True), name="unknown").T, name="z")
    planned = plan(g, HOPPER)
    assert planned.pruned == {"kept": pytest.approx((5 / 30) ** 0.5), "unknown": None}
    text = " ".join(explain_text(describe(planned, target("h200"))).split())
    assert "kept: 40.8% of the norm is lost" in text
    assert "unknown: what is lost depends on the values of a call" in text
    assert text.count("on sparse tensor cores: estimated to be") == 2


@pytest.mark.usefixtures("preferred")
def test_what_is_left_out_is_not_multiplied() -> None:
    graph = layer(16, 64, 64, end="")
    (made,) = executables([graph], arch="sm_90a")
    w, x = np.zeros((64, 64), made.graph.tensors["w"].dtype.numpy), np.ones((16, 64), np.float32)
    w[:, ::4], w[:, 1::4] = 2, 1
    x[3, 2::4], x[4, 0] = np.inf, np.nan
    result = check_executable(made, {"x": x.astype(w.dtype), "w": w})
    assert result.ok, result
    y = np.asarray(made(x=x.astype(w.dtype), w=w)).astype(np.float32)
    assert np.isnan(y[4]).all()
    assert (np.delete(y, 4, axis=0) == 48).all()


def test_words_are_those_of_threads() -> None:
    op = EVERY["sparse_2_4_words"]
    places = some_places(70, 200)
    found = op.reference(places)
    assert found.shape == (4, 2, 128)
    padded = np.tile(np.array([0, 1], np.int8), (128, 64))
    padded[:70, :100] = places
    for stage in range(4):
        for block in range(2):
            part = padded[64 * block : 64 * block + 64, 32 * stage : 32 * stage + 32]
            assert np.array_equal(found[stage, block], words(part)), (stage, block)


@pytest.mark.parametrize("element", ["bfloat16", "float16"])
def test_one_product(element: str) -> None:
    image, metadata, wanted = arguments(element)
    module, y = build([source(element)], cache=default_cache()), np.full((64, 32), np.nan, np.float32)
    module.launch(f"sparse_{element}", [a.ctypes.data for a in (image, metadata, y)])
    assert np.array_equal(y, wanted)
    metadata[77] = 0x44444440
    with pytest.raises(KernelError, match="metadata 0x44444440: terms 0 and 0 of row 35 do not ascend"):
        module.launch(f"sparse_{element}", [a.ctypes.data for a in (image, metadata, y)])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_compile_without_spills(arch: str) -> None:
    machine = target("h200" if arch == "sm_90a" else arch)
    graphs = [layer(8192, 8192, 8192, end=""), layer(512, 4096, 4096), layer(16, 4096, 4096, "float16", given=True)]
    every = [k.source for g in graphs for k in plan(g, Options(target=machine)).every_kernel]
    for compiled in compile_kernels(every, arch, cache=default_cache()):
        assert compiled.spill_bytes == 0, compiled.name
        assert "C75" not in compiled.log
