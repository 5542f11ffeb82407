"""The operators of torch's library quantized_decomposed, in which quantised programs are exported, as plain ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def rules() -> dict[Any, Callable[..., Any]]:
    """Returns how each of the library's operators is computed; none if the program has not loaded the library."""
    library = torch.ops.quantized_decomposed
    found: dict[Any, Callable[..., Any]] = {}
    for name, rule in _RULES.items():
        packet = getattr(library, name, None)
        found |= {getattr(packet, overload): rule for overload in (packet.overloads() if packet is not None else ())}
    return found


def _along(numbers: Any, x: Any, axis: int) -> Any:
    """Returns numbers for the positions along an axis, as they broadcast."""
    return numbers.reshape([-1 if d == axis % x.dim() else 1 for d in range(x.dim())])


def _quantized(x: Any, scale: Any, zero: Any, least: Any, most: Any, dtype: Any) -> Any:
    return torch.clamp(torch.round(x * (1.0 / scale)) + zero, least, most).to(dtype)


def _quantize_along(x: Any, scales: Any, zeros: Any, axis: int, least: int, most: int, dtype: Any) -> Any:
    return _quantized(x, _along(scales, x, axis), _along(zeros, x, axis), least, most, dtype)


def _quantize_groups(x: Any, scales: Any, zeros: Any, least: int, most: int, dtype: Any, size: int = 128) -> Any:
    parts = x.reshape(-1, min(size, x.shape[-1]))
    scaled = parts * (1.0 / scales.reshape(-1, 1)) + zeros.reshape(-1, 1)
    return scaled.round().clamp(least, most).to(dtype).reshape_as(x)


def _quantize_rows(x: Any, scales: Any, zeros: Any, least: int, most: int, dtype: Any) -> Any:
    return (x * (1.0 / scales) + zeros).round().clamp(least, most).to(dtype)


def _dequantize(x: Any, scale: Any, zero: Any, *_: Any, out_dtype: Any = None) -> Any:
    return (x.to(out_dtype or torch.float32) - zero) * scale


def _dequantize_along(x: Any, scales: Any, zeros: Any, axis: int, *_: Any, out_dtype: Any = None) -> Any:
    numbers = x.to(torch.float32)
    if zeros is not None:
        numbers = numbers - _along(zeros, x, axis).to(torch.float32)
    return (numbers * _along(scales, x, axis)).to(out_dtype or torch.float32)


def _dequantize_groups(
    x: Any, scales: Any, zeros: Any, least: int, most: int, dtype: Any, size: int = 128, output_dtype: Any = None
) -> Any:
    numbers = x.to(torch.float32).reshape(-1, min(size, x.shape[-1]))
    if zeros is not None:
        numbers = numbers - zeros.reshape(-1, 1).to(torch.float32)
    return (numbers * scales.reshape(-1, 1)).reshape_as(x).to(output_dtype or torch.float32)


def _dequantize_rows(
    x: Any, scales: Any, zeros: Any, least: int, most: int, dtype: Any, output_dtype: Any = None
) -> Any:
    wide = output_dtype or torch.float32
    return ((x - zeros).to(wide) * scales).to(wide)


_RULES: dict[str, Callable[..., Any]] = {
    "quantize_per_tensor": _quantized,
    "quantize_per_channel": _quantize_along,
    "quantize_per_channel_group": _quantize_groups,
    "quantize_per_token": _quantize_rows,
    "dequantize_per_tensor": _dequantize,
    "dequantize_per_channel": _dequantize_along,
    "dequantize_per_channel_group": _dequantize_groups,
    "dequantize_per_token": _dequantize_rows,
    "convert_element_type": lambda x, dtype: x.to(dtype),
}
