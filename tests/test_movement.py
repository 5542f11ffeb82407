"""Movement: shapes and errors of its ops, views without kernels, kernels that move elements, on the CPU."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from graphs import check_all, undecided_share

import fusegraph as fg
from codegen.pointwise import schedule, vectors
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs

ALL = ("float32", "bfloat16", "float16", "float64", "float8_e4m3", "float8_e5m2", "int32", "int8", "uint8", "int64",
       "int16", "uint16", "uint32", "uint64", "bool")  # fmt: skip


def families(graph: fg.Graph) -> list[str]:
    return [group.family for group in plan(graph).partition.groups]


def kernels(graph: fg.Graph) -> int:
    return len(plan(graph).kernels)


# ---- shapes, values and errors


def _pixels(x: Any, block: int) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, c, h // block, block, w // block, block).transpose(0, 1, 3, 5, 2, 4)


def _image(x: Any, block: int) -> Any:
    n, c, h, w = x.shape
    return x.reshape(n, c // block**2, block, block, h, w).transpose(0, 1, 4, 2, 5, 3)


#: name -> (what the graph does, what NumPy does) with a tensor of shape (5, 6, 7).
CASES: dict[str, tuple[Any, Any]] = {
    "transpose": (lambda g, x: g.transpose(x, (2, 0, -2)), lambda x: x.transpose(2, 0, 1)),
    "T": (lambda g, x: x.T, lambda x: x.T),
    "method": (lambda g, x: x.transpose(1, 0, 2), lambda x: x.transpose(1, 0, 2)),
    "reshape": (lambda g, x: x.reshape(7, -1), lambda x: x.reshape(7, -1)),
    "regroup": (lambda g, x: g.reshape(x, (3, 10, 7)), lambda x: x.reshape(3, 10, 7)),
    "broadcast": (lambda g, x: g.broadcast(x[:, :1], (2, 5, 4, 7)), lambda x: np.broadcast_to(x[:, :1], (2, 5, 4, 7))),
    "slice": (lambda g, x: x[1:4, ::2, -5:-1], lambda x: x[1:4, ::2, -5:-1]),
    "backwards": (lambda g, x: x[::-1, 4:0:-3, 5::-1], lambda x: x[::-1, 4:0:-3, 5::-1]),
    "integers": (lambda g, x: x[2, ..., None, -1], lambda x: x[2, ..., None, -1]),
    "nothing": (lambda g, x: x[3:3], lambda x: x[3:3]),
    "stops": (lambda g, x: g.slice(x, stops=(2, None, -1)), lambda x: x[:2, :, :-1]),
    "flip": (lambda g, x: g.flip(x, (0, 2)), lambda x: np.flip(x, (0, 2))),
    "pad": (
        lambda g, x: g.pad(x, [1, (0, 2), (3, 0)], value=1),
        lambda x: np.pad(x, [(1, 1), (0, 2), (3, 0)], constant_values=1),
    ),
    "reflect": (
        lambda g, x: g.pad(x, [4, (0, 2), 0], "reflect"),
        lambda x: np.pad(x, [(4, 4), (0, 2), (0, 0)], "reflect"),
    ),
    "reflect nothing": (
        lambda g, x: g.pad(x[:, :0], [1, 0, 2], "reflect"),
        lambda x: np.pad(x[:, :0], [(1, 1), (0, 0), (2, 2)], "reflect"),
    ),
    "replicate": (lambda g, x: g.pad(x, 2, "replicate"), lambda x: np.pad(x, 2, "edge")),
    "concatenate": (
        lambda g, x: g.concatenate(x, x[:, 2:3], x, axis=1),
        lambda x: np.concatenate([x, x[:, 2:3], x], 1),
    ),
    "squeeze": (lambda g, x: g.squeeze(g.unsqueeze(x, (0, -1)), 0), lambda x: x[..., None]),
    "space_to_depth": (
        lambda g, x: g.space_to_depth(x[None, :, :4, :6], 2),
        lambda x: _pixels(x[None, :, :4, :6], 2).reshape(1, 20, 2, 3),
    ),
    "depth_to_space": (
        lambda g, x: g.depth_to_space(x[None, :4], 2),
        lambda x: _image(x[None, :4], 2).reshape(1, 1, 12, 14),
    ),
}


@pytest.mark.parametrize("name", list(CASES))
def test_the_reference_is_numpys(name: str) -> None:
    build, numpy = CASES[name]
    g = fg.Graph("case", io_dtype="int32")
    y = g.output(build(g, g.tensor("x", (5, 6, 7))), name="y")
    x = np.arange(210, dtype=np.int32).reshape(5, 6, 7)
    wanted = numpy(x)
    assert y.shape == wanted.shape
    np.testing.assert_array_equal(np.asarray(g.compile("reference")(x)), wanted)


def test_gather_and_split() -> None:
    g = fg.Graph("gather", io_dtype="int32")
    x, index = g.tensor("x", (5, 6, 7)), g.tensor("index", (2, 4), "int64")
    g.output(g.gather(x, index, axis=-2), name="y")
    for number, part in enumerate(g.split(x, (2, 0, 4), axis=1)):
        g.output(part, name=f"part{number}")
    data = np.arange(210, dtype=np.int32).reshape(5, 6, 7)
    places = np.array([[0, 5, 2, 2], [-1, 6, 2**40, -(2**40)]])
    y, *parts = g.compile("reference")(data, places)
    np.testing.assert_array_equal(y, data[:, [[0, 5, 2, 2], [0, 5, 5, 0]]])
    assert [p.shape for p in parts] == [(5, 2, 7), (5, 0, 7), (5, 4, 7)]
    np.testing.assert_array_equal(np.concatenate(parts, 1), data)
    assert [t.shape for t in g.split(x, 3, axis=1)] == [(5, 2, 7)] * 3


def wrong(g: fg.Graph, x: fg.Tensor) -> list[tuple[Any, type[GraphError], str]]:
    i, f = g.tensor("i", (3,), "int32"), g.tensor("f", (3,), "float32")
    return [
        (lambda: g.transpose(x, (0, 0)), AttributeValueError, "each of the 2 dimensions once"),
        (lambda: g.transpose(x, (0, 1, 2)), AttributeValueError, "each of the 2 dimensions once"),
        (lambda: g.reshape(x, (5, 5)), ShapeError, r"24 elements do not fit the shape \[5, 5\], which has 25"),
        (lambda: g.reshape(x, (-1, 5)), ShapeError, "24 elements do not fit"),
        (lambda: g.reshape(x, (-1, -1)), AttributeValueError, "at most one size is -1"),
        (lambda: g.reshape(x, "ab"), AttributeValueError, "shape is a sequence, each entry an integer"),
        (lambda: g.broadcast(x, (4, 7)), ShapeError, "do not broadcast"),
        (lambda: g.broadcast(x, (6,)), ShapeError, "does not broadcast"),
        (lambda: g.slice(x, (1,)), AttributeValueError, "one entry for each of the 2 dimensions"),
        (lambda: g.slice(x, steps=(0, 1)), AttributeValueError, "steps are not 0"),
        (lambda: x[::0], AttributeValueError, "step of 0"),
        (lambda: x[4], ShapeError, "index 4 is out of range for dimension 0"),
        (lambda: x[0, 0, 0], ShapeError, "3 indices for 'x', which has 2 dimensions"),
        (lambda: x[f], AttributeValueError, "a tensor of integers"),
        (lambda: x[i, i], AttributeValueError, "several tensors"),
        (lambda: x[..., ...], AttributeValueError, "several"),
        (lambda: g.pad(x, -1), AttributeValueError, "slice what is to go"),
        (lambda: g.pad(x, [1]), AttributeValueError, "for each of the 2 dimensions"),
        (lambda: g.pad(x, [1, (1, 2, 3)]), AttributeValueError, "a number or"),
        (lambda: g.pad(x, 4, "reflect"), ShapeError, "size 4 has too few elements"),
        (lambda: g.pad(x, 1, "wrap"), AttributeValueError, "mode is 'constant', 'reflect' or 'replicate'"),
        (lambda: g.pad(i, 1, value=0.5), AttributeValueError, "no int32"),
        (lambda: g.concatenate(x, g.tensor("z", (4, 5)), axis=0), ShapeError, "differ beyond axis 0"),
        (lambda: g.concatenate(x, i), DTypeError, "float32 and int32; cast one"),
        (lambda: g.concatenate(x, f), ShapeError, "different ranks"),
        (lambda: g.concatenate(), GraphError, "one or more tensors"),
        (lambda: g.gather(x, f), DTypeError, "index holds integers, got float32"),
        (lambda: g.gather(x, i, axis=2), AttributeValueError, "axis 2 is not one of the 2 axes"),
        (lambda: g.gather(g.slice(x, (4, 0)), i), ShapeError, "no elements to take"),
        (lambda: g.split(x, 5), ShapeError, "does not split into 5 equal parts"),
        (lambda: g.split(x, (1, 2)), ShapeError, "do not add up"),
        (lambda: g.squeeze(x, 0), ShapeError, "has size 4, not 1"),
        (lambda: g.space_to_depth(x, 2), ShapeError, "no image"),
        (lambda: g.depth_to_space(x, 0), AttributeValueError, "positive integer"),
        (lambda: iter(x), TypeError, "not iterable"),
    ]  # type: ignore[list-item]


def test_errors_say_what_is_wrong() -> None:
    g = fg.Graph("errors")
    for call, kind, text in wrong(g, g.tensor("x", (4, 6))):
        with pytest.raises(kind, match=text):
            call()


# ---- numbers


def moved(dtype: str, every: int = 1) -> list[fg.Graph]:
    """Returns graphs of movement ops of one dtype, alone and between pointwise ops; of all cases or of every
    ``every``-th.
    """
    graphs = []
    for name in list(CASES)[ALL.index(dtype) % every :: every]:
        build, _ = CASES[name]
        g = fg.Graph(f"{name} {dtype}")
        x = g.tensor("x", (5, 6, 7), dtype)
        y = build(g, x)
        g.output(y, name="alone")
        graphs.append(g)
        g = fg.Graph(f"{name} between {dtype}")
        x = g.tensor("x", (5, 6, 7), dtype)
        other = g.tensor("b", (6, 1), dtype)
        y = build(g, g.logical_or(x, other) if dtype == "bool" else x + other)
        g.output(g.logical_not(y) if dtype == "bool" else g.relu(y), name="y")
        graphs.append(g)
    g = fg.Graph(f"gather {dtype}")
    x, rows, cols = g.tensor("x", (5, 9), dtype), g.tensor("rows", (4, 2), "int8"), g.tensor("cols", (3,), "int64")
    g.output(g.gather(g.gather(x, rows), cols, axis=2), name="y")
    graphs.append(g)
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ALL)
def test_every_op_of(dtype: str) -> None:
    graphs = moved(dtype, 1 if dtype == "bfloat16" else 5)
    results = check_all(graphs, inputs=special)
    assert undecided_share(results, graphs) < 0.1


@pytest.mark.slow
def test_one_kernel_a_node() -> None:
    check_all(moved("float32"), inputs=special, fusion=False)


def special(graph: fg.Graph) -> Mapping[str, Any]:
    return random_inputs(graph, special=0.1)


def views() -> dict[str, tuple[fg.Graph, int]]:
    """Returns graphs with movement between other kernels, and their numbers of kernels."""
    made: dict[str, tuple[fg.Graph, int]] = {}

    def graph(name: str, count: int) -> fg.Graph:
        made[name] = fg.Graph(name), count
        return made[name][0]

    g = graph("attention heads", 4)  # three products and a softmax: no kernel moves anything
    x, w = g.tensor("x", (2, 8, 6)), g.tensor("w", (2, 6, 12))
    q = (x @ w[0]).reshape(2, 8, 3, 4).transpose(0, 2, 1, 3)
    k = (x @ w[1]).reshape(2, 8, 3, 4).transpose(0, 2, 3, 1)
    g.output(g.softmax(q @ k), name="y")

    g = graph("split result", 1)  # products of the halves of the weight, which are views
    h = g.tensor("x", (8, 6)) @ g.tensor("w", (6, 24))
    gate, up = g.split(h, 2, axis=1)
    g.output(g.swish(gate) * up, name="y")

    g = graph("split channels", 1)
    h = g.conv_fprop(g.tensor("x", (2, 6, 9, 9)), g.tensor("w", (24, 6, 3, 3)), padding=1)
    first, second, third = g.split(h, 3, axis=1)
    g.output(g.sigmoid(first) * second + third, name="y")

    g = graph("split result that does not meet", 3)
    h = g.tensor("x", (8, 6)) @ g.tensor("w", (6, 24))
    first, second = g.split(h, 2, axis=1)
    g.output(g.softmax(first), name="y")
    g.output(g.softmax(second), name="z")

    g = graph("split result in odd parts", 2)
    first, second = g.split(g.tensor("x", (8, 6)) @ g.tensor("w", (6, 10)), 2, axis=1)
    g.output(first * second, name="y")

    g = graph("product written turned", 1)
    g.output((g.tensor("x", (8, 6)) @ g.tensor("w", (6, 12))).T, name="y")

    g = graph("parts written in place", 3)
    x = g.tensor("x", (8, 6))
    parts = (x @ g.tensor("w", (6, 12)), g.softmax(x), x @ g.tensor("v", (6, 5)))
    g.output(g.concatenate(*parts, axis=1), name="y")

    g = graph("parts of parts, turned", 3)
    x = g.tensor("x", (8, 6))
    inner = g.concatenate(x @ g.tensor("w", (6, 12)), x @ g.tensor("v", (6, 5)), axis=1)
    g.output(g.concatenate(inner.T, g.softmax(x).T, axis=0), name="y")

    g = graph("softmax of a view of a view", 1)
    g.output(g.softmax(g.tensor("x", (60, 8))[5:33].T[1:, ::3]), name="y")

    g = graph("convolution of views", 2)
    x = g.tensor("x", (1, 8, 8, 20)).transpose(0, 3, 1, 2)[:, 2:, 1:]
    y = g.conv_fprop(x, g.tensor("w", (9, 20, 3, 3))[:, :18], padding=1)
    g.output(y[:, ::2].transpose(0, 2, 3, 1) * 2, name="y")

    g = graph("column sums of a padded product", 3)
    y = g.pad(g.tensor("x", (8, 6)) @ g.tensor("w", (6, 12)), 1, value=2)
    g.output(g.reduction(y, "add", 0), name="y")

    g = graph("view of an output", 2)
    y = g.output(g.softmax(g.tensor("x", (9, 8))), name="y")
    g.output(g.softmax(y[1:, 3:]), name="z")

    g = graph("one view, two readers", 2)
    x = g.tensor("x", (9, 8)).T[2:, 1:]
    g.output(g.softmax(x), name="y")
    g.output(x @ g.tensor("w", (8, 3)), name="z")

    g = graph("weights side by side", 1)  # one kernel of two products: their operands B are views alike
    x = g.tensor("x", (8, 6))
    gate, up = g.split(g.tensor("w", (6, 24)), 2, axis=1)
    g.output(g.swish(x @ gate) * (x @ up), name="y")

    g = graph("weights that lie differently", 2)  # the one that is a part of others is copied: both must be alike
    x, gate = g.tensor("x", (8, 6)), g.tensor("w", (6, 24))[:, 4:16]
    g.output(g.swish(x @ gate) * (x @ g.tensor("v", (6, 12))), name="y")

    g = graph("views of constants", 3)
    table = g.constant(np.arange(72, dtype=np.float32).reshape(9, 8) / 9)
    x = g.tensor("x", (9, 8))
    g.output(g.softmax(x.reshape(8, 9) + table.T), name="y")
    g.output(g.tensor("v", (5, 4)) @ g.gather(table, g.tensor("i", (4,), "int32")), name="z")

    g = graph("expanded", 1)
    g.output(g.softmax(g.broadcast(g.tensor("x", (1, 8)), (5, 8))), name="y")

    g = graph("reshape that is no view", 2)
    g.output(g.softmax(g.tensor("x", (6, 4)).T.reshape(3, 8)), name="y")
    return made


@pytest.mark.parametrize("fusion", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_views(fusion: bool) -> None:
    check_all([g for g, _ in views().values()], fusion=fusion)


@pytest.mark.parametrize("name", list(views()))
def test_kernels_between_views(name: str) -> None:
    graph, count = views()[name]
    assert kernels(graph) == count, families(graph)


def fused() -> list[fg.Graph]:
    """Returns graphs of movement between pointwise ops, each of one kernel."""
    graphs = []

    def graph(name: str, **how: Any) -> fg.Graph:
        graphs.append(fg.Graph(name, **how))
        return graphs[-1]

    g = graph("split and joined", io_dtype="bfloat16")
    x, y = g.tensor("x", (4, 16)), g.tensor("y", (4, 16))
    a, b = g.split(x * y, 2, axis=1)
    g.output(g.concatenate(-b, a, axis=1) * y + x, name="rotated")

    g = graph("stencil")
    x = g.pad(g.exp(g.tensor("x", (9, 10))), 1, "reflect")
    g.output(x[1:-1, 2:] - x[1:-1, :-2] + x[2:, 1:-1] - x[:-2, 1:-1], name="y")

    g = graph("regrouped")
    x = g.sigmoid(g.tensor("x", (4, 6))).reshape(2, 3, 4).transpose(2, 1, 0).reshape(6, 4)
    g.output(g.exp(x[:, ::-1]), name="y")

    g = graph("shuffled", io_dtype="float16")
    x = g.relu(g.tensor("x", (2, 8, 3, 5)))
    g.output(g.space_to_depth(g.depth_to_space(x, 2)[:, :, 1:5, :8], 2) + 1, name="y")

    g = graph("positions")
    x = g.tensor("x", (5, 7))
    at = g.gen_index(x, axis=1)[::-1, 1:]
    g.output(g.concatenate(at, g.pad(at, [(0, 0), (0, 0)]), g.gen_index(x, axis=0)[:, 1:]) * 2, name="y")

    g = graph("gathered after a pad")
    x, i = g.tensor("x", (4, 5)), g.tensor("i", (3, 2), "int64")
    g.output(g.pad(g.gather(g.pad(x * 2, 2, "replicate"), i, axis=1), [0, 1, 1], value=7) + 1, name="y")

    g = graph("padded twice")
    g.output(g.pad(g.pad(g.tensor("x", (3, 4)), 1, value=1), [(0, 2), (2, 0)], value=float("-inf")), name="y")

    g = graph("joined and cut")
    x, y = g.tensor("x", (3, 4)), g.tensor("y", (3, 5))
    joined = g.concatenate(x, y, x, axis=1)
    g.output(joined[:, 5:9] * 2, name="inside")  # of the second only

    g = graph("random numbers, moved")
    x = g.tensor("x", (6, 8))
    g.output(g.pad(g.rng_uniform(x, 3, 5).T[::-1, 1:], 1) + g.dropout(x, 7, 9).T[1, 0], name="y")

    g = graph("joined in two ways")
    x, y, z = (g.tensor(n, (3, 4)) for n in "xyz")
    g.output(g.concatenate(x, y) * g.concatenate(x, z), name="product")

    g = graph("the same elements twice")
    x = g.tensor("x", (6, 6))
    g.output(g.exp(x) - g.exp(x).T, name="y")

    g = graph("one of many", io_dtype="bfloat16")
    g.output(g.gather(g.tensor("x", (130,)), g.tensor("i", (), "int8")), name="y")

    g = graph("strict", io_dtype="bfloat16")
    x = g.tensor("x", (6, 6))
    g.output(g.pad(x * x, 1) + 1, name="y")
    return graphs


def test_fused_movement() -> None:
    graphs = fused()
    assert {g.name: kernels(g) for g in graphs} == {g.name: 1 for g in graphs}
    check_all(graphs)
    (kernel,) = plan(graphs[7]).kernels
    (read,) = kernel.group.reads
    assert read.shape == (3, 4)  # a part of y, as it lies


@pytest.mark.slow
def test_strict_movement() -> None:
    check_all(fused(), strict=True)


def wide(dtype: str) -> list[fg.Graph]:
    """Returns graphs of concatenations, pads and gathers of tables whose parts begin and end at multiples of a vector,
    or do not.
    """
    graphs = []

    def graph(name: str) -> fg.Graph:
        graphs.append(fg.Graph(f"{name} {dtype}", io_dtype=dtype))
        return graphs[-1]

    for first, second in ((64, 32), (16, 48), (63, 33), (1, 95), (68, 28)):
        g = graph(f"joined {first} {second}")
        a, b = g.tensor("a", (70, first)), g.tensor("b", (70, second))
        g.output(g.concatenate(a, b, a, axis=1), name="columns")
        g = graph(f"joined rows {first} {second}")
        a, b = g.tensor("a", (first, 80)), g.tensor("b", (second, 80))
        g.output(g.logical_not(g.concatenate(a, b)) if dtype == "bool" else -g.concatenate(a, b), name="rows")
    for pads in ([2, 0], [0, 16], [(1, 0), (32, 0)], [0, (3, 5)]):
        g = graph(f"padded {pads}")
        g.output(g.pad(g.tensor("x", (60, 96)), pads, value=1), name="y")
    g = graph("gathered")
    x, i = g.tensor("x", (40, 128)), g.tensor("i", (5, 7), "int32")
    g.output(g.gather(x, i), name="rows")
    g = graph("gathered and cut")
    x, i = g.tensor("x", (9, 40, 128)), g.tensor("i", (37,), "int64")
    g.output(g.pad(g.gather(x, i, axis=1)[..., 16:80], [0, 1, 0], value=1), name="rows")
    g = graph("gathered columns")
    g.output(g.gather(g.tensor("x", (40, 128)), g.tensor("i", (96,), "int32"), axis=1), name="columns")
    g = graph("joined views")
    x = g.tensor("x", (64, 130))
    g.output(g.concatenate(x[:, 2:66], x[:, 66:], x[::-1, :64], axis=1), name="columns")
    return graphs


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_wide_tables(dtype: str) -> None:
    graphs = wide(dtype)
    check_all(graphs)
    check_all([g for g in graphs if g.name.startswith("joined")], alignment=1)
    sources = {g.name.removesuffix(f" {dtype}"): plan(g).kernels[0].source.code for g in graphs}
    vectors = {name for name, code in sources.items() if re.search(r"load<\d+>\((?!i\b|i_2)\w+ \+ ", code)}
    assert {"joined 64 32", "joined 16 48", "padded [2, 0]", "padded [0, 16]", "gathered"} <= vectors
    assert not {"joined 63 33", "padded [0, (3, 5)]", "gathered columns"} & vectors


@pytest.mark.slow
def test_tables_are_read_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few threads a block, these small tensors have several vectors in flight a thread, as large ones have."""
    for module in (schedule, vectors):
        monkeypatch.setattr(module, "THREADS", 32)
    monkeypatch.setattr(schedule, "ENOUGH_BLOCKS", 1 / 132)
    graphs = [*moved("bfloat16"), *wide("int8"), *fused()]
    staged = []
    original = vectors.VectorsRenderer._read_tables
    monkeypatch.setattr(
        vectors.VectorsRenderer, "_read_tables", lambda self, *a, **k: staged.append(1) or original(self, *a, **k)
    )
    check_all(graphs)
    assert len(staged) > 10


def odd() -> list[fg.Graph]:
    """Returns graphs on zero-size and one-element tensors, and on tensors of rank 0."""
    graphs = []
    for shape in ((0, 4), (4, 0), (1, 1), (1,), ()):
        g = fg.Graph(f"odd {shape}")
        x = g.tensor("x", shape)
        g.output(x.T, name="transposed")
        g.output((x * 2).reshape(*shape, 1), name="reshaped")
        g.output(g.pad(x + 1, 1, value=2), name="padded")
        g.output(g.flip(x), name="flipped")
        g.output(g.broadcast(x, (3, *shape)), name="repeated")
        if shape:
            g.output(g.concatenate(x, x + 1), name="joined")
            g.output(g.gather(x, g.tensor("none", (0,), "int32")), name="nothing")
            g.output(x[:0] + 1, name="none of it")
            g.output(g.pad(x, [0] * (len(shape) - 1) + [2], "replicate" if shape[-1] else "constant"), name="wider")
        graphs.append(g)
    return graphs


def test_odd_shapes() -> None:
    check_all(odd())


@pytest.mark.slow
def test_unaligned_views() -> None:
    """Views that begin anywhere: kernels that read vectors must know."""
    graphs = []
    for dtype in ("bfloat16", "int8"):
        for start in (1, 4, 8):
            g = fg.Graph(f"start {start} {dtype}", io_dtype=dtype)
            x, y = g.tensor("x", (700 + start,)), g.tensor("y", (33, 64))
            g.output(g.neg(x[start:]), name="line")
            g.output(g.neg(y[start:, start:]), name="corner")
            g.output(g.reduction(y[:, start:], "max", 1), name="rows")
            graphs.append(g)
    check_all(graphs)
