"""Concatenations: one load for an element whatever the number of parts, on the CPU, against NumPy."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from graphs import check_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.plan import plan

FUZZ = settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


def shifted(g: fg.Graph, x: fg.Tensor, axis: int, by: int, step: int = 1) -> fg.Tensor:
    """Returns a tensor shifted around its ends along an axis; with a step of -1, each of the two parts reversed."""
    keys: tuple[list[slice], ...] = ([slice(None)] * 4, [slice(None)] * 4)
    keys[0][axis], keys[1][axis] = slice(by, None), slice(None, by)
    parts = [x[tuple(key)] for key in keys]
    return g.concatenate([g.flip(part, axis) for part in parts] if step < 0 else parts, axis=axis)


def joined(draw: Callable[[Any], Any], number: int) -> fg.Graph:
    """Returns a graph that joins tensors, views of them and the same ones again, with other work around that."""
    dtype = draw(st.sampled_from(["bfloat16", "float32", "int8", "float64"]))
    g = fg.Graph(f"joined {number}", io_dtype=dtype)
    layout = draw(st.sampled_from(["NCHW", "NHWC"]))
    axis = draw(st.sampled_from([1, 1, 1, 0, 2, 3]))
    shape = [draw(st.integers(1, 3)), draw(st.integers(1, 9)), draw(st.integers(1, 4)), draw(st.integers(1, 4))]
    unit = draw(st.sampled_from([1, 3, 8, 16]))
    parts: list[fg.Tensor] = []
    for k in range(draw(st.integers(2, 9))):
        again = draw(st.integers(0, 9))
        own = list(shape)
        own[axis] = unit * draw(st.integers(0, 3))
        if again == 0 and parts:
            parts.append(draw(st.sampled_from(parts)))
        elif again == 1:  # a view that begins somewhere
            large = [n + d for n, d in zip(own, (1, 3, 0, 2))]
            x = g.tensor(f"x{k}", large, layout=layout)
            parts.append(x[1:, 3 : 3 + own[1], : own[2], 2:])
        elif again == 2:
            parts.append(g.neg(g.tensor(f"x{k}", own)))
        elif again == 3:
            parts.append(g.flip(g.tensor(f"x{k}", own, layout=layout), draw(st.sampled_from([axis, 3]))))
        else:
            parts.append(g.tensor(f"x{k}", own, layout=layout))
    x = g.concatenate(parts, axis=axis)
    how = draw(st.sampled_from(["plain", "pad", "slice", "turn", "relu", "shift"]))
    if how == "shift":  # along two axes, some of it backwards
        for along in draw(st.sampled_from([(1, 2), (3, 2), (3, 3), (0, 1)])):
            x = shifted(g, x, along, draw(st.integers(0, x.shape[along])), draw(st.sampled_from([1, 1, -1])))
    if how == "pad":
        x = g.pad(x, [0, (2, 1), 0, (1, 0)], value=1)
    if how == "slice" and x.shape[axis] > 2:
        keys = [slice(None)] * 4
        keys[axis] = slice(1, -1, draw(st.sampled_from([1, 2])))
        x = x[tuple(keys)]
    if how == "turn":
        x = g.transpose(x, (0, 2, 3, 1)) * 2
    g.output(g.neg(x), name="y")
    return g


@pytest.mark.slow
@given(st.data())
@FUZZ
def test_parts_of_any_kind(data: Any) -> None:
    check_all([joined(data.draw, number) for number in range(6)])


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_one_load_of_many_parts(layout: str) -> None:
    g = fg.Graph(f"many {layout}", io_dtype="bfloat16")
    parts = [g.tensor(f"x{k}", (2, 8 * (k % 3 + 1), 3, 5), layout=layout) for k in range(25)]
    g.output(g.relu(g.concatenate(parts, axis=1)), name="y")
    check_all([g])
    (kernel,) = plan(g).kernels
    assert kernel.source.code.count("load<8>(") == 1


def grown(draw: Callable[[Any], Any], number: int) -> fg.Graph:
    """Returns a graph of convolutions, pools and pointwise ops that read concatenations of what others made."""
    g = fg.Graph(f"grown {number}", io_dtype=draw(st.sampled_from(["bfloat16", "float32"])))
    size, axis = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 1, 2]))
    unit = draw(st.sampled_from([8, 8, 3, 1]))
    x = g.tensor("x", (2, unit, size, size), layout=draw(st.sampled_from(["NHWC", "NHWC", "NCHW"])))
    made: list[fg.Tensor] = [x]

    def convolved(x: fg.Tensor, channels: int, sizes: int) -> fg.Tensor:
        w = g.tensor(f"w{len(g.inputs)}", (channels, x.shape[1], sizes, sizes), layout="NHWC")
        y = g.conv_fprop(x, w, padding=sizes // 2)
        return draw(st.sampled_from([y, g.relu(y), g.relu(y) * 2]))

    parts = [convolved(x, unit * draw(st.integers(1, 2)), 1)]
    for step in range(draw(st.integers(1, 4))):
        how = draw(st.integers(0, 9))
        joined = g.concatenate(parts, axis=axis) if len(parts) > 1 or how == 0 else parts[0]
        if how == 1:
            joined = g.concatenate(joined, draw(st.sampled_from(parts)), axis=axis)
        if how == 2:
            joined = g.concatenate(g.max_pool(joined, 1, 1), joined, axis=axis)
        if how == 3:
            g.output(joined, name=f"joined {step}")
        if how == 4:
            g.output(parts[-1], name=f"part {step}")
        made.append(joined)
        read = g.relu(joined * 0.5 + 1) if draw(st.booleans()) else joined
        if axis == 1:
            parts.append(convolved(read, unit, draw(st.sampled_from([1, 3]))))
        else:
            parts.append(g.max_pool(read[:, :, :size], 3, 1, 1))
        if how == 5:
            parts[0], parts[-1] = parts[-1], parts[0]
        if how == 6:
            parts.append(x if axis == 1 else parts[0])
        if how == 7:
            parts.append(g.avg_pool(parts[-1], 3, 1, 1))
        if how == 8:
            parts = [g.concatenate(parts, axis=axis)]
    whole = g.concatenate(parts, axis=axis) if len(parts) > 1 else parts[0]
    g.output(draw(st.sampled_from([whole, g.relu(whole), whole[:, 1:]])), name="y")
    if draw(st.booleans()):
        g.output(g.reduction(draw(st.sampled_from(parts)), "add", (2, 3)), name="sums")
    return g


@pytest.mark.slow
@given(st.data())
@FUZZ
def test_parts_in_their_places(data: Any) -> None:
    check_all([grown(data.draw, number) for number in range(4)])


def test_shifts_along_several_axes_are_one_load() -> None:
    g = fg.Graph("shifted", io_dtype="bfloat16")
    x = shifted(g, shifted(g, g.tensor("x", (2, 6, 7, 16)), 1, 2), 2, 3)
    g.output(g.relu(g.transpose(x, (0, 2, 1, 3))), name="y")
    check_all([g])
    (kernel,) = plan(g).kernels
    assert len(re.findall(r"load<\d>\(|x\[", kernel.source.code)) == 1


def test_growing_concatenations_share_memory() -> None:
    """As in DenseNet: every layer reads all results before it, in the memory of the last concatenation."""
    g = fg.Graph("dense", io_dtype="bfloat16")
    x = g.tensor("x", (2, 16, 4, 4), layout="NHWC")
    parts = [g.max_pool(x, 3, 1, 1)]
    for k in range(4):
        y = g.relu(g.concatenate(parts, axis=1) * g.tensor(f"s{k}", (1, 16 + 8 * k, 1, 1))) if k else parts[0]
        parts.append(g.conv_fprop(y, g.tensor(f"w{k}", (8, 16 + 8 * k, 3, 3), layout="NHWC"), padding=1))
    g.output(g.relu(g.concatenate(parts, axis=1)), name="y")
    check_all([g])
    groups = plan(g).partition.groups
    assert [n.op.name for group in groups if group.family == "view" for n in group.nodes] == ["concatenate"] * 4
    written = [t for group in groups for t in group.writes if t.base is not t]
    assert len({t.base for t in written}) == 1
    assert [t.start for t in written if t.shape[1] == 8] == [16, 24, 32, 40]


def test_what_was_cut_is_joined_again() -> None:
    """As in networks that split channels, and join the halves with what they make of the second one."""
    g = fg.Graph("split", io_dtype="bfloat16")
    x = g.conv_fprop(g.tensor("x", (2, 8, 4, 4), layout="NHWC"), g.tensor("w", (32, 8, 1, 1), layout="NHWC"))
    first, second = x[:, :16], x[:, 16:]
    more = g.conv_fprop(second, g.tensor("v", (16, 16, 3, 3), layout="NHWC"), padding=1)
    y = g.concatenate(first, second, more, axis=1)
    g.output(g.conv_fprop(y, g.tensor("u", (8, 48, 1, 1), layout="NHWC")), name="y")
    g.output(x * 2, name="z")
    check_all([g])
    assert [k.group.family for k in plan(g).kernels] == ["contraction"] * 3
    g = fg.Graph("pieces")
    x = g.tensor("x", (6, 30))
    g.output(-g.concatenate(x[:, 3:7], x[:, 7:20], x[:, 21:], x[:, :3], axis=1), name="y")
    g.output(-g.concatenate(x[:2], x[2:5], x[5:]), name="z")
    g.output(g.concatenate(x[:, :9], x[:, 9:], axis=1), name="x again")
    g.output(-g.concatenate(x[1:, :9], x[:5, 9:], axis=1), name="no slice")
    check_all([g])


def test_only_parts_that_are_elsewhere_are_copied() -> None:
    """An input is copied; an output is written twice by the kernel that makes it."""
    g = fg.Graph("parts", io_dtype="bfloat16")
    x = g.tensor("x", (2, 16, 4, 4), layout="NHWC")
    made = g.relu(g.conv_fprop(x, g.tensor("w", (16, 16, 3, 3), layout="NHWC"), padding=1))
    seen = g.output(g.conv_fprop(x, g.tensor("v", (16, 16, 1, 1), layout="NHWC")), name="seen")
    y = g.concatenate(x, made, seen, axis=1)
    g.output(g.conv_fprop(y, g.tensor("u", (8, 48, 1, 1), layout="NHWC")), name="y")
    check_all([g])
    names = [tuple(n.op.name for n in k.group.nodes) for k in plan(g).kernels]
    assert sorted(names) == [
        ("conv_fprop",),
        ("conv_fprop", "identity"),
        ("conv_fprop", "relu"),
        ("identity",),
    ]
