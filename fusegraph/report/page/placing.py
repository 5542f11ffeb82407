"""Where the cards of kernels lie on the page: a layered layout, by igraph."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fusegraph.errors import ToolchainError
from fusegraph.report.page import NEEDS

#: Of the page's units, which are pixels at its own scale.
WIDTH, GAP, LAYER_GAP, LANE = 264, 36, 46, 28
#: The most layers that a line passes between the cards; longer ones go over them.
MOST_LAYERS = 12
#: Heights of a card's head, of a row, and of what is below the rows.
HEAD, ROW, FOOT = 46, 20, 10
#: Heights of cards of inputs, and of folded layers.
INPUT, FOLDED = 30, 58
#: Graphs with more inputs than this show none: they would hide the rest.
MOST_INPUTS = 16


@dataclass(frozen=True)
class Placed:
    """A layout.

    cards   card -> the x and y of its upper left corner.
    routes  (card, card) -> points of the line between them: x and y in turns.
    size    width and height of all.
    """

    cards: Mapping[int, tuple[float, float]]
    routes: Mapping[tuple[int, int], list[float]]
    size: tuple[float, float]


def placed(heights: Mapping[int, float], edges: Sequence[tuple[int, int]], light: Set[int] = frozenset()) -> Placed:
    """Returns a layout of cards with these heights, for edges of an acyclic graph; ``light`` cards draw no others near.

    Raises ToolchainError where igraph is missing.
    """
    try:
        import igraph
    except ImportError:
        raise ToolchainError(NEEDS) from None
    layers = _layers(heights, edges)
    chains = {edge: _chain(edge, layers) for edge in edges}
    vertices: list[Any] = [*heights, *(point for chain in chains.values() for point in chain[1:-1])]
    number = {vertex: at for at, vertex in enumerate(vertices)}
    level = {**layers, **{p: p[2] for chain in chains.values() for p in chain[1:-1]}}
    steps = [
        (number[a], number[b]) for chain in chains.values() for a, b in pairwise(chain) if level[b] == level[a] + 1
    ]
    graph = igraph.Graph(len(vertices), steps, directed=True)
    found = graph.layout_sugiyama(layers=[level[v] for v in vertices], maxiter=30)
    rows: dict[int, list[Any]] = defaultdict(list)
    rough = {}
    for vertex, (x, _) in zip(vertices, list(found)[: len(vertices)]):
        rows[level[vertex]].append(vertex)
        rough[vertex] = x
    centre = _columns(rows, rough, chains, light)
    tops = _tops(rows, heights)
    left = min((centre[v] - _half(v) for v in vertices), default=0.0)
    cards = {c: (round(centre[c] - left - WIDTH / 2, 1), tops[layers[c]]) for c in heights}
    routes = {edge: _route(chain, centre, left, tops, level, heights) for edge, chain in chains.items()}
    right = max((centre[v] - left + _half(v) for v in vertices), default=0.0)
    below = max((cards[c][1] + heights[c] for c in cards), default=0.0)
    return Placed(cards, routes, (round(right, 1), round(below, 1)))


def _layers(cards: Mapping[int, float], edges: Sequence[tuple[int, int]]) -> dict[int, int]:
    """Returns the layer of every card: one below the last of those that it reads; first cards just above a reader."""
    before, behind = defaultdict(list), defaultdict(list)
    for a, b in edges:
        before[b].append(a)
        behind[a].append(b)
    layer: dict[int, int] = {}
    for card in _ordered(cards, before, behind):
        layer[card] = max((layer[a] + 1 for a in before[card]), default=0)
    for card in cards:
        if not before[card] and behind[card]:
            layer[card] = min(layer[b] for b in behind[card]) - 1
    return layer


def _ordered(
    cards: Mapping[int, float], before: Mapping[int, list[int]], behind: Mapping[int, list[int]]
) -> Sequence[int]:
    missing = {card: len(before[card]) for card in cards}
    ready = [card for card in cards if not missing[card]]
    for card in ready:
        for other in behind[card]:
            missing[other] -= 1
            if not missing[other]:
                ready.append(other)
    return ready


def _chain(edge: tuple[int, int], layers: Mapping[int, int]) -> list[Any]:
    """Returns an edge's ends with a point between them for each layer that it passes."""
    a, b = edge
    if layers[b] - layers[a] > MOST_LAYERS:
        return [a, b]
    return [a, *((a, b, level) for level in range(layers[a] + 1, layers[b])), b]


def _half(vertex: Any) -> float:
    return LANE / 2 if isinstance(vertex, tuple) else WIDTH / 2


def _columns(
    rows: Mapping[int, list[Any]], rough: Mapping[Any, float], chains: Mapping[Any, list[Any]], light: Set[int]
) -> dict[Any, float]:
    """Returns the x of every vertex: in igraph's order, as near as they fit to those that it is connected with.

    igraph gives points of lines as much room as cards.  Rows begin with their cards in the middle, so that a chain of
    kernels is straight.
    """
    near: dict[Any, list[Any]] = defaultdict(list)
    for chain in chains.values():
        for a, b in pairwise(chain):
            near[a].append(b)
            if chain[0] not in light:
                near[b].append(a)
    centre: dict[Any, float] = {}
    for row in rows.values():
        row.sort(key=rough.__getitem__)
        at = 0.0
        for vertex in row:
            centre[vertex] = at + _half(vertex)
            at += 2 * _half(vertex) + (GAP if not isinstance(vertex, tuple) else 0)
        cards = [centre[vertex] for vertex in row if not isinstance(vertex, tuple)]
        middle = (min(cards) + max(cards)) / 2 if cards else at / 2
        for vertex in row:
            centre[vertex] -= middle
    order = sorted(rows)
    for sweep in range(8):
        for level in order if sweep % 2 == 0 else reversed(order):
            row = rows[level]
            wanted = [_wish(vertex, near[vertex], centre) for vertex in row]
            for vertex, x in zip(row, _spread(row, wanted)):
                centre[vertex] = x
    return centre


def _wish(vertex: Any, others: Sequence[Any], centre: Mapping[Any, float]) -> float:
    """Returns where a vertex wants to be: in the middle of its neighbours, a card of those that are cards."""
    if not others:
        return centre[vertex]
    if not isinstance(vertex, tuple):
        others = [other for other in others if not isinstance(other, tuple)] or others
    xs = sorted(centre[o] for o in others)
    half = len(xs) // 2
    return xs[half] if len(xs) % 2 else (xs[half - 1] + xs[half]) / 2


def _spread(row: Sequence[Any], wanted: Sequence[float]) -> list[float]:
    """Returns places in this order, without overlaps, whose distances from those wanted are least squares.

    Cards weigh more than points of lines, which go around them.
    """
    offsets, at = [], 0.0
    for n, vertex in enumerate(row):
        if n:
            gap = GAP if not (isinstance(vertex, tuple) and isinstance(row[n - 1], tuple)) else 0
            at += _half(row[n - 1]) + _half(vertex) + gap
        offsets.append(at)
    blocks: list[tuple[float, float, int]] = []  # what blocks of neighbours that touch want: sum, weight, number
    for vertex, want, offset in zip(row, wanted, offsets):
        weight = 1.0 if isinstance(vertex, tuple) else 50.0
        total, count = weight * (want - offset), 1
        while blocks and blocks[-1][0] / blocks[-1][1] > total / weight:
            before = blocks.pop()
            total, weight, count = total + before[0], weight + before[1], count + before[2]
        blocks.append((total, weight, count))
    means = [total / weight for total, weight, count in blocks for _ in range(count)]
    return [mean + offset for mean, offset in zip(means, offsets)]


def _tops(rows: Mapping[int, list[Any]], heights: Mapping[int, float]) -> dict[int, float]:
    tops, at = {}, 0.0
    for level in sorted(rows):
        tops[level] = at
        at += max((heights[v] for v in rows[level] if not isinstance(v, tuple)), default=0.0) + LAYER_GAP
    return tops


def _route(
    chain: Sequence[Any],
    centre: Mapping[Any, float],
    left: float,
    tops: Mapping[int, float],
    level: Mapping[Any, int],
    heights: Mapping[int, float],
) -> list[float]:
    """Returns the points of a line: where it leaves a card, enters and leaves every layer, and reaches a card."""
    first, last = chain[0], chain[-1]
    x = centre[first] - left
    points = [x, tops[level[first]] + heights[first], x, tops[level[first] + 1] - LAYER_GAP]
    for point in chain[1:-1]:
        x = centre[point] - left
        points += [x, tops[point[2]], x, tops[point[2] + 1] - LAYER_GAP]
    points += [centre[last] - left, tops[level[last]]]
    return [round(p, 1) for p in points]


def layouts(graph: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the layouts of a graph's data: ``all`` kernels, and with layers that are alike ``folded``, None if none.

    Each has ``cards``: [what, number, x, y, height], where what is "kernel", "input" or "layers" (number: that of a
    repeat); ``routes``: [from, to, points], positions of cards; and ``size``.
    """
    return {"all": _layout(graph, []), "folded": _layout(graph, graph["repeats"]) if graph["repeats"] else None}


def _layout(graph: Mapping[str, Any], folded: Sequence[Sequence[int]]) -> dict[str, Any]:
    stands: dict[int, tuple[str, int]] = {k: ("kernel", k) for k in range(len(graph["kernels"]))}
    for number, (first, length, count) in enumerate(folded):
        stands |= dict.fromkeys(range(first + length, first + length * count), ("layers", number))
    cards = dict.fromkeys(stands.values())
    edges = [(stands[edge["from"]], stands[edge["to"]]) for edge in graph["between"]]
    if len(graph["inputs"]) <= MOST_INPUTS:
        entering = [(("input", number), stands[kernel]) for number, kernel in graph["entering"]]
        cards = dict.fromkeys([*(a for a, _ in entering), *cards])
        edges = entering + edges
    numbers = {card: at for at, card in enumerate(cards)}
    heights = {at: _height(graph, *card) for card, at in numbers.items()}
    pairs = [*dict.fromkeys((numbers[a], numbers[b]) for a, b in edges if a != b)]
    found = placed(heights, pairs, {at for (what, _), at in numbers.items() if what == "input"})
    return {
        "cards": [[*card, *found.cards[at], heights[at]] for card, at in numbers.items()],
        "routes": [[a, b, found.routes[a, b]] for a, b in pairs],
        "size": found.size,
    }


def _height(graph: Mapping[str, Any], what: str, number: int) -> float:
    if what == "kernel":
        return HEAD + ROW * len(graph["kernels"][number]["rows"]) + FOOT
    return INPUT if what == "input" else FOLDED
