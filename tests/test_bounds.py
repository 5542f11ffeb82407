"""The error analysis: it takes what a correct kernel may give, and nothing that is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import executables

import fusegraph as fg
from fusegraph import dtypes as dt
from fusegraph.engines.cpu import CpuExecutable
from fusegraph.engines.reference import evaluate
from fusegraph.lowering.base import Options
from fusegraph.ops.convert import from_reference, to_reference
from fusegraph.passes.decompose import decompose
from fusegraph.report import bounds
from fusegraph.report.bounds import Rounding, accepts, bounded
from fusegraph.report.check import check, compare, random_inputs, rounding_of, run

Array = np.ndarray[Any, Any]
FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3", "float8_e5m2")


def step(array: Array, dtype: dt.DType, ulps: int) -> Array:
    """Moves finite values away from zero by a number of units in the last place."""
    kind = f"i{dtype.itemsize}"
    moved = (array.copy().view(kind) + ulps).astype(kind).view(dtype.numpy)
    seen = to_reference(moved, dtype)
    return np.where(np.isfinite(seen) & np.isfinite(to_reference(array, dtype)), moved, array)


def graph(body: Callable[..., Any], shapes: dict[str, tuple[int, ...]], **how: Any) -> fg.Graph:
    g = fg.Graph("bounds", **how)
    g.output(body(g, *(g.tensor(n, s) for n, s in shapes.items())), name="y")
    return g


def exact(g: fg.Graph, inputs: dict[str, Array]) -> Array:
    """Returns the output of a kernel that makes no rounding error before it stores."""
    (y,) = g.outputs
    return from_reference(evaluate(g, inputs)[y], y.dtype).copy()


def wrong(g: fg.Graph, inputs: dict[str, Array], y: Array, **rounding: Any) -> int:
    (result,) = compare(g, inputs, {"y": y}, Rounding(**rounding))
    assert result.ok == (result.wrong == 0)
    return result.wrong


BODIES: dict[str, tuple[Callable[..., Any], dict[str, tuple[int, ...]]]] = {
    "fma": (lambda g, a, b, c: a + b * c, {"a": (64, 65), "b": (64, 65), "c": (65,)}),
    "gelu": (lambda g, a, bias: g.gelu(a + bias) * a, {"a": (64, 65), "bias": (65,)}),
    "softplus": (lambda g, a: g.log(g.exp(a) + 1), {"a": (4000,)}),
    "matmul": (lambda g, a, w, bias: g.relu(a @ w + bias), {"a": (40, 70), "w": (70, 50), "bias": (50,)}),
    "conv": (lambda g, x, w: g.conv_fprop(x, w, padding=1), {"x": (2, 6, 12, 12), "w": (8, 6, 3, 3)}),
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", list(BODIES))
def test_correct_rounding_is_accepted_and_more_is_not(name: str, dtype: str) -> None:
    """The rounded reference passes; results some units in the last place away do not."""
    body, shapes = BODIES[name]
    g = graph(body, shapes, io_dtype=dtype)
    inputs = random_inputs(g, seed=1)
    y = exact(g, inputs)
    kind = g.outputs[0].dtype
    assert wrong(g, inputs, y) == 0
    narrow = kind.itemsize < 4  # the compute type is wider: all but one rounding is invisible
    ulps = 2 if narrow else 400 if name in ("fma", "softplus") else 8000
    nonzero = int((to_reference(y, kind) != 0).sum())
    assert wrong(g, inputs, step(y, kind, ulps)) > 0.9 * nonzero
    if narrow:
        assert wrong(g, inputs, step(y, kind, -2)) > 0.8 * nonzero


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_wrong_results_are_found(dtype: str) -> None:
    g = graph(lambda g, a, w, bias: g.gelu(a @ w + bias), {"a": (40, 70), "w": (70, 50), "bias": (50,)}, io_dtype=dtype)
    inputs = random_inputs(g, seed=2)
    y = exact(g, inputs)
    assert wrong(g, inputs, y) == 0
    without_bias = exact(g, {**inputs, "bias": inputs["bias"] * 0})
    assert wrong(g, inputs, without_bias) > 0.7 * y.size
    swapped = y.copy()
    swapped[3, 4], swapped[30, 40] = y[30, 40], y[3, 4]
    assert wrong(g, inputs, swapped) == 2
    assert wrong(g, inputs, y[::-1]) > 0.9 * y.size
    shifted = np.roll(y, 1, axis=1)
    assert wrong(g, inputs, shifted) > 0.9 * y.size
    for bad in (np.nan, np.inf, 0.0, -1e3):
        spoiled = y.copy()
        spoiled[17, 5] = bad
        assert wrong(g, inputs, spoiled) == 1, bad
    one_product_missing = dict(inputs)
    one_product_missing["a"] = inputs["a"].copy()
    one_product_missing["a"][:, -1] = 0
    assert wrong(g, inputs, exact(g, one_product_missing)) > 0.5 * y.size


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_integers_are_exact(dtype: str) -> None:
    g = graph(lambda g, a, b: a * b + 3, {"a": (300,), "b": (300,)}, io_dtype=dtype)
    inputs = random_inputs(g)
    y = exact(g, inputs)
    assert wrong(g, inputs, y) == 0
    y[7] += 1
    assert wrong(g, inputs, y) == 1


def test_large_integers_that_are_equal_as_floats() -> None:
    g = graph(lambda g, a: a + 2**60, {"a": (100,)}, io_dtype="int64")
    inputs = random_inputs(g)
    y = exact(g, inputs)
    assert wrong(g, inputs, y) == 0
    assert wrong(g, inputs, y + 1) == 100


def test_discontinuities_are_undecided_only_near_the_jump() -> None:
    """floor, casts and comparisons of something inexact: either side passes at the jump, and only there."""

    def undecided(body: Callable[..., Any], places: Array) -> tuple[Array, Array]:
        g = graph(body, {"x": places.shape})
        inputs = {"x": places.astype(np.float32)}
        value, error = bounded(g, inputs, Rounding())[g.outputs[0]]
        assert wrong(g, inputs, exact(g, inputs)) == 0
        return value, error

    x = np.linspace(0.1, 3.0, 30)  # log(exp(x)) is x, give or take some roundings
    bodies: tuple[Callable[..., Any], ...] = (
        lambda g, x: g.floor(g.log(g.exp(x))),
        lambda g, x: g.cast(g.log(g.exp(x)), "int32"),
        lambda g, x: g.log(g.exp(x)) > x,
        lambda g, x: g.log(g.exp(x)) >= 1,
        lambda g, x: g.mod(g.log(g.exp(x)), 1.0),
    )
    for number, body in enumerate(bodies):
        _, error = undecided(body, x)
        at_jump = (
            np.ones(30, bool) if number == 2 else np.isin(np.round(x, 6), [1.0] if number == 3 else [1.0, 2.0, 3.0])
        )
        np.testing.assert_array_equal(error > 0.5, at_jump, err_msg=f"body {number}")
    g = graph(lambda g, x: g.floor(g.log(g.exp(x))), {"x": (3,)})
    inputs = {"x": np.array([2.0, 2.5, 1.25], np.float32)}
    assert wrong(g, inputs, np.array([1, 2, 1], np.float32)) == 0
    assert wrong(g, inputs, np.array([2, 3, 1], np.float32)) == 1
    assert wrong(g, inputs, np.array([0, 2, 1], np.float32)) == 1


def test_exact_comparisons_are_decided() -> None:
    g = graph(lambda g, a, b: a > b, {"a": (500,), "b": (500,)}, io_dtype="fp8_e4m3")
    inputs = random_inputs(g)
    y = exact(g, inputs)
    assert wrong(g, inputs, y) == 0
    assert wrong(g, inputs, ~y) == 500


def test_cancellation_widens_the_bound() -> None:
    """(x + 1) - 1 loses digits of x where x is small: the bound is absolute there, and 100 roundings are too much."""
    g = graph(lambda g, x: (x + 1.0) - 1.0, {"x": (50,)})
    x = np.geomspace(1e-6, 1e-3, 50).astype(np.float32)
    inputs = {"x": x}
    rounded = (x + np.float32(1)) - np.float32(1)
    assert (rounded != x).all()
    assert wrong(g, inputs, rounded) == 0
    assert wrong(g, inputs, x) == 0
    assert wrong(g, inputs, x + np.float32(1e-5)) == 50


def test_infinities_and_nan() -> None:
    special = np.array([np.inf, -np.inf, np.nan, 0.0, 1e30, 1.0], np.float32)
    g = graph(lambda g, x: abs(x) * 2, {"x": (6,)})
    inputs = {"x": special}
    y = exact(g, inputs)
    assert wrong(g, inputs, y) == 0
    for place, bad in [
        (0, 3e38),
        (0, -np.inf),
        (0, np.nan),
        (1, -np.inf),
        (2, 0.0),
        (2, np.inf),
        (3, 1e-30),
        (5, np.inf),
    ]:
        spoiled = y.copy()
        spoiled[place] = bad
        assert wrong(g, inputs, spoiled) == 1, (place, bad)
    # Beyond float32 on the way, but not in float64: nothing is known.
    g = graph(lambda g, x: x * 1e20 * 1e-20, {"x": (6,)})
    value, error = bounded(g, inputs, Rounding())[g.outputs[0]]
    np.testing.assert_array_equal(np.isinf(error), [False, False, False, False, True, False])
    np.testing.assert_array_equal(np.isnan(value), np.isnan(special))


def test_saturation_is_known() -> None:
    """8-bit floats saturate on the way to memory: the largest value is right, and nothing else is."""
    g = graph(lambda g, x: x * 100, {"x": (4,)}, io_dtype="fp8_e4m3")
    inputs = {"x": from_reference(np.array([100.0, -100.0, np.inf, 1.0]), dt.float8_e4m3)}
    inputs["x"] = inputs["x"].copy()
    y = exact(g, inputs)
    np.testing.assert_array_equal(to_reference(y, dt.float8_e4m3), [448, -448, 448, 96])
    assert wrong(g, inputs, y) == 0
    assert wrong(g, inputs, from_reference(np.array([416.0, -448, 448, 96]), dt.float8_e4m3)) == 1


def test_rounding_between_kernels_is_allowed_where_it_happens() -> None:
    """A bfloat16 intermediate: rounded where it is written to memory, and only there."""

    def body(g: fg.Graph, a: fg.Tensor, b: fg.Tensor) -> fg.Tensor:
        return g.cast(g.mul(a, b, name="product"), "float32") * 3.0

    g = graph(body, {"a": (400,), "b": (400,)}, io_dtype="bf16")
    inputs = random_inputs(g)
    a, b = (inputs[n].astype(np.float64) for n in "ab")
    unrounded = (a * b * 3).astype(np.float32)
    rounded = from_reference(a * b, dt.bfloat16).astype(np.float32) * np.float32(3)
    different = int((abs(unrounded - rounded) > 1e-5 * abs(rounded)).sum())
    assert different > 300
    assert wrong(g, inputs, unrounded) == 0
    assert wrong(g, inputs, rounded) >= different
    assert wrong(g, inputs, rounded, materialized=frozenset({"product"})) == 0
    assert wrong(g, inputs, rounded * np.float32(1.01), materialized=frozenset({"product"})) > 300
    assert wrong(g, inputs, rounded, strict=True) == 0
    assert wrong(g, inputs, unrounded, strict=True) > 300


def test_what_is_computed_once_is_rounded_wherever_it_is_named() -> None:
    """Of equal nodes one is left: the others' results are as inexact."""
    g = fg.Graph("twice", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (1, 2, 32, 16)) for name in "qkv")
    x, w = g.tensor("x", (1, 8, 14, 14), "float32"), g.tensor("w", (16, 8, 3, 3), "float32")
    for name in ("first", "second"):
        g.output(g.sdpa(q, k, v, name=f"attention {name}"), name=f"o {name}", dtype="float32")
        y = g.conv_fprop(x, w, padding=1, algorithm="winograd_4x4", name=f"conv {name}")
        g.output(g.relu(y), name=f"y {name}")
    found = rounding_of(CpuExecutable(g, Options(), lazy=True))
    assert found.scaled == {"attention first rounded", "attention second rounded"}
    assert found.winograd == {"conv first": 4, "conv second": 4}


def test_consumers_of_a_stored_tensor_may_see_either_value() -> None:
    """In the kernel that makes it a tensor is not yet rounded; in others it is.  Both are right, also near ties."""
    g = graph(lambda g, x: g.cast(g.relu(x * 1.001, name="stored"), "fp16"), {"x": (600,)}, io_dtype="bf16")
    inputs = random_inputs(g)
    exactly = np.maximum(inputs["x"].astype(np.float64) * float(np.float32(np.array(1.001, dt.bfloat16.numpy))), 0)
    either = (
        from_reference(exactly, dt.float16),
        from_reference(to_reference(from_reference(exactly, dt.bfloat16), dt.bfloat16), dt.float16),
    )
    for y in either:
        assert wrong(g, inputs, y, materialized=frozenset({"stored"})) == 0


def test_cancelling_terms_of_gradients() -> None:
    """Gradients that cross zero have an error in units of the loss, and stay checked."""
    g = graph(lambda g, loss, x: g.swish_backward(loss, x), {"loss": (4000,), "x": (4000,)})
    inputs = random_inputs(g)
    inputs["x"] = np.linspace(-1.4, -1.2, 4000).astype(np.float32)  # the slope of swish is 0 at -1.278
    assert wrong(g, inputs, run(executables([g])[0], inputs)["y"]) == 0
    y = exact(g, inputs)
    assert wrong(g, inputs, y + np.float32(1e-5)) == 4000


def test_oscillation_is_undecided_where_the_argument_is_unknown() -> None:
    """The sine of a number that is known to within more than half a period can be anything in [-1, 1]."""
    g = graph(lambda g, x: g.sin((x + 1e9) - 1e9), {"x": (200,)})
    inputs = random_inputs(g)
    _, error = bounded(g, inputs, Rounding())[g.outputs[0]]
    assert np.isinf(error).all()
    g = graph(lambda g, x: g.sin((x + 1.0) - 1.0), {"x": (200,)})
    _, error = bounded(g, inputs, Rounding())[g.outputs[0]]
    assert error.max() < 1e-5


def test_errors_of_several_operands_act_together() -> None:
    """A product of two numbers close to zero, both inexact: moving one at a time would show nothing."""
    g = graph(lambda g, x: ((x + 1e3) - 1e3 - x) * ((x + 1e3) - 1e3 - x * 1.0), {"x": (300,)})
    inputs = random_inputs(g)
    x = inputs["x"]
    rest = (x + np.float32(1e3)) - np.float32(1e3) - x
    assert (rest != 0).sum() > 250
    assert wrong(g, inputs, rest * rest) == 0
    assert wrong(g, inputs, rest * rest + np.float32(1e-3)) == 300


def test_what_may_all_be_zero_may_be_false() -> None:
    """Not where one operand alone is: the other still says true."""
    g = graph(lambda g, x: g.logical_or((x + 1e8) - 1e8, (x + 1e8) - 1e8), {"x": (50,)})
    inputs = random_inputs(g)
    assert exact(g, inputs).all()
    assert wrong(g, inputs, np.zeros(50, bool)) == 0
    g = graph(lambda g, x: g.logical_or((x + 1e8) - 1e8, x), {"x": (50,)})
    assert wrong(g, inputs, np.zeros(50, bool)) == 50


@pytest.mark.parametrize("op", ["cmp_eq", "cmp_neq"])
def test_inexact_operands_may_be_equal_wherever_both_can_be(op: str) -> None:
    """Also where neither operand's value is within the other's bound."""
    g = fg.Graph("equal")
    a, b = ((g.tensor(n, (6,)) + 1e4) - 1e4 for n in "ab")
    y = g.output(getattr(g, op)(a, b))
    x = np.linspace(0.25, 0.75, 6).astype(np.float32)
    each = bounded(g, {"a": x, "b": x}, Rounding())[a][1]
    apart = np.array([0.0, 0.9, 1.1, -1.9, 2.1, -3.0])
    _, error = bounded(g, {"a": x, "b": (x + apart * each).astype(np.float32)}, Rounding())[y]
    np.testing.assert_array_equal(error > 0, np.abs(apart) < 2)


@pytest.mark.parametrize("dtype", ["float32", "int32", "bool"])
def test_exact_operands_are_equal_or_not(dtype: str) -> None:
    g = fg.Graph("equal", io_dtype=dtype)
    y = g.output(g.cmp_eq(g.tensor("a", (6,)), g.tensor("b", (3, 6))))
    _, error = bounded(g, random_inputs(g, special=0.2), Rounding())[y]
    assert not error.any()


def test_bits_of_inexact_integers_are_undecided() -> None:
    """The lowest bit, of ends that are both odd."""
    g = graph(lambda g, x: g.bitwise_and(g.cast(g.exp(x * 0.125 + 20.0), "int32"), 1), {"x": (100,)})
    _, error = bounded(g, random_inputs(g), Rounding())[g.outputs[0]]
    assert np.isinf(error).all()


def test_what_is_narrowed_from_float64_is_rounded_to_what_computes() -> None:
    """A norm of fp8 with a bias in float64: float32 is what its result has in the kernel."""
    g = fg.Graph("narrowed")
    x, bias = g.tensor("x", (7, 5), "float8_e5m2"), g.tensor("bias", (5,), "float64")
    zero = g.constant(np.zeros(5, np.float32))
    y = g.output(g.tensor("other", (7, 5), "float64") + g.layernorm(x, zero, bias))
    inputs = random_inputs(g)
    _, error = bounded(g, inputs, Rounding())[y]
    assert (error > 2.0**-26 * np.abs(inputs["bias"])).all()
    assert check(g, "cpu", inputs=inputs).ok


def test_accepts_at_the_ends() -> None:
    zeros = np.zeros(3)
    one = from_reference(np.ones(3), dt.bfloat16)
    assert accepts(dt.bfloat16, one, np.array([1.0, 1.003, 1.005]), zeros).tolist() == [True, True, False]
    assert accepts(dt.bfloat16, one, np.array([1.005, 1.3, 1.0]), np.array([0.0025, np.inf, 0])).all()
    assert accepts(dt.bool_, np.array([True, False]), np.array([False, False]), np.array([1.0, 0.0])).all()
    assert not accepts(dt.bool_, np.array([True]), np.array([False]), np.zeros(1)).any()


def test_check_describes_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusegraph.ops import TABLE

    g = graph(lambda g, x: x + 1.0, {"x": (4, 5)})
    good = check(g)
    assert good.ok
    assert str(good) == "graph 'bounds' on cpu: ok"
    monkeypatch.setitem(TABLE["add"].cuda, "float", "{a} - {b}")  # type: ignore[index]
    bad = check(g)
    assert not bad.ok
    (output,) = bad.outputs
    assert output.wrong == 20
    assert output.max_abs_error == pytest.approx(2)
    text = str(bad)
    assert text.startswith("graph 'bounds' on cpu: y: 20 wrong, at [0, 0] got ")
    assert "reference" in text
    assert "bound" in text


def test_sums_whose_sign_of_infinity_depends_on_the_order_are_undecided_in_what_follows() -> None:
    g = fg.Graph("bounds", io_dtype="float64")
    a, b = g.tensor("a", (1, 3)), g.tensor("b", (3, 1))
    y = g.matmul(a, b)
    g.output(y > 0.0, name="positive")
    g.output(g.relu(y), name="y")
    large = float(np.finfo(np.float64).max)
    inputs = {"a": np.array([[-large, -large, large]]), "b": np.array([[1.0], [1.0], [large]])}
    values = bounded(g, inputs, Rounding())
    for tensor in g.outputs:
        value, error = values[tensor]
        for other in (np.zeros(value.shape), np.ones(value.shape)):
            assert accepts(tensor.dtype, other.astype(tensor.dtype.numpy), value, error).all()


def test_nodes_of_composites_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    g = fg.Graph("chain")
    x = g.tensor("x", (4, 8))
    for n in range(3):
        x = g.softmax(g.gelu(g.matmul(x, g.tensor(f"w{n}", (8, 8)))))
    g.output(x)
    seen: list[str] = []
    analysed = bounds._node
    monkeypatch.setattr(bounds, "_node", lambda *a: (seen.append(a[1].name), analysed(*a))[1])
    _, error = bounded(g, random_inputs(g), Rounding())[x]
    assert len(seen) == len(set(seen)) == decompose(g).graph.node_count
    assert error.max() < 1e-3


def test_large_elements_have_finite_bounds() -> None:
    g = fg.Graph("large", compute_dtype="float64")
    x, w = g.tensor("x", (2, 3), "float64"), g.tensor("w", (3, 2), "float64")
    y = g.matmul(x, w)
    g.output(y)
    inputs = {"x": np.full((2, 3), 5e307), "w": np.ones((3, 2))}
    value, error = bounded(g, inputs, Rounding())[y]
    assert (value == 1.5e308).all()
    assert (error < 1e294).all()
