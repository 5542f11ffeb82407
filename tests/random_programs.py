"""Random programs of torch whose sizes vary, drawn by hypothesis: lines of Python that torch itself has run."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

#: Elements of the largest tensor of a program.
MOST = 20_000
#: Lines that make a tensor of x and y; a and b are axes of x.
LINES = [
    "x.relu()", "x.tanh() * 2", "x.sin() + 0.5", "x / x.shape[0]", "x * x.shape[-1]", "x + y", "x * y", "x - y.tanh()",
    "torch.maximum(x, y)", "torch.cat([x, y], {a})", "torch.cat([x, x[:1]])", "torch.cat([x, x], {a})",
    "x.narrow({a}, 1, x.shape[{a}] - 1)", "x[1:] - x[:-1]", "x[::2]", "x[..., ::2]", "x[-2:]", "x[..., -1:]",
    "x[:5]", "x[..., :16:2]", "x[: x.shape[0] // 2]", "x[x.shape[0] // 2 :]", "x[..., x.shape[0] // 2]", "x[-1]",
    "x[..., 0]", "x[x.shape[0] - 1]", "x.flatten()", "x.flatten(0, 1)", "x.flatten(-2)", "x.reshape(x.shape[0], -1)",
    "x.view(x.shape[0] * x.shape[1], *x.shape[2:])", "x.reshape(x.shape[-1], -1)", "x.reshape(-1, 1, x.shape[-1])",
    "x.reshape(2, -1)", "x.reshape(*x.shape[:-1], 2, x.shape[-1] // 2)", "x.transpose({a}, {b})", "x.unsqueeze({a})",
    "x.unsqueeze(-1)", "x.sum({a})", "x.sum({a}, keepdim=True)", "x.mean(({a}, {b})) if {a} != {b} else x.mean({a})",
    "x.amax({a})", "x.var({a}, correction=0)", "x.logsumexp({a})", "x - x.mean({a}, keepdim=True)", "x.softmax({a})",
    "x.log_softmax({a})", "functional.layer_norm(x, x.shape[-1:])", "functional.rms_norm(x, x.shape[-1:], eps=0.1)",
    "(x @ y).tanh()", "(x @ x.mT).tanh()", "(x.mT @ x).tanh()", "torch.einsum('...ij,...kj->...ik', x, y).tanh()",
    "x.expand(y.shape[-1], *x.shape)", "x + torch.arange(x.shape[-1]).to(x)", "x.new_full((x.shape[0], 3), 0.5)",
    "x.cumsum({a}) * 0.125", "x.flip({a})", "x.roll(1, {a})", "x.repeat_interleave(2, {a})", "x.tril()", "x.triu(1)",
    "functional.pad(x, (1, 2))", "functional.pad(x, (0, x.shape[0]))", "functional.pad(x, (-1, 1))",
    "torch.where(torch.arange(x.shape[-1]) < x.shape[0] - 1, x, x.new_zeros(()))", "x.chunk(2, {a})[0]",
    "functional.avg_pool1d(x, 3, 2, 1)", "functional.max_pool1d(x, 3, 2, 1)", "x.diagonal()", "x.diff(dim={a})",
    "x.index_select({a}, torch.tensor([0, 1, 0]))", "x[..., torch.tensor([0, -1])]", "x.sum() / x.numel()",
    "torch.stack([x, x + 1], {a})", "x.unfold({a}, 2, 1)", "x.new_ones(x.shape[0], x.shape[-1]) * x.mean()",
]  # fmt: skip
#: Lines that write to an input.
WRITES = [
    "x0.add_(x)", "x0.mul_(0.5)", "x0[1:] = 0.25", "x0[..., 0] = 1.5", "x0[1:].mul_(2)", "x0[:-1].copy_(x0[1:] * 2)",
    "x0.copy_(x)", "x0.clamp_(-1, 1)",
]  # fmt: skip


@dataclass
class Program:
    """A function of some inputs.

    shapes   of the inputs, with names for sizes that vary.
    choices  the sizes at which it runs, all of at least 2: torch compiles those of 0 and 1 apart.
    """

    shapes: dict[str, tuple[int | str, ...]]
    choices: list[dict[str, int]]
    lines: list[str] = field(default_factory=list)
    results: list[str] = field(default_factory=list)

    @property
    def source(self) -> str:
        body = "\n".join(f"    {line}" for line in [*self.lines, f"return {', '.join(self.results)},"])
        return f"def program({', '.join(self.shapes)}):\n{body}\n"

    def function(self) -> Any:
        scope = {"torch": torch, "functional": torch.nn.functional}
        exec(self.source, scope)
        return scope["program"]

    def inputs(self, number: int) -> list[Any]:
        """Returns tensors of the sizes of a choice, whose dimensions are marked as those that vary."""
        made, found = torch.Generator().manual_seed(number), []
        for shape in self.shapes.values():
            sizes = [n if isinstance(n, int) else self.choices[number][n] for n in shape]
            found.append(torch.randn(sizes, generator=made))
            for axis, n in enumerate(shape):
                mark = torch._dynamo.mark_static if isinstance(n, int) else torch._dynamo.maybe_mark_dynamic
                mark(found[-1], axis)
        return found

    def __str__(self) -> str:
        return f"{self.source}shapes {self.shapes}\nchoices {self.choices}"


@st.composite
def programs(draw: Any, most: int = 6) -> Program:
    """Draws programs of one to three inputs, one or two sizes that vary and so many lines."""
    names = ("n", "m")[: draw(st.integers(1, 2))]
    first = {"n": 5, "m": 7}
    choices = [{name: first[name] for name in names}, dict.fromkeys(names, 2), dict.fromkeys(names, 16)]
    choices += [dict(zip(names, (2, 16))), {name: draw(st.integers(2, 16)) for name in names}]
    choices += [{name: draw(st.integers(2, 16)) for name in names}]
    sizes = st.sampled_from([*names, *names, 1, 3, 8])
    shapes = {f"x{k}": tuple(draw(st.lists(sizes, min_size=1, max_size=3))) for k in range(draw(st.integers(1, 3)))}
    if not any(isinstance(n, str) for shape in shapes.values() for n in shape):
        shapes["x0"] = (names[0], *shapes["x0"][1:])
    found = Program(shapes, choices)
    every = [
        dict(zip(shapes, (x.double() for x in found.inputs(k))), torch=torch, functional=torch.nn.functional)
        for k in range(len(choices))
    ]
    for number in range(draw(st.integers(1, most))):
        operands = {key: draw(st.sampled_from([*shapes, *found.results])) for key in "xy"}
        if draw(st.integers(0, 9)) == 0:
            line = _of(operands, draw(st.sampled_from(WRITES)))
        else:
            rank = every[0][operands["x"]].ndim
            axes = [draw(st.integers(0, max(rank - 1, 0))) for _ in "ab"]
            line = f"v{number} = " + _of(operands, draw(st.sampled_from(LINES)).format(a=axes[0], b=axes[1]))
        if _runs(line, every):
            found.lines.append(line)
            if line.startswith("v"):
                found.results.append(f"v{number}")
    if not found.results:
        found.lines.append("v = x0 * 2")
        found.results.append("v")
    found.results = found.results[-3:]
    return found


def _of(operands: dict[str, str], line: str) -> str:
    """Returns a line with operands in place of x and y."""
    return re.sub(r"\b[xy]\b", lambda found: operands[found[0]], line)


def _runs(line: str, scopes: list[dict[str, Any]]) -> bool:
    """Runs a line at all choices of sizes; tells whether torch takes it at each, and its results are not too large."""
    tried = [{name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in scope.items()} for scope in scopes]
    try:
        for scope in tried:
            exec(line, scope)
            made = scope[line.split(" ")[0]] if line.startswith("v") else scope["x0"]
            if made.numel() > MOST or made.ndim > 4 or not made.isfinite().all() or made.abs().amax() > 1e3:
                return False
    except (RuntimeError, IndexError, TypeError):
        return False
    for scope, new in zip(scopes, tried):
        scope.update(new)
    return True
