"""Copies of frozen data classes with other values, what is computed once, and what is looked for among many."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from codegen.buffers import Edge
from codegen.ranking import least
from codegen.records import changed, once
from codegen.sizes import Bounds, at, dimension, moving


@dataclass(frozen=True)
class Tile:
    rows: int
    cols: int = 4

    @once
    def size(self) -> int:
        """Elements."""
        counts.append(self)
        return self.rows * self.cols


counts: list[Tile] = []


def test_what_is_computed_once_is_not_copied():
    tile = Tile(3)
    assert (tile.size, tile.size, len(counts)) == (12, 12, 1)
    other = changed(tile, cols=5)
    assert (other.size, other) == (15, replace(tile, cols=5))
    assert (tile.size, tile, repr(other)) == (12, Tile(3), "Tile(rows=3, cols=5)")
    assert Tile.size.__doc__ == "Elements."


def test_unknown_fields_are_refused():
    with pytest.raises(AssertionError, match="no such fields: depth"):
        changed(Tile(3), depth=1)


def test_the_least_of_candidates_is_found_with_few_estimates():
    asked: list[str] = []

    def estimated(candidate: tuple[float, str]) -> tuple[float, str] | None:
        asked.append(candidate[1])
        return None if candidate[0] < 0 else candidate

    some = [(3.0, (5.0, "a")), (1.0, (4.0, "b")), (2.0, (4.0, "c")), (0.5, (-1.0, "none")), (4.5, (9.0, "d"))]
    assert least(some, estimated) == (4.0, "b")  # the first of equals
    assert asked == ["none", "b", "c", "a"]
    assert least(some[::-1], estimated) == (4.0, "c")
    assert least([(0.5, (-1.0, "none"))], estimated) is None


def test_parts_are_moved_as_by_looking_for_sizes_each_time():
    n = dimension("n", 8, Bounds(1, 64))
    part = {"tile": Tile(n + 1, 3), "plain": (1, 2), "several": [(n, "x"), Edge(n * 4, 16), Tile(2)]}
    move = moving(part)
    for size in (1, 8, 63):
        assert move({"n": size}) == at(part, {"n": size})
        bounds = {"n": Bounds(1, size)}
        found = move({"n": size}, vary=True, within=bounds)
        assert found == at(part, {"n": size}, vary=True, within=bounds)
        assert found["tile"].rows.dims == bounds
    assert move({"n": 8})["plain"] is part["plain"]
    assert moving(part["plain"])({"n": 8}) is part["plain"]
