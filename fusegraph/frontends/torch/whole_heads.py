"""A linear layer with the cross entropy of its results as one operator, whose logits are not kept.

torch saves the logits, or as many probabilities, for the gradient: with a large vocabulary more than all else.  Where
nothing but the loss uses them, the two calls become one operator here, forward and backward.
"""

from __future__ import annotations

import inspect
import operator
from dataclasses import dataclass
from typing import Any

import torch

from fusegraph.frontends.torch.table import Call, aten_by_name
from fusegraph.graph import Tensor

functional = torch.nn.functional
_SIGNATURE = inspect.signature(functional.cross_entropy)
#: The operators' name; a layer of which an option leaves it to torch stays as it is.
NAME = "fusegraph.linear_cross_entropy"
#: Logits of fewer bytes, as float32, are no burden.
LEAST_BYTES = 32 << 20
_HOW = "int ignore_index, float label_smoothing, str reduction"


# ---- the operators


def _wide(x: Any) -> Any:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _logits(x: Any, w: Any, bias: Any) -> Any:
    wide = _wide(x)
    return functional.linear(x.to(wide), w.to(wide), None if bias is None else bias.to(wide))


def _result(x: Any, w: Any, bias: Any, target: Any, ignore: int, smoothing: float, reduction: str) -> Any:
    """Returns the loss, and the logarithms of the sums of exponentials of all rows of x [rows, elements]."""
    logits = _logits(x, w, bias)
    how: dict[str, Any] = {"ignore_index": ignore, "label_smoothing": smoothing, "reduction": reduction}
    return functional.cross_entropy(logits, target, **how), logits.logsumexp(-1)


def _result_form(x: Any, w: Any, bias: Any, target: Any, ignore: int, smoothing: float, reduction: str) -> Any:
    rows = x.shape[:1]
    return x.new_empty(rows if reduction == "none" else (), dtype=_wide(x)), x.new_empty(rows, dtype=_wide(x))


def _gradient(
    grad_out: Any,
    x: Any,
    w: Any,
    bias: Any,
    target: Any,
    logsumexp: Any,
    ignore: int,
    smoothing: float,
    reduction: str,
    wanted: Any,
) -> Any:
    """Returns the gradients by x, w and bias that are wanted, else empty tensors."""
    counts = target != ignore
    by_logits = (_logits(x, w, bias) - logsumexp[:, None]).exp() - smoothing / w.shape[0]
    hit = torch.where(counts, target, 0)[:, None]
    by_logits = by_logits.scatter_add(1, hit, torch.full_like(hit, smoothing - 1, dtype=by_logits.dtype))
    scale = grad_out / counts.sum() if reduction == "mean" else grad_out
    by_logits = torch.where(counts[:, None], by_logits * (scale[:, None] if scale.dim() else scale), 0)
    found = by_logits @ w.to(by_logits.dtype), by_logits.mT @ x.to(by_logits.dtype), by_logits.sum(0)
    return tuple(
        by.to(like.dtype).clone() if asked and like is not None else x.new_empty(0)
        for by, like, asked in zip(found, (x, w, bias), wanted)
    )


def _gradient_form(_: Any, x: Any, w: Any, bias: Any, *others: Any) -> Any:
    return tuple(
        torch.empty_like(like, memory_format=torch.contiguous_format) if asked and like is not None else x.new_empty(0)
        for like, asked in zip((x, w, bias), others[-1])
    )


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    x, w, bias, target, *ctx.how = inputs
    ctx.save_for_backward(x, w, bias, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _gradients(ctx: Any, grad_out: Any, _: Any) -> Any:
    wanted = list(ctx.needs_input_grad[:3])
    found = linear_cross_entropy_backward(grad_out, *ctx.saved_tensors, *ctx.how, wanted)
    return (*(by if asked else None for by, asked in zip(found, wanted)), None, None, None, None)


#: torch computes these operators only where a piece cannot.
linear_cross_entropy: Any = torch.library.custom_op(
    "fusegraph::linear_cross_entropy",
    _result,
    mutates_args=(),
    schema=f"(Tensor x, Tensor w, Tensor? bias, Tensor target, {_HOW}) -> (Tensor, Tensor)",
)
linear_cross_entropy_backward: Any = torch.library.custom_op(
    "fusegraph::linear_cross_entropy_backward",
    _gradient,
    mutates_args=(),
    schema="(Tensor grad_out, Tensor x, Tensor w, Tensor? bias, Tensor target, Tensor logsumexp,"
    f" {_HOW}, bool[3] wanted) -> (Tensor, Tensor, Tensor)",
)
linear_cross_entropy.register_fake(_result_form)
linear_cross_entropy_backward.register_fake(_gradient_form)
linear_cross_entropy.register_autograd(_gradients, setup_context=_keep)


# ---- in our graphs


def _how(c: Call, ignore_index: int, label_smoothing: float, reduction: str) -> dict[str, Any]:
    how = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
    return {**how, "compute_dtype": "tf32" if c.precision.matmul else None}


@aten_by_name(f"{NAME}.default")
def _head(
    c: Call,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    target: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
) -> tuple[Tensor, Tensor]:
    how = _how(c, ignore_index, label_smoothing, reduction)
    loss, logsumexp = c.graph.linear_cross_entropy(x, w, target, *(() if bias is None else (bias,)), **how)
    return loss, logsumexp


@aten_by_name(f"{NAME}_backward.default")
def _head_backward(
    c: Call,
    grad_out: Tensor,
    x: Tensor,
    w: Tensor,
    bias: Tensor | None,
    target: Tensor,
    logsumexp: Tensor,
    ignore_index: int,
    label_smoothing: float,
    reduction: str,
    wanted: Any,
) -> tuple[Tensor | None, ...]:
    how = _how(c, ignore_index, label_smoothing, reduction)
    given = (grad_out, x, w, target, logsumexp, *(() if bias is None else (bias,)))
    found = (*c.graph.linear_cross_entropy_backward(*given, **how), None)
    return tuple(by if asked else None for by, asked in zip(found, wanted))


# ---- calls that become one


@dataclass(frozen=True)
class _Found:
    """A call of cross_entropy with its arguments, that of the layer, and what selects and joins rows between them."""

    loss: Any
    given: dict[str, Any]
    layer: Any
    steps: list[Any]


def keep_heads_whole(module: Any) -> None:
    """Makes linear layers whose results only a cross entropy uses one operator with it, in a graph from the tracer."""
    for part in module.modules():
        graph = getattr(part, "graph", None)
        calls = graph.find_nodes(op="call_function", target=functional.cross_entropy) if graph is not None else ()
        found = [head for node in calls if (head := _found(node)) is not None]
        for head in found:
            _replace(graph, head)
        if found:
            part.recompile()


def _found(loss: Any) -> _Found | None:
    """Returns the layer whose results a call of cross_entropy takes, if nothing else uses them and they are large."""
    bound = _SIGNATURE.bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if any(given[key] is not None for key in ("weight", "size_average", "reduce")):
        return None
    steps: list[Any] = []
    target, node = traced_value(given["target"]), given["input"]
    while isinstance(node, torch.fx.Node) and len(node.users) == 1 and node.target is not functional.linear:
        if not _keeps_rows(node):
            return None
        steps.insert(0, node)
        node = node.args[0]
    if not isinstance(node, torch.fx.Node) or len(node.users) != 1 or target is None or target.dim() != 1:
        return None
    operands = [traced_value(x) for x in inspect.signature(_operands).bind(*node.args, **node.kwargs).args]
    shape = traced_value(given["input"]).shape
    if len(shape) != 2 or not all(isinstance(n, int) for n in shape) or 4 * shape.numel() < LEAST_BYTES:
        return None
    if target.is_floating_point() or any(x is not None and not x.is_floating_point() for x in operands):
        return None
    return _Found(loss, given, node, steps)


def traced_value(node: Any) -> Any:
    """Returns what the tracer knows of a tensor; None if it is none."""
    return node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None


def _keeps_rows(node: Any) -> bool:
    """Tells whether a node selects, divides or joins rows of logits, or converts them, and leaves rows whole."""
    before, after = (traced_value(x) for x in (node.args[0] if node.args else None, node))
    if before is None or after is None or not after.dim() or before.shape[-1] != after.shape[-1]:
        return False
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(x is Ellipsis or isinstance(x, slice | int) for x in index)
        last = index[-1] if Ellipsis in index or len(index) == before.dim() else slice(None)
        return plain and last in (Ellipsis, slice(None))
    return node.op == "call_method" and node.target in ("float", "double", "to", "contiguous", "view", "reshape")


def _replace(graph: Any, head: _Found) -> None:
    """Writes the operator in place of the layer and the cross entropy."""
    with graph.inserting_before(head.layer):
        operands = graph.call_function(_operands, head.layer.args, head.layer.kwargs)
        x, w, bias = (graph.call_function(operator.getitem, (operands, n)) for n in range(3))
    with graph.inserting_before(head.loss):
        for step in head.steps:
            if step.target is operator.getitem:
                x = graph.call_function(operator.getitem, (x, step.args[1]))
            elif step.target in ("view", "reshape"):
                x = graph.call_function(_in_rows, (x, *step.args[1:]), step.kwargs)
        how = tuple(head.given[key] for key in ("target", "ignore_index", "label_smoothing", "reduction"))
        made = graph.call_function(_loss, (x, w, bias, *how, traced_value(head.loss).dtype))
    made.meta = dict(head.loss.meta)
    head.loss.replace_all_uses_with(made)
    for node in (head.loss, *reversed(head.steps), head.layer):
        graph.erase_node(node)


def _operands(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    """Returns the operands of a linear layer as torch would multiply them here."""
    given, device = (input, weight, bias), input.device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype != torch.float64 else x for x in given)


def _in_rows(x: Any, *sizes: Any, **named: Any) -> Any:
    """Returns the reshape of logits to sizes, of the features that they are made of."""
    (sizes,) = named.values() if named else (sizes,)
    given = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int | torch.SymInt) else sizes
    return x.reshape(*given[:-1], x.shape[-1])


def _loss(
    x: Any, w: Any, bias: Any, target: Any, ignore: int, smoothing: float, reduction: str, dtype: torch.dtype
) -> Any:
    return linear_cross_entropy(x, w, bias, target, ignore, smoothing, reduction)[0].to(dtype)
