"""Winograd's convolution: its transforms on the CPU engine, its error bound, when it is chosen, what `explain` says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, share
from kernel_cases import Case, check_cases, rendered

import codegen
import fusegraph as fg
from codegen.winograd import WinogradSchedule, WinogradSpec
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import AttributeValueError, WorkspaceError
from fusegraph.lowering.base import Options
from fusegraph.ops import winograd
from fusegraph.passes import split_contractions
from fusegraph.passes.algorithms import choose
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, compare, random_inputs, rounding_of, run
from fusegraph.report.explain import describe, explain_text
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.cache import default_cache

TILES = ("winograd_2x2", "winograd_4x4")
GPU = pytest.mark.skipif(not driver.available(), reason="no GPU")


def convolution(
    shape: tuple[int, ...] = (2, 5, 7, 9),
    filters: int = 6,
    algorithm: str | None = "winograd_4x4",
    layout: str = "NHWC",
    op: str = "conv_fprop",
    out: str | None = None,
    taps: str = "KCRS",
    epilogue: bool = True,
    **attributes: Any,
) -> fg.Graph:
    """Builds relu(convolution + bias) with ``filters`` output channels, of an image or loss of this shape."""
    graph = fg.Graph("convolution")
    x = graph.tensor("x", shape, layout=layout)
    both = (filters, shape[1]) if op == "conv_fprop" else (shape[1], filters)
    w = graph.tensor("w", (*both, 3, 3), layout=taps)
    y = getattr(graph, op)(x, w, algorithm=algorithm, name="conv", **{"padding": 1, **attributes})
    if epilogue:
        y = graph.relu(y + graph.tensor("bias", (filters, 1, 1)))
    graph.output(y, name="y", layout=out)
    return graph


def widest(spec: Any) -> Any:
    """Returns the schedule with the most channels per thread for Winograd's transforms."""
    return codegen.schedules(spec)[-1 if isinstance(spec, WinogradSpec) else 0]


def wide_offsets(spec: Any) -> Any:
    return replace(next(s for s in codegen.schedules(spec) if hasattr(s, "itype")), itype="int64")


# ---- the algorithm


@pytest.mark.parametrize("tile", [2, 4])
@pytest.mark.parametrize("mode", ["cross_correlation", "convolution"])
def test_the_transforms_make_a_convolution(tile, mode):
    rng = np.random.default_rng(tile)
    for op, padding in (
        ("conv_fprop", 1),
        ("conv_fprop", ((0, 2), (3, 1))),
        ("conv_dgrad", 0),
        ("conv_dgrad", ((2, 1), (0, 3))),
    ):
        graph = convolution(op=op, padding=padding, mode=mode, epilogue=False)
        (node,) = graph.nodes
        x, w = (rng.standard_normal(t.shape) for t in node.inputs)
        of_filter, of_input, of_output = winograd.transforms(node.op.role, node.attributes, node.output.shape, tile)
        u, v = winograd.filter_transform(w, **of_filter), winograd.input_transform(x, **of_input)
        direct = node.op.reference(x, w, **node.attributes)
        np.testing.assert_allclose(winograd.output_transform(v @ u, **of_output), direct, atol=1e-12)


def test_shapes_layouts_and_paddings():
    check_cases(
        [
            convolution(),
            convolution(algorithm="winograd_2x2", layout="NCHW"),
            convolution((1, 8, 8, 8), 8, layout="NCHW", out="NHWC", taps="KRSC"),
            convolution((2, 4, 5, 12), 3, op="conv_dgrad", padding=0),
            Case(convolution((1, 8, 6, 6), 4, mode="convolution"), schedule=widest),
        ],
        guard=True,
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", TILES)
def test_every_shape_layout_and_schedule(algorithm):
    graphs = []
    for layout, out in (("NHWC", None), ("NCHW", "NHWC"), ("NCHW", None))[:: 1 if algorithm == TILES[1] else 2]:
        graphs += [
            convolution(layout=layout, out=out, algorithm=algorithm),
            convolution((1, 8, 8, 8), 8, algorithm, layout, out=out, taps="KRSC"),
            convolution((2, 4, 5, 12), 3, algorithm, layout, "conv_dgrad", out, padding=0),
            convolution((1, 8, 4, 8), 4, algorithm, layout, out=out, padding=((2, 0), (1, 3)), mode="convolution"),
            convolution((1, 4, 6, 6), 4, algorithm, layout, "conv_dgrad", out, padding=3, mode="convolution"),
            convolution((1, 4, 1, 1), 8, algorithm, layout, out=out, epilogue=False),
            convolution((1, 1, 3, 3), 1, algorithm, layout, out=out, padding=0),
            convolution((3, 1, 4, 70), 1, algorithm, layout, out=out),
        ]
    wide = [Case(g, schedule=widest) for g in graphs[1:6]]
    check_cases([*graphs, *wide, *(Case(g, schedule=wide_offsets) for g in graphs[:2])], guard=True)


def strided() -> fg.Graph:
    """Builds a convolution on every second image and channel of larger arrays, and on rows with gaps."""
    graph = fg.Graph("strided")
    x = graph.tensor("x", (2, 4, 6, 7), strides=(2 * 8 * 6 * 9, 2, 72, 8))
    w = graph.tensor("w", (4, 4, 3, 3), strides=(100, 20, 5, 1))
    y = graph.conv_fprop(x, w, padding=1, algorithm="winograd_4x4")
    graph.output(y, name="y", strides=(1000, 240, 32, 4))
    return graph


def epilogues() -> fg.Graph:
    """Builds an epilogue with broadcasts of every kind, two outputs, an index and a result in bfloat16."""
    graph = fg.Graph("epilogues")
    x = graph.tensor("x", (2, 4, 6, 8), layout="NHWC")
    y = graph.conv_fprop(x, graph.tensor("w", (8, 4, 3, 3)), padding=1, algorithm="winograd_4x4", name="conv")
    residual = graph.tensor("residual", (2, 8, 6, 8), layout="NHWC")
    row, image = graph.tensor("row", (6, 1)), graph.tensor("image", (2, 1, 1, 1))
    scaled = y * graph.tensor("channel", (8, 1, 1)) + residual
    graph.output(scaled, name="scaled")
    both = graph.swish(scaled * row + image) + graph.cast(graph.gen_index(y, axis=3), "float32")
    graph.output(both, name="rounded", dtype="bfloat16")
    return graph


def narrow_result() -> fg.Graph:
    graph = convolution((1, 3, 5, 5), 3, layout="NCHW", epilogue=False, dtype="float16")
    graph.name = "narrow"
    return graph


def shared() -> fg.Graph:
    """Builds two convolutions of one image, and one with the same filter twice."""
    graph = fg.Graph("shared")
    x, other = (graph.tensor(n, (1, 4, 6, 6), layout="NHWC") for n in ("x", "other"))
    w, v = (graph.tensor(n, (4, 4, 3, 3)) for n in ("w", "v"))
    pairs = {"xw": (x, w), "xv": (x, v), "ow": (other, w)}
    for name, (image, taps) in pairs.items():
        graph.output(graph.conv_fprop(image, taps, padding=1, algorithm="winograd_2x2"), name=name)
    return graph


def constant_filter() -> fg.Graph:
    graph = fg.Graph("constant")
    x = graph.tensor("x", (1, 4, 6, 6), layout="NHWC")
    w = np.random.default_rng(3).standard_normal((8, 4, 3, 3)).astype(np.float32)
    graph.output(graph.conv_fprop(x, graph.constant(w), padding=1, algorithm="winograd_4x4"), name="y")
    return graph


def chain() -> fg.Graph:
    """Builds a convolution of a convolution's result, whose internal names a user gave to other tensors."""
    graph = fg.Graph("chain")
    x, w = graph.tensor("x", (1, 4, 6, 6)), graph.tensor("conv filter", (4, 4, 3, 3))
    first = graph.conv_fprop(x, w, padding=1, algorithm="winograd_4x4", name="conv")
    second = graph.conv_fprop(graph.relu(first), w, padding=1, algorithm="winograd_2x2", name="conv products")
    graph.output(second, name="conv input")
    return graph


def test_strides_epilogues_constants_and_sharing():
    graphs = [strided(), epilogues(), narrow_result(), shared(), constant_filter(), chain()]
    check_all(graphs)

    def ops(graph: fg.Graph) -> list[str]:
        return [n.op.name for n in plan(graph).simplified.nodes]

    assert ops(shared()).count("winograd_input") == ops(shared()).count("winograd_filter") == 2
    assert ops(constant_filter()) == ["winograd_input", "matmul", "winograd_output"]
    assert len(plan(epilogues()).kernels) == 4


@pytest.mark.slow
def test_without_fusion_and_strict():
    graphs = [epilogues(), chain(), convolution()]
    check_all(graphs, fusion=False)
    check_all(graphs, strict=True)


def test_addresses_need_not_be_aligned():
    made = CpuExecutable(convolution((1, 8, 6, 6), 8), Options(), lazy=True)
    given = random_inputs(made.graph, 1)
    shifted = {n: _shifted(a) for n, a in given.items()}
    result = made(*(shifted[t.name] for t in made.graph.inputs))
    checks = compare(made.graph, given, {"y": result}, rounding_of(made))
    assert all(c.ok for c in checks)


def _shifted(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns a copy of the array 4 bytes past a multiple of 16, with the same strides."""
    room = np.zeros(array.nbytes + 32, np.uint8)
    start = -room.ctypes.data % 16 + 4
    moved = np.ndarray(array.shape, array.dtype, room.data, start, array.strides)
    moved[...] = array
    return moved


# ---- numbers


def executables(*graphs: fg.Graph) -> list[CpuExecutable]:
    made = [CpuExecutable(g, Options(), lazy=True) for g in graphs]
    build_together(made)
    return made


def test_errors_are_about_those_of_the_direct_sum(monkeypatch):
    monkeypatch.setattr(split_contractions, "weighed", lambda *_: None)  # the errors of sums in parts are smaller
    algorithms = ("direct", *TILES)
    made = executables(*(convolution((1, 64, 12, 12), 8, a, epilogue=False) for a in algorithms))
    given = random_inputs(made[0].graph, 5)
    error = {}
    for name, exe in zip(algorithms, made):
        (found,) = compare(exe.graph, given, run(exe, given), rounding_of(exe))
        assert found.ok
        assert found.undecided == 0
        error[name] = found.rel_error
    assert error["winograd_2x2"] < 1.2 * error["direct"]
    assert error["winograd_4x4"] < 3.5 * error["direct"]


def test_the_bound_finds_wrong_results():
    """One product of 64 x 9 left out of one result is found, as is a result of the neighbour."""
    (exe,) = executables(convolution((1, 64, 12, 12), 4, epilogue=False))
    given = random_inputs(exe.graph, 2)
    (good,) = run(exe, given).values()
    x, w = given["x"], given["w"]
    missing, moved = good.copy(), good.copy()
    missing[0, 1, 5, 6] -= x[0, 7, 5, 6] * w[1, 7, 1, 1]
    moved[0, 2, 3, 3] = good[0, 2, 3, 4]
    for bad in (missing, moved):
        (result,) = compare(exe.graph, given, {"y": bad}, rounding_of(exe))
        assert result.wrong == 1


def test_what_is_not_finite_stays_in_its_tiles():
    (exe,) = executables(convolution((1, 4, 16, 16), 4, epilogue=False, padding=0))
    given = random_inputs(exe.graph, 2)
    given["x"][0, 1, 1, 2] = np.nan
    given["x"][0, 2, 13, 8] = np.inf
    assert check_executable(exe, given).ok
    (y,) = run(exe, given).values()
    lost = np.zeros((14, 14), bool)
    lost[0:4, 0:4] = lost[8:14, 4:12] = True  # the tiles whose patches of 6 x 6 hold one of them
    assert np.isfinite(y[0][:, ~lost]).all()
    assert not np.isfinite(y[0][:, :2, :3]).any()  # all that the NaN takes part in
    assert not np.isfinite(y[0][:, 11:14, 6:9]).any()


def test_what_overflows_is_not_decided():
    (exe,) = executables(convolution((1, 2, 8, 8), 2, epilogue=False))
    given = random_inputs(exe.graph, 2)
    given["x"][0, 0, 1, 1] = 3e38
    result = check_executable(exe, given)
    assert result.ok
    assert 0 < result.outputs[0].undecided < exe.graph.outputs[0].size
    # Products that are finite, whose sums are not.
    given["x"][0, 0, 1, 1], given["w"][0, 0, 0, 0] = 2e19, 1e18
    result = check_executable(exe, given)
    assert result.ok
    assert result.outputs[0].undecided > 0


# ---- the choice


def chosen(graph: fg.Graph, **options: Any) -> tuple[str, str]:
    (found,) = choose(graph, Options(**options)).notes["algorithms"].values()
    return found.name, found.reason


def large(dtype: str = "float32", compute: str = "float32", **how: Any) -> fg.Graph:
    graph = fg.Graph("large", io_dtype=dtype, compute_dtype=compute)
    taps, groups = how.pop("taps", 3), how.get("groups", 1)
    x = graph.tensor("x", (16, 256, 56, 56), layout="NHWC")
    w = graph.tensor("w", (256, 256 // groups, taps, taps))
    graph.output(graph.conv_fprop(x, w, padding=taps // 2, **how), name="y")
    return graph


@pytest.mark.parametrize(
    ("graph", "options", "name", "text"),
    [
        (large(), {}, "winograd F(4x4,3x3)", "may spread over 4x4 results"),
        (large(algorithm="winograd_2x2"), {}, "winograd F(2x2,3x3)", "asked for"),
        (large(algorithm="winograd_2x2"), {"strict": True}, "winograd F(2x2,3x3)", "asked for"),
        (large(algorithm="direct"), {}, "implicit GEMM", "'direct' was asked for"),
        (large(), {"strict": True}, "implicit GEMM", "strict"),
        (large(), {"workspace": 10**8}, "implicit GEMM", "more than 100000000"),
        (large(stride=2), {}, "implicit GEMM", "a stride of 1"),
        (large(dilation=2), {}, "implicit GEMM", "a dilation of 1"),
        (large(groups=2), {}, "implicit GEMM", "one group"),
        (large("bfloat16"), {}, "implicit GEMM", "not bfloat16"),
        (large(compute="tf32"), {}, "implicit GEMM", "tf32"),
        (large(compute="float64"), {}, "implicit GEMM", "float64"),
        (large(taps=5), {}, "implicit GEMM", "not 5x5"),
        (convolution((1, 16, 8, 8), 16, None), {}, "implicit GEMM", "of the time of the direct sum"),
        (convolution((1, 3, 64, 64), 8, None), {}, "direct", "few channels"),
        (convolution((16, 256, 28, 28), 256, None), {}, "winograd F(4x4,3x3)", "fewer products"),
        (convolution((1, 512, 7, 7), 512, None), {}, "implicit GEMM", "of the time of the direct sum"),  # in parts
        (convolution((0, 16, 8, 8), 16, None), {}, "implicit GEMM", "nothing to multiply"),
        (convolution((1, 0, 8, 8), 16, None), {}, "implicit GEMM", "nothing to multiply"),
    ],
)
def test_what_is_chosen_and_why(graph, options, name, text):
    found, reason = chosen(graph, **options)
    assert found == name
    assert text in reason


def test_one_by_one_is_a_matrix_product():
    graph = fg.Graph("pointwise")
    x, w = graph.tensor("x", (1, 16, 8, 8)), graph.tensor("w", (16, 16, 1, 1))
    graph.output(graph.conv_fprop(x, w), name="y")
    assert chosen(graph)[0] == "matrix product"


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ({"algorithm": "fft"}, "algorithm is None, 'direct', 'winograd_4x4' or 'winograd_2x2', got 'fft'"),
        ({"algorithm": "winograd_4x4", "stride": 2}, "'winograd_4x4' does not do this convolution: .* stride of 1"),
        ({"algorithm": "winograd_2x2", "compute_dtype": "tf32"}, "tf32 has tensor cores"),
    ],
)
@pytest.mark.parametrize("op", ["conv_fprop", "conv_dgrad"])
def test_algorithms_that_there_are_not(op, attributes, text):
    with pytest.raises(AttributeValueError, match=text):
        convolution(op=op, **attributes)


def test_a_limited_workspace_forbids_it():
    graph = convolution((16, 256, 56, 56), 256, None, taps="KRSC")
    assert chosen(graph, workspace=1 << 30)[0].startswith("winograd")
    made = CpuExecutable(graph, Options(), workspace_limit=0, lazy=True)
    assert made.plan is not None
    assert made.plan.memory.size == 0
    with pytest.raises(WorkspaceError):
        CpuExecutable(convolution(algorithm="winograd_4x4"), Options(), workspace_limit=0, lazy=True)


def test_explain_tells_it():
    facts = describe(plan(large()))
    (told,) = facts["algorithms"]
    assert told["node"] == "y"
    assert told["algorithm"] == "winograd F(4x4,3x3)"
    text = " ".join(explain_text(facts).split())
    assert f"convolutions: y: winograd F(4x4,3x3) {told['reason']}" in text
    assert "GB more" in text or "MB more" in text


# ---- sources


def golden_kernels() -> dict[str, str]:
    graph = fg.Graph("winograd")
    x = graph.tensor("x", (64, 256, 56, 56), layout="NHWC")
    y = graph.conv_fprop(x, graph.tensor("w", (256, 256, 3, 3), layout="KRSC"), padding=1, name="conv")
    graph.output(graph.relu(y + graph.tensor("bias", (256, 1, 1))), name="y")
    return {k.group.lowered.spec.transform: k.source.code for k in plan(graph).kernels if k.group.family == "winograd"}


@pytest.mark.parametrize("transform", ["filter", "input", "output"])
def test_golden_source(transform):
    check_golden(f"winograd_{transform}", golden_kernels()[transform])


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_kernels_compile_without_spills(arch):
    sources = []
    for algorithm in TILES:
        for graph in (
            convolution((64, 256, 56, 56), 256, algorithm),
            convolution((64, 256, 7, 7), 256, algorithm, "NCHW"),
        ):
            for kernel in plan(graph).kernels:
                spec = kernel.group.lowered.spec
                if isinstance(spec, WinogradSpec):
                    sources += [rendered(spec, s) for s in codegen.schedules(spec) if s.threads == 256]
    for kernel in nvrtc.compile_kernels(share(arch, list(dict.fromkeys(sources))), arch, cache=default_cache()):
        assert kernel.spill_bytes == kernel.stack_bytes == 0
        assert kernel.registers * 256 <= 65536


def test_a_width_that_does_not_suit_is_refused():
    graph = convolution((1, 5, 6, 6), 5)
    spec = next(s for k in plan(graph).kernels if isinstance(s := k.group.lowered.spec, WinogradSpec))
    with pytest.raises(ValueError, match="WinogradSchedule"):
        rendered(spec, WinogradSchedule(2, 256, "int32"))


@pytest.mark.gpu
@GPU
def test_on_the_gpu():
    graphs = [strided(), epilogues(), narrow_result(), shared(), constant_filter(), chain()]
    for algorithm in TILES:
        for layout in ("NHWC", "NCHW"):
            graphs.append(convolution((3, 65, 31, 33), 66, algorithm, layout))
            graphs.append(convolution((2, 64, 28, 28), 64, algorithm, layout, "conv_dgrad"))
    check_on_gpu(graphs)
