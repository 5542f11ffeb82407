"""Operators of ONNX's other domains: optimizer steps, some of classical machine learning, and n-gram counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from itertools import zip_longest
from math import log

from fusegraph.dtypes import int64
from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.operators.indices import positions
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Tensor

_ML, _TRAINING = "ai.onnx.ml", "ai.onnx.preview.training"
#: (a parameter, its gradient including that of the norm, its states) -> the parameter and its states after the step.
Step = Callable[..., tuple[Tensor, ...]]


@operator("Binarizer", domain=_ML)
def binarizer(call: Call, x: Tensor) -> Tensor:
    return call.graph.cast(call.graph.cmp_gt(x, call["threshold"]), x.dtype)


@operator("ArrayFeatureExtractor", domain=_ML)
def array_feature_extractor(call: Call, x: Tensor, index: Tensor) -> Tensor:
    """Gathers elements of the last dimension; a vector counts as one row."""
    if not x.rank:
        raise ModelError("a tensor of rank 0 has no features")
    rows = call.graph.reshape(x, [1, -1]) if x.rank == 1 else x
    flat = call.graph.reshape(index, [-1])
    return call.graph.gather(rows, positions(call, flat, rows.shape[-1]), rows.rank - 1)


# ---- steps of optimisers


def _stepped(call: Call, step: Step, states: int, tensors: tuple[Tensor, ...]) -> list[Tensor]:
    """Takes the step of each parameter, which has ``states`` states.

    ``tensors`` and the results hold all parameters first, then (in ``tensors``) all gradients, then each state of all.
    """
    graph, kinds, results = call.graph, 2 + states, []
    count, rest = divmod(len(tensors), kinds)
    if rest or not count:
        raise ModelError(f"{len(tensors)} tensors are not {kinds} for every parameter")
    every = [tensors[n::count] for n in range(count)]
    if any(t.shape != each[0].shape for each in every for t in each):
        raise ModelError(f"what belongs to {every[0][0].name!r}, or to another parameter, has not its shape")
    for x, gradient, *old in every:
        new = step(x, graph.add(graph.mul(x, call["norm_coefficient"]), gradient), *old)
        results.append([graph.cast(t, was.dtype) for t, was in zip(new, (x, *old))])
    return [t for kind in zip(*results) for t in kind]


@operator("Adagrad", domain=_TRAINING)
def adagrad(call: Call, rate: Tensor, step: Tensor, *tensors: Tensor) -> list[Tensor]:
    graph = call.graph
    decay = graph.add(graph.mul(graph.cast(step, rate.dtype), call["decay_factor"]), 1.0)

    def stepped(x: Tensor, g: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
        h = graph.add(squares, graph.mul(g, g))
        moved = graph.div(graph.mul(graph.div(rate, decay), g), graph.add(graph.sqrt(h), call["epsilon"]))
        return graph.sub(x, moved), h

    return _stepped(call, stepped, 1, tensors)


@operator("Momentum", domain=_TRAINING)
def momentum(call: Call, rate: Tensor, step: Tensor, *tensors: Tensor) -> list[Tensor]:
    graph, mode = call.graph, call.word("mode", "standard", "nesterov")
    begun = graph.cmp_gt(step, 0)
    share = graph.binary_select(graph.constant(call["beta"], dtype=rate.dtype), 1.0, begun)

    def stepped(x: Tensor, g: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        v = graph.add(graph.mul(velocity, call["alpha"]), graph.mul(share, g))
        way = v if mode == "standard" else graph.add(g, graph.mul(v, call["alpha"]))
        return graph.sub(x, graph.mul(rate, way)), v

    return _stepped(call, stepped, 1, tensors)


@operator("Adam", domain=_TRAINING)
def adam(call: Call, rate: Tensor, step: Tensor, *tensors: Tensor) -> list[Tensor]:
    graph, alpha, beta = call.graph, call["alpha"], call["beta"]
    if not (0 < alpha < 1 and 0 < beta < 1):
        raise ModelError(f"alpha and beta are between 0 and 1, got {alpha:g} and {beta:g}")
    count = graph.cast(step, rate.dtype)

    def missing(share: float) -> Tensor:
        """Returns 1 - share^count."""
        return graph.neg(graph.expm1(graph.mul(count, log(share))))

    corrected = graph.div(graph.mul(rate, graph.sqrt(missing(beta))), missing(alpha))
    moving = graph.binary_select(corrected, rate, graph.cmp_gt(step, 0))

    def stepped(x: Tensor, g: Tensor, velocity: Tensor, squares: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        v = graph.add(graph.mul(velocity, alpha), graph.mul(g, 1 - alpha))
        h = graph.add(graph.mul(squares, beta), graph.mul(graph.mul(g, g), 1 - beta))
        moved = graph.mul(moving, graph.div(v, graph.add(graph.sqrt(h), call["epsilon"])))
        return graph.mul(graph.sub(x, moved), 1 - call["norm_coefficient_post"]), v, h

    return _stepped(call, stepped, 2, tensors)


# ---- n-grams


@operator("TfIdfVectorizer")
def tf_idf_vectorizer(call: Call, x: Tensor) -> Tensor:
    """Counts the n-grams of a pool in each row; the elements of an n-gram are adjacent or equally spaced."""
    graph = call.graph
    if call["pool_int64s"] is None:
        raise call.refuse("type string")
    if not x.dtype.is_int or not 1 <= x.rank <= 2:
        raise ModelError(f"rows of integers are wanted, got {x.dtype} {list(x.shape)}")
    mode = call.word("mode", "TF", "IDF", "TFIDF")
    grams, size = _pool(call)
    rows = graph.cast(graph.reshape(x, [-1, x.shape[-1]]), int64)
    counts = [graph.broadcast(graph.constant(0.0, dtype="float32"), [rows.shape[0], 1])]
    places: dict[int, list[int]] = {}
    total = 1
    for length, known in grams.items():
        found = _found(call, rows, list(known), length)
        if found is None:
            continue
        counts.append(found)
        for number, place in enumerate(known.values()):
            places.setdefault(place, []).append(total + number)
        total += len(known)
    every = graph.concatenate(*counts, axis=1) if len(counts) > 1 else counts[0]
    # Several n-grams may share a place; column 0 is zero, to fill up places with fewer of them.
    turns = zip_longest(*(places.get(place, (0,)) for place in range(size)), fillvalue=0)
    y = reduce(graph.add, (graph.resample(every, 1, list(index)) for index in turns))
    if mode == "IDF":
        y = graph.cast(graph.cmp_gt(y, 0.0), "float32")
    weights = call["weights"]
    if mode != "TF" and weights is not None:
        if len(weights) != size:
            raise ModelError(f"there are {size} weights, got {len(weights)}")
        y = graph.mul(y, graph.constant([float(v) for v in weights], dtype="float32"))
    return graph.reshape(y, [size]) if x.rank == 1 else y


def _pool(call: Call) -> tuple[dict[int, dict[tuple[int, ...], int]], int]:
    """Returns length -> n-gram -> its place in the result, for the lengths that count, and the size of the result."""
    pool, starts, places = call["pool_int64s"], call["ngram_counts"], call["ngram_indexes"]
    if not places or not 0 <= min(places) <= max(places) < 1 << 24:
        raise ModelError(f"ngram_indexes {places[:8]} are no places of a result")
    if sorted(starts) != list(starts) or (starts and not 0 <= starts[0] <= starts[-1] <= len(pool)):
        raise ModelError(f"ngram_counts {starts[:8]} do not rise to {len(pool)}")
    if call["max_skip_count"] < 0 or call["min_gram_length"] < 1:
        raise ModelError("min_gram_length is at least 1, max_skip_count at least 0")
    found: dict[int, dict[tuple[int, ...], int]] = {}
    number = 0
    for length, (first, last) in enumerate(zip(starts, [*starts[1:], len(pool)]), 1):
        grams = [tuple(pool[at : at + length]) for at in range(first, last, length)]
        if (last - first) % length or number + len(grams) > len(places):
            raise ModelError(f"the pool of n-grams of {length} has {last - first} numbers, or places are missing")
        if grams and call["min_gram_length"] <= length <= call["max_gram_length"]:
            found[length] = dict(zip(grams, places[number:]))
        number += len(grams)
    return found, max(places) + 1


def _found(call: Call, rows: Tensor, grams: list[tuple[int, ...]], length: int) -> Tensor | None:
    """Returns (rows, n-grams): how often each is in a row; None if rows are too short."""
    graph, total = call.graph, None
    for apart in range(1, call["max_skip_count"] + 2 if length > 1 else 2):
        count = rows.shape[1] - apart * (length - 1)
        if count < 1:
            break
        call.check_size(4 * length)
        own = (graph.unsqueeze(rows[:, k * apart : k * apart + count], 1) for k in range(length))
        wanted = (graph.constant([[[number] for number in column]], dtype=int64) for column in zip(*grams))
        hit = reduce(graph.logical_and, map(graph.cmp_eq, own, wanted))
        found = graph.reduction(graph.cast(hit, "float32"), "add", 2, keepdims=False)
        total = found if total is None else graph.add(total, found)
    return total
