"""Attention under masks that depend on data: conditions on integers of queries and keys become ranges, and tiles that
they rule out are skipped.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

import numpy as np
import pytest
from graphs import check_all, executables
from test_attention import written_out

import fusegraph as fg
from codegen.attention import wgmma_schedule as attention_wgmma_schedule
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import AttentionWgmmaSchedule
from codegen.families import FORMS
from fusegraph.plan import plan
from fusegraph.report.check import check_executable, random_inputs, run


def packed(g: fg.Graph, s: fg.Tensor) -> fg.Tensor:
    """Masks keys of other documents (whose numbers depend on the batch) and keys too far behind."""
    rows, keys = s.shape[-2:]
    i, j = g.gen_index(s, axis=2), g.gen_index(s, axis=3)
    of_query, of_key = g.tensor("of query", (2, 1, rows, 1), "int32"), g.tensor("of key", (2, 1, 1, keys), "int32")
    near = g.logical_and(j > i - 20, g.cmp_eq(of_query, of_key))
    return g.cast(g.binary_select(s + g.cast(j - i, "float32") * 0.01, -inf, near), "bfloat16")


def test_ranges_are_bounds_that_depend_on_data() -> None:
    g = fg.Graph("packed", io_dtype="bfloat16")
    g.output(written_out(g, score=packed)[1], name="o")
    (spec,) = [x.lowered.spec for x in plan(g).partition.groups if x.family == "attention"]
    assert {(b.row, b.key, len(b.loads)) for b in spec.ranges} == {(0, 0, 2)}
    assert [(b.row, b.key) for b in spec.bounds] == [(-1, 1)]
    assert not spec.within.loads
    assert len(spec.inside.loads) == 2


def intervals_of_data(g: fg.Graph, s: fg.Tensor) -> fg.Tensor:
    """Masks keys outside a range given for each query, and keys whose rank (64-bit) or level plus position exceeds a
    limit.
    """
    rows, keys = s.shape[-2:]
    i, j = (g.gen_index(s, axis=axis) for axis in (2, 3))
    first, reach = (g.tensor(name, (rows, 1), dtype) for name, dtype in (("first", "int32"), ("reach", "int8")))
    rank, level = (g.tensor(name, (keys,), dtype) for name, dtype in (("rank", "int64"), ("level", "int32")))
    far = (j >= first) & (j <= i + g.cast(reach, "int32"))
    met = far & (rank <= 40) & (level + j <= i + 60)
    return g.binary_select(s, -inf, met)


@pytest.mark.slow
@pytest.mark.parametrize("keys", [96, 101])
def test_ranges_of_other_numbers(keys: int) -> None:
    g = fg.Graph("intervals", io_dtype="bfloat16")
    g.output(written_out(g, score=intervals_of_data, keys=keys)[1], name="o")
    (spec,) = [x.lowered.spec for x in plan(g).partition.groups if x.family == "attention"]
    assert len(spec.ranges) >= 3
    inputs = random_inputs(g)
    inputs["first"][...] = (np.arange(33) * 2)[:, None]
    inputs["reach"][...] = 40
    inputs["rank"][...] = np.arange(keys) % 50
    inputs["level"][...] = -np.arange(keys) // 2
    check_all([g], arch="sm_90a", inputs=lambda _: inputs)


@pytest.mark.slow
def test_tiles_that_data_rule_out_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values of other documents are NaN: what is skipped does not matter, what is masked in part would."""

    def small(spec: AttentionSpec, arch: Any) -> tuple[AttentionWgmmaSchedule, ...]:
        return tuple(replace(s, groups=1, keys=16, blocks=3) for s in attention_wgmma_schedule.schedules(spec, arch))

    monkeypatch.setattr(FORMS[AttentionWgmmaSchedule], "schedules", small)
    g = fg.Graph("packed", io_dtype="bfloat16")
    q, k, v = (g.tensor(name, (2, 3, 192, 32)) for name in "qkv")
    scores = g.matmul(q, k.transpose(0, 1, 3, 2), dtype="float32") * 0.25
    g.output(g.softmax(packed(g, scores)) @ v, name="o")
    (executable,) = executables([g], arch="sm_90a")
    inputs = random_inputs(g)
    for key in ("of query", "of key"):
        inputs[key].reshape(2, 192)[...] = np.arange(192) // 64  # documents begin where tiles do
    first = {key: array.copy() for key, array in inputs.items()}
    first["v"][:, :, 64:] = np.nan
    assert check_executable(executable, inputs).ok
    found = run(executable, first)["o"].astype(np.float32)
    assert np.isfinite(found[:, :, :64]).all()
    assert np.isnan(found[:, :, 64:]).all()


def wrapping(g: fg.Graph, s: fg.Tensor) -> fg.Tensor:
    """Masks by comparisons of small integers, which wrap around."""
    rows = s.shape[-2]
    i, j = (g.gen_index(s, axis=axis) for axis in (2, 3))
    reach = g.tensor("reach", (rows, 1), "uint8")
    less = g.cast(reach - g.constant(np.array(5, np.uint8)), "int32")
    return g.binary_select(s, -inf, (j <= less) & (g.cast(j, "int8") <= g.cast(i, "int8")))


def test_small_integers_that_wrap_around_are_no_ranges() -> None:
    g = fg.Graph("wrapping", io_dtype="bfloat16")
    g.output(written_out(g, score=wrapping, keys=200)[1], name="o")
    (spec,) = [x.lowered.spec for x in plan(g).partition.groups if x.family == "attention"]
    assert not spec.bounds
    assert not spec.ranges
    inputs = random_inputs(g)
    inputs["reach"][...] = np.arange(33)[:, None]
    check_all([g], arch="sm_80", inputs=lambda _: inputs)


@pytest.mark.parametrize(
    ("arch", "rows", "rounded"),
    [
        ("sm_90a", 1, False),
        ("sm_90a", 1, True),
        *(pytest.param(a, r, False, marks=pytest.mark.slow) for a, r in (("sm_90a", 3), ("sm_80", 1))),
        pytest.param("sm_90a", 3, True, marks=pytest.mark.slow),
    ],
)
def test_parts_divide_the_keys_that_are_there(arch: str, rows: int, rounded: bool) -> None:
    """A cache is filled up to a position that is data: parts divide what is filled, and read nothing else.

    The blocks of a cluster do so, if probabilities are rounded.
    """
    g = fg.Graph("filled", io_dtype="bfloat16")
    q, (k, v) = g.tensor("q", (1, 2, rows, 64)), (g.tensor(name, (1, 2, 1100, 64)) for name in "kv")
    s = g.matmul(q, k.transpose(0, 1, 3, 2), dtype="float32") * 0.125
    kept = g.cast(g.gen_index(s, axis=3), "int64") <= g.tensor("position", (rows, 1), "int64")
    p = g.softmax(g.binary_select(s, -inf, kept))
    g.output((g.cast(p, "bfloat16") if rounded else p) @ v, name="o")
    (spec,) = [x.lowered.spec for x in plan(g).partition.groups if x.family == "attention"]
    assert (spec.parts > 1) == (not rounded)
    assert (len(spec.bounds), len(spec.ranges)) == ((1, 0) if rows == 1 else (0, 1))
    (executable,) = executables([g], arch=arch)
    inputs = random_inputs(g)
    for position in (0, 127, 128, 700, 1099, 2**40):
        inputs["position"][...] = position + np.arange(rows)[:, None]
        assert check_executable(executable, inputs).ok, position
    inputs["position"][...] = 383  # tiles begin at multiples of 128 or of less
    inputs["v"][:, :, 384:] = np.nan
    assert np.isfinite(run(executable, inputs)["o"].astype(np.float32)).all()
    inputs["position"][...] = -(2**40)
    assert np.isnan(run(executable, inputs)["o"].astype(np.float32)).all()


@pytest.mark.parametrize("kept", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_keys_that_a_mask_of_data_rules_out_are_not_read(kept: bool) -> None:
    """Two attentions with one mask, as layers of a decoder have: where its keys begin and end is found once."""
    g = fg.Graph("masked", io_dtype="bfloat16")
    mask = g.tensor("mask", (2, 1, 1, 1100), "bool")
    x = g.tensor("q", (2, 2, 1, 64))
    for n in range(2):
        k, v = (g.tensor(f"{name}{n}", (2, 2, 1100, 64)) for name in "kv")
        s = g.matmul(x, k.transpose(0, 1, 3, 2), dtype="float32") * 0.125
        s = g.binary_select(s, -inf, mask) if kept else g.binary_select(-inf, s, mask)
        x = g.softmax(s) @ v
    g.output(x, name="o")
    specs = [k.group.lowered.spec for k in plan(g).kernels]
    attention = [spec for spec in specs if isinstance(spec, AttentionSpec)]
    assert [(len(spec.bounds), spec.parts > 1) for spec in attention] == [(2, True)] * 2
    assert len(specs) == 5  # one for the mask; two each for the parts, and to combine them
    (executable,) = executables([g], arch="sm_90a")
    inputs = random_inputs(g)
    inputs["mask"][...] = np.random.default_rng(0).random(inputs["mask"].shape) < 0.5
    assert check_executable(executable, inputs).ok
    position = np.arange(1100)
    inputs["mask"][0, 0, 0] = ((position >= 300) & (position < 640)) == kept
    inputs["mask"][1, 0, 0] = (position == 1099) == kept
    assert check_executable(executable, inputs).ok
    inputs["v1"][0, :, 640:] = np.nan
    inputs["v1"][1, :, :896] = np.nan
    assert np.isfinite(run(executable, inputs)["o"].astype(np.float32)).all()
    inputs["mask"][0] = not kept
    found = run(executable, inputs)["o"].astype(np.float32)
    assert np.isnan(found[0]).all()
    assert np.isfinite(found[1]).all()
