"""The gradients of attention: the op sdpa_backward, and its kernels on the CPU against the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from golden_files import check_golden
from graphs import check_all, check_on_gpu, compile_for

import fusegraph as fg
from codegen.target import target
from fusegraph.engines.reference import evaluate
from fusegraph.errors import DTypeError, GraphError, ShapeError
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import random_inputs, run
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

Extra = Callable[[fg.Graph], Mapping[str, Any]]


def made(
    *,
    name: str = "gradients",
    dtype: str = "bfloat16",
    batch: int = 1,
    heads: int = 2,
    shared: int | None = None,
    rows: int = 65,
    keys: int | None = None,
    depth: int = 32,
    width: int | None = None,
    layout: str = "BHSD",
    extra: Extra | None = None,
    sink: str = "",
    forward: bool = True,
    results: int = 5,
    **attributes: Any,
) -> fg.Graph:
    """Builds the gradients of an sdpa.

    The sdpa's results are inputs unless the graph contains the sdpa, too.  sink: "of sdpa", or "of both" if the
    gradients have it as well.
    """
    g = fg.Graph(name, io_dtype=dtype)
    keys, width = rows if keys is None else keys, depth if width is None else width

    def tensor(key: str, h: int, length: int, elements: int) -> fg.Tensor:
        strides = {
            "BHSD": (h * length * elements, length * elements, elements, 1),
            "BSHD": (h * length * elements, elements, h * elements, 1),
            "gaps": (h * length * (elements + 3), length * (elements + 3), elements + 3, 1),
            "turned": (h * length * elements, length * elements, 1, length),
        }[layout]
        return g.tensor(key, (batch, h, length, elements), strides=strides)

    q, k, v = (
        tensor("q", heads, rows, depth),
        tensor("k", shared or heads, keys, depth),
        tensor("v", shared or heads, keys, width),
    )
    loss = tensor("dO", heads, rows, width)
    more = extra(g) if extra else {}
    token = {"sink_token": g.tensor("sink", (1, heads, 1, 1), "float32")} if sink else {}
    if forward:
        o, stats = g.sdpa(q, k, v, **more, **token, generate_stats=True, **attributes)
    else:
        o = tensor("o", heads, rows, width)
        stats = g.tensor("stats", (batch, heads, rows, 1), "float64" if dtype == "float64" else "float32")
    if sink == "of both":
        more = {**more, **token}
    every = g.sdpa_backward(q, k, v, o, loss, stats, **more, **attributes)
    for key, t in zip(("dQ", "dK", "dV", "dBias", "dSink")[:results], every):
        g.output(t, name=key)
    return g


def lengths(g: fg.Graph) -> dict[str, Any]:
    return {
        "seq_len_q": g.constant(np.array([65, 7], np.int32)),
        "seq_len_kv": g.constant(np.array([130, 33], np.int32)),
    }


def lengths_of(*numbers: int) -> Extra:
    return lambda g: {"seq_len_q": g.constant(np.array(numbers, np.int32))}


def bias(*shape: int, dtype: str | None = None) -> Extra:
    return lambda g: {"bias": g.tensor("bias", shape, dtype)}


def dropout(g: fg.Graph) -> dict[str, Any]:
    return {"seed": 7, "offset": 3}


CAUSAL: dict[str, Any] = {"use_causal_mask": True}
BOTTOM: dict[str, Any] = {**CAUSAL, "diagonal_alignment": "BOTTOM_RIGHT"}

QUICK: tuple[dict[str, Any], ...] = (
    {"name": "plain", "rows": 17, "keys": 35, "depth": 24, "heads": 1, "forward": False},
    {"name": "causal", "rows": 40, "heads": 4, "shared": 2, **CAUSAL},
)
VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "one", "rows": 1},
    {"name": "bottom", "rows": 63, "keys": 130, "width": 64, **BOTTOM},
    {"name": "rows without keys", "rows": 130, "keys": 63, "use_alibi_mask": True, "heads": 3, **BOTTOM},
    {"name": "band", "rows": 130, "diagonal_band_left_bound": 5, "diagonal_band_right_bound": 70},
    {"name": "capped", "dtype": "float16", "keys": 130, "soft_cap": 5.0, "layout": "BSHD"},
    {"name": "scaled", "attn_scale": -0.3, "heads": 1},
    {"name": "zero", "attn_scale": 0, "heads": 1},
    {"name": "biased", "keys": 66, "extra": bias(1, 1, 65, 66)},
    {"name": "biased keys", "keys": 67, "extra": bias(67, dtype="float32")},
    {"name": "biased and capped", "batch": 2, "extra": bias(2, 2, 65, 65), "soft_cap": 3.0},
    {
        "name": "masked",
        "heads": 4,
        "shared": 2,
        "batch": 2,
        "extra": lambda g: {"mask": g.tensor("m", (65, 65), "bool")},
    },
    {"name": "lengths", "keys": 130, "batch": 2, "extra": lengths, **BOTTOM},
    {"name": "sunk", "heads": 4, "shared": 2, "sink": "of sdpa", **CAUSAL},
    {"name": "by sink", "batch": 2, "heads": 4, "shared": 2, "rows": 20, "sink": "of both", "extra": lengths_of(20, 3)},
    {"name": "single", "dtype": "float32", "heads": 4, "shared": 2, "rows": 20, "extra": bias(4, 20, 1), **CAUSAL},
    {"name": "single capped", "dtype": "float32", "rows": 20, "keys": 33, "depth": 40, "soft_cap": 3.0, **BOTTOM},
    {"name": "double", "dtype": "float64", "rows": 9, "depth": 7, "width": 5, "heads": 1},
    {"name": "dropped", "rows": 20, "heads": 4, "shared": 2, "extra": dropout, "dropout_probability": 0.3, **CAUSAL},
    {"name": "gaps", "layout": "gaps", "rows": 20, **CAUSAL},
    {"name": "turned", "layout": "turned", "rows": 20},
)


def test_forms() -> None:
    check_all([made(**QUICK[1])], arch="sm_90a")


def test_values_without_elements() -> None:
    """NVRTC refuses arrays of no elements, which the compiler for a CPU takes."""
    graphs = [
        made(name=f"none{n}", rows=5, keys=6, depth=16, width=0, dtype=dtype, forward=forward, results=3)
        for n, (dtype, forward) in enumerate([("bfloat16", False), ("float32", True)])
    ]
    compile_for("sm_80", graphs)
    check_all(graphs, arch="sm_80")


@pytest.mark.slow
def test_sizes() -> None:
    """Nothing, and one of everything."""
    sizes = [(0, 2, 2, 5, 6, 16, 16), (1, 2, 2, 0, 6, 16, 16), (1, 2, 2, 5, 6, 16, 0)]
    sizes += [(1, 1, 1, 130, 130, 256, 256)]  # a ring with as few stages as there may be
    sizes += [(1, 1, 1, 1, 1, 1, 1), (1, 4, 2, 1, 20, 16, 8), (1, 4, 2, 20, 1, 16, 8), (2, 4, 1, 20, 30, 16, 8)]
    graphs = [
        made(name=f"s{n}", batch=b, heads=h, shared=k, rows=q, keys=kv, depth=d, width=v, forward=False, **CAUSAL)
        for n, (b, h, k, q, kv, d, v) in enumerate(sizes)
    ]
    check_all(graphs, arch="sm_90a")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_variants(arch: str) -> None:
    graphs = [made(**how) for how in (*QUICK, *VARIANTS)]
    for graph in graphs:
        families = [g.family for g in plan(graph).partition.groups]
        # One query needs no tile; gradients by scores that are an output and multiplied with a slope are written out.
        whole = graph.name not in ("one", "biased and capped")
        assert families.count("attention_backward") == 2 * whole, graph.name
        assert ("contraction" in families) != whole, graph.name
    check_all(graphs, arch=arch)


@pytest.mark.parametrize("arch", ["sm_90a", "sm_80"])
def test_golden_source(arch: str) -> None:
    how: dict[str, Any] = {"soft_cap": 30.0} if arch == "sm_90a" else {}  # one kernel does not make its gradients
    graph = made(name="gradients", rows=1024, heads=4, shared=2, depth=64, forward=False, **how, **CAUSAL)
    kernels = plan(graph, choose=by_cost_model(target(arch))).kernels
    sources = [k.source.code for k in kernels if k.group.family == "attention_backward"]
    for over, source in zip(("queries", "keys"), sources, strict=True):
        check_golden(f"attention_backward_{over}_{arch}", source)


@pytest.mark.slow
def test_registers() -> None:
    """The kernels of usual sizes keep everything in registers, and their products are not serialised."""
    chosen = by_cost_model(target("sm_90a"))
    sources = []
    for depth, shared in ((64, 16), (64, 4), (128, 16), (128, 4), (256, 16), (256, 4)):
        name = f"d{depth}s{shared}"
        graph = made(name=name, rows=4096, heads=16, shared=shared, depth=depth, forward=False, **CAUSAL)
        kernels = [k for k in plan(graph, choose=chosen).kernels if k.group.family == "attention_backward"]
        form = "Wgmma" if depth > 128 else "Fused"
        assert all(type(k.choice.schedule).__name__ == f"AttentionBackward{form}Schedule" for k in kernels)
        sources += [k.source for k in kernels]
    for source, compiled in zip(sources, nvrtc.compile_kernels(sources, "sm_90a", cache=default_cache()), strict=True):
        assert compiled.spill_bytes == 0, compiled.name
        # A block has as many registers as its warpgroups move among each other, or they wait for ever.
        threads = source.block[0]
        assert compiled.registers * threads == target("sm_90a").arch.registers_at_launch(threads)
        assert not compiled.warnings, compiled.warnings


def test_reference() -> None:
    """Differences of the forward pass's reference in float64."""
    how: dict[str, Any] = {"rows": 5, "keys": 6, "depth": 3, "width": 2, "heads": 4, "shared": 2, "dtype": "float64"}
    given: dict[str, Any] = {"extra": lambda g: {**bias(1, 4, 1, 6)(g), **dropout(g)}, "soft_cap": 2.0, **BOTTOM}
    given |= {"dropout_probability": 0.4, "sink": "of both"}
    graph = made(**how, **given)
    forward = graph.nodes[0]
    inputs = random_inputs(graph)
    found = {t.name: x for t, x in evaluate(graph, inputs).items()}

    def loss(values: Mapping[str, Any]) -> float:
        operands = [np.asarray(t.value if t.value is not None else values[t.name]) for t in forward.inputs]
        operands = [x if x.dtype.kind in "bi" else x.astype(np.float64) for x in operands]
        return float((forward.op.reference(*operands, **forward.attributes)[0] * values["dO"]).sum())

    rng = np.random.default_rng(1)
    for key, gradient in (("q", "dQ"), ("k", "dK"), ("v", "dV"), ("bias", "dBias"), ("sink", "dSink")):
        direction = rng.standard_normal(inputs[key].shape)
        ends = [loss({**inputs, key: inputs[key] + step * direction}) for step in (1e-5, -1e-5)]
        assert np.isclose((ends[0] - ends[1]) / 2e-5, (found[gradient] * direction).sum(), rtol=1e-6), key


@pytest.mark.gpu
def test_on_gpu() -> None:
    graphs = [made(**how) for how in (*QUICK, *VARIANTS)]
    for rows, keys, depth in ((509, 765, 128), (300, 300, 256), (765, 509, 64)):
        graphs.append(made(name=f"d{depth}", rows=rows, keys=keys, depth=depth, heads=2, shared=1, **BOTTOM))
    check_on_gpu(graphs)


@pytest.mark.gpu
def test_the_same_bits_on_gpu() -> None:
    graph = made(name="again", rows=700, depth=128, heads=8, shared=2, forward=False, **CAUSAL)
    executable = graph.compile("cuda")
    inputs = random_inputs(graph)
    first, second = run(executable, inputs), run(executable, inputs)
    assert all(np.array_equal(first[key].view(np.uint16), second[key].view(np.uint16)) for key in first)


def test_errors() -> None:
    g = fg.Graph("wrong")
    q, k, o, stats = (g.tensor(n, s) for n, s in zip("qkos", ((1, 2, 5, 8), (1, 1, 6, 8), (1, 2, 5, 8), (1, 2, 5, 1))))
    with pytest.raises(ShapeError, match=r"stats \[1, 2, 5, 8\] has not the shape \[1, 2, 5, 1\]"):
        g.sdpa_backward(q, k, k, o, o, o)
    with pytest.raises(ShapeError, match=r"dO \[1, 1, 6, 8\] has not the shape \[1, 2, 5, 8\]"):
        g.sdpa_backward(q, k, k, o, k, stats)
    with pytest.raises(ShapeError, match="queries and keys have no elements"):
        g.sdpa_backward(g.tensor("q0", (1, 2, 5, 0)), g.tensor("k0", (1, 1, 6, 0)), k, o, o, stats)
    with pytest.raises(DTypeError, match="stats is of floats, got int32"):
        g.sdpa_backward(q, k, k, o, o, g.tensor("i", (1, 2, 5, 1), "int32"))
    small = g.cast(q, "float8_e4m3")
    with pytest.raises(DTypeError, match="q is float8_e4m3: attention of 8-bit floats is for inference"):
        g.sdpa_backward(small, small, small, o, o, stats)
    with pytest.raises(GraphError, match="no descale_k: attention of 8-bit floats is for inference"):
        g.sdpa_backward(q, k, k, o, o, stats, descale_k=1.0)
    with pytest.raises(GraphError, match="no page_table_v: attention to pages is for inference"):
        g.sdpa_backward(q, k, k, o, o, stats, page_table_v=g.tensor("t", (1, 2), "int32"))
    with pytest.raises(ShapeError, match=r"sink_token \[1, 3, 1, 1\] does not broadcast"):
        g.sdpa_backward(q, k, k, o, o, stats, sink_token=g.tensor("three", (1, 3, 1, 1)))
