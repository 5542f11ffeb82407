"""Rotary position embeddings: `rope` and its gradient, those written out, and both in front of attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu, compile_for

import fusegraph as fg
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError
from fusegraph.plan import Plan, plan
from fusegraph.report.check import random_inputs

Array = np.ndarray[Any, Any]
OPS = ("rope", "rope_backward")


def rotated(
    op: str = "rope",
    shape: tuple[int, ...] = (2, 3, 70, 64),
    dtype: str = "bfloat16",
    angles: str = "float32",
    strides: tuple[int, ...] | None = None,
    **how: Any,
) -> fg.Graph:
    called = " ".join(f"{key} {value}" for key, value in how.items())
    g = fg.Graph(f"{op} {shape} {dtype} {angles} {strides} {called}", io_dtype=dtype)
    x = g.tensor("x", shape, strides=strides)
    freqs = g.tensor("freqs", (shape[2], 1, 1, how.get("rope_dim") or shape[3]), angles)
    g.output(getattr(g, op)(x, freqs, **how), name="y")
    return g


def variants(op: str) -> list[fg.Graph]:
    """Whole rows and the ends of some, scales, ragged sizes, every float dtype, rows of heads side by side."""
    return [
        rotated(op),
        rotated(op, rope_dim=32, output_scale=0.125),
        rotated(op, (1, 2, 63, 6), "float16", rope_dim=2),
        rotated(op, (2, 3, 5, 7), "float32", rope_dim=4, output_scale=-3.0),
        rotated(op, (1, 5, 9, 24), "float64", "float64"),
        rotated(op, (1, 2, 4, 10), "float64", "float32", rope_dim=6),
        rotated(op, (2, 1, 17, 16), "float8_e4m3"),
        rotated(op, (2, 4, 19, 32), "bfloat16", "bfloat16", (19 * 128, 32, 128, 1)),
        rotated(op, (3, 4, 8, 16), "float16", strides=(700, 160, 18, 1)),
        rotated(op, (1, 1, 1, 2), "float32"),
        *(rotated(op, shape) for shape in ((0, 2, 3, 8), (2, 2, 0, 8), (2, 0, 3, 8))),
    ]


@pytest.mark.parametrize("op", OPS)
def test_against_the_reference(op: str) -> None:
    graphs = variants(op)
    assert [len(plan(g).kernels) for g in graphs] == [1] * len(graphs)
    check_all(graphs[1:3] if op == "rope" else graphs[3:4])


@pytest.mark.slow
def test_everything_against_the_reference() -> None:
    check_all([g for op in OPS for g in variants(op)])
    check_all([g for op in OPS for g in variants(op)[:3]], strict=True)


def special(graph: fg.Graph) -> dict[str, Array]:
    """Returns inputs with large angles, and with NaN and infinities among angles and elements."""
    found = random_inputs(graph)
    x, freqs = found["x"], found["freqs"]
    freqs[...] = (np.arange(freqs.shape[0])[:, None, None, None] * 1234.5).astype(freqs.dtype)
    freqs[1, ..., 0], freqs[2, ..., 1] = np.nan, np.inf
    x[0, 0, 3, :3] = np.nan, np.inf, -np.inf
    return found


@pytest.mark.slow
def test_angles_without_end_and_no_numbers() -> None:
    check_all([rotated(dtype=d, rope_dim=r) for d in ("float32", "bfloat16") for r in (0, 32)], inputs=special)


def evaluated(graph: fg.Graph, **inputs: Array) -> Array:
    return np.asarray(graph.compile("reference")(*(inputs[t.name] for t in graph.inputs)))


def test_is_a_product_of_complex_numbers() -> None:
    """The reference, and that the gradient is the transpose: turned back, everything is as it was."""
    rng = np.random.default_rng(0)
    x, freqs = rng.standard_normal((2, 3, 5, 10)), rng.standard_normal((5, 1, 1, 6)) * 9
    how = {"shape": x.shape, "dtype": "float64", "angles": "float64", "rope_dim": 6}
    y = evaluated(rotated(**how, output_scale=2.0), x=x, freqs=freqs)
    pairs = (x[..., 4:7] + 1j * x[..., 7:]) * np.exp(1j * freqs[:, 0, 0, :3])
    np.testing.assert_allclose(y, 2 * np.concatenate([x[..., :4], pairs.real, pairs.imag], -1), rtol=1e-12, atol=1e-12)
    back = evaluated(rotated("rope_backward", **how, output_scale=0.5), x=y, freqs=freqs)
    np.testing.assert_allclose(back, x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda g, x, f: g.rope(x, f, rope_dim=3), AttributeValueError, "even and at most 8"),
        (lambda g, x, f: g.rope(x, f, rope_dim=10), AttributeValueError, "even and at most 8"),
        (lambda g, x, f: g.rope(x, f, rope_dim=-2), AttributeValueError, "even and at most 8"),
        (lambda g, x, f: g.rope(x, f, rope_dim=True), AttributeValueError, "rope_dim is an integer"),
        (lambda g, x, f: g.rope(x, f, output_scale=np.inf), AttributeValueError, "output_scale is a finite number"),
        (lambda g, x, f: g.rope(x, f, rope_dim=4), ShapeError, r"freqs \[6, 1, 1, 8\] .* \[6, 1, 1, 4\]"),
        (lambda g, x, f: g.rope_backward(x, f.transpose((1, 2, 0, 3))), ShapeError, r"freqs \[1, 1, 6, 8\]"),
        (lambda g, x, f: g.rope(g.tensor("v", (6, 8)), f), ShapeError, "4 dimensions"),
        (lambda g, x, f: g.rope(g.cast(x, "int32"), f), DTypeError, "rope does not take int32"),
        (lambda g, x, f: g.rope(x, g.cast(f, "int32")), DTypeError, "rope does not take int32"),
    ],
)
def test_what_does_not_fit(make: Callable[..., Any], error: type[GraphError], message: str) -> None:
    g = fg.Graph("wrong")
    with pytest.raises(error, match=message):
        make(g, g.tensor("x", (2, 3, 6, 8)), g.tensor("freqs", (6, 1, 1, 8)))


# ---- in front of attention


def _half(g: fg.Graph, x: fg.Tensor, cos: fg.Tensor, sin: fg.Tensor) -> fg.Tensor:
    low, high = g.split(x, 2, axis=3)
    return x * cos + g.concatenate(-high, low, axis=3) * sin


def _chunks(g: fg.Graph, x: fg.Tensor, cos: fg.Tensor, sin: fg.Tensor) -> fg.Tensor:
    low, high = g.split(x, 2, axis=3)
    cos, sin = (g.split(t, 2, axis=-1)[0] for t in (cos, sin))
    return g.concatenate(low * cos - high * sin, high * cos + low * sin, axis=3)


def _interleaved(g: fg.Graph, x: fg.Tensor, cos: fg.Tensor, sin: fg.Tensor) -> fg.Tensor:
    even, odd = g.split(x.reshape((*x.shape[:3], x.shape[3] // 2, 2)), 2, axis=4)
    return x * cos + g.concatenate(-odd, even, axis=4).reshape(x.shape) * sin


def _strided(g: fg.Graph, x: fg.Tensor, cos: fg.Tensor, sin: fg.Tensor) -> fg.Tensor:
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., ::2], sin[..., ::2]
    parts = (t.reshape((*t.shape, 1)) for t in (even * cos - odd * sin, odd * cos + even * sin))
    return g.concatenate(*parts, axis=4).reshape(x.shape)


def _partial(g: fg.Graph, x: fg.Tensor, cos: fg.Tensor, sin: fg.Tensor) -> fg.Tensor:
    kept = x.shape[3] // 2
    turned = _half(g, x[..., :kept], cos[..., :kept], sin[..., :kept])
    return g.concatenate(turned, x[..., kept:], axis=3)


KINDS = {"half": _half, "chunks": _chunks, "interleaved": _interleaved, "strided": _strided, "partial": _partial}


def attention(
    kind: str,
    heads: int = 4,
    shared: int = 2,
    rows: int = 40,
    keys: int = 40,
    elements: int = 32,
    dtype: str = "float16",
) -> fg.Graph:
    g = fg.Graph(f"{kind} {heads} {shared} {rows} {keys} {elements} {dtype}", io_dtype=dtype)
    q, k, v = (
        g.tensor(n, (2, h, s, elements)) for n, h, s in (("q", heads, rows), ("k", shared, keys), ("v", shared, keys))
    )
    if kind == "rope":
        freqs = g.tensor("freqs", (keys, 1, 1, elements), "float32")
        q, k = g.rope(q, freqs[keys - rows :], output_scale=0.2), g.rope(k, freqs)
    else:
        cos, sin = (g.tensor(n, (keys, elements)) for n in ("cos", "sin"))
        q = KINDS[kind](g, q, cos[keys - rows :], sin[keys - rows :])
        k = KINDS[kind](g, k, cos, sin)
    how = {"diagonal_alignment": "BOTTOM_RIGHT", "diagonal_band_right_bound": 0}
    g.output(g.sdpa(q, k, v, **how), name="o")
    return g


def families(made: Plan) -> list[str]:
    return [k.group.family for k in made.kernels]


@pytest.mark.parametrize("kind", ["rope", *KINDS])
def test_what_attention_turns(kind: str) -> None:
    """Queries, and keys that one tile of queries meets; else these are in memory once, turned.  Cosines and sines of
    angles are computed by a kernel of their own.
    """
    several, few = attention(kind, rows=300, keys=300), attention(kind, shared=4)
    decode = attention(kind, rows=1, keys=96)
    tables, both = ["pointwise"] * (kind == "rope"), ["pointwise"] * 2 * (kind == "rope")
    made = [plan(g) for g in (several, few, decode)]
    assert families(made[0]) == [*tables, "pointwise", "attention"]
    assert families(made[1]) == [*tables, "attention"]
    assert families(made[2]) == [*both, "attention"]
    assert [len(p.memory.offsets) for p in made] == [
        2 * len(tables) + 1,
        2 * len(tables),
        2 * len(both),
    ]


def reason(graph: fg.Graph, operand: str) -> str:
    (found,) = [d.reason for d in plan(graph).partition.decisions if f"its {operand}" in d.reason]
    return found


def test_why_attention_turns_them() -> None:
    """Queries are read once, keys by every tile of queries and by both heads that share them."""
    graph = attention("half", rows=1000, keys=1000)
    assert "computes its queries on their way to shared memory" in reason(graph, "queries")
    assert "would save moving 512 kB, but would compute each element 16 times" in reason(graph, "keys")
    decode = attention("half", rows=1, keys=500)  # both heads are rows of one tile
    assert "computes its keys on their way to shared memory" in reason(decode, "keys")
    saved = [d.bytes_saved for d in plan(decode).partition.decisions if "its keys" in d.reason]
    assert saved == [2 * 2 * 2 * 500 * 32 * 2]
    assert "copies of 1000 keys are on their way" in reason(attention("half", rows=1, keys=1000), "keys")


def test_attention_of_rotated_queries_and_keys() -> None:
    check_all([attention("rope")])


@pytest.mark.slow
def test_attention_of_all_kinds() -> None:
    graphs = [attention(kind) for kind in KINDS] + [attention("rope", shared=4, rows=1, keys=70)]
    graphs += [attention(kind, shared=4, elements=64, dtype="bfloat16") for kind in KINDS]
    check_all([*graphs, *(attention(kind, rows=1, keys=70, dtype="float32") for kind in KINDS)])
    check_all([attention("rope"), attention("half", shared=4)], arch="sm_90a")


@pytest.mark.slow
def test_kernels_compile() -> None:
    graphs = [
        *variants("rope")[:5],
        *variants("rope_backward")[1:4],
        *(attention(kind) for kind in ("rope", "strided")),
    ]
    assert [k.name for k in compile_for("sm_90a", graphs) if k.spill_bytes] == []


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    graphs = [g for op in OPS for g in variants(op)]
    check_on_gpu([*graphs, *(attention(kind, rows=500, keys=509) for kind in ("rope", *KINDS))])
    check_on_gpu([rotated(dtype=d, rope_dim=r) for d in ("float32", "bfloat16") for r in (0, 32)], inputs=special)
