"""Sizes of random graphs that vary: builder code in which Dims stand for some of the numbers."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np
from chosen_sizes import some_sizes

import fusegraph as fg
from fusegraph.engines.sized import sources_of
from fusegraph.errors import FusegraphError
from fusegraph.sized_graphs import check_shapes, varies

#: What the numbers in shapes and strides are written in.
_SIZES = re.compile(r"(?:g\.tensor\('[^']*', |strides=|\.reshape\(|g\.broadcast\(t\d+, |size=)[(\[]([^)\]]*)[)\]]")
_SHAPE = re.compile(r"g\.tensor\('[^']*', \(([^)]*)\)")
_NUMBER = re.compile(r"\b\d+\b")
#: Choices of a number, and of its bounds, that are tried.
_ATTEMPTS = 8


def with_dims(lines: Sequence[str], seed: int) -> tuple[str, ...] | None:
    """Returns builder code with Dims in place of one or two sizes; None if no attempt makes a graph."""
    rng, found = random.Random(seed), tuple(lines)
    for name in ("n", "m")[: rng.choice((1, 1, 2))]:
        for _ in range(_ATTEMPTS):
            made = _with_dim(found, name, rng)
            if made is not None and _is_graph(made):
                found = made
                break
    return found if any("fg.Dim" in line for line in found) else None


def _with_dim(lines: tuple[str, ...], name: str, rng: random.Random) -> tuple[str, ...] | None:
    """Returns builder code with a Dim in place of a size, its multiples, and what is a little larger than these."""
    known = [int(n) for line in lines for part in _SHAPE.findall(line) for n in _NUMBER.findall(part) if int(n) > 1]
    if not known:
        return None
    size = rng.choice(known)
    low = rng.choice((1, 1, 2, size // 2, size - 1))
    unit = rng.choice([1, 1, 1, *(k for k in (2, 8) if size % k == 0)])
    most = max(size * rng.choice((1, 2)), size + 3)

    def written(number: re.Match[str]) -> str:
        whole, rest = divmod(int(number[0]), size)
        if not whole or (rest and (rest not in (1, 2, 3, 8) or size < 16)):
            return number[0]
        return f"{f'{whole} * ' * (whole > 1)}{name}{f' + {rest}' * (rest > 0)}"

    def replaced(part: re.Match[str]) -> str:
        start, end = part.span(1)
        inner = _NUMBER.sub(written, part[1])
        return part[0][: start - part.start()] + inner + part[0][end - part.start() :]

    dim = f'{name} = fg.Dim("{name}", {max(low, 0)}, {most}, {unit})'
    return (dim, *(_SIZES.sub(replaced, line) for line in lines))


def _is_graph(lines: Sequence[str]) -> bool:
    scope: dict[str, Any] = {"fg": fg, "np": np, "ml_dtypes": ml_dtypes}
    try:
        exec("\n".join(lines), scope)
        graph = scope["g"]
        sources_of(graph)
        for sizes in some_sizes(graph, 4) if varies(graph) else ():
            check_shapes(graph, sizes)
    except (FusegraphError, ArithmeticError, ValueError):  # it has other sizes somewhere
        return False
    return varies(graph)
