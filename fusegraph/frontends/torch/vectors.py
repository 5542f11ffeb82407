"""Batch normalization with known statistics, as one factor and one term per channel.

Those of several layers are computed by one kernel over their concatenated vectors; otherwise there would be one launch
per layer for a few hundred numbers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fusegraph.dtypes import float32, float64
from fusegraph.graph import Graph, Tensor

#: How many vectors one kernel takes at most: each is a parameter.
_MOST = 128


@dataclass(frozen=True)
class Layer:
    """The vectors of a layer (scale and bias are None if it has none) and its epsilon."""

    scale: Tensor | None
    bias: Tensor | None
    mean: Tensor
    variance: Tensor
    epsilon: float

    @property
    def vectors(self) -> tuple[Tensor | None, ...]:
        return self.scale, self.bias, self.mean, self.variance


#: The factor and the term of a layer.
Line = tuple[Tensor, Tensor]


def line(graph: Graph, layer: Layer) -> Line:
    """Returns (factor, bias - mean * factor) for factor = scale / sqrt(variance + epsilon), in float32 or float64."""
    wide = float64 if layer.variance.dtype == float64 else float32
    factor = graph.rsqrt(graph.cast(layer.variance, wide) + layer.epsilon)
    factor = factor if layer.scale is None else factor * layer.scale
    return factor, (-layer.mean * factor if layer.bias is None else layer.bias - layer.mean * factor)


def lines(graph: Graph, layers: Iterable[Layer]) -> dict[Layer, Line]:
    """Returns layer -> (factor, term), for layers whose vectors are inputs of the graph."""
    alike: dict[object, list[Layer]] = defaultdict(list)
    for layer in layers:
        alike[layer.epsilon, *(None if v is None else v.dtype for v in layer.vectors)].append(layer)
    result: dict[Layer, Line] = {}
    for same in alike.values():
        count = _MOST // sum(v is not None for v in same[0].vectors)
        for start in range(0, len(same), count):
            result |= _together(graph, same[start : start + count])
    return result


def _together(graph: Graph, layers: Sequence[Layer]) -> dict[Layer, Line]:
    if len(layers) == 1:
        return {layers[0]: line(graph, layers[0])}

    def joined(vectors: Sequence[Tensor | None]) -> Tensor | None:
        given = [v for v in vectors if v is not None]
        return graph.concatenate(*given) if given else None

    scale, bias, mean, variance = (joined(vectors) for vectors in zip(*(layer.vectors for layer in layers)))
    assert mean is not None
    assert variance is not None
    factor, term = line(graph, Layer(scale, bias, mean, variance, layers[0].epsilon))
    result, start = {}, 0
    for layer in layers:
        stop = start + layer.mean.size
        result[layer] = factor[start:stop], term[start:stop]
        start = stop
    return result
