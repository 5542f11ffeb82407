"""Shared by the tests: many graphs through one run of the host compiler, and random graphs.

A random graph is a `Recipe`: builder code that is executed to make the graph, so that what a failure prints is the
graph.  `draw_recipe` writes one with the help of a `Draw`, of hypothesis or of a seed; `smaller` takes away what a
failure does not need.

    print(seeded(17))                   # the code
    print(failure(smaller(seeded(17)))) # what is wrong with it
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
import pytest
from hypothesis import strategies as st

import fusegraph as fg
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.engines.cuda import CudaExecutable
from fusegraph.errors import FusegraphError
from fusegraph.lowering.base import Options
from fusegraph.ops.convolution import smallest_sizes
from fusegraph.plan import plan
from fusegraph.report.check import CheckResult, check_executable, random_inputs
from fusegraph.runtime import driver, nvrtc
from fusegraph.runtime.cache import default_cache

T = TypeVar("T")
Array = np.ndarray[Any, Any]

FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3", "float8_e5m2")
INTEGERS = ("int32", "int8", "uint8", "int64")
DTYPES = (*FLOATS, *INTEGERS, "bool")
#: Architectures that tests compile for: before Hopper, Hopper, and after.
ARCHS = ("sm_80", "sm_90a", "sm_120")


def executables(
    graphs: Sequence[fg.Graph], *, fusion: bool = True, arch: str | None = None, **options: Any
) -> list[CpuExecutable]:
    """CPU executables of several graphs, their kernels built by one call of the host compiler.  options: `Options`."""
    made = [CpuExecutable(g, Options(**options), fusion=fusion, lazy=True, arch=arch) for g in graphs]
    build_together(made)
    return made


def check_all(
    graphs: Sequence[fg.Graph],
    *,
    inputs: Callable[[fg.Graph], Mapping[str, Array]] = random_inputs,
    fusion: bool = True,
    arch: str | None = None,
    **options: Any,
) -> list[CheckResult]:
    """Every graph's kernels on the CPU against the reference, built together; raises AssertionError for those wrong."""
    strict = bool(options.get("strict"))
    made = executables(graphs, fusion=fusion, arch=arch, **options)
    results = [check_executable(e, inputs(e.graph), strict=strict) for e in made]
    wrong = [f"{r}\n{show(e.graph)}" for r, e in zip(results, made) if not r.ok]
    assert not wrong, "\n\n".join(wrong)
    return results


def check_on_gpu(
    graphs: Sequence[fg.Graph],
    *,
    inputs: Callable[[fg.Graph], Mapping[str, Array]] = random_inputs,
    fusion: bool = True,
    **options: Any,
) -> list[CheckResult]:
    """`check_all` on the first GPU."""
    made = gpu_executables(graphs, fusion=fusion, **options)
    results = [check_executable(e, inputs(e.graph), strict=bool(options.get("strict"))) for e in made]
    wrong = [f"{r}\n{show(e.graph)}" for r, e in zip(results, made) if not r.ok]
    assert not wrong, "\n\n".join(wrong)
    return results


def gpu_executables(graphs: Sequence[fg.Graph], *, fusion: bool = True, **options: Any) -> list[CudaExecutable]:
    """CUDA executables of several graphs, their kernels compiled in parallel."""
    compile_for(driver.properties(0).arch, graphs, fusion=fusion, **options)
    return [CudaExecutable(g, Options(**options), fusion=fusion) for g in graphs]


def compile_for(
    arch: str, graphs: Sequence[fg.Graph], *, fusion: bool = True, **options: Any
) -> list[nvrtc.CompiledKernel]:
    """All kernels of the graphs for an architecture, compiled in parallel and left in the cache."""
    sources = [k.source for g in graphs for k in plan(g, Options(**options), fusion=fusion).kernels]
    flags = ("--fmad=false",) if options.get("strict") else ()
    return nvrtc.compile_kernels(sources, arch, cache=default_cache(), options=flags)


def quick(first: T, *others: T) -> list[Any]:
    """Parameters of a test, all but the first left to the slow tier."""
    return [first, *(pytest.param(x, marks=pytest.mark.slow) for x in others)]


#: `ARCHS` as parameters of a test; all but Hopper are left to the slow tier.
QUICK_ARCHS = quick("sm_90a", "sm_80", "sm_120")


def share(arch: str, items: Sequence[T], shift: int = 0) -> list[T]:
    """What of the items is compiled for an architecture: a third, different ones for each of `ARCHS`.

    For sources that do not depend on the architecture: each of them is compiled, and some of each kind everywhere.
    ``shift`` changes which, where several lists are much alike.
    """
    return list(items[(ARCHS.index(arch) + shift) % len(ARCHS) :: len(ARCHS)])


def undecided_share(results: Sequence[CheckResult], graphs: Sequence[fg.Graph]) -> float:
    """Share of output elements for which the error analysis lets anything pass."""
    undecided = sum(o.undecided for r in results for o in r.outputs)
    return undecided / max(sum(t.size for g in graphs for t in g.outputs), 1)


def show(graph: fg.Graph) -> str:
    """A graph's tensors and nodes, one a line."""
    tensors = [f"  {t!r}{' constant' if t.is_constant else ''}" for t in graph.tensors.values()]
    nodes = [f"  {n!r} {dict(n.attributes)}" for n in graph.nodes]
    return "\n".join([repr(graph), *tensors, *nodes])


# ---- random graphs


class Draw(Protocol):
    """Where the decisions of a random graph come from."""

    def integer(self, low: int, high: int) -> int: ...

    def pick(self, items: Sequence[T]) -> T: ...


class Seeded:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        return self._random.randint(low, high)

    def pick(self, items: Sequence[T]) -> T:
        return self._random.choice(items)


class Drawn:
    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def pick(self, items: Sequence[T]) -> T:
        result: T = self._draw(st.sampled_from(items))
        return result


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
    """The random graph of a seed."""
    return draw_recipe(Seeded(seed), themes)


@st.composite
def recipes(draw: Callable[..., Any], themes: Sequence[str] = THEMES) -> Recipe:
    """Random graphs for hypothesis."""
    return draw_recipe(Drawn(draw), themes)


class WrongGraph(AssertionError):
    """A random graph whose kernels are wrong: recipe is the smallest one found that shows it."""

    def __init__(self, recipe: Recipe, original: Recipe) -> None:
        super().__init__(f"{failure(recipe)}\n{recipe}\n\nwhich was made smaller from\n{original}")
        self.recipe = recipe


def check_recipes(given: Sequence[Recipe]) -> list[CheckResult]:
    """The recipes' graphs on the CPU engine against the reference, built together.

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
    made = [CpuExecutable(r.build(), Options(strict=r.strict), lazy=True) for r in given]
    build_together(made)
    return [check_executable(e, r.inputs(e.graph), strict=r.strict) for e, r in zip(made, given)]


def failure(recipe: Recipe) -> str | None:
    """What is wrong with a recipe's graph on the CPU engine; None if nothing is."""
    try:
        (result,) = _check([recipe])
    except FusegraphError as error:
        return f"{type(error).__name__}: {error}"
    return None if result.ok else str(result)


def smaller(recipe: Recipe, *, attempts: int = 200) -> Recipe:
    """A recipe with fewer lines and simpler ones that fails in the same way."""
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
    """Recipes one step simpler: without a line, an operand in place of a node, without an argument."""
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
    """Writes a random graph of pointwise nodes around what the theme names."""
    author = _Author(draw, draw.pick(themes))
    author.write_graph()
    special = draw.pick((0.0, 0.0, 0.0, 0.02))
    return Recipe(tuple(author.lines), draw.integer(0, 3) == 3, special, draw.integer(0, 99))


_SIZES = (1, 2, 3, 5, 4, 7, 8, 16, 17, 33, 64, 130, 257, 1025)
_UNARY = (
    "relu", "neg", "abs", "sigmoid", "tanh", "gelu", "swish", "erf", "sin", "cos", "elu", "softplus", "hardswish",
    "hardsigmoid", "mish", "gelu_approx_tanh", "sign", "floor", "ceil", "round", "expm1", "exp", "exp2", "log1p", "log",
    "log2", "sqrt", "rsqrt", "reciprocal", "tan", "trunc", "sinh", "cosh", "asin", "acos", "atan", "asinh", "acosh",
    "atanh",
)  # fmt: skip
_UNARY_INTEGER = ("relu", "neg", "abs", "sign", "round", "floor")
_INTEGER = ("quotient", "bitwise_and", "bitwise_or", "bitwise_xor", "bitwise_not", "shift_left", "shift_right")
_BACKWARD = (
    "relu_backward", "gelu_backward", "gelu_approx_tanh_backward", "sigmoid_backward", "tanh_backward",
    "swish_backward", "softplus_backward", "elu_backward", "leaky_relu_backward",
)  # fmt: skip
_WITH_ATTRIBUTES = (
    "g.relu({x}, upper_clip=6.0)",
    "g.relu({x}, negative_slope=0.1, lower_clip=-0.5)",
    "g.leaky_relu({x}, negative_slope=0.01)",
    "g.clamp({x}, -1.5, 2.0)",
    "g.clamp({x}, min=-0.25)",
    "g.swish({x}, beta=1.5)",
    "g.softplus({x}, beta=2.0)",
    "g.elu({x}, alpha=0.5)",
)
_POOLS = (
    "max_pool", "max_pool_index", "avg_pool", "adaptive_max_pool", "adaptive_max_pool_index", "adaptive_avg_pool",
    "max_pool_backward", "max_pool_backward_index", "avg_pool_backward", "adaptive_max_pool_backward",
    "adaptive_max_pool_backward_index", "adaptive_avg_pool_backward", "global_max_pool", "global_avg_pool",
    "local_response_norm", "local_contrast_norm", "local_response_norm_backward", "local_contrast_norm_backward",
)  # fmt: skip
_COMPARE = ("cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "cmp_eq", "cmp_neq")
_NAMES = ("a", "b", "x.1", "weight [0]", "int", "i", "o0", "größe", "size", "v")


class _Author:
    def __init__(self, draw: Draw, theme: str) -> None:
        self.draw, self.theme = draw, theme
        self.lines: list[str] = []
        self.scope: dict[str, Any] = {"fg": fg, "np": np, "ml_dtypes": ml_dtypes}
        self.names: list[str] = []  # variables that hold tensors, oldest first
        self.taken: set[str] = set()
        self.consumed: set[str] = set()

    # ---- writing code

    def write(self, line: str) -> None:
        exec(line, self.scope)
        self.lines.append(line)

    def define(self, expression: str) -> str:
        name = f"t{len(self.names)}"
        self.write(f"{name} = {expression}")
        self.names.append(name)
        return name

    def tensor(self, name: str) -> fg.Tensor:
        found: fg.Tensor = self.scope[name]
        return found

    def chance(self, percent: int) -> bool:
        return self.draw.integer(0, 99) >= 100 - percent

    # ---- the graph

    def write_graph(self) -> None:
        compute = ', compute_dtype="float64"' if self.chance(10) else ""
        compute = compute or (', compute_dtype="tf32"' if self.chance(10) else "")
        self.write(f'g = fg.Graph("{self.draw.pick(("fuzz", "relu", "size"))}"{compute})')
        self.dtypes = [self.draw.pick(FLOATS), self.draw.pick(FLOATS), self.draw.pick(DTYPES)]
        self.base = self.base_shape()
        for number in range(self.draw.integer(1, 4)):
            self.input(self.base if number == 0 else self.broadcastable(self.base))
        anchors = 0 if self.theme == "pointwise" else self.draw.pick((1, 1, 1, 2, *((2, 3) * (self.theme == "rows"))))
        steps = ["anchor"] * anchors + ["pointwise"] * self.draw.integer(1, 8)
        while steps:
            step = steps.pop(self.draw.integer(0, len(steps) - 1))
            if step == "anchor":
                getattr(self, self.theme)()
                if self.theme in ("matmul", "conv") and self.chance(15):
                    steps.append("reduction")  # of its result, more likely than of something else
            elif step == "reduction":
                self.rows()
            else:
                self.pointwise()
        self.outputs()

    def base_shape(self) -> tuple[int, ...]:
        ranks = {"pointwise": (0, 6), "rows": (1, 5), "matmul": (2, 4), "conv": (3, 5), "pool": (3, 5)}
        low, high = ranks[self.theme]
        rank = max(low, min(self.draw.pick((2, 1, 3, 4, 0, 5, 6)), high))
        left = 4096
        shape = []
        for _ in range(rank):
            shape.append(self.draw.pick([s for s in _SIZES if s <= left]))
            left //= shape[-1]
        if self.theme == "pointwise" and rank and self.chance(2):
            shape[0] = 0
        order = self.draw.integer(0, 1)
        return tuple(shape if order else reversed(shape))

    def broadcastable(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape that broadcasts to a shape: itself, with dimensions of 1, or without its first."""
        kind = self.draw.pick(("same", "same", "ones", "short", "both"))
        result = list(shape)
        if kind in ("ones", "both"):
            result = [1 if self.draw.integer(0, 1) else s for s in result]
        if kind in ("short", "both"):
            result = result[self.draw.integer(0, len(result)) :]
        return tuple(result)

    def input(self, shape: tuple[int, ...], dtype: str | None = None) -> str:
        dtype = dtype or self.draw.pick(self.dtypes)
        named = self.draw.pick(_NAMES) if self.chance(20) else f"input{len(self.names)}"
        name = named if named not in self.taken else f"input{len(self.names)}"
        self.taken.add(name)
        return self.define(f"g.tensor({name!r}, {shape}, {dtype!r}{self.layout(shape)})")

    def layout(self, shape: tuple[int, ...], *, repeats: bool = True) -> str:
        """``, layout=...`` or ``, strides=...``: packed in some order, with gaps, or repeating along a dimension."""
        rank = len(shape)
        kind = self.draw.pick(("plain", "plain", "plain", "plain", "permuted", "padded", "repeated", "channels_last"))
        if kind == "channels_last" and rank >= 3:
            return ', layout="channels_last"'
        if kind in ("plain", "channels_last") or rank == 0 or (kind == "repeated" and not repeats):
            return ""
        order = list(range(rank))
        if kind == "permuted":
            for place in range(rank - 1, 0, -1):
                other = self.draw.integer(0, place)
                order[place], order[other] = order[other], order[place]
        strides, step = [0] * rank, 1
        for place, dim in enumerate(reversed(order)):
            strides[dim] = step
            step *= max(shape[dim], 1)
            if kind == "padded" and place == 0:
                step += self.draw.pick((1, 3, 8))
        if kind == "repeated":
            strides[self.draw.integer(0, rank - 1)] = 0
        return f", strides={tuple(strides)}"

    # ---- operands

    def any(self) -> str:
        """Some tensor, more likely a recent one."""
        if self.chance(60):
            name = self.names[-1]
        else:
            name = self.names[self.draw.integer(0, len(self.names) - 1)]
        self.consumed.add(name)
        return name

    def fitting(self, shape: tuple[int, ...]) -> str:
        """A tensor that broadcasts with a shape without making it much larger, else a new one."""
        fits = []
        for name in self.names:
            try:
                both = np.broadcast_shapes(shape, self.tensor(name).shape)
            except ValueError:
                continue
            if prod(both) <= 20_000:
                fits.append(name)
        if fits and not self.chance(10):
            name = self.draw.pick(fits[::-1])
            self.consumed.add(name)
            return name
        if self.chance(50):
            return self.constant(self.broadcastable(shape))
        return self.input(self.broadcastable(shape))

    def constant(self, shape: tuple[int, ...]) -> str:
        dtype = self.draw.pick(self.dtypes)
        seed = self.draw.integer(0, 9)
        return self.define(f"g.constant(np.random.default_rng({seed}).integers(-4, 5, {shape}) / 4, dtype={dtype!r})")

    def real(self, name: str) -> str:
        """The tensor, cast to a float if it is none."""
        if self.tensor(name).dtype.is_float:
            return name
        return self.define(f"g.cast({name}, {self.draw.pick(FLOATS[:3])!r})")

    def number(self, name: str) -> str:
        """The tensor, cast to a number if it is bool."""
        if not self.tensor(name).dtype.is_bool:
            return name
        return self.define(f"g.cast({name}, {self.draw.pick(('float32', 'int32', 'int8'))!r})")

    def pair(self) -> tuple[str, str]:
        x = self.any()
        y = self.fitting(self.tensor(x).shape)
        return (x, y) if self.draw.integer(0, 1) else (y, x)

    def name_argument(self) -> str:
        if not self.chance(10):
            return ""
        name = f"node {len(self.names)}"
        return f", name={name!r}"

    # ---- nodes

    def pointwise(self) -> None:
        kind = self.draw.pick(
            ("binary", "unary", "binary", "unary", "scalar", "attributes", "select", "backward", "cast", "compare",
             "logical", "index", "float_binary", "again", "move", "random", "integer")
        )  # fmt: skip
        getattr(self, f"node_{kind}")()

    def node_unary(self) -> None:
        x = self.number(self.any())
        if self.tensor(x).dtype.is_int and self.chance(50):
            op = self.draw.pick(_UNARY_INTEGER)
        else:
            x = self.real(x)
            op = self.draw.pick(_UNARY)
            if op in ("log1p", "log", "log2", "sqrt", "rsqrt") and self.chance(80):
                x = self.define(f"g.abs({x})")
        self.define(f"g.{op}({x}{self.name_argument()})")

    def node_attributes(self) -> None:
        self.define(self.draw.pick(_WITH_ATTRIBUTES).format(x=self.real(self.any())))

    def node_binary(self) -> None:
        x, y = self.pair()
        op = self.draw.pick(("+", "*", "-", "max", "min", "add_square", "bias", "scale"))
        x, y = self.number(x), self.number(y)
        self.define(f"{x} {op} {y}" if len(op) == 1 else f"g.{op}({x}, {y})")

    def node_float_binary(self) -> None:
        x, y = (self.real(name) for name in self.pair())
        op = self.draw.pick(("div", "mod", "pow", "div"))
        if op == "pow":
            x = self.define(f"g.abs({x})")
        if op == "div" and self.chance(70):
            y = self.define(f"g.abs({y}) + 1")
        self.define(f"g.{op}({x}, {y})")

    def node_integer(self) -> None:
        """Bits and whole quotients."""
        x, y = (
            name if self.tensor(name).dtype.is_int else self.define(f"g.cast({name}, 'int32')") for name in self.pair()
        )
        op = self.draw.pick(_INTEGER)
        self.define(f"g.{op}({x})" if op == "bitwise_not" else f"g.{op}({x}, {y})")

    def node_scalar(self) -> None:
        x = self.number(self.any())
        op = self.draw.pick(("+", "*", "-", "reversed -", "max", "/"))
        value = (
            self.draw.pick((2, 1, 0, 3)) if self.tensor(x).dtype.is_int else self.draw.pick((0.5, 1.0, 0.0, -1.25, 3))
        )
        if op == "/":
            self.define(f"{self.real(x)} / {value or 2}")
        elif op == "reversed -":
            self.define(f"{value} - {x}")
        else:
            self.define(f"g.max({x}, {value})" if op == "max" else f"{x} {op} {value}")

    def node_compare(self) -> None:
        x, y = self.pair()
        self.define(f"g.{self.draw.pick(_COMPARE)}({x}, {y})")

    def node_logical(self) -> None:
        x, y = self.pair()
        op = self.draw.pick(("logical_and", "logical_or", "logical_not", "isnan"))
        if op == "isnan":
            self.define(f"g.isnan({self.real(x)})")
        else:
            self.define(f"g.{op}({x})" if op == "logical_not" else f"g.{op}({x}, {y})")

    def node_select(self) -> None:
        x, y = self.pair()
        shape = np.broadcast_shapes(self.tensor(x).shape, self.tensor(y).shape)
        mask = self.fitting(shape)
        if not self.tensor(mask).dtype.is_bool and self.chance(70):
            mask = self.define(f"g.cmp_gt({mask}, 0)")
        self.define(f"g.binary_select({x}, {y}, {mask})")

    def node_backward(self) -> None:
        loss, x = (self.real(name) for name in self.pair())
        op = self.draw.pick(_BACKWARD)
        slope = ", negative_slope=0.1" if op == "leaky_relu_backward" else ""
        self.define(f"g.{op}({loss}, {x}{slope})")

    def node_cast(self) -> None:
        self.define(f"g.cast({self.any()}, {self.draw.pick(DTYPES)!r})")

    def node_index(self) -> None:
        x = self.any()
        rank = self.tensor(x).rank
        if rank:
            self.define(f"g.gen_index({x}, axis={self.draw.integer(-rank, rank - 1)})")

    def node_again(self) -> None:
        """A line once more: a common subexpression."""
        nodes = [line for line in self.lines if " = g." in line and "g.tensor(" not in line and "name=" not in line]
        if nodes:
            self.define(self.draw.pick(nodes[::-1]).split(" = ", 1)[1])

    def node_move(self) -> None:
        """Elements at other places; several times, so that views of views and more meet."""
        for _ in range(self.draw.pick((1, 2, 1, 3))):
            kind = self.draw.pick(("transpose", "slice", "reshape", "pad", "concatenate", "gather", "broadcast"))
            getattr(self, f"move_{kind}")(self.any())

    def move_transpose(self, x: str) -> None:
        perm = list(range(self.tensor(x).rank))
        for place in reversed(range(1, len(perm))):
            other = self.draw.integer(0, place)
            perm[place], perm[other] = perm[other], perm[place]
        self.define(f"g.transpose({x}, {perm}{self.name_argument()})")

    def move_slice(self, x: str) -> None:
        parts = []
        for size in self.tensor(x).shape:
            low = self.draw.integer(0, size // 2)
            high = self.draw.integer(size - size // 3, size)
            kind = self.draw.pick((":", f"{low}:{high}", f"{low}:", f":{high}:2", "::-1", f"{high}:{low}:-2"))
            parts.append(kind)
        if parts:
            self.define(f"{x}[{', '.join(parts)}]")

    def move_reshape(self, x: str) -> None:
        shape = list(self.tensor(x).shape)
        for _ in range(self.draw.integer(1, 3)):
            d = self.draw.integer(0, max(len(shape) - 1, 0))
            if len(shape) > 1 and d and self.chance(50):
                shape[d - 1 : d + 1] = [shape[d - 1] * shape[d]]
            elif shape:
                part = self.draw.pick([k for k in (1, 2, 3, 5, 8) if shape[d] % k == 0])
                if len(shape) < 6:
                    shape[d : d + 1] = [shape[d] // part, part]
        self.define(f"{x}.reshape({tuple(shape)})")

    def move_pad(self, x: str) -> None:
        tensor, mode = self.tensor(x), self.draw.pick(("constant", "constant", "reflect", "replicate"))
        most = [2 if mode == "constant" else min(2, n - 1) if mode == "reflect" else 2 * (n > 0) for n in tensor.shape]
        pads = [(self.draw.integer(0, max(m, 0)), self.draw.integer(0, max(m, 0))) for m in most]
        if prod(n + sum(p) for n, p in zip(tensor.shape, pads)) <= 20_000:
            value = ", value=1" if mode == "constant" and self.chance(50) else ""
            self.define(f"g.pad({x}, {pads}, {mode!r}{value})")

    def move_concatenate(self, x: str) -> None:
        tensor = self.tensor(x)
        if not tensor.rank or tensor.size > 7000:
            return
        axis = self.draw.integer(0, tensor.rank - 1)
        parts = [x]
        for _ in range(self.draw.integer(1, 2)):
            fits = [
                n for n in self.names
                if (t := self.tensor(n)).dtype == tensor.dtype and t.rank == tensor.rank and t.size <= 7000
                and all(a == b for d, (a, b) in enumerate(zip(t.shape, tensor.shape)) if d != axis)
            ]  # fmt: skip
            shape = tuple(self.draw.pick((1, 3, n)) if d == axis else n for d, n in enumerate(tensor.shape))
            other = self.draw.pick(fits[::-1]) if fits and self.chance(60) else self.input(shape, tensor.dtype.name)
            self.consumed.add(other)
            parts.append(other)
        self.define(f"g.concatenate({', '.join(parts)}, axis={axis})")

    def move_gather(self, x: str) -> None:
        tensor = self.tensor(x)
        if not tensor.rank or 0 in tensor.shape:
            return
        axis = self.draw.integer(0, tensor.rank - 1)
        shape = self.draw.pick(((3,), (1,), (2, 2), (), (5,)))
        if tensor.size // tensor.shape[axis] * prod(shape) <= 20_000 and tensor.rank + len(shape) <= 7:
            index = self.input(shape, self.draw.pick(("int32", "int64", "int8", "uint8")))
            self.define(f"g.gather({x}, {index}, {axis})")

    def move_broadcast(self, x: str) -> None:
        tensor = self.tensor(x)
        shape = [self.draw.pick((2, 1, 5)) if n == 1 else n for n in tensor.shape]
        front = (self.draw.pick((2, 3)),) if self.chance(50) and tensor.rank < 6 else ()
        if prod((*front, *shape)) <= 20_000:
            self.define(f"g.broadcast({x}, {(*front, *shape)})")

    def node_random(self) -> None:
        x, op = self.real(self.any()), self.draw.pick(("dropout", "rng_uniform", "rng_normal", "dropout_backward"))
        how = ", probability=0.25" if op.startswith("dropout") else ""
        self.define(f"g.{op}({x}, {self.draw.integer(0, 9)}, {self.draw.integer(0, 2)}{how})")

    def rows(self) -> None:
        if self.chance(40):
            self.composite()
            return
        x = self.number(self.any())
        tensor = self.tensor(x)
        if tensor.rank and self.chance(15):
            axis = self.draw.integer(0, tensor.rank - 1)
            self.define(f"g.cumsum({x}, {axis}, reverse={self.chance(50)}{self.name_argument()})")
            return
        axes = tuple(d for d in range(tensor.rank) if self.draw.integer(0, 1))
        modes = ("add", "max", "min", "amax", "norm1", "any", "all", "argmin", "argmax", "mul_no_zeros")
        mode = self.draw.pick((*modes, *(("avg", "norm2", "mul", "var") if tensor.dtype.is_float else ())))
        if mode.startswith("arg") and not axes:
            mode = "max"
        if mode.removeprefix("arg") in ("max", "min", "amax") and any(tensor.shape[d] == 0 for d in axes):
            mode = "add"
        keepdims = "" if self.chance(70) else ", keepdims=False"
        self.define(f"g.reduction({x}, {mode!r}, {axes}{keepdims}{self.name_argument()})")

    def composite(self) -> None:
        if self.chance(10):
            self.attention()
            return
        x = self.real(self.any())
        shape = self.tensor(x).shape
        if not shape or 0 in shape:
            return
        axis = self.draw.integer(-len(shape), len(shape) - 1)
        if len(shape) >= 3 and self.chance(30):
            self.batch_norm(x)
            return
        if self.chance(25):
            self.row_gradient(x, axis)
            return
        op = self.draw.pick(("softmax", "log_softmax", "logsumexp", "layernorm", "rmsnorm", "adalayernorm"))
        if op in ("softmax", "log_softmax"):
            self.define(f"g.{op}({x}, {axis}{self.name_argument()})")
            return
        axes = (axis,) if self.chance(60) else tuple(range(len(shape) // 2, len(shape)))
        if op == "logsumexp":
            self.define(f"g.{op}({x}, {axes}, {self.chance(60)}{self.name_argument()})")
            return
        weights = ", ".join(self.input(self.broadcastable(shape)) for _ in range(1 if op == "rmsnorm" else 2))
        # Of a few equal numbers the variance is 0, and nothing would be known of what is divided by it.
        self.define(f"g.{op}({x}, {weights}, {axes}, epsilon=0.1{self.name_argument()})")

    def attention(self) -> None:
        """Attention of new tensors, with some of what it can have."""
        dtype = self.draw.pick(("bfloat16", "float16", "float32"))
        batch, shared, group = self.draw.pick((1, 2)), self.draw.pick((1, 2)), self.draw.pick((1, 1, 3))
        rows, keys, depth = self.draw.pick((1, 5, 17, 33)), self.draw.pick((1, 7, 33, 40)), self.draw.pick((8, 16, 24))
        width = self.draw.pick((depth, 8, 20))
        q = self.input((batch, shared * group, rows, depth), dtype)
        k, v = (self.input((batch, shared, keys, n), dtype) for n in (depth, width))
        how = self.draw.pick(
            ("", ", use_causal_mask=True", ", diagonal_band_left_bound=3, diagonal_alignment='BOTTOM_RIGHT'",
             ", soft_cap=2.0", ", use_alibi_mask=True")
        )  # fmt: skip
        if self.chance(30):
            mask = self.input(self.broadcastable((batch, shared * group, rows, keys)), "bool")
            how = f", mask={mask}{how}"
        self.define(f"g.sdpa({q}, {k}, {v}{how})")

    def row_gradient(self, x: str, axis: int) -> None:
        """The gradient of a softmax or a norm along an axis."""
        shape = self.tensor(x).shape
        loss = self.real(self.input(shape))
        op = self.draw.pick(("softmax", "log_softmax", "layernorm", "rmsnorm", "adalayernorm"))
        if op.endswith("softmax"):
            self.define(f"g.{op}_backward({loss}, {x}, {axis}{self.name_argument()})")
            return
        row = tuple(1 if d == axis % len(shape) else n for d, n in enumerate(shape))
        scale, count = self.real(self.input(self.broadcastable(shape))), 1 if op == "rmsnorm" else 2
        kept = ", ".join(self.input(row) for _ in range(count))
        self.define(f"g.{op}_backward({loss}, {x}, {scale}, {kept}, {axis})[{self.draw.integer(0, count)}]")

    def batch_norm(self, x: str) -> None:
        """A norm of [N, C, ...], with its statistics and their gradients or without."""
        shape = self.tensor(x).shape
        one = (1, shape[1], *(1 for _ in shape[2:]))
        op = self.draw.pick(("groupnorm", "batchnorm", "instancenorm", "genstats", "batchnorm_inference"))
        if op == "genstats":
            self.define(f"g.genstats({x})[{self.draw.integer(0, 1)}]")
            return
        if op == "batchnorm_inference":
            self.define(f"g.batchnorm_inference({x}, {', '.join(self.input(one) for _ in range(4))})")
            return
        groups = f", groups={self.draw.pick([k for k in (1, 2, 3, 4) if shape[1] % k == 0])}" if op[0] == "g" else ""
        phase = ', norm_forward_phase="training"' if op != "batchnorm" else ""
        scale, bias = self.real(self.input(one)), self.input(one)
        if not self.chance(50):
            first = "[0]" if op == "batchnorm" else ""
            self.define(f"g.{op}({x}, {scale}, {bias}{groups}, epsilon=0.1){first}")
            return
        kept = [self.define(f"g.{op}({x}, {scale}, {bias}{groups}, epsilon=0.1{phase})[{k}]") for k in range(3)]
        loss = self.real(kept[0])
        self.define(f"g.{op}_backward({loss}, {x}, {scale}, {kept[1]}, {kept[2]}{groups})[{self.draw.integer(0, 2)}]")

    def pool(self) -> None:
        x, op = self.number(self.any()), self.draw.pick(_POOLS)
        if "max" not in op or op.endswith("_backward"):
            x = self.real(x)
        shape = self.tensor(x).shape
        if not shape or 0 in shape:
            return
        spatial = 3 <= len(shape) <= 5 and self.chance(70)
        axes = {self.draw.integer(0, len(shape) - 1) for _ in range(self.draw.integer(1, 2))}
        along = tuple(range(2, len(shape))) if spatial else tuple(sorted(axes))
        end = ("" if spatial else f", axes={along}") + (self.name_argument() if "backward" not in op else "")
        if op.startswith("global"):
            self.define(f"g.{op}({x}{end})")
        elif op.startswith("local"):
            operands = f"{x}, {x}" if "backward" in op else x
            if "response" in op:
                end, how = f", axis={along[0]}{self.name_argument()}", f"{self.draw.integer(1, 4)}, alpha=0.5"
            else:
                how = f"{self.draw.pick((3, 2))}, epsilon=0.1"
            self.define(f"g.{op}({operands}, {how}{end})")
        elif op.startswith("adaptive"):
            size = [self.draw.pick([1, 2, shape[a], min(shape[a] + 1, 40), max(shape[a] // 2, 1)]) for a in along]
            self.pooled(x, op, f"{size}{end}", end, along)
        else:
            self.pooled(x, op, f"{self.windows([shape[a] for a in along], 'avg' in op)}{end}", "", along)

    def pooled(self, x: str, op: str, how: str, adaptive: str, along: tuple[int, ...]) -> None:
        """Pooling, or the gradient of some pooling of a tensor."""
        backward = "_backward" in op
        forward = op.replace("_backward", "")
        result = self.define(f"g.{forward}({x}, {how})")
        if not backward:
            return
        loss = self.input(self.tensor(result).shape, self.draw.pick(FLOATS))
        size = [self.tensor(x).shape[a] for a in along]
        given = f"{loss}, {result}" if "index" in op else f"{loss}, {x}" if "max" in op else loss
        if op == "adaptive_max_pool_backward":
            self.define(f"g.{op}({given}{adaptive})")
        elif op.startswith("adaptive"):
            self.define(f"g.{op}({given}, {size}{adaptive})")
        else:
            self.define(f"g.{op}({given}, {how})" if op == "max_pool_backward" else f"g.{op}({given}, {size}, {how})")

    def windows(self, sizes: Sequence[int], average: bool) -> str:
        window, stride, padding, dilation = [], [], [], []
        for size in sizes:
            t, d = self.draw.pick((3, 2, 1, 5)), 1 if average else self.draw.pick((1, 1, 1, 2))
            before, after = self.draw.integer(0, 2), self.draw.integer(0, 2)
            window.append(1 if (t - 1) * d + 1 > size + before + after else t)
            dilation.append(d)
            stride.append(self.draw.pick((1, 2, 1, 3)))
            padding.append((before, after))
        how = f"{window}, stride={stride}, padding={padding}" + (", ceil_mode=True" if self.chance(20) else "")
        if average:
            return how + (", count_include_pad=False" if self.chance(50) else "")
        return f"{how}, dilation={dilation}"

    def matmul(self) -> None:
        found = [n for n in self.names if self.tensor(n).rank >= 2 and 0 not in self.tensor(n).shape]
        x = self.draw.pick(found[::-1]) if found else self.input((5, 7))
        self.consumed.add(x)
        shape = self.tensor(x).shape
        left = self.chance(20)
        inner = shape[-2] if left else shape[-1]
        other = self.draw.pick((3, 1, 8, 17, 32, 65))
        while prod(shape) * other > 200_000:
            other = max(other // 4, 1)
        own = (other, inner) if left else (inner, other)
        batch = self.broadcastable(shape[:-2])
        w = self.input((*batch, *own), self.draw.pick((self.tensor(x).dtype.name, *self.dtypes)))
        dtype = self.draw.pick(("", "", "", ', dtype="float32"'))
        result = self.define(f"g.matmul({w}, {x}{dtype})" if left else f"g.matmul({x}, {w}{dtype})")
        assert self.tensor(result).size <= 10**6
        if not left:
            self.gate(result, w)

    def conv(self) -> None:
        found = [n for n in self.names if 3 <= self.tensor(n).rank <= 5 and 0 not in self.tensor(n).shape]
        x = self.draw.pick(found[::-1]) if found else self.input((2, 3, 9))
        if self.chance(15):  # what Winograd's algorithm may be asked to do
            sizes = (
                self.draw.integer(1, 2),
                self.draw.pick((3, 1, 8)),
                self.draw.integer(1, 12),
                self.draw.integer(1, 9),
            )
            x = self.input(sizes, "float32")
        self.consumed.add(x)
        shape = self.tensor(x).shape
        channels, spatial = shape[1], shape[2:]
        groups = self.draw.pick([k for k in (1, 2, 3, channels) if channels % k == 0])
        per_group = self.draw.pick((1, 2, 3, 8) if groups < 64 else (1,))
        while prod(shape) // groups * groups * per_group > 100_000 and per_group > 1:
            per_group -= 1
        taps, stride, dilation, padding = [], [], [], []
        for size in spatial:
            t, d = self.draw.pick((1, 3, 2, 5)), self.draw.pick((1, 1, 1, 2))
            before, after = self.draw.integer(0, 2), self.draw.integer(0, 2)
            if (t - 1) * d + 1 > size + before + after or size * t > 600:
                t = 1
            taps.append(t)
            dilation.append(d)
            stride.append(self.draw.pick((1, 1, 2, 3)))
            padding.append((before, after))
        dtype = self.draw.pick((self.tensor(x).dtype.name, *self.dtypes))
        mode = ', mode="convolution"' if self.chance(20) else ""
        kind = self.draw.pick(("fprop", "fprop", "dgrad", "wgrad"))
        if len(spatial) == 2 and self.tensor(x).dtype.name == "float32" and kind != "wgrad" and self.chance(70):
            taps, stride, dilation, groups, dtype = [3, 3], [1, 1], [1, 1], 1, "float32"
            padding = [(1, 1) if size < 3 else pair for size, pair in zip(spatial, padding)]
            tile = self.draw.pick((2, 4))
            mode += f", compute_dtype='float32', algorithm='winograd_{tile}x{tile}'"
        filters = groups * per_group
        how = f"stride={stride}, padding={padding}, dilation={dilation}, groups={groups}{mode}"
        if kind == "dgrad" and self.backward(x, per_group, groups, taps, how, dtype):
            return
        if kind == "wgrad":
            reach = [(t - 1) * d + 1 for t, d in zip(taps, dilation)]
            out = [(n + sum(p) - r) // s + 1 for n, p, r, s in zip(spatial, padding, reach, stride)]
            loss = self.input((shape[0], filters, *out), dtype)
            self.define(f"g.conv_wgrad({x}, {loss}, taps={taps}, {how})")
            return
        w = self.input((filters, channels // groups, *taps), dtype)
        self.gate(self.define(f"g.conv_fprop({x}, {w}, {how})"), w)

    def gate(self, product: str, factor: str) -> None:
        """Sometimes the same product with another second factor, and a node that takes both."""
        if not self.chance(15):
            return
        expression = self.lines[-1].split(" = ", 1)[1]
        declared = next(line for line in self.lines if line.startswith(f"{factor} = "))
        other = self.define(f"g.tensor('factor{len(self.names)}', {declared.split(', ', 1)[1]}")
        self.consumed |= {product, other, factor}
        both = self.define(re.sub(rf"\b{factor}\b", other, expression))
        self.consumed.add(both)
        first, second = self.number(product), self.number(both)
        self.define(f"g.{self.draw.pick(('mul', 'mul', 'add', 'max', 'min'))}({first}, {second})")

    def backward(self, loss: str, per_group: int, groups: int, taps: Sequence[int], how: str, dtype: str) -> bool:
        """A transposed convolution of a tensor, if the padding leaves a result that is not too large."""
        filters, *positions = self.tensor(loss).shape[1:]
        keys: dict[str, Any] = eval(f"dict({how})")
        smallest = smallest_sizes(positions, taps, keys["stride"], keys["padding"], keys["dilation"])
        size = [n + self.draw.integer(0, s - 1) for n, s in zip(smallest, keys["stride"])]
        if min(smallest) < 1 or self.tensor(loss).shape[0] * groups * per_group * prod(size) > 100_000:
            return False
        w = self.input((filters, per_group, *taps), dtype)
        self.define(f"g.conv_dgrad({loss}, {w}, size={size}, {how})")
        return True

    # ---- outputs

    def outputs(self) -> None:
        leaves = [n for n in self.names if n not in self.consumed]
        extra = [self.names[self.draw.integer(0, len(self.names) - 1)] for _ in range(self.draw.integer(0, 2))]
        chosen = dict.fromkeys([self.names[-1], *leaves[-2:], *extra])
        for number, name in enumerate(chosen):
            tensor = self.tensor(name)
            how = f', name="y{number}"' if self.chance(70) else ""
            if self.chance(15):
                how += f", dtype={self.draw.pick(DTYPES)!r}"
            self.write(f"g.output({name}{how}{self.layout(tensor.shape, repeats=False)})")
