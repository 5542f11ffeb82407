"""A linear layer with the cross entropy of its results as one operator, whose logits are not kept.

torch saves the logits, or as many probabilities, for the gradient: with a large vocabulary more than all else.  Where
nothing but the loss uses them, what computes both becomes one operator here, forward and backward, however it is
written: as a layer or a product, with cross_entropy or with nll_loss of a log_softmax.
"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from fusegraph.frontends.torch.table import Call, aten_by_name
from fusegraph.graph import Tensor
from fusegraph.ops.linear_cross_entropy import LEAST_LOGITS_BYTES

functional = torch.nn.functional
#: What computes losses -> its signature.
_LOSSES = {loss: inspect.signature(loss) for loss in (functional.cross_entropy, functional.nll_loss)}
#: The operators' name; a layer of which an option leaves it to torch stays as it is.
NAME = "fusegraph.linear_cross_entropy"
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
    """A loss with its arguments, the layer whose results it takes, and what is between them.

    bias   what is added to the layer's results behind it, None if nothing is.
    steps  the nodes between layer and loss, the last one first.
    """

    loss: Any
    given: dict[str, Any]
    layer: Any
    bias: Any
    steps: list[Any]


def keep_heads_whole(module: Any) -> None:
    """Makes linear layers whose results only a loss uses one operator with it, in a graph from the tracer."""
    for part in module.modules():
        graph = getattr(part, "graph", None)
        calls = [n for loss in _LOSSES for n in graph.find_nodes(op="call_function", target=loss)] if graph else []
        found = [head for node in calls if (head := _found(node)) is not None]
        for head in found:
            _replace(graph, head)
        if found:
            part.recompile()


def _found(loss: Any) -> _Found | None:
    """Returns the layer whose results a loss takes, if nothing else uses them and they are large."""
    bound = _LOSSES[loss.target].bind(*loss.args, **loss.kwargs)
    bound.apply_defaults()
    given = {"label_smoothing": 0.0, **bound.arguments}
    scores, target = (traced_value(given[key]) for key in ("input", "target"))
    if any(given[key] is not None for key in ("weight", "size_average", "reduce")) or scores is None or target is None:
        return None
    shape = scores.shape
    if len(shape) < 2 or not all(isinstance(n, int) for n in shape) or 4 * shape.numel() < LEAST_LOGITS_BYTES:
        return None
    if target.is_floating_point() or target.shape != shape[:1] + shape[2:]:
        return None
    # from the loss back to the layer; who may use a node is known
    normalised, classes, bias, users = loss.target is functional.cross_entropy, 1, None, {loss}
    node, steps = given["input"], list[Any]()
    while _name(node) not in _LAYERS:
        value, source, others = traced_value(node), _operand(node), list[Any]()
        if value is None or traced_value(source) is None or set(node.users) != users:
            return None
        last = classes == value.dim() - 1
        if not normalised and (sums := _normalises(node, classes)) is not None:
            normalised, others = True, sums
        elif last and bias is None and (added := _sum_with_bias(node)) is not None:
            source, bias = added
        elif (last and _keeps_rows(node)) or (not last and _moves_classes(node)):
            classes = traced_value(source).dim() - 1
        else:
            return None
        steps += [node, *others]
        node, users = source, {node, *others}
    if not normalised or classes != traced_value(node).dim() - 1 or set(node.users) != users:
        return None
    try:
        given_operands = fx.map_arg((node.args, dict(node.kwargs)), traced_value)
        x, w, own = _LAYERS[_name(node)](*given_operands[0], **given_operands[1])
    except (AttributeError, RuntimeError, TypeError):  # a vector, or an argument that scales or is not traced
        return None
    biases = [b for b in (own, traced_value(bias)) if b is not None]
    if w.dim() != 2 or len(biases) > 1 or any(b.shape != w.shape[:1] for b in biases):
        return None
    return _Found(loss, given, node, bias, steps) if all(t.is_floating_point() for t in (x, w, *biases)) else None


def traced_value(node: Any) -> Any:
    """Returns what the tracer knows of a tensor; None if it is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def _name(node: Any) -> str:
    """Returns the name of the method or of torch's function that a node calls; an empty one for others."""
    if not isinstance(node, fx.Node) or node.op not in ("call_method", "call_function"):
        return ""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if any(getattr(m, name, None) is node.target for m in (torch, functional, operator)) else ""


def _operand(node: Any, number: int = 0, key: str = "input", default: Any = None) -> Any:
    """Returns an argument of a node by its number or its key."""
    if not isinstance(node, fx.Node):
        return default
    return node.args[number] if number < len(node.args) else node.kwargs.get(key, default)


def _normalises(node: Any, axis: int) -> list[Any] | None:
    """Returns the nodes that a node needs to be the log_softmax of its operand along an axis; None if it is not that.

    `x - x.logsumexp(axis, keepdim=True)` needs the logsumexp.
    """
    sums = node if (direct := _name(node) == "log_softmax") else _operand(node, 1, "other")
    if not direct and not (
        _name(node) == "sub"
        and "alpha" not in node.kwargs
        and _name(sums) == "logsumexp"
        and _operand(sums) is _operand(node)
        and set(sums.users) == {node}
        and _operand(sums, 2, "keepdim", False) is True
    ):
        return None
    along = _operand(sums, 1, "dim")
    along = along[0] if isinstance(along, list | tuple) and len(along) == 1 else along
    if not isinstance(along, int) or along % traced_value(node).dim() != axis:
        return None
    return [] if direct else [sums]


def _sum_with_bias(node: Any) -> tuple[Any, Any] | None:
    """Returns the logits and the bias that a node adds, in either order; None if it is no such sum."""
    if _name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None
    whole = traced_value(node).shape
    for logits, bias in (node.args, node.args[::-1]):
        known = [traced_value(x) for x in (logits, bias)]
        if all(x is not None for x in known) and known[0].shape == whole and known[1].shape == whole[-1:]:
            return logits, bias
    return None


def _moves_classes(node: Any) -> bool:
    """Tells whether a node is a view of its operand whose last axis is its axis 1."""
    if _name(node) not in ("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims"):
        return False
    moved, found = traced_value(_operand(node)).movedim(-1, 1), traced_value(node)
    return bool(moved.shape == found.shape and moved.stride() == found.stride())


def _keeps_rows(node: Any) -> bool:
    """Tells whether a node selects, divides or joins rows of logits, or converts them, and leaves rows whole."""
    before, after, name = traced_value(_operand(node)), traced_value(node), _name(node)
    if not before.dim() or not after.dim() or before.shape[-1] != after.shape[-1] or not after.is_floating_point():
        return False
    if name == "getitem":
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(x is Ellipsis or isinstance(x, slice | int) for x in index)
        last = index[-1] if Ellipsis in index or len(index) == before.dim() else slice(None)
        return plain and last in (Ellipsis, slice(None))
    if name in _RESHAPES:
        return before.dtype == after.dtype and all(isinstance(n, int) for n in after.shape)
    return name in ("float", "double", "to", "contiguous") and before.shape == after.shape


def _replace(graph: Any, head: _Found) -> None:
    """Writes the operator in place of the layer, the loss and what is between them."""
    with graph.inserting_before(head.layer):
        operands = graph.call_function(_LAYERS[_name(head.layer)], head.layer.args, head.layer.kwargs)
        x, w, bias = (graph.call_function(operator.getitem, (operands, n)) for n in range(3))
    with graph.inserting_before(head.loss):
        for step in reversed(head.steps):
            if _name(step) == "getitem":
                x = graph.call_function(operator.getitem, (x, step.args[1]))
            elif _name(step) in _RESHAPES:
                x = graph.call_function(_in_rows, (x, *traced_value(step).shape[:-1]))
        how = tuple(head.given[key] for key in ("target", "ignore_index", "label_smoothing", "reduction"))
        bias = bias if head.bias is None else head.bias
        made = graph.call_function(_loss, (x, w, bias, *how, traced_value(head.loss).dtype))
    made.meta = dict(head.loss.meta)
    head.loss.replace_all_uses_with(made)
    for node in (head.loss, *head.steps, head.layer):
        graph.erase_node(node)


def _linear(input: Any, weight: Any, bias: Any = None) -> tuple[Any, ...]:
    """Returns the operands of a linear layer as torch would multiply them here."""
    given, device = (input, weight, bias), input.device.type
    if not torch.is_autocast_enabled(device):
        return given
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x is not None and x.dtype != torch.float64 else x for x in given)


def _product(input: Any, other: Any = None, *, mat2: Any = None) -> tuple[Any, ...]:
    """Returns the operands of a product as those of a linear layer."""
    return _linear(input, (mat2 if other is None else other).mT)


def _sum_and_product(input: Any, mat1: Any, mat2: Any) -> tuple[Any, ...]:
    """Returns the operands of addmm as those of a linear layer."""
    return _linear(mat1, mat2.mT, input)


#: What computes logits -> its operands as those of a linear layer.
_LAYERS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "linear": _linear,
    "matmul": _product,
    "mm": _product,
    "addmm": _sum_and_product,
}
#: What divides and joins rows.
_RESHAPES = ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze")


def _in_rows(x: Any, *sizes: int) -> Any:
    """Returns the reshape of logits to sizes, and so many classes, of the features that they are made of."""
    return x.reshape(*sizes, x.shape[-1])


def _loss(
    x: Any, w: Any, bias: Any, target: Any, ignore: int, smoothing: float, reduction: str, dtype: torch.dtype
) -> Any:
    rows, classes = x.reshape(-1, x.shape[-1]), target.reshape(-1)
    loss = linear_cross_entropy(rows, w, bias, classes, ignore, smoothing, reduction)[0].to(dtype)
    return loss.reshape(target.shape) if reduction == "none" else loss
