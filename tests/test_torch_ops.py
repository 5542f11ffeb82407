"""Every ATen operator of the table, on the cpu engine, against torch: all of them in a few compiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_operators import GROUPS, POINTWISE, Case, random  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.frontends.torch import build  # noqa: E402
from fusegraph.frontends.torch.table import FREE, HANDLERS  # noqa: E402
from fusegraph.layout import same_strides  # noqa: E402


def _difference(got: Any, wanted: Any, name: str) -> str:
    """What differs but for rounding: dtype, shape, strides or elements; "" if nothing does."""
    if (got.dtype, got.shape) != (wanted.dtype, wanted.shape):
        return f"{name}: {got.dtype} {got.shape}, not {wanted.dtype} {wanted.shape}"
    if not same_strides(tuple(wanted.shape), got.stride(), wanted.stride()) and got.numel() > 1:
        return f"{name}: strides {got.stride()}, not {wanted.stride()}"
    try:
        torch.testing.assert_close(got, wanted, rtol=3e-5, atol=3e-6, equal_nan=True)
    except AssertionError as error:
        return f"{name}: {error}"
    return ""


def _check(cases: Sequence[Case], *inputs: Any, left: Sequence[str] = ()) -> None:
    """All cases as one function, compiled and eager; torch computes only operators that are ``left`` to it."""

    def every(*values: Any) -> list[Any]:
        return [function(*values) for _, function in cases]

    torch._dynamo.reset()
    fusegraph.torch.report(clear=True)
    with torch.no_grad():
        got = torch.compile(every, backend="fusegraph")(*inputs)
        wanted = every(*inputs)
    wrong = [
        text
        for (name, _), a, b in zip(cases, got, wanted)
        for x, y in (zip(a, b) if isinstance(b, tuple | list) else [(a, b)])
        if y is not None and (text := _difference(x, y, name))
    ]
    assert not wrong, "\n".join(wrong)
    seen = {(op, why) for report in fusegraph.torch.report() for _, op, why in report.left}
    assert {op for op, _ in seen} == set(left), seen


@pytest.fixture
def handled(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The operators whose handlers have been called."""
    names: set[str] = set()
    original = build._Builder._applied

    def recording(self: Any, node: Any, table: Any) -> Any:
        names.add(str(node.target))
        return original(self, node, table)

    monkeypatch.setattr(build._Builder, "_applied", recording)
    return names


#: What torch's own decompositions, or other releases of it, leave for the table, and what only CUDA has.
UNSEEN = {
    *(f"aten.upsample_nearest{n}d.{kind}" for n in (1, 2, 3) for kind in ("default", "vec")),
    *(f"aten.upsample_{kind}.vec" for kind in ("linear1d", "bilinear2d", "trilinear3d")),
    *(f"aten.__{side}shift__.{kind}" for side in "lr" for kind in ("Tensor", "Scalar")),
    *(f"aten.bitwise_{side}_shift.{kind}" for side in ("left", "right") for kind in ("Tensor", "Tensor_Scalar")),
    *(f"aten.bitwise_{op}.Scalar" for op in ("and", "or", "xor")),
    "aten.div.Scalar_mode",
    "aten.scaled_dot_product_attention.default",
    "aten._scaled_dot_product_flash_attention.default",
    "aten._scaled_dot_product_efficient_attention.default",
    "aten._scaled_dot_product_cudnn_attention.default",
    "aten._scaled_dot_product_flash_attention_backward.default",
    "aten._scaled_dot_product_efficient_attention_backward.default",
    "aten._scaled_dot_product_cudnn_attention_backward.default",
    "aten._unsafe_view.default",
    "aten.avg_pool1d.default",
    "aten.lift_fresh_copy.default",
    "prims.convert_element_type.default",
    "aten.arange.start",
    "aten.diagonal_copy.default",
    *(f"aten.{name}.default" for name in ("empty_like", "empty_permuted", "empty_strided", "new_empty")),
    "aten.new_empty_strided.default",
    "aten.empty.memory_format",
    "aten.add.Scalar",
    "aten.sub.Scalar",
    "aten.rsub.Scalar",
    "aten.rsub.Tensor",
    "aten.mul.Scalar",
    "aten.div.Scalar",
    "aten.arange.default",
    "aten.reshape.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.transpose.int",
    "aten.t.default",
    "aten.detach.default",
    "aten.split.Tensor",
    "aten.unbind.int",
    "aten.zeros.default",
    "aten.zeros_like.default",
    "aten.ones.default",
    "aten.ones_like.default",
    "aten.new_full.default",
    "aten.new_zeros.default",
    "aten.new_ones.default",
}


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_operators(group: str, handled: set[str]) -> None:
    cases, inputs = GROUPS[group]
    _check(cases, *inputs)
    assert sorted(_names(group) - handled - UNSEEN) == []


@pytest.mark.slow
def test_pointwise_operators(handled: set[str]) -> None:
    x, y = random(5, 7), random(5, 7, seed=1)
    x[0, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    _check(POINTWISE, x, y, y.abs() + 0.1, torch.arange(35).reshape(5, 7) % 5 - 2, y > 0.3)
    assert sorted(_names("pointwise") - handled - UNSEEN) == []


def _names(module: str) -> set[str]:
    """The operators that a module has put into the table."""
    every = {**HANDLERS, **FREE}
    return {name for name, handler in every.items() if handler.__module__.endswith(f".{module}")}
