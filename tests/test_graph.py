"""The builder: what it infers, and what it refuses and says."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from graphs import check_all

import fusegraph as fg
from fusegraph.errors import ArgumentError, AttributeValueError, DTypeError, GraphError, LayoutError, ShapeError
from fusegraph.ops import TABLE
from fusegraph.plan import plan


@pytest.fixture
def g() -> fg.Graph:
    return fg.Graph("test")


# ---- tensors


def test_tensors_have_shape_dtype_and_strides() -> None:
    g = fg.Graph("test", io_dtype="bf16")
    x = g.tensor("x", (2, 3, 4, 5))
    assert (x.name, x.shape, x.dtype, x.strides) == ("x", (2, 3, 4, 5), fg.bfloat16, (60, 20, 5, 1))
    assert (x.rank, x.size, x.nbytes, x.is_constant) == (4, 120, 240, False)
    assert g.tensor("nhwc", (2, 3, 4, 5), layout="NHWC").strides == (60, 1, 15, 3)
    assert g.tensor("last", (2, 3, 7), layout="channels_last").strides == (21, 1, 3)
    assert g.tensor("filter", (8, 3, 4, 5), layout="KRSC").strides == (60, 1, 15, 3)
    assert g.tensor("strided", (2, 3), "int8", strides=(16, 2)).strides == (16, 2)
    assert g.tensor("repeated", (2, 3), strides=(0, 1)).strides == (0, 1)
    assert g.tensor("point", ()).shape == ()
    assert g.tensor("numpy sizes", np.array([2, 3])).shape == (2, 3)
    assert [t.name for t in g.inputs] == [t.name for t in g.tensors.values()]


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        ("float32", fg.float32), ("fp16", fg.float16), ("double", fg.float64), (np.float32, fg.float32),
        (np.dtype("int8"), fg.int8), (ml_dtypes.bfloat16, fg.bfloat16), (ml_dtypes.float8_e4m3fn, fg.float8_e4m3),
        ("float8_e4m3fn", fg.float8_e4m3), (bool, fg.bool_), (fg.int64, fg.int64),
    ],
)  # fmt: skip
def test_dtypes_by_many_names(g: fg.Graph, given: Any, dtype: fg.DType) -> None:
    assert g.tensor("x", (1,), given).dtype is dtype


def test_constants(g: fg.Graph) -> None:
    array = np.arange(6, dtype=np.int8).reshape(2, 3).T
    c = g.constant(array)
    array[...] = 0
    assert c.value is not None
    assert (c.shape, c.strides, c.dtype) == ((3, 2), (2, 1), fg.int8)
    np.testing.assert_array_equal(c.value, [[0, 3], [1, 4], [2, 5]])
    with pytest.raises(ValueError, match="read-only"):
        c.value[0, 0] = 1
    half = fg.Graph("half", io_dtype="fp16")
    assert half.constant(3).dtype is half.constant([1.5, 2.0]).dtype is fg.float16
    assert half.constant(np.float32(3)).dtype is fg.float32
    assert half.constant(True).dtype is fg.bool_
    assert half.constant(3, dtype="int8", name="three").name == "three"
    third = half.constant(1 / 3)
    assert third.value == np.float16(1 / 3)
    integers = fg.Graph("integers", io_dtype="int8")
    assert integers.constant(1.5).dtype is fg.float32
    with pytest.raises(ShapeError, match=r"constant 'uneven': .*inhomogeneous"):
        g.constant([[1], [1, 2]], name="uneven")


# ---- operators


def test_operators_are_ops(g: fg.Graph) -> None:
    a, b = g.tensor("a", (4, 5)), g.tensor("b", (4, 5))
    for result, op in [
        (a + b, "add"), (a - b, "sub"), (a * b, "mul"), (a / b, "div"), (a**b, "pow"), (-a, "neg"), (abs(a), "abs"),
        (a > b, "cmp_gt"), (a >= b, "cmp_ge"), (a < b, "cmp_lt"), (a <= b, "cmp_le"),
        (a @ g.tensor("w", (5, 3)), "matmul"),
        ((a > b) & (b > a), "logical_and"), ((a > b) | (b > a), "logical_or"), (~(a > b), "logical_not"),
    ]:  # fmt: skip
        node = g.producer(result)
        assert node is not None
        assert node.op.name == op
    assert [n.op.name for n in g.nodes[:3]] == ["add", "sub", "mul"]


def test_operators_with_numbers_and_arrays(g: fg.Graph) -> None:
    x = g.tensor("x", (2, 3), "bf16")
    assert (x + 1).dtype is (2.5 * x).dtype is (x / 3).dtype is (1 - x).dtype is fg.bfloat16
    left = 2 - x
    assert left.graph.producer(left).inputs[1] is x  # type: ignore[union-attr]
    assert (np.ones((4, 1, 3), np.float32) * x).shape == (4, 2, 3)
    assert (x + np.float32(1)).dtype is fg.float32
    i = g.tensor("i", (2,), "int8")
    assert (i + 1).dtype is fg.int8
    assert (i + 1000).dtype is fg.int32
    assert (i + 2**40).dtype is fg.int64
    assert (i * 0.5).dtype is fg.float32
    assert (i > 0.5).dtype is fg.bool_
    b = g.tensor("b", (2,), "bool")
    assert (b & True).dtype is fg.bool_
    assert g.binary_select(1.0, x, x > 0).dtype is fg.bfloat16
    c = g.max(1.0, 2.0)
    assert c.dtype is fg.float32


def test_promotion(g: fg.Graph) -> None:
    def joined(*dtypes: str) -> str:
        tensors = [g.tensor(f"t{len(g.tensors)}", (2,), d) for d in dtypes]
        return g.max(*tensors).dtype.name

    assert joined("float16", "bfloat16") == "float32"
    assert joined("float8_e4m3", "float8_e5m2") == "float16"
    assert joined("int64", "float16") == "float16"
    assert joined("int8", "uint8") == "int32"
    assert joined("bool", "uint8") == "uint8"
    assert joined("float32", "float64") == "float64"


def test_results_lie_in_memory_as_their_operands(g: fg.Graph) -> None:
    nhwc = g.tensor("nhwc", (2, 8, 4, 4), layout="NHWC")
    nchw = g.tensor("nchw", (2, 8, 4, 4))
    bias = g.tensor("bias", (8, 1, 1))
    last = (128, 1, 32, 8)
    assert g.relu(nhwc).strides == last
    assert (bias + nhwc).strides == last
    assert (nhwc + nchw).strides == last
    assert (nchw + nhwc).strides == nchw.strides
    assert (nhwc > 0).strides == last
    assert (g.tensor("padded", (3, 5), strides=(8, 1)) * 2).strides == (5, 1)
    assert (g.tensor("transposed", (3, 5), strides=(1, 3)) * 2).strides == (1, 3)
    assert (g.tensor("repeated", (3, 5), strides=(0, 1)) * 2).strides == (5, 1)
    w = g.tensor("w", (6, 8, 3, 3))
    assert g.conv_fprop(nhwc, w, padding=1).strides == (96, 1, 24, 6)
    assert g.conv_fprop(nchw, w, padding=1).strides == (96, 16, 4, 1)
    assert (g.tensor("a", (3, 5), strides=(1, 3)) @ g.tensor("b", (5, 7))).strides == (7, 1)


def test_shapes_broadcast(g: fg.Graph) -> None:
    a = g.tensor("a", (5, 1, 3))
    assert (a + g.tensor("b", (4, 1))).shape == (5, 4, 3)
    assert (a + g.tensor("c", ())).shape == (5, 1, 3)
    assert (a * g.tensor("d", (0, 1))).shape == (5, 0, 3)


def test_methods_describe_themselves() -> None:
    for name, op in TABLE.items():
        method = getattr(fg.Graph, name)
        assert method.__doc__ == op.doc
        assert method.__name__ == name
        assert all(key in str(method.__signature__) for key in (*op.operands, *op.attributes))


# ---- outputs


def test_outputs(g: fg.Graph) -> None:
    x = g.tensor("x", (2, 3, 4, 5))
    y = g.output(g.relu(x), name="y", layout="NHWC")
    assert (y.name, y.strides) == ("y", (60, 1, 15, 3))
    assert g.tensors["y"] is y
    assert "relu" not in g.tensors
    z = g.output(y * 2, name="z", dtype="fp16", strides=(120, 40, 8, 1))
    assert (z.dtype, z.strides) == (fg.float16, (120, 40, 8, 1))
    same = g.output(x)
    assert g.producer(same).op.name == "identity"  # type: ignore[union-attr]
    constant = g.output(g.constant([1.0, 2.0]), name="ones")
    assert constant.shape == (2,)
    assert g.outputs == [y, z, same, constant]
    again = g.output(g.identity(y), name="again")
    assert again is not y
    check_all([g])


def test_names_are_unique_and_kept(g: fg.Graph) -> None:
    x = g.tensor("x", (2,))
    names = [g.relu(x).name for _ in range(3)] + [g.relu(x, name="mine").name]
    assert len(set(names)) == 4
    assert names[0] == "relu"
    assert names[3] == "mine"


def test_network_holds_the_edges(g: fg.Graph) -> None:
    x = g.tensor("x", (2,))
    a = g.relu(x)
    b = a * a
    assert [n.name for n in g.consumers(a)] == [b.name]
    assert g.network.number_of_edges() == 2  # a is taken twice
    assert g.consumers(x) == [g.producer(a)]
    assert repr(g) == "<Graph 'test': 1 inputs, 2 nodes, 0 outputs>"
    assert repr(g.producer(b)) == f"<Node {b.name!r} = mul(relu, relu)>"


# ---- refusals


def other_graph(g: fg.Graph) -> None:
    stranger = fg.Graph("another graph").tensor("stranger", (2,))
    g.tensor("x", (2,)) + stranger


def other_output(g: fg.Graph) -> None:
    elsewhere = fg.Graph("another graph")
    g.output(elsewhere.relu(elsewhere.tensor("stranger", (2,))))


def twice(g: fg.Graph) -> None:
    y = g.output(g.relu(g.tensor("x", (2,))), name="y")
    g.output(y)


def truth(g: fg.Graph) -> None:
    if g.tensor("x", (2,)) > 0:
        pass


def x(g: fg.Graph, shape: tuple[int, ...] = (2, 3), dtype: str = "float32") -> fg.Tensor:
    return g.tensor("x", shape, dtype)


REFUSALS: list[tuple[type[Exception], str, Callable[[fg.Graph], Any]]] = [
    # shapes
    (ShapeError, r"not negative, got -1 in shape \(2, -1\)", lambda g: g.tensor("x", (2, -1))),
    (ShapeError, r"a shape is a sequence, each entry an integer, got \(2.5,\)", lambda g: g.tensor("x", (2.5,))),  # type: ignore[list-item]
    (ShapeError, r"each entry an integer, got \(True,\)", lambda g: g.tensor("x", (True,))),
    (ShapeError, r"a sequence, each entry an integer, got 5", lambda g: g.tensor("x", 5)),  # type: ignore[arg-type]
    (ShapeError, r"add: shapes \[2, 3\] and \[4\] do not broadcast.*axis -1.*3 and 4.*a = 'x' float32 \[2, 3\]",
     lambda g: x(g) + g.tensor("b", (4,))),
    (ShapeError, r"matmul 'product': the inner sizes differ: 3 columns against 2 rows.*\[2, 3\]",
     lambda g: g.matmul(x(g), g.tensor("b", (2, 5)), name="product")),
    (ShapeError, r"matmul.*at least 2 dimensions.*'x'", lambda g: g.matmul(x(g, (3,)), g.tensor("b", (3, 5)))),
    (ShapeError, r"conv_fprop.*3, 4 or 5 dimensions.*'x'", lambda g: g.conv_fprop(x(g), g.tensor("w", (2, 3)))),
    (ShapeError, r"conv_fprop.*4 channels of x are not 1 groups of the filter's 3",
     lambda g: g.conv_fprop(x(g, (1, 4, 8)), g.tensor("w", (2, 3, 3)), groups=1)),
    (ShapeError, r"conv_fprop.*spatial dimension 0: a filter reaching over 9 does not fit 8",
     lambda g: g.conv_fprop(x(g, (1, 4, 8)), g.tensor("w", (2, 4, 9)))),
    # overflow of sizes
    (ShapeError, r"\(4294967296, 4294967296\) overflows: 18446744073709551616 elements",
     lambda g: g.tensor("x", (2**32, 2**32))),
    (ShapeError, r"add: shape \(2147483648, 4294967296\) overflows",
     lambda g: x(g, (2**31, 1)) + g.tensor("b", (1, 2**32))),
    (ShapeError, r"matmul.*overflows", lambda g: g.matmul(x(g, (2**32, 1)), g.tensor("b", (1, 2**32)))),
    (ShapeError, r"conv_fprop.*overflows",
     lambda g: g.conv_fprop(x(g, (2**31, 1, 8)), g.tensor("w", (2**31, 1, 3)), padding=2**20)),
    (LayoutError, r"tensor 'x': strides \(4611686018427387904, 1\).*overflow",
     lambda g: g.tensor("x", (3, 3), strides=(2**62, 1))),
    # layouts
    (LayoutError, r"tensor 'x': layout 'NHCW' does not fit.*one of contiguous, channels_last, NCHW, NHWC",
     lambda g: g.tensor("x", (1, 2, 3, 4), layout="NHCW")),
    (LayoutError, r"layout 'NHWC' does not fit a tensor of rank 3", lambda g: g.tensor("x", (1, 2, 3), layout="NHWC")),
    (LayoutError, r"layout 5 does not fit", lambda g: g.tensor("x", (1,), layout=5)),  # type: ignore[arg-type]
    (LayoutError, r"tensor 'x': give a layout or strides, not both",
     lambda g: g.tensor("x", (1,), layout="contiguous", strides=(1,))),
    (LayoutError, r"tensor 'x': strides are not negative, got \(-3, 1\)",
     lambda g: g.tensor("x", (2, 3), strides=(-3, 1))),
    (LayoutError, r"tensor 'x': 1 strides \(1,\) for a tensor of 2", lambda g: g.tensor("x", (2, 3), strides=(1,))),
    (LayoutError, r"tensor 'x': strides are integers", lambda g: g.tensor("x", (2,), strides=(0.5,))),  # type: ignore[list-item]
    (LayoutError, r"output 'relu'.*\(0, 1\) of shape \(2, 3\) make elements share an address",
     lambda g: g.output(g.relu(x(g)), strides=(0, 1))),
    (LayoutError, r"output 'relu': layout 'NHWC' does not fit", lambda g: g.output(g.relu(x(g)), layout="NHWC")),
    (LayoutError, r"output 'relu': give a layout or strides",
     lambda g: g.output(g.relu(x(g)), layout="contiguous", strides=(3, 1))),
    # dtypes
    (DTypeError, r"unknown dtype 'float31'; fusegraph has float64, float32", lambda g: g.tensor("x", (2,), "float31")),
    (DTypeError, r"unknown dtype <class 'complex'>", lambda g: g.tensor("x", (2,), complex)),
    (DTypeError, r"tf32, fast_float_for_fp8; got bfloat16", lambda _: fg.Graph("g", compute_dtype="bf16")),
    (DTypeError, r"constant 'c': NumPy dtype complex128", lambda g: g.constant(1j, name="c")),
    (DTypeError, r"constant 'c': NumPy dtype complex64", lambda g: g.constant(np.zeros(3, np.complex64), name="c")),
    (DTypeError, r"constant 'c': NumPy dtype <U5", lambda g: g.constant("hello", name="c")),
    (DTypeError, r"exp 'e': exp does not take int32.*x = 'x' int32", lambda g: g.exp(x(g, dtype="int32"), name="e")),
    (DTypeError, r"add: add does not take bool", lambda g: x(g, dtype="bool") + True),
    (DTypeError, r"add, operand 'b': 1\d+ does not fit in uint64", lambda g: x(g, dtype="int32") + 10**30),
    (DTypeError, r"mul, operand 'b': 70000 does not fit in float16", lambda g: x(g, dtype="float16") * 70000),
    (DTypeError, r"mul, operand 'a': 1000.0 does not fit in float8_e4m3, whose values go from -448.0 to 448.0",
     lambda g: 1000.0 * x(g, dtype="float8_e4m3")),
    (DTypeError, r"matmul.*cannot be stored as int32", lambda g: g.matmul(x(g), g.tensor("b", (3, 2)), dtype="int32")),
    # attributes
    (GraphError, r"relu\(.*unexpected keyword argument 'slope'", lambda g: g.relu(x(g), slope=1.0)),
    (GraphError, r"relu has no attribute 'slope'; it has: negative_slope, lower_clip, upper_clip",
     lambda g: g.apply(TABLE["relu"], (x(g),), {"slope": 1})),
    (GraphError, r"gen_index\(.*missing a required argument: 'axis'", lambda g: g.gen_index(x(g))),
    (GraphError, r"gen_index needs the attribute 'axis'", lambda g: g.apply(TABLE["gen_index"], (x(g),), {})),
    (AttributeValueError, r"gen_index: axis 2 is not one of the 2 axes of \[2, 3\]",
     lambda g: g.gen_index(x(g), axis=2)),
    (AttributeValueError, r"clamp 'c': min is at most max", lambda g: g.clamp(x(g), 2, 1, name="c")),
    (AttributeValueError, r"softplus: beta is positive, got -1", lambda g: g.softplus(x(g), beta=-1)),
    (AttributeValueError, r"swish: beta is a finite number, got nan", lambda g: g.swish(x(g), beta=float("nan"))),
    (AttributeValueError, r"conv_fprop: stride is an integer of at least 1.*got 0",
     lambda g: g.conv_fprop(x(g, (1, 2, 5)), g.tensor("w", (2, 2, 3)), stride=0)),
    (AttributeValueError, r"conv_fprop: padding .*got \(1, 2\)",
     lambda g: g.conv_fprop(x(g, (1, 2, 5)), g.tensor("w", (2, 2, 3)), padding=[1, 2])),
    (AttributeValueError, r"conv_fprop: dilation.*got \(1, 2\)",
     lambda g: g.conv_fprop(x(g, (1, 2, 5)), g.tensor("w", (2, 2, 3)), dilation=(1, 2))),
    (AttributeValueError, r"conv_fprop: groups is a positive integer, got 0",
     lambda g: g.conv_fprop(x(g, (1, 2, 5)), g.tensor("w", (2, 2, 3)), groups=0)),
    (AttributeValueError, r"conv_fprop: mode is 'cross_correlation' or 'convolution', got 'same'",
     lambda g: g.conv_fprop(x(g, (1, 2, 5)), g.tensor("w", (2, 2, 3)), mode="same")),
    (DTypeError, r"unknown dtype 'int7'", lambda g: g.cast(x(g), "int7")),
    # operands
    (GraphError, r"relu: operand 'x' is a str; give a Tensor of this graph, a number or a NumPy array",
     lambda g: g.relu("x")),  # type: ignore[arg-type]
    (GraphError, r"add: operand 'b' is a NoneType", lambda g: g.add(x(g), None)),  # type: ignore[arg-type]
    (GraphError, r"add: operand 'b' is a list", lambda g: g.add(x(g), [1, 2, 3])),  # type: ignore[operator]
    (GraphError, r"add\(.*missing a required argument: 'b'", lambda g: g.add(x(g))),
    (GraphError, r"relu takes 1 tensors \(x\), got 2", lambda g: g.apply(TABLE["relu"], (x(g), 1), {})),
    (GraphError, r"add, operand 'b': tensor 'stranger' belongs to graph 'another graph', not to this graph 'test'",
     other_graph),
    (GraphError, r"no truth value.*binary_select", truth),
    # outputs
    (GraphError, r"output: tensor 'relu' belongs to graph 'another graph'", other_output),
    (GraphError, r"tensor 'y' is an output already", twice),
    (GraphError, r"output: expected a Tensor, got ndarray", lambda g: g.output(np.zeros(3))),  # type: ignore[arg-type]
    (GraphError, r"graph 'test' has a tensor 'x' already \[2, 3\]", lambda g: g.output(g.relu(x(g)), name="x")),
    (GraphError, r"graph 'test' has no outputs; mark its results with graph.output", lambda g: (x(g), plan(g))),
    # names
    (GraphError, r"graph 'test' has a tensor 'x' already \[2, 3\]", lambda g: (x(g), g.tensor("x", (5,)))),
    (GraphError, r"has a tensor 'x' already", lambda g: g.relu(x(g), name="x")),
    (GraphError, r"has a tensor 'x' already", lambda g: (x(g), g.constant(1, name="x"))),
]  # fmt: skip


@pytest.mark.parametrize(("error", "text", "build"), REFUSALS, ids=[r[1][:48] for r in REFUSALS])
def test_refusals(g: fg.Graph, error: type[Exception], text: str, build: Callable[[fg.Graph], Any]) -> None:
    with pytest.raises(error) as raised:
        build(g)
    assert re.search(text, str(raised.value)), str(raised.value)
    assert raised.type is error


def test_engines_refuse_a_graph_without_outputs(g: fg.Graph) -> None:
    g.relu(g.tensor("x", (3,)))
    for engine in ("cpu", "cuda", "reference"):
        with pytest.raises(GraphError, match="graph 'test' has no outputs"):
            g.compile(engine, target="sm_90a") if engine == "cuda" else g.compile(engine)


def test_a_refused_node_leaves_no_trace(g: fg.Graph) -> None:
    a = g.tensor("a", (2,))
    for wrong in (lambda: g.exp(g.cast(a, "int8")), lambda: g.matmul(a, a), lambda: g.output(a, strides=(0,))):
        with pytest.raises(GraphError):
            wrong()
    g.output(g.relu(a), name="y")
    check_all([g])


# ---- names from users

BAD_NAMES = [
    "",
    "a\nb",
    'quo"te',
    "ap'ostrophe",
    "end */ of comment",
    "back\\slash",
    "a\0b",
    "x" * 201,
    "tab\t",
    "<a>",
    "%s",
]


@pytest.mark.parametrize("name", BAD_NAMES)
def test_names_that_could_leave_their_place_are_refused(g: fg.Graph, name: str) -> None:
    a = g.tensor("a", (2,))
    for make in (
        lambda: g.tensor(name, (2,)),
        lambda: g.relu(a, name=name),
        lambda: g.output(g.relu(a), name=name) if name else g.tensor(name, (2,)),
        lambda: g.constant(1.0, name=name) if name else g.tensor(name, (2,)),
        lambda: fg.Graph(name),
    ):
        with pytest.raises(GraphError, match=r"name .* is not allowed: use 1 to 200 letters, digits") as raised:
            make()
        assert repr(name) in str(raised.value)


@pytest.mark.parametrize("name", [5, None, b"x"])
def test_names_are_text(g: fg.Graph, name: Any) -> None:
    with pytest.raises(GraphError, match=re.escape(repr(name))):
        g.tensor(name, (2,))


#: Allowed names that are no C identifiers, or ones with a meaning in C, CUDA or the kernels themselves.
ODD_NAMES = [
    "größe", "重み", "naïve x", "1st", "a.b", "a b", "a-b", "w[0]", "a/b:c", "@", "#", "_", "__x", "int", "float",
    "for", "this", "threadIdx", "blockIdx", "size", "first", "i", "o", "u", "e", "v", "row", "row0", "col", "outer",
    "i0", "o1", "index", "load", "store", "convert", "round_to", "math", "infinity", "quiet_nan", "Vector", "widen",
    "narrow", "main", "linux", "uint32", "float16", "bfloat16", "sigmoid", "relu", "exp", "exit", "printf", "errno",
    "NULL", "a_v", "y_v", "x_kernel", "assert", "std", "asm", "new", "signed_", "INFINITY", "EOF", "__global__",
    "M_PI", "stdin", "Word", "saturate",
]  # fmt: skip


@pytest.mark.slow
def test_odd_names_become_c() -> None:
    """Tensors, nodes, outputs and graphs of such names: ASCII source that compiles and computes the right thing."""
    graphs = []
    for k, name in enumerate(ODD_NAMES):
        other = ODD_NAMES[(k + 1) % len(ODD_NAMES)]
        g = fg.Graph(name)
        a = g.tensor(name, (5, 33))
        b = g.tensor(other, (33,))
        product = g.mul(a, float("inf"), name=f"{name}_2")
        g.output(g.binary_select(product, g.relu(a + b), a > 1e9), name=f"{name} {other}")
        g.output(g.cast(g.cast(a, "fp16"), "float32") + g.gen_index(a, axis=0), strides=(40, 1))
        graphs.append(g)
    for g in graphs:
        for kernel in plan(g).kernels:
            assert kernel.source.code.isascii()
            assert re.fullmatch(r"[A-Za-z]\w*_kernel(_\d+)?", kernel.name, re.ASCII)
    check_all(graphs)


@pytest.mark.slow
def test_every_name_of_the_device_headers_can_be_a_tensor() -> None:
    from codegen.cpu import DEVICE_DIR

    words = set()
    for header in DEVICE_DIR.glob("*.cuh"):
        words |= set(re.findall(r"\b[A-Za-z]\w{2,}\b", re.sub(r"//.*", "", header.read_text())))
    allowed = sorted(w for w in words if not w.startswith("__"))
    graphs = []
    for start in range(0, len(allowed), 24):
        g = fg.Graph("names", io_dtype="fp16")
        tensors = [g.tensor(word, (20, 36) if k % 2 else (36,)) for k, word in enumerate(allowed[start : start + 24])]
        total = tensors[0]
        for t in tensors[1:]:
            total = total + t
        g.output(g.cast(g.cast(total, "fp8_e4m3"), "float32") * float("nan"))
        graphs.append(g)
    check_all(graphs)


def test_names_we_chose_yield_to_the_users():
    g = fg.Graph("names")
    x = g.tensor("x", (4,))
    c = g.constant(2.0)
    total = g.add(x, c)
    assert (c.name, total.name) == ("constant", "add")
    y = g.output(g.mul(total, c), name="add")
    z = g.output(g.sub(total, c, name="constant"))
    assert (y.name, z.name) == ("add", "constant")
    assert c.name not in ("add", "constant")
    assert g.tensors[c.name] is c
    assert g.tensors[total.name] is total
    with pytest.raises(fg.errors.GraphError, match="already"):
        g.relu(total, name="add")
    check_all([g])


@pytest.mark.parametrize(("name", "value"), [("workspace_limit", -1), ("workspace_limit", "1 MB"), ("jobs", 0)])
def test_limits_that_are_none(g: fg.Graph, name: str, value: Any) -> None:
    g.output(g.relu(g.tensor("x", (4,))))
    with pytest.raises(ArgumentError, match=rf"{name} is {value!r}; it should be an integer.*, or None"):
        g.compile("cpu", **{name: value})
