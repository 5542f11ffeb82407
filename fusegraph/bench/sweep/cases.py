"""The cases of a sweep, drawn from distributions that look like the layers of real networks.

A case is torch code over tensors of drawn sizes: a convolution, product, reduction, norm, softmax, pooling, movement,
embedding or attention, with something in front of it and behind it as often as networks have that.  The same seed and
number give the same case, whatever the others are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import prod
from random import Random

from fusegraph.bench.sweep.convolutions import conv, conv_backward
from fusegraph.bench.sweep.draw import DTYPES, MOST_BYTES, MOST_OPERATIONS, Case, Draw, Refused
from fusegraph.bench.sweep.layers import movement, norm, pool, reduction, softmax
from fusegraph.bench.sweep.products import attention, embedding, matmul, projections, rotary


def case(seed: int, number: int, kinds: Sequence[str] = (), dtypes: Sequence[str] = ()) -> Case:
    """Returns the case of a seed and a number; of some kinds (keys of `KINDS`) and dtypes, if given."""
    rng = Random(f"{seed} {number}")
    names = list(kinds or KINDS)
    weights = [KINDS[name][0] for name in names]
    kind = rng.choices(names, weights)[0]
    dtype = rng.choice(list(dtypes or DTYPES))
    while True:
        try:
            made = KINDS[kind][1](Draw(rng, dtype))
        except Refused:
            continue
        size = sum(prod(o.shape) * (8 if o.below else 2 if "16" in dtype else 4) for o in made.operands)
        if size <= MOST_BYTES and made.operations <= MOST_OPERATIONS:
            return replace(made, kind=kind)


#: kind -> how often it is drawn, and what draws it.
KINDS: dict[str, tuple[float, Callable[[Draw], Case]]] = {
    "conv": (24, conv),
    "conv_transposed": (4, partial(conv, transposed=True)),
    "conv_backward": (12, conv_backward),
    "matmul": (16, matmul),
    "projections": (5, projections),
    "reduction": (6, reduction),
    "norm": (9, norm),
    "softmax": (4, softmax),
    "pool": (5, pool),
    "movement": (6, movement),
    "embedding": (3, embedding),
    "attention": (9, attention),
    "rotary": (1, rotary),
}
