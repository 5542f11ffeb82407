"""Every ATen operator of the table, on the cpu engine, against torch: all of them in a few compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch", reason="torch is not installed")

from torch_operators import GROUPS, POINTWISE, Case, random  # noqa: E402

import fusegraph.torch  # noqa: E402
from fusegraph.frontends.torch import build  # noqa: E402
from fusegraph.frontends.torch.table import FREE, HANDLERS  # noqa: E402
from fusegraph.layout import same_strides  # noqa: E402


def _difference(got: Any, wanted: Any, name: str) -> str:
    """Returns what differs beyond rounding: dtype, shape, strides or elements; "" if nothing does."""
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
        got = torch.compile(every, backend="fusegraph", fullgraph=True)(*inputs)
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
    "aten.scalar_tensor.default",
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


#: Operators along a dimension that torch itself refuses for a tensor without any.
NO_SCALARS = {
    "aten.cat.default",
    "aten.select_scatter.default",
    "aten.slice_scatter.default",
}
_WAYS = {"scatter_reduce": "amax", "index_reduce": "prod", "scatter": "multiply"}


def _call_on_scalars(operator: Any, dim: int) -> Callable[..., Any]:
    """Returns a call of an operator with tensors of rank 0, by number, along a dimension."""
    numbers = {"self": 0, "grad_output": 0, "output": 1, "src": 1, "source": 1, "index": 2}
    values = {
        "dim": dim, "dims": [dim], "half_to_float": False, "input_dtype": torch.float32, "ord": 1, "value": 2.5,
        "k": 1, "stable": True,
        "reduce": _WAYS.get(operator._schema.name.removeprefix("aten::")),
    }  # fmt: skip
    args: list[tuple[int | None, Any]] = []
    kwargs = {}
    for argument in operator._schema.arguments:
        of_tensor = argument.name in numbers or isinstance(argument.type, torch.TensorType)
        value = [dim] if argument.name == "dim" and "List" in str(argument.type) else values.get(argument.name)
        if not argument.kwarg_only and (of_tensor or value is not None):
            args.append((numbers.get(argument.name, 1), None) if of_tensor else (None, value))
        elif value is not None:
            kwargs[argument.name] = value
    return lambda *tensors: operator(*[value if n is None else tensors[n] for n, value in args], **kwargs)


@pytest.mark.slow
def test_tensors_of_no_dimension_along_one() -> None:
    """Every operator of the table that takes a dim works on tensors of rank 0, wherever torch does."""
    tensors = torch.tensor(0.75), torch.tensor(1.5), torch.tensor(0)
    cases, refused = [], set()
    for name in sorted(HANDLERS):
        operator: Any = torch.ops
        for part in name.split("."):
            operator = getattr(operator, part, None)
        if operator is None or not {a.name for a in operator._schema.arguments} & {"dim", "dims"}:
            continue
        for dim in (0, -1):
            call = _call_on_scalars(operator, dim)
            try:
                call(*tensors)
            except (RuntimeError, IndexError, TypeError):
                refused.add(name)
                continue
            cases.append((f"{name} {dim}", call))
    assert refused == NO_SCALARS
    assert len(cases) > 70
    _check(cases, *tensors)


def _names(module: str) -> set[str]:
    """Returns the operators that a module has put into the table."""
    every = {**HANDLERS, **FREE}
    return {name for name, handler in every.items() if handler.__module__.endswith(f".{module}")}


@pytest.mark.parametrize("name", ["int16", *quick("uint64", "uint16", "uint32")])
def test_integers_of_other_widths(name: str) -> None:
    """Casts to and from them, and what torch computes in them."""
    dtype = getattr(torch, name)
    limits = torch.iinfo(dtype)
    numbers = [limits.min, limits.max, 0, 1, limits.max - 1, 7, 100, limits.max // 3]
    x = torch.tensor(numbers, dtype=dtype)
    floats = torch.tensor([1.9, -1.9, -5.0, 70000.0, -70000.0, 300.0, 40000.0, 0.0])

    def function(x: Any, floats: Any) -> list[Any]:
        made = [x.to(d) for d in (torch.float32, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool)]
        made += [floats.to(dtype), x.to(torch.int64).to(dtype), x.reshape(2, 4).t().contiguous(), torch.cat([x, x])]
        if name == "int16":
            made += [x + x, x * 3, -x, x // 3, x % 7, x & 7, x >> 2, x.sum(), x.max(), x > 5, x.clamp(3, 100), x / 3]
        return made

    torch._dynamo.reset()
    for found, wanted in zip(torch.compile(function, backend="fusegraph")(x, floats), function(x, floats), strict=True):
        assert found.dtype == wanted.dtype
        bits = [t.reshape(-1).contiguous().view(torch.uint8) for t in (found, wanted)]
        assert torch.equal(*bits)
