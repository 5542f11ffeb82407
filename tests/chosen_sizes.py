"""Sizes at which tests run graphs whose sizes vary."""

from __future__ import annotations

import random
from collections.abc import Mapping
from math import exp, log, prod

import fusegraph as fg
from codegen.sizes import Bounds, at
from fusegraph.dims import bounds_of

#: Elements of the largest tensor of a graph that is run.
MOST = 40_000
#: Sizes that are drawn at most: there may be few that are small.
TRIES = 200


def some_sizes(graph: fg.Graph, count: int, seed: int = 0) -> list[dict[str, int]]:
    """Returns sizes by symbol: the least ones, the largest that are not too large, and between them, many of 8."""
    bounds = bounds_of(s for t in graph.tensors.values() for s in (*t.shape, *t.strides))
    found = [{name: b.min for name, b in bounds.items()}, _largest(graph, bounds)]
    rng = random.Random(seed)
    for _ in range(TRIES):
        if len(found) == count:
            break
        sizes = {name: _between(rng, b) for name, b in bounds.items()}
        if _elements(graph, sizes) <= MOST and sizes not in found:
            found.append(sizes)
    return found


def _between(rng: random.Random, bounds: Bounds) -> int:
    low, high = bounds
    size = round(exp(rng.uniform(log(max(low, 1)), log(high))))
    rounded = size // 8 * 8
    return rng.choice((size, size, rounded if rounded >= low else size, min(max(low, 1), high)))


def _largest(graph: fg.Graph, bounds: Mapping[str, Bounds]) -> dict[str, int]:
    sizes = {name: b.max for name, b in bounds.items()}
    while _elements(graph, sizes) > MOST:
        name = max(sizes, key=lambda n: sizes[n] / max(bounds[n].min, 1))
        if sizes[name] == bounds[name].min:
            break
        sizes[name] = max(sizes[name] // 2, bounds[name].min)
    return sizes


def _elements(graph: fg.Graph, sizes: Mapping[str, int]) -> int:
    return max(prod(at(t.shape, sizes)) for t in graph.tensors.values())
