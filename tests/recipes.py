"""Random graphs: made from a seed or by hypothesis, checked, and made smaller where they are wrong.

A random graph is a `Recipe`: builder code that is executed to make the graph, so that what a failure prints is the
graph.  `draw_recipe` writes one with the help of a `Draw`, of hypothesis or of a seed; `smaller` takes away what a
failure does not need.

    print(seeded(17))                   # the code
    print(failure(smaller(seeded(17)))) # what is wrong with it
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from chosen_sizes import some_sizes
from hypothesis import strategies as st
from random_dims import with_dims
from random_graphs import GraphAuthor
from random_nodes import Draw, Drawn, Seeded

import fusegraph as fg
from fusegraph.engines.base import Executable
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.engines.sized import on_cpu
from fusegraph.errors import FusegraphError
from fusegraph.lowering.base import Options
from fusegraph.report.check import CheckResult, check_executable, random_inputs
from fusegraph.sized_graphs import varies

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Recipe:
    """A graph as builder code, and how to check it."""

    lines: tuple[str, ...]
    strict: bool = False
    special: float = 0.0
    seed: int = 0

    def build(self) -> fg.Graph:
        scope: dict[str, Any] = {"fg": fg, "np": np, "ml_dtypes": ml_dtypes}
        exec("\n".join(self.lines), scope)
        graph: fg.Graph = scope["g"]
        return graph

    def inputs(self, graph: fg.Graph) -> dict[str, Array]:
        return random_inputs(graph, self.seed, special=self.special)

    def __str__(self) -> str:
        how = f"# strict={self.strict}, inputs random_inputs(g, {self.seed}, special={self.special})"
        return "\n".join([how, *self.lines])


THEMES = ("pointwise", "matmul", "conv", "rows", "pool")


def seeded(seed: int, *, themes: Sequence[str] = THEMES) -> Recipe:
    """Draws the random graph of a seed."""
    return draw_recipe(Seeded(seed), themes)


@st.composite
def recipes(draw: Callable[..., Any], themes: Sequence[str] = THEMES) -> Recipe:
    """Draws random graphs for hypothesis."""
    return draw_recipe(Drawn(draw), themes)


class WrongGraph(AssertionError):
    """A random graph whose kernels are wrong: recipe is the smallest one found that shows it."""

    def __init__(self, recipe: Recipe, original: Recipe) -> None:
        super().__init__(f"{failure(recipe)}\n{recipe}\n\nwhich was made smaller from\n{original}")
        self.recipe = recipe


def check_recipes(given: Sequence[Recipe]) -> list[CheckResult]:
    """Checks the recipes' graphs, built together, on the CPU engine against the reference.

    Raises WrongGraph for the first that is wrong or does not get that far.
    """
    try:
        results = _check(given)
    except FusegraphError:
        results = []
    for number, recipe in enumerate(given):
        if not (results[number].ok if results else failure(recipe) is None):
            raise WrongGraph(smaller(recipe), recipe)
    return results


def _check(given: Sequence[Recipe]) -> list[CheckResult]:
    graphs = [r.build() for r in given]
    known = {g: CpuExecutable(g, Options(strict=r.strict), lazy=True) for g, r in zip(graphs, given) if not varies(g)}
    build_together(list(known.values()))
    made = zip(graphs, given)
    return [_check_sizes(g, r) if g not in known else _check_known(known[g], r) for g, r in made]


def _check_known(executable: Executable, recipe: Recipe) -> CheckResult:
    return check_executable(executable, recipe.inputs(executable.graph), strict=recipe.strict)


def _check_sizes(graph: fg.Graph, recipe: Recipe) -> CheckResult:
    """Checks a graph whose sizes vary at some sizes; returns the first result that is wrong, or the last."""
    executable = on_cpu(graph, Options(strict=recipe.strict), fusion=True, cache=None)
    for sizes in some_sizes(graph, 5, recipe.seed):
        result = _check_known(executable.at(sizes), recipe)
        if not result.ok:
            break
    return result


def varying(recipe: Recipe) -> Recipe | None:
    """Returns a recipe with Dims for some of its sizes; None if none was found that go together."""
    lines = with_dims(recipe.lines, recipe.seed)
    return None if lines is None else replace(recipe, lines=lines)


def failure(recipe: Recipe) -> str | None:
    """Returns what is wrong with a recipe's graph on the CPU engine; None if nothing is."""
    try:
        (result,) = _check([recipe])
    except FusegraphError as error:
        return f"{type(error).__name__}: {error}"
    return None if result.ok else str(result)


def smaller(recipe: Recipe, *, attempts: int = 200) -> Recipe:
    """Reduces a recipe to one with fewer or simpler lines that fails in the same way."""
    kind = (failure(recipe) or "").split()[0]
    progress = True
    while progress:
        progress = False
        for candidate in _simpler(recipe):
            attempts -= 1
            if attempts < 0:
                return recipe
            try:
                candidate.build()
            except Exception:  # what was taken away was needed
                continue
            if (failure(candidate) or "-").split()[0] == kind:
                recipe, progress = candidate, True
                break
    return recipe


def _simpler(recipe: Recipe) -> Iterator[Recipe]:
    """Yields recipes one step simpler: without a line, an operand in place of a node, without an argument."""
    lines = recipe.lines
    for k in reversed(range(1, len(lines))):
        defined, _, expression = lines[k].partition(" = ")
        rest = lines[:k] + lines[k + 1 :]
        if not re.fullmatch(r"t\d+", defined) or not any(re.search(rf"\b{defined}\b", line) for line in rest):
            yield replace(recipe, lines=rest)
            continue
        for operand in dict.fromkeys(re.findall(r"\bt\d+\b", expression)):
            yield replace(recipe, lines=tuple(re.sub(rf"\b{defined}\b", operand, line) for line in rest))
    for k, line in enumerate(lines):
        for pattern in (r", (strides|layout|dtype|compute_dtype)=(\([^)]*\)|[^,)]+)", r", name=[^,)]+"):
            if re.search(pattern, line):
                yield replace(recipe, lines=(*lines[:k], re.sub(pattern, "", line), *lines[k + 1 :]))
    if recipe.strict:
        yield replace(recipe, strict=False)
    if recipe.special:
        yield replace(recipe, special=0.0)


def draw_recipe(draw: Draw, themes: Sequence[str]) -> Recipe:
    """Writes a random graph of pointwise nodes around the anchors of a theme."""
    author = GraphAuthor(draw, draw.pick(themes))
    author.write_graph()
    special, strict, seed = draw.pick((0.0, 0.0, 0.0, 0.02)), draw.integer(0, 3) == 3, draw.integer(0, 99)
    if author.chance(20):
        author.gradients()
    return Recipe(tuple(author.lines), strict, special, seed)
