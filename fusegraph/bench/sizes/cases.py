"""Models of the zoo and graphs of the builder, with the bounds of the sizes that vary."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import exp, log
from typing import Any, TypeAlias

from fusegraph.bench.graphs import GRAPHS, Build
from fusegraph.dims import Dim
from fusegraph.graph import Graph, Tensor

#: The least and the largest size by the name of what varies.
Bounds: TypeAlias = Mapping[str, tuple[int, int]]


@dataclass(frozen=True)
class Operand:
    """An input: sizes, by name where they vary; integers are ``below`` a number if that is not 0.

    ``layout`` is one of `Graph.tensor`, of graphs alone.
    """

    shape: tuple[str | int, ...]
    below: int = 0
    layout: str | None = None

    def at(self, sizes: Mapping[str, Any]) -> tuple[Any, ...]:
        """Returns the shape where what varies has these sizes."""
        return tuple(sizes[size] if isinstance(size, str) else size for size in self.shape)

    @property
    def varying(self) -> dict[int, str]:
        """The names of its dimensions that vary, by position."""
        return {axis: size for axis, size in enumerate(self.shape) if isinstance(size, str)}


@dataclass(frozen=True)
class Case:
    """What is compiled once and called at many sizes.

    name      a model of the zoo, or the name of a graph.
    operands  its inputs by name; "" is a model's only one.
    bounds    of the sizes that vary.
    graph     writes it with the builder; None: it is a model.
    changes   what a model's configuration says instead.
    """

    name: str
    operands: Mapping[str, Operand]
    bounds: Bounds
    graph: Build | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)

    def drawn(self, seed: int, number: int) -> dict[str, int]:
        """Returns the sizes of a call: within the bounds, evenly in logarithms, half of them multiples of 8."""
        rng = random.Random(f"{seed} {self.name} {number}")
        found = {}
        for name, (low, high) in self.bounds.items():
            size = round(exp(rng.uniform(log(low), log(high))))
            found[name] = rng.choice((size, max(size // 8 * 8, low)))
        return found

    def built(self) -> Graph:
        """Returns the graph, with Dims."""
        assert self.graph is not None
        graph = Graph(self.name.partition(":")[2], io_dtype="bfloat16")
        dims = {name: Dim(name, *ends) for name, ends in self.bounds.items()}
        given = [graph.tensor(name, o.at(dims), layout=o.layout) for name, o in self.operands.items()]
        made = self.graph(graph, *given)
        for output in [made] if isinstance(made, Tensor) else made:
            graph.output(output)
        return graph


#: Torch traces a size of 1 apart, whatever compiles what it traced.
_LEAST = 2


def _tokens(vocabulary: int) -> dict[str, Operand]:
    return {"input_ids": Operand(("batch", "length"), vocabulary)}


def _image(name: str, height: str | int, width: str | int) -> dict[str, Operand]:
    return {name: Operand(("batch", 3, height, width))}


def _up_to(**most: int) -> dict[str, tuple[int, int]]:
    return {name: (_LEAST, size) for name, size in most.items()}


#: Few and narrow layers, for an engine that emulates a GPU.
_HIDDEN = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
_SMALL: dict[str, Case] = {
    case.name: case
    for case in (
        Case("tv:resnet18", _image("", "height", "width"), {"batch": (2, 4), "height": (40, 80), "width": (40, 80)}),
        Case("tv:mobilenet_v2", _image("", 32, 32), _up_to(batch=8), changes={"width_mult": 0.25}),
        Case(
            "hf:vit", _image("pixel_values", 64, 64), _up_to(batch=16), changes={**_HIDDEN, "image_size": 64}
        ),
        Case("hf:bert-base", _tokens(1000), _up_to(batch=8, length=96), changes={**_HIDDEN, "vocab_size": 1000}),
        Case(
            "hf:gpt2", _tokens(1000), _up_to(batch=8, length=96),
            changes={"n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0},
        ),
        Case(
            "hf:llama-1b", {"input_ids": Operand((1, "length"), 1000)}, _up_to(length=192),
            changes={**_HIDDEN, "num_key_value_heads": 1, "vocab_size": 1000},
        ),
        Case(
            "hf:t5-encoder", _tokens(1000), _up_to(batch=8, length=96),
            changes={"d_model": 64, "d_kv": 32, "d_ff": 128, "num_layers": 2, "num_heads": 2, "vocab_size": 1000},
        ),
    )
}  # fmt: skip
_WHOLE: dict[str, Case] = {
    case.name: case
    for case in (
        Case("tv:resnet18", _image("", "height", "width"), {"batch": (2, 64), "height": (96, 320), "width": (96, 320)}),
        Case("tv:mobilenet_v2", _image("", 224, 224), _up_to(batch=128)),
        Case("hf:vit", _image("pixel_values", 224, 224), _up_to(batch=128)),
        Case("hf:bert-base", _tokens(30522), _up_to(batch=32, length=512)),
        Case("hf:gpt2", _tokens(50257), _up_to(batch=8, length=1024)),
        Case("hf:llama-1b", {"input_ids": Operand((1, "length"), 128256)}, _up_to(length=2048)),
        Case("hf:t5-encoder", _tokens(32128), _up_to(batch=16, length=512)),
    )
}


def _residual_block(g: Graph, x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    hidden = g.relu(g.conv_fprop(x, w1, padding=1) + b1)
    return g.relu(g.conv_fprop(hidden, w2, padding=1) + b2 + x)


def _graphs(small: bool) -> list[Case]:
    """Returns graphs as the examples write them."""
    width, side = (64, 24) if small else (1024, 96)
    channels, depth, rows = (16, 32, 64) if small else (64, 64, 4096)
    image = Operand(("images", channels, "height", "width"), layout="NHWC")
    weights = Operand((channels, channels, 3, 3), layout="KRSC")
    bias = Operand((1, channels, 1, 1))
    heads = Operand(("batch", 4, "length", depth))
    every = (
        (GRAPHS["sigmoid_fma"], dict.fromkeys("abc", Operand(("rows", "columns"))), {"rows": rows, "columns": rows}),
        (
            GRAPHS["linear_gelu"],
            {"x": Operand(("tokens", width)), "w": Operand((width, 4 * width)), "bias": Operand((4 * width,))},
            {"tokens": rows},
        ),
        (
            _residual_block,
            {"x": image, "w1": weights, "b1": bias, "w2": weights, "b2": bias},
            {"images": 4, "height": side, "width": side},
        ),
        (GRAPHS["sdpa_causal"], dict.fromkeys("qkv", heads), {"batch": 4, "length": 2 * rows}),
        (
            GRAPHS["layernorm_gelu"],
            {"x": Operand(("rows", "columns")), **dict.fromkeys(("scale", "shift"), Operand(("columns",)))},
            {"rows": rows, "columns": rows},
        ),
    )
    names = ("sigmoid_fma", "matmul_bias_gelu", "conv_bias_relu", "causal_attention", "layernorm_gelu")
    return [
        Case(f"graph:{name}", operands, {key: (1, most) for key, most in sizes.items()}, graph)
        for name, (graph, operands, sizes) in zip(names, every)
    ]


def cases(wanted: Callable[[str], Any], *, small: bool) -> list[Case]:
    """Returns the cases whose names are wanted; ``small`` ones have few and narrow layers, and small sizes."""
    return [case for case in (*(_SMALL if small else _WHOLE).values(), *_graphs(small)) if wanted(case.name)]
