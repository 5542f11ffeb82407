"""Attention of 8-bit floats with scales."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from graphs import check_all, check_on_gpu
from test_attention import BOTTOM, CAUSAL, FORMS

import fusegraph as fg
from codegen.declined import Declined
from codegen.target import target
from fusegraph.engines.reference import evaluate
from fusegraph.errors import DTypeError, NotSupportedError, ShapeError
from fusegraph.lowering import cudnn_attention_fp8
from fusegraph.ops.attention_fp8 import SCALES
from fusegraph.passes import operand_layouts
from fusegraph.passes.decompose import decompose
from fusegraph.plan import by_cost_model, plan
from fusegraph.report.check import check_executable, random_inputs

E4M3, E5M2 = "float8_e4m3", "float8_e5m2"


def built(
    name: str = "small",
    *,
    dtype: str = E4M3,
    heads: int = 2,
    shared: int = 2,
    rows: int = 65,
    keys: int = 131,
    depth: int = 32,
    mask: bool = False,
    out: str | None = None,
    **how: Any,
) -> fg.Graph:
    g = fg.Graph(name, io_dtype=dtype)
    q = g.tensor("q", (1, heads, rows, depth))
    k, v = (g.tensor(n, (1, shared, keys, depth)) for n in "kv")
    scales = {n: g.tensor(n, (1, 1, 1, 1), "float32") for n in SCALES}
    if mask:
        how["mask"] = g.tensor("mask", (keys,), "bool")
    found: Any = g.sdpa_fp8(q, k, v, **scales, dtype=out, **how)
    for n, t in enumerate(found if isinstance(found, tuple) else (found,)):
        g.output(t, name=f"out{n}")
    return g


def inputs(g: fg.Graph) -> dict[str, Any]:
    found = random_inputs(g)
    for key, value in zip(SCALES, (0.5, 0.25, 2.0, 1 / 256, 256.0, 4.0)):
        found[key][...] = value if (key, g.name) != ("descale_k", "negative") else -value
    return found


VARIANTS: tuple[dict[str, Any], ...] = (
    {"name": "plain"},
    {"name": "causal", "heads": 4, "generate_stats": True, "depth": 64, **CAUSAL},
    {"name": "wide result", "dtype": E5M2, "out": "bfloat16", "mask": True, **BOTTOM},
    {"name": "odd", "depth": 37, "keys": 33, "soft_cap": 3.0},
    {"name": "one", "rows": 1, "keys": 2048, "heads": 4},
)


@pytest.mark.slow
@pytest.mark.parametrize("arch", FORMS)
def test_attention_of_small_floats(arch: str) -> None:
    check_all([built(**how) for how in VARIANTS], arch=arch, inputs=inputs)


HOPPER: tuple[dict[str, Any], ...] = (
    {"name": "plain", "rows": 70, "keys": 144},
    {"name": "causal", "rows": 200, "keys": 300, "heads": 4, "depth": 64, "generate_stats": True, **CAUSAL},
    {"name": "deep", "rows": 130, "keys": 272, "depth": 128, "dtype": E5M2, "out": "bfloat16"},
    {"name": "few", "rows": 64, "keys": 100, "depth": 96, "shared": 1},
    {"name": "no quads", "rows": 70, "keys": 131, "depth": 64},
    {"name": "negative", "rows": 70, "keys": 144, "generate_stats": True, **CAUSAL},
)


@pytest.mark.slow
def test_warpgroups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are laid out along the keys, which pays for large ones."""
    monkeypatch.setattr(operand_layouts, "WARPS", 1e-9)
    graphs = [built(**how) for how in HOPPER]
    for g in graphs:
        kernels = plan(g, choose=by_cost_model(target("sm_90a"))).kernels
        assert [k.group.family for k in kernels] == ["pointwise", "attention"]
        assert type(kernels[1].choice.schedule).__name__ == "AttentionWgmmaSchedule"
    results = check_all(graphs, arch="sm_90a", inputs=inputs)
    assert not any(o.undecided for r in results for o in r.outputs)


def test_values_are_laid_out_where_it_pays() -> None:
    def families(**how: Any) -> list[str]:
        return [k.group.family for k in plan(built(**how)).kernels]

    large = {"rows": 4096, "keys": 4096, "heads": 16, "shared": 16, "depth": 128}
    assert families(**large) == ["pointwise", "attention"]
    assert "pointwise" not in families(**{**large, "rows": 64})


def test_an_operand_of_all_probabilities_is_one_of_the_results() -> None:
    (kernel,) = plan(built()).kernels
    spec = kernel.group.lowered.spec
    assert spec.weight is None
    assert len(spec.epilogue.loads) == 4


def test_tensor_cores_take_them() -> None:
    for how in VARIANTS:
        kernel = plan(built(**how), choose=by_cost_model(target("sm_80"))).kernels[0]
        assert type(kernel.choice.schedule).__name__ == "AttentionMmaSchedule", how


def test_the_reference_is_what_the_nodes_compute() -> None:
    for how in VARIANTS:
        g = built(**{**how, "out": "float32"})
        given, parts = inputs(g), decompose(g)
        whole, written_out = evaluate(g, given), evaluate(parts.graph, given)
        for new, old in zip(parts.graph.outputs, g.outputs):
            np.testing.assert_allclose(written_out[new], whole[old], rtol=1e-6, atol=1e-6, err_msg=g.name)


def test_what_cudnn_is_not_told() -> None:
    for how, text in (
        ({"mask": True}, "no mask"),
        ({"soft_cap": 2.0}, "no soft_cap"),
        ({"use_alibi_mask": True}, "alibi"),
    ):
        with pytest.raises(Declined, match=text):
            cudnn_attention_fp8.check(built(**how).nodes[0])
    cudnn_attention_fp8.check(built(generate_stats=True, **BOTTOM).nodes[0])


def test_refusals() -> None:
    with pytest.raises(ShapeError, match="queries and keys have no elements"):
        built(depth=0)
    with pytest.raises(DTypeError, match="q is of 8-bit floats, got bfloat16"):
        built(dtype="bfloat16")
    g = fg.Graph("refused", io_dtype=E4M3)
    x = g.tensor("x", (1, 1, 8, 16))
    with pytest.raises(DTypeError, match="descale_q is one number in float32"):
        g.sdpa_fp8(x, x, x, *(g.tensor(n, (2,), "float32") for n in SCALES))
    with pytest.raises(ShapeError, match="4 dimensions"):
        g.sdpa_fp8(g.tensor("y", (8, 16)), x, x, *(g.tensor(f"{n} alone", (1,), "float32") for n in SCALES))


@pytest.mark.gpu
def test_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    check_on_gpu([built(**how) for how in VARIANTS], inputs=inputs)
    monkeypatch.setattr(operand_layouts, "WARPS", 1e-9)
    check_on_gpu([built(**how) for how in HOPPER], inputs=inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("how", [{}, {"heads": 4, "generate_stats": True, **CAUSAL}], ids=("full", "causal"))
def test_on_cudnn(how: dict[str, Any]) -> None:
    pytest.importorskip("cudnn")
    g = built(rows=256, keys=256, depth=128, **how)
    try:
        executable = g.compile("cudnn")
    except NotSupportedError as reason:
        pytest.skip(str(reason))  # there is no such attention before Hopper
    result = check_executable(executable, inputs(g))
    assert result.ok, result
