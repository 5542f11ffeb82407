"""Random numbers of kernels: Philox counts them by an element's position and a seed, which torch draws.

Each operator that draws has a seed of its own, from torch's generator; `prepare_random_numbers` draws all those of a
graph at once.  Gradients compute the numbers again, so that no mask is kept.  torch's own kernels draw others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy

from fusegraph.frontends.torch.table import Call, aten
from fusegraph.graph import Tensor
from fusegraph.layout import overlaps, stride_order
from fusegraph.ops import random
from fusegraph.ops.random import threshold

#: Whether kernels draw random numbers; else torch draws what eager mode would.
IN_KERNELS: ContextVar[bool] = ContextVar("IN_KERNELS", default=True)


@contextmanager
def drawn_in_kernels(in_kernels: bool) -> Iterator[None]:
    """Chooses whether kernels draw the random numbers of graphs that are traced within, or torch."""
    token = IN_KERNELS.set(in_kernels)
    try:
        yield
    finally:
        IN_KERNELS.reset(token)


# ---- operators


def _seeds(count: int, device: torch.device) -> Any:
    return torch.randint(torch.iinfo(torch.int64).max, (count,), dtype=torch.int64, device=device)


#: Draws seeds of int64.
seeds: Any = torch.library.custom_op(
    "fusegraph::seeds",
    _seeds,
    mutates_args=(),
    schema="(SymInt count, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)
seeds.register_fake(lambda count, device: torch.empty(count, dtype=torch.int64, device=device))


def _numbers(name: str, draw: Callable[..., Any]) -> Any:
    """Registers an operator of float32 numbers in the order of a contiguous tensor, by one of ``seeds``."""

    def computed(size: Any, seeds: Any, number: int) -> Any:
        found = draw(np.empty(tuple(size)), np.int64(int(seeds[number])), np.int64(0))
        return torch.from_numpy(found.astype(np.float32)).to(seeds.device)

    schema = "(SymInt[] size, Tensor seeds, int number) -> Tensor"
    made: Any = torch.library.custom_op(f"fusegraph::{name}", computed, mutates_args=(), schema=schema)
    made.register_fake(lambda size, seeds, number: seeds.new_empty(size, dtype=torch.float32))
    return made


uniform, normal = _numbers("uniform", random.uniform), _numbers("normal", random.normal)


@aten("fusegraph.uniform.default")
def _draw_uniform(c: Call, size: Any, seeds: Tensor, number: int) -> Tensor:
    return c.graph.rng_uniform(c.zeros(c.form.shape), seed_at(seeds, number), 0)


@aten("fusegraph.normal.default")
def _draw_normal(c: Call, size: Any, seeds: Tensor, number: int) -> Tensor:
    return c.graph.rng_normal(c.zeros(c.form.shape), seed_at(seeds, number), 0)


def seed_at(seeds: Tensor, number: int) -> Tensor:
    """Returns one of seeds."""
    return seeds[number : number + 1].reshape(())


# ---- torch's operators

#: The digits of uniform numbers by dtype: rounded to a narrow one, some would be 1.
_DIGITS = {torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


def rules() -> Mapping[Any, Any]:
    """Returns the decompositions of operators that draw random numbers into those of this module."""
    ops = torch.ops.aten
    return {
        ops.native_dropout.default: _dropout,
        ops.bernoulli.p: _bernoulli,
        ops.bernoulli.Tensor: _bernoulli,
        ops.bernoulli.default: lambda x, **how: _bernoulli(x, x, **how),
        ops.rand.default: partial(_filled, uniform),
        ops.randn.default: partial(_filled, normal),
        ops.rand_like.default: partial(_like, uniform),
        ops.randn_like.default: partial(_like, normal),
        ops.uniform.default: lambda x, low=0.0, high=1.0, **how: _moved(_like(uniform, x, **how), high - low, low),
        ops.exponential.default: _exponential,
        ops.multinomial.default: _multinomial,
        ops.normal_functional.default: lambda x, mean=0.0, std=1.0, **how: _moved(_like(normal, x, **how), std, mean),
    }


def _like_in_memory(make: Callable[[list[int]], Any], x: Any) -> Any:
    """Returns what is made in the shape of x, in the order in which its elements lie in memory."""
    order = range(x.dim()) if overlaps(x.shape, x.stride()) else stride_order(x.shape, x.stride())
    return make([x.shape[d] for d in order]).permute([order.index(d) for d in range(x.dim())])


def _numbers_like(draw: Any, x: Any) -> Any:
    return _like_in_memory(lambda size: draw(size, seeds(1, x.device), 0), x)


def _dropout(x: Any, probability: float, train: bool | None) -> tuple[Any, Any]:
    """Computes native_dropout; the mask depends only on shape and strides of x."""
    if not train or probability in (0, 1):
        kept = train and probability == 1
        return x * (0 if kept else 1), torch.full(x.shape, not kept, dtype=torch.bool, device=x.device)
    if IN_KERNELS.get():
        mask = _numbers_like(uniform, x) >= threshold(probability)
    else:  # as in eager mode
        rooms = partial(torch.empty, dtype=torch.bool, device=x.device)
        mask = _like_in_memory(lambda size: torch.bernoulli(rooms(size), 1 - probability), x)
    return x * mask * (1 / (1 - probability)), mask


def _bernoulli(x: Any, probability: Any = 0.5, *, generator: Any = None) -> Any:
    if not IN_KERNELS.get() or generator is not None or getattr(probability, "dtype", None) == torch.float64:
        return NotImplemented
    return (_numbers_like(uniform, x) < probability).to(x.dtype)


def _filled(draw: Any, size: Any, *, dtype: Any = None, device: Any = None, **how: Any) -> Any:
    device = torch.device("cpu" if device is None else device)
    return _drawn(draw, lambda: draw(size, seeds(1, device), 0), dtype or torch.get_default_dtype(), how)


def _like(draw: Any, x: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **how: Any) -> Any:
    if device not in (None, x.device) or memory_format not in (None, torch.preserve_format):
        return NotImplemented
    return _drawn(draw, lambda: _numbers_like(draw, x), dtype or x.dtype, how)


def _drawn(draw: Any, make: Callable[[], Any], dtype: Any, how: Mapping[str, Any]) -> Any:
    """Returns numbers of a dtype; NotImplemented for those that torch has to draw."""
    if not IN_KERNELS.get() or how.get("generator") is not None or dtype not in _DIGITS:
        return NotImplemented
    found = make()
    if draw is uniform and dtype != torch.float32:
        found = (found * 2 ** _DIGITS[dtype]).floor() / 2 ** _DIGITS[dtype]
    return found.to(dtype)


def _moved(x: Any, scale: float, start: float) -> Any:
    return x if x is NotImplemented else x * scale + start


#: Less than any logarithm of a random number but that of 1.
_LEAST = 2.0**-25


def _exponential(x: Any, rate: float = 1.0, *, generator: Any = None) -> Any:
    if not IN_KERNELS.get() or generator is not None or x.dtype not in _DIGITS:
        return NotImplemented
    return ((1 - _numbers_like(uniform, x)).log().neg().clamp(min=_LEAST) / rate).to(x.dtype)


def _multinomial(weights: Any, count: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Draws positions: the first of exponential numbers at rates like the weights, and the next ones if need be."""
    if not IN_KERNELS.get() or generator is not None or weights.dtype not in _DIGITS:
        return NotImplemented
    rates = weights.float()
    if replacement and count > 1:
        rates = rates.unsqueeze(-2).expand(*rates.shape[:-1], count, rates.shape[-1])
    first = rates / _exponential(torch.empty(rates.shape, dtype=torch.float32, device=rates.device))
    if replacement and count > 1:
        return first.argmax(-1)
    return first.argmax(-1, keepdim=True) if count == 1 else first.topk(count).indices


# ---- in traced graphs


def prepare_random_numbers(graph: Any) -> None:
    """Draws all seeds of a traced graph at once, and has gradients compute numbers again instead of keeping them."""
    drawing = defaultdict(list)
    for node in graph.nodes:
        if node.target is torch.ops.fusegraph.seeds.default:
            drawing[node.args[1]].append(node)
        elif node.target in (torch.ops.fusegraph.uniform.default, torch.ops.fusegraph.normal.default):
            node.meta.setdefault("recompute", CheckpointPolicy.PREFER_RECOMPUTE)
            node.meta.setdefault("ac_graph_id", 0)
    for device, every in drawing.items():
        if len(every) > 1:
            _join(graph, device, every)


def _join(graph: Any, device: Any, every: Sequence[Any]) -> None:
    """Draws the seeds of several nodes at once."""
    first = every[0]
    with graph.inserting_before(first):
        joined = graph.call_function(first.target, (len(every), device))
    joined.meta = {key: value for key, value in first.meta.items() if key != "recompute"}
    joined.meta["val"] = first.meta["val"].new_empty(len(every))
    for number, node in enumerate(every):
        for user in [*node.users]:
            known = [joined if x is node else x for x in user.args]
            named = [argument.name for argument in user.target._schema.arguments]  # torch leaves out a number of 0
            user.args = (*known[: named.index("number")], number, *known[named.index("number") + 1 :])
        graph.erase_node(node)
