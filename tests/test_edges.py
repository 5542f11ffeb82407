"""Edges of tiles, arrays in shared memory, and the loops and conditions that writers leave out."""

from __future__ import annotations

import pytest

from codegen.buffers import Buffer, Edge, every, where
from codegen.naming import Writer


@pytest.mark.parametrize(("total", "tiles", "outside"), [(12, 3, ""), (13, 4, "m >= 13"), (3, 1, "m >= 3")])
def test_only_ragged_edges_have_conditions(total: int, tiles: int, outside: str) -> None:
    edge = Edge(total, 4)
    assert (edge.tiles, edge.padded, edge.ragged) == (tiles, 4 * tiles, bool(outside))
    assert (edge.outside("m"), edge.outside("0")) == (outside, "")
    assert edge.inside("m") == outside.replace(">=", "<")


def test_conditions_and_values_that_always_hold_leave_no_trace() -> None:
    assert every("", "a", "", "b") == "a && b"
    assert (where("", "x", "0"), where("a", "x", "0")) == ("x", "a ? x : 0")


def test_an_array_is_declared_in_static_shared_memory() -> None:
    tile = Buffer("tile", "float", (8, 32), stages=2, pad=4, align=16)
    assert (tile.static, tile.bytes) == ("__shared__ __align__(16) float tile[2][8][36];", 2 * 8 * 36 * 4)
    assert Buffer("weights", "int8", (3,)).static == "__shared__ int8 weights[3];"


def test_a_loop_that_runs_once_is_none() -> None:
    w = Writer()
    with w.scope():
        assert (w.each("i", 2), w.each("j", 1), w.each("k", 3, "int64", unroll=False)) == ("i", "0", "k")
        w.leave("", "i == k", "")
        w.leave("", how="return")
    assert "\n".join(w.lines) + "\n" == (
        "#pragma unroll\nfor (int i = 0; i < 2; ++i) {\n    #pragma unroll 1\n"
        "    for (int64 k = 0; k < 3; ++k) {\n        if (i == k) continue;\n    }\n}\n"
    )


def test_several_conditions_get_a_name() -> None:
    w = Writer()
    assert (w.inside("", "a"), w.inside(""), w.lines) == ("a", "", [])
    assert w.inside("a", "", "b") == "inside"
    assert w.lines == ["const bool inside = a && b;"]
