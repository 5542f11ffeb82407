"""Random ONNX models of dimensions that are only named, drawn by hypothesis; no part of fusegraph draws or checks them.

A dimension of a value is known by its sizes at all choices of sizes: two that are the same there are one dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st
from onnx import TensorProto, checker, helper, numpy_helper

#: The size of a dimension at each choice of sizes.
Along = tuple[int, ...]
#: Elements of the largest tensor that is drawn.
MOST = 20_000
#: What a model's inputs and constants are: ours are of float32, those of the oracle of float64.
ELEMENTS = {"float": TensorProto.FLOAT, "double": TensorProto.DOUBLE}


@dataclass
class Drawn:
    """A model as it is drawn.

    bounds   the least and the largest size of each dimension that is named.
    choices  the sizes at which it runs.
    nodes    with operator, inputs, results and attributes.
    """

    bounds: dict[str, tuple[int, int]]
    choices: list[dict[str, int]]
    inputs: dict[str, tuple[int | str, ...]] = field(default_factory=dict)
    nodes: list[tuple[str, list[str], list[str], dict[str, Any]]] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    shapes: dict[str, tuple[Along, ...]] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    def known(self, size: int) -> Along:
        return (size,) * len(self.choices)

    def add(self, operator: str, inputs: list[str], shape: list[Along] | tuple[Along, ...], **attributes: Any) -> str:
        name = self.helper(operator, inputs, **attributes)
        self.shapes[name] = tuple(shape)
        return name

    def helper(self, operator: str, inputs: list[str], **attributes: Any) -> str:
        """Adds a node whose result is no operand of what is drawn later, as a shape is none."""
        name = f"v{len(self.nodes)}"
        self.nodes.append((operator, inputs, [name], attributes))
        return name

    def ints(self, *numbers: int) -> str:
        return self.constant(np.array(numbers, np.int64))

    def constant(self, value: Any) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def size(self, x: str, axis: int) -> str:
        """Returns a vector of one number, the size of an axis, as exporters compute it."""
        return self.helper(
            "Unsqueeze", [self.helper("Gather", [self.helper("Shape", [x]), self._scalar(axis)]), self.ints(0)]
        )

    def _scalar(self, number: int) -> str:
        return self.constant(np.array(number, np.int64))

    def proto(self, element: str) -> Any:
        """Returns the model with inputs and constants of an element type."""
        kind = ELEMENTS[element]
        infos = [helper.make_tensor_value_info(name, kind, shape) for name, shape in self.inputs.items()]
        results = [helper.make_tensor_value_info(name, kind, [None] * len(self.shapes[name])) for name in self.outputs]
        arrays = [
            numpy_helper.from_array(v.astype(element.replace("float", "float32")) if v.dtype.kind == "f" else v, name)
            for name, v in self.constants.items()
        ]
        nodes = [
            helper.make_node(o, i, r, **{k: (kind if v == "element" else v) for k, v in a.items()})
            for o, i, r, a in self.nodes
        ]
        graph = helper.make_graph(nodes, "drawn", infos, results, arrays)
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10)
        checker.check_model(model)
        return model

    def arrays(self, number: int) -> dict[str, Any]:
        rng = np.random.default_rng(number)
        sizes = {name: [along[number] for along in self.shapes[name]] for name in self.inputs}
        return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in sizes.items()}

    def __str__(self) -> str:
        lines = [f"bounds {self.bounds}", *(f"input {name} {list(shape)}" for name, shape in self.inputs.items())]
        lines += [f"{name} = {value.tolist()}" for name, value in self.constants.items()]
        lines += [f"{', '.join(r)} = {o}({', '.join(i)}) {a or ''}" for o, i, r, a in self.nodes]
        return "\n".join([*lines, f"outputs {self.outputs}", f"choices {self.choices}"])


def _steps() -> list[Callable[[Drawn, Any, str], Any]]:
    return [
        unary, with_number, with_other, rowwise, joined, doubled, sliced, turned, merged, merged_by_shape, split,
        reduced, softmax, normed, product, weights, spread, picked, padded, running, positions, mean, pooled, tiled,
        padded_again,
    ]  # fmt: skip


def unary(d: Drawn, draw: Any, x: str) -> Any:
    return d.add(draw(st.sampled_from(["Relu", "Tanh", "Neg", "Sigmoid", "Abs"])), [x], d.shapes[x])


def with_number(d: Drawn, draw: Any, x: str) -> Any:
    """Computes with a number that is a size."""
    if not (shape := d.shapes[x]):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    if min(shape[axis]) == 0:
        return None
    number = d.helper("Cast", [d.size(x, axis)], to="element")
    return d.add(draw(st.sampled_from(["Div", "Add"])), [x, number], shape)


def with_other(d: Drawn, draw: Any, x: str) -> Any:
    """Combines two values as NumPy broadcasts them."""
    ones = d.known(1)

    def together(y: str) -> list[Along] | None:
        a, b = ([ones] * (4 - len(d.shapes[v])) + list(d.shapes[v]) for v in (x, y))
        found = [q if p == ones else p for p, q in zip(a, b)]
        return found if all(p in (ones, f) and q in (ones, f) for p, q, f in zip(a, b, found)) else None

    others = [y for y in d.shapes if together(y) is not None]
    y = draw(st.sampled_from(others))
    rank = max(len(d.shapes[x]), len(d.shapes[y]))
    made = together(y)
    assert made is not None
    return d.add(draw(st.sampled_from(["Add", "Mul", "Sub", "Max"])), [x, y], made[4 - rank :])


def rowwise(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]) or len(set(shape[-1])) > 1 or not shape[-1][0]:
        return None
    row = d.constant(np.linspace(-1, 1, shape[-1][0]))
    return d.add(draw(st.sampled_from(["Add", "Mul"])), [x, row], shape)


def joined(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    others = [y for y, s in d.shapes.items() if len(s) == len(shape) and _but(s, axis) == _but(shape, axis)]
    y = draw(st.sampled_from(others))
    both = tuple(a + b for a, b in zip(shape[axis], d.shapes[y][axis]))
    return d.add("Concat", [x, y], [*shape[:axis], both, *shape[axis + 1 :]], axis=axis)


def doubled(d: Drawn, draw: Any, x: str) -> Any:
    return d.add("Add", [x, x], d.shapes[x])


def sliced(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    if len(set(shape[axis])) > 1:
        bounds = [(0, 2**31, 2), (1, 2**31, 1), (0, -1, 1), (-2, 2**31, 1), (-1, -(2**31), -1), (0, 16, 2), (0, 5, 1)]
        bounds += [(0, 1, 1), (1, 2**31, 2), (1, -1, 1), (-3, -1, 1), (3, 9, 3)]
    else:
        bounds = [(0, 2, 1), (1, 2**31, 1), (-1, -(2**31), -1), (0, 2**31, 2)]
    start, stop, step = draw(st.sampled_from(bounds))
    ends = [d.ints(start), d.ints(stop), d.ints(axis), d.ints(step)]
    if draw(st.booleans()) and min(shape[axis]) > 1:  # up to half of the size
        step, stop = abs(step), 0
        start = min(max(start, 0), 1)
        ends = [d.ints(start), d.helper("Div", [d.size(x, axis), d.ints(2)]), d.ints(axis), d.ints(step)]
        along = tuple(len(range(n)[start : n // 2 : step]) for n in shape[axis])
    else:
        along = tuple(len(range(n)[start:stop:step]) for n in shape[axis])
    return d.add("Slice", [x, *ends], [*shape[:axis], along, *shape[axis + 1 :]])


def turned(d: Drawn, draw: Any, x: str) -> Any:
    order = draw(st.permutations(range(len(d.shapes[x]))))
    if not order:
        return None
    return d.add("Transpose", [x], [d.shapes[x][n] for n in order], perm=list(order))


def _merge(d: Drawn, draw: Any, x: str) -> tuple[int, list[Along]] | None:
    if len(shape := d.shapes[x]) < 2 or any(0 in along for along in shape):
        return None
    axis = draw(st.integers(0, len(shape) - 2))
    both = tuple(a * b for a, b in zip(shape[axis], shape[axis + 1]))
    return axis, [*shape[:axis], both, *shape[axis + 2 :]]


def merged(d: Drawn, draw: Any, x: str) -> Any:
    found = _merge(d, draw, x)
    if found is None:
        return None
    axis, shape = found
    if any(len(set(along)) > 1 for along in shape[axis + 1 :]):
        return None
    numbers = [0] * axis + [-1] + [along[0] for along in shape[axis + 1 :]]
    return d.add("Reshape", [x, d.ints(*numbers)], shape)


def merged_by_shape(d: Drawn, draw: Any, x: str) -> Any:
    found = _merge(d, draw, x)
    if found is None:
        return None
    axis, shape = found
    both = d.helper("Mul", [d.size(x, axis), d.size(x, axis + 1)])
    rest = [d.size(x, n) for n in range(len(d.shapes[x])) if n not in (axis, axis + 1)]
    return d.add("Reshape", [x, d.helper("Concat", [*rest[:axis], both, *rest[axis:]], axis=0)], shape)


def split(d: Drawn, draw: Any, x: str) -> Any:
    shape = d.shapes[x]
    axes = [n for n, along in enumerate(shape) if all(size and size % 2 == 0 for size in along)]
    if not axes or len(shape) > 3:
        return None
    axis = draw(st.sampled_from(axes))
    half = d.helper("Div", [d.size(x, axis), d.ints(2)])
    parts = [half, d.ints(2)] if draw(st.booleans()) else [d.ints(2), d.ints(-1)]
    sizes = [d.size(x, n) for n in range(len(shape))]
    text = d.helper("Concat", [*sizes[:axis], *parts, *sizes[axis + 1 :]], axis=0)
    halves = tuple(size // 2 for size in shape[axis])
    made = [halves, d.known(2)] if parts[0] == half else [d.known(2), halves]
    return d.add("Reshape", [x, text], [*shape[:axis], *made, *shape[axis + 1 :]])


def reduced(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]) or any(0 in along for along in shape):
        return None
    axes = sorted(draw(st.sets(st.integers(0, len(shape) - 1), min_size=1, max_size=2)))
    operator = draw(st.sampled_from(["ReduceSum", "ReduceMean", "ReduceMax", "ReduceL2", "ReduceLogSumExp"]))
    keep = draw(st.integers(0, 1))
    made = [d.known(1) if n in axes else along for n, along in enumerate(shape) if keep or n not in axes]
    return d.add(operator, [x, d.ints(*axes)], made, keepdims=keep)


def softmax(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]) or any(0 in along for along in shape):
        return None
    return d.add("Softmax", [x], shape, axis=draw(st.integers(-len(shape), len(shape) - 1)))


def normed(d: Drawn, draw: Any, x: str) -> Any:
    """Divides by a root of the mean of squares."""
    if not (shape := d.shapes[x]) or any(0 in along for along in shape):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    mean = d.helper("ReduceMean", [d.helper("Mul", [x, x]), d.ints(axis)], keepdims=1)
    root = d.helper("Sqrt", [d.helper("Add", [mean, d.constant(np.array(0.1))])])
    return d.add("Div", [x, root], shape)


def product(d: Drawn, draw: Any, x: str) -> Any:
    """Multiplies by a value, or by itself turned."""
    if len(shape := d.shapes[x]) < 2 or 0 in shape[-1]:
        return None
    others = [y for y, s in d.shapes.items() if len(s) == len(shape) and s[:-2] == shape[:-2] and s[-2] == shape[-1]]
    if others and draw(st.booleans()):
        y = draw(st.sampled_from(others))
        return d.add("MatMul", [x, y], [*shape[:-1], d.shapes[y][-1]])
    order = [*range(len(shape) - 2), len(shape) - 1, len(shape) - 2]
    found = d.add("MatMul", [x, d.helper("Transpose", [x], perm=order)], [*shape[:-1], shape[-2]])
    return d.add("Tanh", [found], d.shapes[found])


def weights(d: Drawn, draw: Any, x: str) -> Any:
    if len(shape := d.shapes[x]) < 2 or len(set(shape[-1])) > 1 or not shape[-1][0]:
        return None
    columns = draw(st.sampled_from([1, 3, 8]))
    w = np.random.default_rng(columns).standard_normal((shape[-1][0], columns)) / shape[-1][0] ** 0.5
    return d.add("MatMul", [x, d.constant(w)], [*shape[:-1], d.known(columns)])


def spread(d: Drawn, draw: Any, x: str) -> Any:
    """Repeats a dimension of size 1 to the size of another value's."""
    shape = d.shapes[x]
    axes = [n for n, along in enumerate(shape) if along == d.known(1)]
    others = [(y, n) for y, s in d.shapes.items() for n in range(len(s))]
    if not axes or not others:
        return None
    axis, (y, other) = draw(st.sampled_from(axes)), draw(st.sampled_from(others))
    sizes = [d.size(y, other) if n == axis else d.ints(1) for n in range(len(shape))]
    made = [d.shapes[y][other] if n == axis else along for n, along in enumerate(shape)]
    return d.add("Expand", [x, d.helper("Concat", sizes, axis=0)], made)


def picked(d: Drawn, draw: Any, x: str) -> Any:
    """Takes the first, the last or some elements of an axis."""
    if not (shape := d.shapes[x]):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    index = draw(st.sampled_from([np.array(0), np.array(-1), np.array([0, -1, 0])]))
    if 0 in shape[axis]:
        return None
    made = [*shape[:axis], *(d.known(n) for n in index.shape), *shape[axis + 1 :]]
    return d.add("Gather", [x, d.constant(index.astype(np.int64))], made, axis=axis)


def padded(d: Drawn, draw: Any, x: str) -> Any:
    shape = d.shapes[x]
    before, after = draw(st.sampled_from([(1, 1), (0, 2), (3, 0)]))
    if not shape:
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    numbers = [before if n == axis else 0 for n in range(len(shape))]
    numbers += [after if n == axis else 0 for n in range(len(shape))]
    along = tuple(n + before + after for n in shape[axis])
    return d.add("Pad", [x, d.ints(*numbers)], [*shape[:axis], along, *shape[axis + 1 :]])


def padded_again(d: Drawn, draw: Any, x: str) -> Any:
    """Pads an axis by as much as another is long."""
    if not (shape := d.shapes[x]) or len(shape) > 2:
        return None
    axis, other = draw(st.integers(0, len(shape) - 1)), draw(st.integers(0, len(shape) - 1))
    before = d.ints(*[0] * len(shape))
    after = d.helper("Concat", [d.size(x, other) if n == axis else d.ints(0) for n in range(len(shape))], axis=0)
    along = tuple(a + b for a, b in zip(shape[axis], shape[other]))
    return d.add("Pad", [x, d.helper("Concat", [before, after], axis=0)], [*shape[:axis], along, *shape[axis + 1 :]])


def running(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]) or any(0 in along for along in shape):
        return None
    total = d.helper("CumSum", [x, d.constant(np.array(draw(st.integers(0, len(shape) - 1)), np.int64))])
    return d.add("Mul", [total, d.constant(np.array(0.125))], shape)


def positions(d: Drawn, draw: Any, x: str) -> Any:
    """Masks what is behind the diagonal of the last two axes, by ranges of their sizes."""
    if len(shape := d.shapes[x]) < 2:
        return None
    rank = len(shape)
    ends = [d.helper("Squeeze", [d.size(x, axis)]) for axis in (rank - 2, rank - 1)]
    zero, one = d._scalar(0), d._scalar(1)
    rows, columns = (d.helper("Range", [zero, end, one]) for end in ends)
    seen = d.helper("LessOrEqual", [columns, d.helper("Add", [d.helper("Unsqueeze", [rows, d.ints(1)]), d._scalar(2)])])
    return d.add("Where", [seen, x, d.constant(np.array(-3.0))], shape)


def mean(d: Drawn, draw: Any, x: str) -> Any:
    """Divides a sum by the number of elements of the whole."""
    if not (shape := d.shapes[x]) or any(0 in along for along in shape):
        return None
    total = d.helper("ReduceSum", [x, d.ints(len(shape) - 1)], keepdims=1)
    count = d.helper("Cast", [d.helper("Size", [x])], to="element")
    return d.add("Sub", [x, d.helper("Div", [total, count])], shape)


def pooled(d: Drawn, draw: Any, x: str) -> Any:
    """Slides a window over the last axis of (N, C, L)."""
    if len(shape := d.shapes[x]) != 3 or any(0 in along for along in shape):
        return None
    taps, stride, pad = draw(st.sampled_from([(2, 2, 0), (3, 1, 1), (3, 2, 1), (3, 2, 0)]))
    if min(shape[-1]) < taps:
        return None
    along = tuple((n + 2 * pad - taps) // stride + 1 for n in shape[-1])
    how = {"kernel_shape": [taps], "strides": [stride], "pads": [pad, pad]}
    channels = shape[1]
    if len(set(channels)) == 1 and channels[0] <= 16 and draw(st.booleans()):
        w = np.random.default_rng(taps).standard_normal((4, channels[0], taps)) / (channels[0] * taps) ** 0.5
        return d.add("Conv", [x, d.constant(w)], [shape[0], d.known(4), along], **how)
    kinds = ["AveragePool"] if pad else ["MaxPool", "AveragePool"]  # onnx's evaluator pads no maxima of few elements
    return d.add(draw(st.sampled_from(kinds)), [x], [*shape[:2], along], **how)


def tiled(d: Drawn, draw: Any, x: str) -> Any:
    if not (shape := d.shapes[x]):
        return None
    axis = draw(st.integers(0, len(shape) - 1))
    times = d.ints(*[2 if n == axis else 1 for n in range(len(shape))])
    twice = tuple(2 * n for n in shape[axis])
    return d.add("Tile", [x, times], [*shape[:axis], twice, *shape[axis + 1 :]])


def _but(shape: tuple[Along, ...], axis: int) -> tuple[Along, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


@st.composite
def models(draw: Any, most: int = 6) -> Drawn:
    """Draws models of one to three inputs, with one or two dimensions that are named, and so many steps."""
    bounds = {}
    for name in ("n", "m")[: draw(st.integers(1, 2))]:
        low = draw(st.sampled_from([1, 1, 2, 3, 8]))
        bounds[name] = low, draw(st.sampled_from([9, 16, 33, 64]))
    choices = [{name: ends[which] for name, ends in bounds.items()} for which in (0, 1)]
    choices += [{name: ends[(which + n) % 2] for n, (name, ends) in enumerate(bounds.items())} for which in (0, 1)]
    choices.append(dict.fromkeys(bounds, 8))
    choices.append({name: draw(st.integers(*ends)) for name, ends in bounds.items()})
    choices = [sizes for n, sizes in enumerate(choices) if sizes not in choices[:n]]
    d = Drawn(bounds, choices)
    sizes = st.sampled_from([*bounds, *bounds, 1, 3, 8])
    for number in range(draw(st.integers(1, 3))):
        shape = draw(st.lists(sizes, min_size=1, max_size=3))
        if number == 0:
            shape[0] = draw(st.sampled_from([*bounds]))
            shape = [*shape[1:], shape[0]] if draw(st.booleans()) else shape
        name = f"x{number}"
        d.inputs[name] = tuple(shape)
        d.shapes[name] = tuple(
            tuple(sizes[n] for sizes in choices) if isinstance(n, str) else d.known(n) for n in shape
        )
    used = {n for shape in d.inputs.values() for n in shape}
    if not bounds.keys() <= used:
        d.inputs["x9"] = tuple(bounds)
        d.shapes["x9"] = tuple(tuple(sizes[n] for sizes in choices) for n in bounds)
    for _ in range(draw(st.integers(1, most))):
        before = dict(d.shapes), len(d.nodes), len(d.constants)
        made = draw(st.sampled_from(_steps()))(d, draw, draw(st.sampled_from([*d.shapes][-4:])))
        if made in d.shapes and (len(d.shapes[made]) > 4 or _elements(d.shapes[made]) > MOST):
            d.shapes, d.nodes = before[0], d.nodes[: before[1]]
            d.constants = dict(list(d.constants.items())[: before[2]])
    read = {name for _, inputs, _, _ in d.nodes for name in inputs}
    d.outputs = [name for name in d.shapes if name not in read and name not in d.inputs]
    d.outputs = d.outputs or [d.add("Neg", ["x0"], d.shapes["x0"])]
    return d


def _elements(shape: tuple[Along, ...]) -> int:
    return max((int(np.prod(at)) for at in zip(*shape)), default=1)
