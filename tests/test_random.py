"""Random numbers: Philox's own bits, the same ones everywhere; and dropout, fused with what surrounds it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, compile_for, executables

import fusegraph as fg
from fusegraph.engines.reference import evaluate
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.ops.random import inner_dims, philox
from fusegraph.plan import plan
from fusegraph.report.check import random_inputs, run
from fusegraph.report.explain import describe


def numbers(shape: tuple[int, ...], dtype: str = "float32", op: str = "rng_uniform", **how: Any) -> fg.Graph:
    g = fg.Graph("numbers", io_dtype=dtype)
    g.output(getattr(g, op)(g.tensor("x", shape, **how), 12345678901, -3), name="y")
    return g


def block(dtype: str, shape: tuple[int, int] = (24, 96), seed: Any = None) -> fg.Graph:
    """The end of a transformer block: norm, activation, dropout, residual."""
    g = fg.Graph("norm_gelu_dropout_residual", io_dtype=dtype)
    x, residual = g.tensor("x", shape), g.tensor("residual", shape)
    scale, bias = g.tensor("scale", shape[1:]), g.tensor("bias", shape[1:])
    seed = g.tensor("seed", (), "int64") if seed is None else seed
    h = g.gelu(g.layernorm(x, scale, bias))
    g.output(g.dropout(h, seed, 7, probability=0.1) + residual, name="y")
    return g


#: (counter, key, what Philox4x32-10 makes of them), of the Random123 library's known answers.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN)
def test_known_answers(counter: str, key: str, words: str) -> None:
    def arrays(text: str) -> Any:
        return tuple(np.array(int(word, 16), np.uint64) for word in text.split())

    assert [int(w) for w in philox(arrays(counter), arrays(key))] == [int(w, 16) for w in words.split()]


def test_the_first_numbers_follow_from_the_definition() -> None:
    """Element i is word i % 4 of counter (i / 4, 0, offset) and key seed, 24 bits of it."""
    g = fg.Graph("first")
    g.output(g.rng_uniform(g.tensor("x", (6,)), 0, 0), name="y")
    (y,) = (evaluate(g, random_inputs(g))[t] for t in g.outputs)
    assert [int(v * 2**24) for v in y[:4]] == [int(word[:6], 16) for word in KNOWN[0][2].split()]


def test_same_bits_everywhere() -> None:
    """Uniform numbers depend on seed, offset and position alone: not on layout, dtype or the rest of a kernel."""
    shape = (3, 5, 4, 6)
    graphs = [numbers(shape), numbers(shape, layout="NHWC"), numbers(shape, "float64")]
    other = fg.Graph("other")
    x = other.tensor("x", shape)
    uniform = other.output(other.rng_uniform(x * 2.0, 12345678901, -3), name="y")
    other.output(other.reduction(uniform * x, "add", (2, 3)), name="sum")
    assert len(plan(other).kernels) == 1
    expected = evaluate(graphs[0], random_inputs(graphs[0]))[graphs[0].outputs[0]]
    for executable in executables([*graphs, other]):
        assert np.array_equal(run(executable, random_inputs(executable.graph))["y"], expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_against_the_reference(dtype: str) -> None:
    shapes: list[tuple[int, ...]] = [(), (1,), (31,), (7, 33), (4, 8, 16), (2, 0)]
    check_all([numbers(s, dtype, op) for s in shapes for op in ("rng_uniform", "rng_normal")])


def test_distributions() -> None:
    size = 1 << 16
    for op, mean, variance in (("rng_uniform", 0.5, 1 / 12), ("rng_normal", 0.0, 1.0)):
        g = numbers((size,), op=op)
        y = evaluate(g, {"x": np.zeros(size, np.float32)})[g.outputs[0]]
        assert abs(y.mean() - mean) < 4 * np.sqrt(variance / size)
        assert abs(y.var() / variance - 1) < 4 * np.sqrt(2 / size)
        assert len(np.unique(y)) > 0.99 * size
        assert abs(np.corrcoef(y[:-1], y[1:])[0, 1]) < 4 / np.sqrt(size)


def test_other_seeds_and_offsets_give_others() -> None:
    g = fg.Graph("seeds")
    x, seed, offset = g.tensor("x", (64,)), g.tensor("seed", (1,), "int64"), g.tensor("offset", (), "int32")
    g.output(g.rng_uniform(x, seed, offset), name="y")
    (made,) = executables([g])
    pairs = [(0, 0), (1, 0), (0, 1), (1 << 40, 0), (-1, 0), (0, -1)]
    found = []
    for s, o in pairs:
        inputs = {"x": np.zeros(64, np.float32), "seed": np.array([s], np.int64), "offset": np.array(o, np.int32)}
        found.append(run(made, inputs)["y"])
        assert np.array_equal(found[-1], evaluate(g, inputs)[g.outputs[0]])
    assert len({y.tobytes() for y in found}) == len(pairs)


def test_positions_beyond_31_bits() -> None:
    """A tensor that an int32 cannot number: the dimensions in front are another word of the counter."""
    assert [inner_dims(s) for s in ((2, 3), (2**30, 2), (3, 2**30), (2**20, 2**20, 2**10), ())] == [2, 1, 1, 2, 0]
    (kernel,) = plan(numbers((6, 2**29), "bfloat16")).kernels
    arguments = kernel.source.code.split("philox::uniform<float>(")[1]
    assert arguments.count("int32(") == 2


# ---- dropout


def test_norm_gelu_dropout_and_residual_are_one_kernel() -> None:
    graphs = [block(d) for d in ("float32", "bfloat16")] + [block("float16", (5, 33), 99)]
    assert [len(plan(g).kernels) for g in graphs] == [1, 1, 1]
    check_all(graphs)
    check_all(graphs[:1], strict=True)
    told = describe(plan(block("bfloat16", (8192, 8192))))
    assert told["bytes_moved"] < told["bytes_unfused"] / 3 * 1.001
    assert told["bytes_moved"] < 3.001 * 2 * 8192**2


def test_dropped_and_kept() -> None:
    g = fg.Graph("dropout")
    x = g.tensor("x", (64, 64))
    for probability in (0.0, 0.25, 1.0):
        g.output(g.dropout(x, 5, 6, probability=probability), name=f"y{probability}")
    (made,) = executables([g])
    values = np.full((64, 64), 3.0, np.float32)
    values[0] = np.nan
    y = run(made, {"x": values})
    np.testing.assert_array_equal(y["y0.0"], values)
    assert not y["y1.0"].any()
    kept = y["y0.25"] != 0
    assert abs(kept.mean() - 0.75) < 0.03
    assert np.allclose(y["y0.25"][1:][kept[1:]], 4.0)
    assert np.isnan(y["y0.25"][0][kept[0]]).all()


def test_backward_has_the_same_mask() -> None:
    """Nothing is kept for the gradient: the mask is computed again, from a loss of another layout too."""
    forward, backward = fg.Graph("forward"), fg.Graph("backward", io_dtype="bfloat16")
    x = forward.tensor("x", (2, 8, 4, 4))
    forward.output(forward.dropout(x, 5, 6, probability=0.3), name="y")
    loss = backward.tensor("loss", (2, 8, 4, 4), layout="NHWC")
    backward.output(backward.dropout_backward(loss, 5, 6, probability=0.3), name="dx")
    check_all([forward, backward])
    made = executables([forward, backward])
    ones = np.ones((2, 8, 4, 4), np.float32)
    y = run(made[0], {"x": ones})["y"]
    given = random_inputs(backward)["loss"]
    given[...] = 1
    dx = run(made[1], {"loss": given})["dx"]
    assert np.array_equal(y != 0, dx != 0)
    assert 0 < (y != 0).sum() < y.size


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda g, x: g.dropout(x, 0, 0, probability=1.5), AttributeValueError, "probability is between 0 and 1"),
        (lambda g, x: g.dropout(x, x, 0), DTypeError, "seed is an integer"),
        (lambda g, x: g.dropout(x, 0.5, 0), DTypeError, "seed is an integer"),
        (lambda g, x: g.rng_uniform(x, g.cast(x, "int32"), 0), ShapeError, "seed is one number"),
        (lambda g, x: g.rng_uniform(x, 1 << 63, 0), DTypeError, "does not fit in int64"),
        (lambda g, x: g.rng_uniform(g.cast(x, "int32"), 0, 0), DTypeError, "rng_uniform does not take int32"),
        (lambda g, x: g.rng_normal(x, 0, 0, dtype="int32"), DTypeError, "rng_normal does not take int32"),
    ],
)
def test_refused(make: Any, error: type[GraphError], text: str) -> None:
    g = fg.Graph("refused")
    with pytest.raises(error, match=text):
        make(g, g.tensor("x", (4, 8)))


# ---- GPUs


def gpu_graphs() -> list[fg.Graph]:
    graphs = [block(d, (64, n)) for d in ("float32", "bfloat16") for n in (1000, 4096)]
    return graphs + [numbers((64, 1023), d, op) for d in ("float32", "float64") for op in ("rng_uniform", "rng_normal")]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_compiles_for_gpus(arch: str) -> None:
    assert [k.name for k in compile_for(arch, gpu_graphs()) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    check_on_gpu(gpu_graphs())
