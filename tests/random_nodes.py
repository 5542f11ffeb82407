"""Random nodes as builder code: operands, pointwise nodes, and nodes that move elements."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Protocol, TypeVar

import ml_dtypes
import numpy as np
from hypothesis import strategies as st

import fusegraph as fg

T = TypeVar("T")

FLOATS = ("float32", "bfloat16", "float16", "float64", "float8_e4m3", "float8_e5m2")
INTEGERS = ("int32", "int8", "uint8", "int64", "int16", "uint16", "uint32")  # uint64 does not go with signed ones
DTYPES = (*FLOATS, *INTEGERS, "bool")


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
_COMPARE = ("cmp_gt", "cmp_ge", "cmp_lt", "cmp_le", "cmp_eq", "cmp_neq")
_NAMES = ("a", "b", "x.1", "weight [0]", "int", "i", "o0", "größe", "size", "v")


class NodeAuthor:
    """Writes nodes of a graph, line by line."""

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

    # ---- operands

    def broadcastable(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns a shape that broadcasts to the given one: the same, some dimensions replaced by 1, or without the
        first.
        """
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
        """Returns ``, layout=...`` or ``, strides=...``: packed in some order, with gaps, or repeating along a
        dimension.
        """
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

    def any(self) -> str:
        """Returns some tensor, more likely a recent one."""
        if self.chance(60):
            name = self.names[-1]
        else:
            name = self.names[self.draw.integer(0, len(self.names) - 1)]
        self.consumed.add(name)
        return name

    def fitting(self, shape: tuple[int, ...]) -> str:
        """Returns a tensor that broadcasts with a shape without making it much larger, else a new one."""
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
        """Returns the tensor, cast to a float type if it has another."""
        if self.tensor(name).dtype.is_float:
            return name
        return self.define(f"g.cast({name}, {self.draw.pick(FLOATS[:3])!r})")

    def number(self, name: str) -> str:
        """Returns the tensor, cast to a numeric type if it is bool."""
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
        """Adds a bitwise op or an integer division."""
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
        x = self.any()
        if self.tensor(x).dtype.is_int and self.tensor(x).dtype.itemsize < 8 and self.chance(20):
            self.define(f"g.bitcast({x})")
            return
        self.define(f"g.cast({x}, {self.draw.pick(DTYPES)!r})")

    def node_index(self) -> None:
        x = self.any()
        rank = self.tensor(x).rank
        if rank:
            self.define(f"g.gen_index({x}, axis={self.draw.integer(-rank, rank - 1)})")

    def node_again(self) -> None:
        """Repeats a line: a common subexpression."""
        nodes = [line for line in self.lines if " = g." in line and "g.tensor(" not in line and "name=" not in line]
        if nodes:
            self.define(self.draw.pick(nodes[::-1]).split(" = ", 1)[1])

    def node_move(self) -> None:
        """Adds movement ops, several at times, so that views of views and more occur."""
        for _ in range(self.draw.pick((1, 2, 1, 3))):
            kind = self.draw.pick(
                ("transpose", "slice", "reshape", "pad", "concatenate", "gather", "broadcast", "scatter")
            )
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

    def move_scatter(self, x: str) -> None:
        tensor = self.tensor(x)
        if not tensor.rank or 0 in tensor.shape or tensor.size > 4000:
            return
        axis, count = self.draw.integer(0, tensor.rank - 1), self.draw.pick((7, 3, 1, 20))
        shape = tuple(count if d == axis else n for d, n in enumerate(tensor.shape))
        if prod(shape) > 20_000:
            return
        own = shape if self.chance(60) else tuple(count if d == axis else 1 for d in range(tensor.rank))
        index = self.input(own, self.draw.pick(("int32", "int64", "int8", "uint8")))
        reduction = self.draw.pick(("add", "none", "max", "min", "mul", *(["mean"] if tensor.dtype.is_float else [])))
        updates = self.input(shape, tensor.dtype.name)
        self.define(f"g.scatter({x}, {index}, {updates}, {axis}, {reduction!r}, {self.chance(80)})")

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
