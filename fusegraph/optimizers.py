"""Optimisers as parts of a graph: functions that add the updates of parameters, by their gradients, as assignments.

    grads = graph.gradients(loss, weights)
    grads, norm = optimizers.clip_by_global_norm(graph, grads, 1.0)
    state = optimizers.adamw(graph, weights, grads, graph.tensor("lr", (), "float32"))

What an optimiser keeps from call to call (moments, master weights, the number of steps) are further inputs of the
graph, which a call overwrites as it does the parameters: `State` names them and gives the arrays to begin with.
Arithmetic is in float32, in float64 for parameters of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log, prod, sqrt
from typing import Any

import numpy as np

from fusegraph.dtypes import DType, float32, float64
from fusegraph.errors import AttributeValueError, DTypeError, GraphError, ShapeError, shown
from fusegraph.graph import Graph, Tensor
from fusegraph.ops.attributes import of_kind
from fusegraph.runtime.strides import empty_numpy
from fusegraph.values import dtype as any_dtype
from fusegraph.values import integer, number, several

#: Of a polynomial that takes all singular values near 1 (Jordan et al., "Muon", 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class State:
    """What an optimiser keeps: inputs of the graph by their names, and of which parameter some are master weights."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    masters: dict[str, str] = field(default_factory=dict)

    def arrays(self, values: Mapping[str, Any] | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Returns the arrays of the first call, by name: zeros, and copies of the parameters as master weights.

        They have the strides of their tensors.  ``values`` are the parameters' arrays by their names.  Raises
        GraphError if one is missing, ShapeError if one has another shape.
        """
        found = {}
        for name, tensor in self.tensors.items():
            of = self.masters.get(name)
            if of is None:
                value: Any = 0
            elif values is None or of not in values:
                raise GraphError(f"{name!r} begins as {of!r}, whose array is not given")
            else:
                value = np.asarray(values[of])
                if value.shape != tensor.shape:
                    raise ShapeError(f"{of!r} is {list(tensor.shape)}, its array {list(value.shape)}")
            found[name] = empty_numpy(tensor.shape, tensor.strides, tensor.dtype.numpy)
            found[name][...] = value
        return found


class _Step:
    """One step of an optimiser in the making; ``keep`` adds what it keeps."""

    def __init__(
        self,
        graph: Graph,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor],
        lr: float | Tensor,
        weight_decay: float,
        masters: bool,
    ) -> None:
        parameters, gradients = _tensors(graph, "parameters", parameters), _tensors(graph, "gradients", gradients)
        if len(parameters) != len(gradients):
            raise GraphError(f"{len(parameters)} parameters have {len(gradients)} gradients")
        for p, g in zip(parameters, gradients):
            if p.shape != g.shape:
                raise ShapeError(f"{p.name!r} is {list(p.shape)}, its gradient {g.name!r} {list(g.shape)}")
            if not p.dtype.is_float or not g.dtype.is_float:
                raise DTypeError(f"{p.name!r} is {p.dtype}, its gradient {g.dtype}; optimisers are for floats")
        self.graph, self.masters, self.state = graph, masters, State()
        self.pairs = list(zip(parameters, gradients))
        self.lr, self.decay = _scalar(graph, "lr", lr), _number("weight_decay", weight_decay)

    def rate(self, dtype: DType) -> float | Tensor:
        """Returns the learning rate in a dtype."""
        return _in(self.lr, dtype)

    def keep(self, name: str, shape: tuple[int, ...], dtype: DType, strides: Any = None) -> Tensor:
        made = self.graph.tensor(name, shape, dtype, strides=strides)
        self.state.tensors[name] = made
        return made

    def beside(self, parameter: Tensor, part: str) -> Tensor:
        """Returns what is kept for each element of a parameter."""
        return self.keep(f"{parameter.name} {part}", parameter.shape, wide(parameter), parameter.strides)

    def counted(self) -> Tensor:
        """Returns the number of this step, from 1 on, which is kept."""
        before = self.keep(self.graph._unique("step"), (), float32)
        return self.graph.assign(before, before + 1)

    def update(self, new: Callable[[Tensor, Tensor, Tensor], Tensor]) -> State:
        """Assigns ``new(parameter, its values, its gradient)`` to each parameter, the two in the type of arithmetic."""
        for parameter, gradient in self.pairs:
            real, stored = wide(parameter), parameter
            if self.masters and parameter.dtype != real:
                stored = self.beside(parameter, "master")
                self.state.masters[stored.name] = parameter.name
            values = new(parameter, _cast(stored, real), _cast(gradient, real))
            if stored is not parameter:
                values = self.graph.assign(stored, values)
            self.graph.assign(parameter, _cast(values, parameter.dtype))
        return self.state


def wide(tensor: Tensor) -> DType:
    """Returns the dtype in which a parameter is updated."""
    return float64 if tensor.dtype == float64 else float32


def _cast(x: Tensor, dtype: DType) -> Tensor:
    return x if x.dtype == dtype else x.graph.cast(x, dtype)


def _in(value: float | Tensor, dtype: DType) -> float | Tensor:
    """Returns what `_scalar` returned, tensors in a dtype."""
    return _cast(value, dtype) if isinstance(value, Tensor) else value


def _number(name: str, value: Any, below: float | None = None) -> float:
    """Returns a number that is at least 0, and less than ``below``.  Raises AttributeValueError."""
    found = float(of_kind(name, number, value))
    if found < 0 or (below is not None and found >= below):
        wanted = "at least 0" if below is None else f"at least 0 and less than {below}"
        raise AttributeValueError(f"{name} is {wanted}, got {shown(value)}")
    return found


def _betas(betas: Any) -> list[float]:
    """Returns two numbers that are less than 1.  Raises AttributeValueError."""
    found = [_number("a beta", beta, 1) for beta in of_kind("betas", several(number), betas)]
    if len(found) != 2:
        raise AttributeValueError(f"betas are two numbers, got {shown(betas)}")
    return found


def _scalar(graph: Graph, name: str, value: Any) -> float | Tensor:
    """Returns a number that is at least 0, or a tensor of one element with the shape ()."""
    if not isinstance(value, Tensor):
        return _number(name, value)
    _tensors(graph, name, [value])
    if value.size != 1:
        raise ShapeError(f"{name} is one number, got {value.name!r} {list(value.shape)}")
    return graph.reshape(value, ()) if value.rank else value


def _tensors(graph: Any, name: str, given: Any) -> list[Tensor]:
    """Returns tensors of a graph as a list.  Raises GraphError."""
    if not isinstance(graph, Graph):
        raise GraphError(f"an optimiser is part of a Graph, got {shown(graph)}")
    try:
        found = list(given)
    except Exception:  # Python asks an object for its elements
        raise GraphError(f"{name} are several tensors, as in [x], got {shown(given)}") from None
    for tensor in found:
        graph._own(tensor, name)
    return found


def _newton_schulz(steps: Any, epsilon: Any, dtype: Any) -> tuple[int, float, DType]:
    """Returns what `orthogonal` is told, as plain values.  Raises AttributeValueError, DTypeError."""
    if (count := of_kind("steps", integer, steps)) < 0:
        raise AttributeValueError(f"steps is at least 0, got {count}")
    real = of_kind("dtype", any_dtype, dtype)
    if not real.is_float or real.itemsize == 1:
        raise DTypeError(f"dtype is of floats of 16 bits or more, got {real}")
    return count, _number("epsilon", epsilon), real


def _moved(old: Tensor, new: Tensor, kept: float) -> Tensor:
    """Returns kept * old + (1 - kept) * new."""
    return old * kept + new * (1 - kept)


def clip_by_global_norm(
    graph: Graph, gradients: Sequence[Tensor], max_norm: float | Tensor
) -> tuple[list[Tensor], Tensor]:
    """Returns gradients scaled so that their common norm is at most ``max_norm``, and the norm that they had.

    As torch.nn.utils.clip_grad_norm_: the factor is max_norm / (norm + 1e-6), at most 1.  The norm is float32, or
    float64 if a gradient is, of shape ().  Raises GraphError, ShapeError, DTypeError, AttributeValueError.
    """
    gradients, most = _tensors(graph, "gradients", gradients), _scalar(graph, "max_norm", max_norm)
    for gradient in gradients:
        if not gradient.dtype.is_float:
            raise DTypeError(f"the gradient {gradient.name!r} is {gradient.dtype}; norms are of floats")
    real = float64 if any(g.dtype == float64 for g in gradients) else float32
    total: Tensor | None = None
    for gradient in gradients:
        x = _cast(gradient, real)
        own = graph.reduction(x * x, "add", keepdims=False)
        total = own if total is None else total + own
    if total is None:
        return [], graph.constant(0.0, dtype=real)
    norm = graph.sqrt(total)
    scale = graph.min(_in(most, real) / (norm + 1e-6), 1.0)
    return [_cast(_cast(g, real) * scale, g.dtype) for g in gradients], norm


def sgd(
    graph: Graph,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: float | Tensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    masters: bool = False,
) -> State:
    """Adds a step of stochastic gradient descent: parameter -= lr * gradient, or lr * the momentum of gradients.

    parameters are inputs of the graph, gradients have their shapes; lr is a number, or a tensor of one.  As in
    torch.optim.SGD, the momentum is momentum * before + gradient, and with nesterov the step is gradient + momentum *
    that; weight_decay * parameter is part of the gradient.  With masters, parameters of 16 bits are rounded copies of
    float32 values that the state has.  Raises GraphError, ShapeError, DTypeError, AttributeValueError.
    """
    momentum = _number("momentum", momentum, 1)
    if nesterov and not momentum:
        raise AttributeValueError("nesterov is a way to use momentum, which is 0")
    step = _Step(graph, parameters, gradients, lr, weight_decay, masters)

    def new(parameter: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        if step.decay:
            gradient = gradient + values * step.decay
        if momentum:
            before = step.beside(parameter, "momentum")
            moment = graph.assign(before, before * momentum + gradient)
            gradient = gradient + moment * momentum if nesterov else moment
        return values - gradient * step.rate(values.dtype)

    return step.update(new)


def adamw(
    graph: Graph,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: float | Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    epsilon: float = 1e-8,
    weight_decay: float = 1e-2,
    masters: bool = False,
) -> State:
    """Adds a step of AdamW (Loshchilov and Hutter, 2019), as torch.optim.AdamW computes it.

    The state has two moments of each parameter, and the number of steps.  Operands, masters and errors as in `sgd`.
    """
    (first, second), epsilon = _betas(betas), _number("epsilon", epsilon)
    step = _Step(graph, parameters, gradients, lr, weight_decay, masters)
    count = step.counted()

    def unbiased(beta: float, dtype: DType) -> Tensor:
        """Returns 1 - beta^step, without cancellation."""
        if not beta:
            return graph.constant(1.0, dtype=dtype)
        return -graph.expm1(_cast(count, dtype) * log(beta))

    def new(parameter: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        rate, dtype = step.rate(values.dtype), values.dtype
        before, square = step.beside(parameter, "first moment"), step.beside(parameter, "second moment")
        mean = graph.assign(before, _moved(before, gradient, first))
        variance = graph.assign(square, _moved(square, gradient * gradient, second))
        size = graph.sqrt(variance) / graph.sqrt(unbiased(second, dtype)) + epsilon
        return values * (1 - rate * step.decay) - mean / size * (rate / unbiased(first, dtype))

    return step.update(new)


def lion(
    graph: Graph,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: float | Tensor,
    *,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    masters: bool = False,
) -> State:
    """Adds a step of Lion (Chen et al., "Symbolic discovery of optimization algorithms", 2023).

    The step has the sign of a mean of momentum and gradient, by the first beta; the momentum moves by the second.
    Operands, masters and errors as in `sgd`.
    """
    first, second = _betas(betas)
    step = _Step(graph, parameters, gradients, lr, weight_decay, masters)

    def new(parameter: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        rate, before = step.rate(values.dtype), step.beside(parameter, "momentum")
        graph.assign(before, _moved(before, gradient, second))
        return values * (1 - rate * step.decay) - graph.sign(_moved(before, gradient, first)) * rate

    return step.update(new)


def muon(
    graph: Graph,
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    lr: float | Tensor,
    *,
    momentum: float = 0.95,
    nesterov: bool = True,
    weight_decay: float = 0.1,
    steps: int = 5,
    epsilon: float = 1e-7,
    dtype: Any = "bfloat16",
    masters: bool = False,
) -> State:
    """Adds a step of Muon (Jordan et al., 2024) for matrices, as torch.optim.Muon computes it.

    The momentum's singular values are taken near 1 by ``steps`` steps of Newton and Schulz, whose products are of
    ``dtype``; the step is lr * sqrt(max(1, rows / columns)) * that.  Parameters of more dimensions are matrices of
    their first one; those of fewer raise ShapeError: they are for another optimiser.  Others as in `sgd`.
    """
    momentum = _number("momentum", momentum, 1)
    steps, epsilon, dtype = _newton_schulz(steps, epsilon, dtype)
    step = _Step(graph, parameters, gradients, lr, weight_decay, masters)
    for parameter, _ in step.pairs:
        if parameter.rank < 2:
            raise ShapeError(f"{parameter.name!r} {list(parameter.shape)} is no matrix: Muon is for matrices")

    def new(parameter: Tensor, values: Tensor, gradient: Tensor) -> Tensor:
        rate, before = step.rate(values.dtype), step.beside(parameter, "momentum")
        moment = graph.assign(before, _moved(before, gradient, momentum))
        wanted = _moved(gradient, moment, 1 - momentum) if nesterov else moment
        rows, columns = parameter.shape[0], prod(parameter.shape[1:])
        if not parameter.size:
            return values
        found = orthogonal(graph, graph.reshape(wanted, (rows, columns)), steps=steps, epsilon=epsilon, dtype=dtype)
        found = graph.reshape(_cast(found, values.dtype), parameter.shape)
        return values * (1 - rate * step.decay) - found * (rate * sqrt(max(1.0, rows / columns)))

    return step.update(new)


def orthogonal(graph: Graph, x: Tensor, *, steps: int = 5, epsilon: float = 1e-7, dtype: Any = "bfloat16") -> Tensor:
    """Returns a matrix with x's singular vectors, and singular values near 1, in ``dtype``.

    Each of ``steps`` steps of Newton and Schulz is x <- a x + (b x x^T + c (x x^T)^2) x.  Errors as in `sgd`.
    """
    steps, epsilon, dtype = _newton_schulz(steps, epsilon, dtype)
    _tensors(graph, "x", [x])
    if x.rank != 2:
        raise ShapeError(f"{x.name!r} {list(x.shape)} is no matrix")
    a, b, c = NEWTON_SCHULZ
    real = _cast(x, wide(x))
    length = graph.max(graph.sqrt(graph.reduction(real * real, "add")), epsilon)
    turned = x.shape[0] > x.shape[1]
    y = graph.cast(real / length, dtype)
    y = graph.transpose(y, (1, 0)) if turned else y
    for _ in range(steps):
        gram = graph.matmul(y, graph.transpose(y, (1, 0)))
        update = gram * b + graph.matmul(gram, gram) * c
        y = y * a + graph.matmul(update, y)
    return graph.transpose(y, (1, 0)) if turned else y
