"""ATen's matrix products and convolutions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fusegraph.dtypes import DType, float32
from fusegraph.errors import NotSupportedError
from fusegraph.frontends.torch.table import Call, aten, pair
from fusegraph.graph import Tensor
from fusegraph.ops.base import Role
from fusegraph.ops.convolution import smallest_sizes


def product(c: Call, a: Tensor, b: Tensor, dtype: DType | None = None) -> Tensor:
    """Returns a matrix product of a dtype, as torch's settings allow it to be computed."""
    compute: Literal["tf32"] | None = "tf32" if c.precision.matmul and a.dtype == float32 else None
    result: Tensor = c.graph.matmul(a, b, dtype=dtype, compute_dtype=compute)
    return result


def _product(c: Call, a: Tensor, b: Tensor) -> Tensor:
    if not c.dtype.is_float:
        a, b = c.cast(a), c.cast(b)
    return c.cast(product(c, a, b))


def _divided(c: Call, a: Tensor) -> Tensor:
    """Returns a matrix as it was before torch merged its leading dimensions.

    The product then has these dimensions too, and what follows it need not be reshaped again.
    """
    node = c.graph.producer(a)
    if node is None or node.op.role is not Role.RESHAPE:
        return a
    # A reshape of a reshape is one of the first tensor, as the one that torch merged may be.
    (x,) = node.inputs
    beside = (n.output for n in c.graph.consumers(x) if n.op.role is Role.RESHAPE)
    return next((t for t in (x, *beside) if t.rank > 2 and t.shape[-1] == a.shape[-1]), a)


@aten("mm.default", "bmm.default", "mv.default")
def _mm(c: Call, a: Tensor, b: Tensor) -> Tensor:
    if b.rank == 1:
        return _product(c, a, b.reshape(-1, 1)).reshape(c.form.shape)
    if a.rank == 2:
        a = _divided(c, a)
    result = _product(c, a, b)
    return result if result.shape == c.form.shape else result.reshape(c.form.shape)


@aten("addmm.default", "baddbmm.default")
def _addmm(c: Call, x: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if x.rank <= 1 and a.rank == 2:
        a = _divided(c, a)
    result = _product(c, a, b)
    result = result if alpha == 1 else c.apply("mul", result, alpha)
    if beta != 0:  # otherwise x is ignored, even NaN
        result = c.apply("add", result, x if beta == 1 else c.apply("mul", x, beta))
    return result if result.shape == c.form.shape else result.reshape(c.form.shape)


def _windows(
    c: Call,
    x: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> tuple[dict[str, Any], bool, tuple[int, ...]]:
    """Returns the attributes of a convolution, whether it is transposed, and its output_padding."""
    count = x.rank - 2
    how: dict[str, Any] = {
        key: pair(v, count) for key, v in (("stride", stride), ("padding", padding), ("dilation", dilation))
    }
    tf32 = c.precision.convolution and x.dtype == float32
    how |= {"groups": groups, "compute_dtype": "tf32" if tf32 else None}
    return how, transposed, pair(output_padding, count)


@aten("convolution.default")
def _convolution(c: Call, x: Tensor, w: Tensor, bias: Tensor | None, *given: Any) -> Tensor:
    if x.rank < 3:
        raise NotSupportedError(f"a convolution of rank {x.rank}")
    how, transposed, more = _windows(c, x, *given)
    if transposed:
        least = smallest_sizes(x.shape[2:], w.shape[2:], how["stride"], how["padding"], how["dilation"])
        result = c.graph.conv_dgrad(x, w, size=[a + b for a, b in zip(least, more)], **how)
    else:
        result = c.graph.conv_fprop(x, w, **how)
    if bias is not None:
        result = c.graph.add(result, bias.reshape((-1, *(1 for _ in x.shape[2:]))))
    return c.cast(result)


@aten("convolution_backward.default")
def _convolution_backward(
    c: Call, loss: Tensor, x: Tensor, w: Tensor, bias_sizes: Sequence[int] | None, *given: Any
) -> tuple[Tensor | None, ...]:
    """Returns the gradients by x, w and the bias; None for those that the mask does not ask for."""
    *windows, output_mask = given
    how, transposed, _ = _windows(c, x, *windows)
    dx = dw = db = None
    if transposed:  # the forward op is itself the gradient of a convolution
        dx = c.graph.conv_fprop(loss, w, **how) if output_mask[0] else None
        dw = c.graph.conv_wgrad(loss, x, taps=w.shape[2:], **how) if output_mask[1] else None
    else:
        dx = c.graph.conv_dgrad(loss, w, size=x.shape[2:], **how) if output_mask[0] else None
        dw = c.graph.conv_wgrad(x, loss, taps=w.shape[2:], **how) if output_mask[1] else None
    if output_mask[2]:
        db = c.graph.reduction(loss, mode="add", axes=(0, *range(2, loss.rank)), keepdims=False)
    return dx, dw, db
