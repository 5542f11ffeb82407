"""Long sums of products in parts: the nodes on the CPU engine, in every form, and which contractions are split."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from choosing import always
from kernel_cases import Case, check_cases

import fusegraph as fg
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.target import target
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.graph import Graph, Node
from fusegraph.ops.parts import PARTS, part_length
from fusegraph.passes import filter_gradients, split_contractions
from fusegraph.passes.split_contractions import best_cut
from fusegraph.plan import Kernel, plan
from fusegraph.report.explain import describe


def product(m: int, n: int, k: int, dtype: str = "float32", batch: tuple[int, ...] = (), turned: bool = False) -> Graph:
    """Builds gelu(a @ b + bias), or the plain product for integers."""
    graph = fg.Graph("product", io_dtype=dtype)
    a = graph.tensor("a", (*batch, m, k), strides=(1, m) if turned else None)
    b = graph.tensor("b", (k, n))
    y = graph.matmul(a, b, name="sum")
    if y.dtype.is_float:
        y = graph.gelu(y + graph.tensor("bias", (n,)))
    graph.output(y, name="y")
    return graph


def forward(shape: tuple[int, ...], filters: int, dtype: str = "float32", layout: str = "NHWC", **how: Any) -> Graph:
    graph = fg.Graph("forward", io_dtype=dtype)
    x = graph.tensor("x", shape, layout=layout)
    w = graph.tensor("w", (filters, shape[1], 3, 3), layout=layout)
    y = graph.conv_fprop(x, w, **{"padding": 1, **how}, name="conv")
    graph.output(graph.relu(y + x) if y.shape == x.shape else y, name="y")
    return graph


def backward(shape: tuple[int, ...], filters: int, dtype: str = "float32", layout: str = "NHWC", **how: Any) -> Graph:
    """Builds the gradient of a filter, scaled."""
    graph = fg.Graph("backward", io_dtype=dtype)
    x = graph.tensor("image", shape, layout=layout)
    how = {"padding": 1, "stride": 1, **how}
    reach = 2 * how.get("dilation", 1) + 1
    out = [(size + 2 * how["padding"] - reach) // how["stride"] + 1 for size in shape[2:]]
    loss = graph.tensor("loss", (shape[0], filters, *out), layout=layout)
    y = graph.conv_wgrad(x, loss, taps=3, name="dw", **how)
    graph.output(y * 0.5 if y.dtype.is_float else y, name="scaled")
    return graph


def transposed(loss: tuple[int, ...], channels: int, dtype: str = "float32", layout: str = "NHWC", **how: Any) -> Graph:
    """Builds relu of the gradient of an image."""
    graph = fg.Graph("transposed", io_dtype=dtype)
    dy = graph.tensor("loss", loss, layout=layout)
    w = graph.tensor("w", (loss[1], channels, 3, 3), layout=layout)
    graph.output(graph.relu(graph.conv_dgrad(dy, w, **{"padding": 1, **how}, name="dx")), name="y")
    return graph


@pytest.fixture(autouse=True)
def no_bands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves all filter gradients to tiled products."""
    monkeypatch.setattr(filter_gradients, "weighed", lambda *_: None)


@pytest.fixture
def in_parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Splits every contraction that allows it into so many parts."""

    def force(count: int) -> None:
        monkeypatch.setattr(split_contractions, "weighed", always(lambda node: count if node.op in PARTS else 0))

    return force


def added(kernel: Kernel) -> None:
    """Parts are added up by a reduction, or by a pointwise kernel that turns them."""
    assert kernel.group.family in ("rows", "pointwise")


def on_hopper(made: CpuExecutable) -> None:
    assert made.plan is not None
    first, second = made.plan.kernels
    assert isinstance(first.choice.schedule, WgmmaSchedule), first.choice
    added(second)


def two_kernels(made: CpuExecutable) -> None:
    assert made.plan is not None
    first, second = made.plan.kernels
    assert first.group.family == "contraction"
    added(second)


def hopper(graph: Graph) -> Case:
    return Case(graph, arch="sm_90a", check=on_hopper)


@pytest.mark.slow
def test_parts_in_every_form(in_parts):
    in_parts(2)
    check_cases(
        [
            Case(product(7, 9, 20), check=two_kernels),
            Case(backward((4, 3, 5, 6), 4, layout="NCHW"), check=two_kernels),
            Case(backward((2, 8, 6, 7), 5, "bfloat16", stride=2), check=two_kernels),
            Case(backward((2, 34, 5, 4), 36, groups=2), check=two_kernels),
            Case(transposed((2, 8, 6, 7), 5, stride=2), check=two_kernels),
            hopper(product(70, 40, 256, "bfloat16")),
            hopper(backward((4, 64, 8, 8), 24, "bfloat16")),
            hopper(backward((4, 64, 8, 8), 64, "bfloat16", groups=2)),
            hopper(backward((4, 32, 7, 5), 40, "bfloat16")),  # parts end within an image
            hopper(backward((2, 32, 1, 3), 40, "float16")),  # the second part has nothing
            hopper(transposed((1, 128, 8, 8), 24, "bfloat16", stride=2)),
        ],
        guard=True,
    )


@pytest.mark.slow
def test_more_shapes_and_types(in_parts):
    in_parts(4)
    cases = [
        product(5, 6, 12, dtype, batch, turned)
        for dtype, batch, turned in (
            ("float64", (), True),
            ("int8", (), False),
            ("int64", (2,), False),
            ("float16", (2, 3), False),
            ("bfloat16", (), True),
        )
    ]
    cases += [forward((2, 8, 5, 6), 8), forward((1, 8, 5, 6), 8, "bfloat16", "NCHW")]
    cases += [transposed((2, 8, 5, 6), 8, layout="NCHW", dilation=2, stride=2, padding=2), transposed((1, 4, 5, 6), 8)]
    cases += [
        backward((4, 3, 5, 6), 4, "float64", mode="convolution"),
        backward((8, 2, 5, 6), 4, "int8"),
        backward((4, 5, 9, 7), 6, "float16", "NCHW", dilation=2, padding=2),
    ]
    on_tensor_cores = [forward((1, 256, 9, 8), 40, "bfloat16"), backward((8, 64, 10, 10), 40, "float16", padding=0)]
    check_cases([*(Case(g, check=two_kernels) for g in cases), *map(hopper, on_tensor_cores)], guard=True)


def test_last_parts_have_less(in_parts):
    """A prime number of products, in parts of whole stages: the last one has 5, or all that there are."""
    in_parts(3)
    cases = [product(5, 6, 133), product(5, 6, 133, "bfloat16", (2,)), product(9, 7, 133, "float16", turned=True)]
    cases += [product(5, 6, 131, "float64"), product(5, 6, 149, "int8")]
    nothing = [Case(product(5, 6, 67), check=two_kernels), Case(product(4, 40, 61, "bfloat16"), arch="sm_90a")]
    check_cases([*(Case(g, check=two_kernels) for g in cases), *nothing], guard=True)


@pytest.mark.parametrize("size", [7901, 65537, 2913, 4000, 127])
def test_counts_of_parts(size):
    graph = product(4, 16, size, "bfloat16")
    (node,) = (n for n in graph.nodes if n.op in PARTS)
    cut = split_contractions._cut(node, fg.bfloat16, graph, target("h200"))
    for count in cut.counts if cut is not None else ():
        length = part_length(size, count)
        assert (count - 1) * length < size <= count * length
    assert size < 256 or (cut is not None and min(abs(n - 16) for n in cut.counts) <= 8)


def test_reference():
    rng = np.random.default_rng(1)
    made = product(3, 4, 12), forward((2, 6, 5, 5), 3), backward((6, 2, 5, 5), 3), transposed((2, 6, 5, 5), 3, stride=2)
    for graph in made:
        node = next(n for n in graph.nodes if n.op in PARTS)
        x, y = (rng.standard_normal(t.shape) for t in node.inputs)
        whole = node.op.reference(x, y, **node.attributes)
        parts = PARTS[node.op].reference(x, y, parts=3, **node.attributes)
        assert parts.shape == (3, *whole.shape)
        np.testing.assert_allclose(parts.sum(0), whole)
    x, y = rng.standard_normal((2, 133)), rng.standard_normal((133, 3))
    matmul = next(op for op in PARTS if op.name == "matmul")
    parts = PARTS[matmul].reference(x, y, parts=3, **matmul.attributes)
    np.testing.assert_allclose(parts[2], x[:, 128:] @ y[128:])
    np.testing.assert_allclose(parts.sum(0), x @ y)


def split_of(graph: Graph) -> int:
    (node,) = (n for n in graph.nodes if n.op in PARTS)
    return best_cut(node, graph, target("h200"))[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_split(dtype):
    long, few = product(64, 64, 1 << 16, dtype), backward((64, 64, 56, 56), 64, dtype)
    for graph in (long, few):
        count = split_of(graph)
        assert count > 1
        partial = next(n for n in plan(graph).simplified.nodes if n.op.name.endswith("_parts"))
        assert partial.output.shape[0] == partial.attributes["parts"] == count
        assert partial.output.dtype == fg.float32
    for graph in (
        product(4096, 4096, 4096, dtype),  # enough tiles
        product(64, 64, 256, dtype),  # too short
        backward((2, 8, 6, 6), 8, dtype),
        forward((64, 64, 112, 112), 64, dtype, stride=2),
    ):
        assert split_of(graph) == 1
        assert not any(n.op.name.endswith("_parts") for n in plan(graph).simplified.nodes)


@pytest.mark.parametrize(
    ("graph", "times", "most"),
    [
        (
            forward((1, 512, 7, 7), 512, algorithm="direct"),
            {1: 291, 2: 153, 4: 81, 8: 45, 16: 30, 32: 26, 64: 23.6},
            1.11,
        ),
        (
            backward((64, 64, 56, 56), 64, "bfloat16"),
            {1: 132, 2: 72, 4: 56.5, 8: 51.6, 16: 52, 32: 46.3, 64: 50.8},
            1.05,
        ),
        (
            backward((64, 256, 56, 56), 256, "bfloat16"),
            {1: 330, 2: 343, 4: 358, 8: 386, 16: 310, 32: 321, 64: 353},
            1.05,
        ),
    ],
)
def test_parts_are_those_that_were_fastest_on_an_h200(graph, times, most):
    """Microseconds with a cold cache, by the number of parts."""
    assert times[split_of(graph)] <= most * min(times.values())


def test_products_of_one_kernel_stay_whole():
    graph = fg.Graph("gated")
    x = graph.tensor("x", (64, 4096))
    gate, up = (graph.matmul(x, graph.tensor(name, (4096, 64)), name=f"by {name}") for name in ("v", "w"))
    graph.output(graph.gelu(gate) * up, name="y")
    assert [best_cut(n, graph, target("h200"))[0] for n in graph.nodes if n.op.name == "matmul"] == [1, 1]
    assert split_of(product(64, 64, 4096)) > 1


def test_explain_tells_the_parts():
    graph = backward((64, 64, 56, 56), 64)
    (told,) = describe(plan(graph))["algorithms"]
    assert told["algorithm"] == f"implicit GEMM in {split_of(graph)} parts"


def test_what_stays_whole():
    """fp8, whose sums on tensor cores are rounded; channels of groups; results that are no sums any more."""
    assert split_of(product(64, 64, 1 << 16, "float8_e4m3")) == 1
    graph = fg.Graph("grouped")
    x, w = graph.tensor("x", (1, 2048, 8, 8)), graph.tensor("w", (64, 1024, 3, 3))
    graph.output(graph.conv_fprop(x, w, padding=1, groups=2))
    assert split_of(graph) == 1
    graph = fg.Graph("gradients in groups")
    x, loss = graph.tensor("x", (64, 64, 56, 56)), graph.tensor("loss", (64, 64, 56, 56))
    graph.output(graph.conv_wgrad(x, loss, taps=3, padding=1, groups=2))
    assert split_of(graph) > 1  # images are not
    graph = fg.Graph("narrow", io_dtype="int8")
    a, b = graph.tensor("a", (64, 1 << 16)), graph.tensor("b", (1 << 16, 64))
    graph.output(graph.matmul(a, b, dtype="int8"))
    assert split_of(graph) == 1


def test_parts_are_whole_stages_of_tensor_cores():
    node: Node
    for graph in (product(64, 64, 64 * 1000, "bfloat16"), backward((50, 64, 56, 56), 64, "bfloat16")):
        (node,) = (n for n in graph.nodes if n.op in PARTS)
        count = split_of(graph)
        length = node.inputs[0].shape[-1] if node.op.name == "matmul" else 50 * 56 * 56
        assert count > 1
        assert length // count % 64 == 0
