"""Recurrent networks, unrolled over time steps; the products with the inputs are one product for all steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from fusegraph.errors import ModelError
from fusegraph.frontends.onnx.table import Call, operator
from fusegraph.graph import Graph, Tensor

Activation = Callable[[Tensor], Tensor]
#: A time step: (cell, inputs' part of the gates, states) -> new states, the first of which is the output.
Step = Callable[["Cell", Tensor, list[Tensor]], list[Tensor]]

_ACTIVATIONS = ("relu", "tanh", "sigmoid", "softplus")


@dataclass(frozen=True)
class Cell:
    """The weights of one direction.  Gates (B, gates * hidden) are inputs @ w + states @ r + biases.

    recurrent  r, of shape (hidden, gates * hidden); bias: its bias (gates * hidden,).
    peepholes  those of an LSTM, (3, hidden).
    """

    call: Call
    hidden: int
    recurrent: Tensor
    bias: Tensor | None
    peepholes: Tensor | None
    activations: tuple[Activation, ...]

    @property
    def graph(self) -> Graph:
        return self.call.graph

    def gate(self, x: Tensor, number: int) -> Tensor:
        """Returns one gate of those that are side by side in the last dimension."""
        return x[..., number * self.hidden : (number + 1) * self.hidden]

    def clipped(self, x: Tensor) -> Tensor:
        limit = self.call["clip"]
        return x if limit is None else self.graph.clamp(x, -limit, limit)

    def fed_back(self, state: Tensor, first: int = 0, last: int | None = None) -> Tensor:
        """Returns the states' part of gates ``first`` to ``last`` (exclusive), with its bias."""
        columns = slice(first * self.hidden, None if last is None else last * self.hidden)
        y = self.graph.matmul(state, self.recurrent[:, columns])
        return y if self.bias is None else self.graph.add(y, self.bias[columns])


def _rnn(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    (f,) = cell.activations
    return [f(cell.clipped(cell.graph.add(x, cell.fed_back(states[0]))))]


def _gru(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """A step of a GRU, whose gates are update, reset, hidden."""
    graph, (state,), (f, g) = cell.graph, states, cell.activations
    both = graph.add(x[..., : 2 * cell.hidden], cell.fed_back(state, 0, 2))
    update, reset = (f(cell.clipped(cell.gate(both, n))) for n in (0, 1))
    if cell.call["linear_before_reset"]:
        back = graph.mul(reset, cell.fed_back(state, 2))
    else:
        back = cell.fed_back(graph.mul(reset, state), 2)
    fresh = g(cell.clipped(graph.add(cell.gate(x, 2), back)))
    return [graph.add(graph.mul(graph.sub(1.0, update), fresh), graph.mul(update, state))]


def _lstm(cell: Cell, x: Tensor, states: list[Tensor]) -> list[Tensor]:
    """A step of an LSTM, whose gates are input, output, forget, cell, and peepholes input, output, forget."""
    graph, (state, old), (f, g, h) = cell.graph, states, cell.activations
    gates = graph.add(x, cell.fed_back(state))

    def opened(number: int, content: Tensor) -> Tensor:
        row = cell.gate(gates, number)
        if cell.peepholes is not None:
            row = graph.add(row, graph.mul(cell.peepholes[number], content))
        return f(cell.clipped(row))

    entering = opened(0, old)
    kept = graph.sub(1.0, entering) if cell.call["input_forget"] else opened(2, old)
    fresh = g(cell.clipped(cell.gate(gates, 3)))
    content = graph.add(graph.mul(kept, old), graph.mul(entering, fresh))
    return [graph.mul(opened(1, content), h(content)), content]


def _recurrent(
    gates: int,
    defaults: tuple[str, ...],
    step: Step,
    call: Call,
    x: Tensor,
    w: Tensor,
    r: Tensor,
    bias: Tensor | None = None,
    lengths: Tensor | None = None,
    *initial: Tensor | None,
) -> list[Tensor]:
    """Returns Y (steps, directions, batch, hidden) and the last of each state (directions, batch, hidden).

    With layout 1, batch is the first dimension of each.
    """
    graph, count = call.graph, 2 if step is _lstm else 1
    if call["layout"]:
        x = graph.transpose(x, [1, 0, 2])
        initial = tuple(t if t is None or n >= count else graph.transpose(t, [1, 0, 2]) for n, t in enumerate(initial))
    direction = call.word("direction", "forward", "reverse", "bidirectional")
    backwards = {"forward": [False], "reverse": [True], "bidirectional": [False, True]}[direction]
    names = call["activations"] or list(defaults) * len(backwards)
    if x.rank != 3 or w.rank != 3 or r.rank != 3 or len(names) < len(defaults) * len(backwards):
        raise ModelError(
            f"x, w and r have three dimensions and {len(defaults)} activations a direction, got {names[:6]}"
        )
    steps, batch, hidden = call.fixed(x.shape[0], "the length of sequences"), x.shape[1], r.shape[2]
    if w.shape != (len(backwards), gates * hidden, x.shape[2]) or r.shape != (len(backwards), gates * hidden, hidden):
        raise ModelError(f"w {list(w.shape)} and r {list(r.shape)} are not those of {gates} gates of {hidden}")
    if not steps:
        raise call.refuse("no steps")
    call.check_size(steps)
    exists = None
    if lengths is not None:
        exists = graph.cmp_lt(graph.reshape(graph.arange(steps, dtype=lengths.dtype), [-1, 1]), lengths)
    found = []
    for d, backward in enumerate(backwards):
        width = gates * hidden
        chosen = names[len(defaults) * d : len(defaults) * (d + 1)]
        cell = Cell(
            call,
            hidden,
            graph.transpose(r[d]),
            None if bias is None else bias[d, width:],
            initial[2][d].reshape(3, hidden) if len(initial) > 2 and initial[2] is not None else None,
            tuple(_activation(call, name) for name in chosen),
        )
        every = graph.matmul(x, graph.transpose(w[d]))
        every = every if bias is None else graph.add(every, bias[d, :width])
        none = graph.broadcast(graph.constant(0, dtype=x.dtype), [batch, hidden])
        given = [initial[n] if n < len(initial) else None for n in range(count)]
        states = [none if t is None else t[d] for t in given]
        outputs: list[Any] = [None] * steps
        for t in range(steps)[:: -1 if backward else 1]:
            call.check_size()
            new = step(cell, every[t], states)
            if exists is None:
                states, outputs[t] = new, new[0]
            else:
                mask = graph.reshape(exists[t], [batch, 1])
                states = [graph.binary_select(a, b, mask) for a, b in zip(new, states)]
                outputs[t] = graph.binary_select(new[0], none, mask)
        found.append((_joined(graph, outputs), states))
    y = _joined(graph, [output for output, _ in found], 1)
    last = [_joined(graph, [states[n] for _, states in found]) for n in range(count)]
    if call["layout"]:
        return [graph.transpose(y, [2, 0, 1, 3]), *(graph.transpose(t, [1, 0, 2]) for t in last)]
    return [y, *last]


def _joined(graph: Graph, tensors: list[Tensor], axis: int = 0) -> Tensor:
    return graph.concatenate(*(graph.unsqueeze(t, axis) for t in tensors), axis=axis)


def _activation(call: Call, name: str) -> Activation:
    if name.lower() not in _ACTIVATIONS or call["activation_alpha"] or call["activation_beta"]:
        raise call.refuse(f"activation {name[:40]}")
    return getattr(call.graph, name.lower())


operator("RNN")(partial(_recurrent, 1, ("Tanh",), _rnn))
operator("GRU")(partial(_recurrent, 3, ("Sigmoid", "Tanh"), _gru))
operator("LSTM")(partial(_recurrent, 4, ("Sigmoid", "Tanh", "Tanh"), _lstm))
