"""The fast path of a call: checks all arrays of one framework at once and reads their addresses.

A `Reader` is made once for the arguments of a graph and a framework.  It returns the addresses of arrays that are
exactly as the graph declares them.  Anything else (other types, other shapes, wrong dtypes) it leaves to the views and
checks of `arguments`, which can say what is wrong.  Nothing is remembered about an array: torch tensors can change
their shape, their memory and even their device in place.

A reader is a generated function with the code for each array written out: a loop over the arrays would take twice as
long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from fusegraph.engines.arguments import Argument
from fusegraph.layout import same_strides
from fusegraph.runtime.arrays import Device, DeviceArray, torch_dtype

#: (arrays, stream that will use them) -> their addresses, or None if one of them is not exactly as declared.
Reader = Callable[[Sequence[Any], int], tuple[int, ...] | None]
_Check = Callable[..., bool]

#: How many guards a reader may make, see `_torch_reader`.
_LESSONS = 16


#: The packages whose arrays are told apart.
_PACKAGES = ("torch", "cupy", "fusegraph", "jax", "jaxlib", "numpy")


def framework_of(kind: type) -> str:
    """Returns the package that defines a type of arrays or one of its bases: "torch", "cupy", "fusegraph", ..."""
    roots = [base.__module__.partition(".")[0] for base in kind.__mro__]
    return next((root for root in roots if root in _PACKAGES), roots[0])


def reader(framework: str, arguments: Sequence[Argument], device: Device) -> Reader:
    """Returns the reader of a framework's arrays for these arguments; for most frameworks one that accepts none."""
    if framework == "torch":
        return _torch_reader(sys.modules["torch"], arguments, device)
    if framework == "cupy" and device.is_cuda:
        return _cupy_reader(sys.modules["cupy"], arguments, device)
    if framework == "fusegraph":
        return _device_array_reader(arguments, device)
    return _recognises_nothing


def address_of(framework: str) -> Callable[[Any], int]:
    """Returns the function that reads the address of an array of torch, CuPy or fusegraph."""
    if framework == "torch":
        address: Callable[[Any], int] = sys.modules["torch"].Tensor.data_ptr
        return address
    return _cupy_address if framework == "cupy" else _device_array_address


def counter(framework: str) -> Callable[[Sequence[Any]], None] | None:
    """Returns what tells a framework that arrays have been written, so that it counts their changes; None if none is.

    torch counts versions, by which autograd and packed copies of parameters notice a change.
    """
    if framework != "torch":
        return None
    torch: Any = sys.modules["torch"]
    increment = torch.autograd.graph.increment_version

    def count(arrays: Sequence[Any]) -> None:
        for x in arrays:
            if isinstance(x, torch.Tensor):
                increment(x)

    return count


def _cupy_address(array: Any) -> int:
    # Outputs of dtypes that CuPy lacks are allocated as DeviceArrays.
    return int(array.pointer if type(array) is DeviceArray else array.data.ptr)


def _device_array_address(array: Any) -> int:
    return int(array.pointer)


def _recognises_nothing(arrays: Sequence[Any], stream: int) -> None:
    return None


def _unrolled(count: int, address: str, test: str = "", **names: Any) -> Reader:
    """Returns a reader of ``count`` arrays: it gives ``address`` of each array, or None unless ``test`` holds for all.

    Both are expressions with {x} for an array; ``test`` also has {i} for its number.  ``names`` are the values of the
    names in them.
    """
    arrays = [f"x{i}" for i in range(count)]
    lines = ["def read(arrays, stream):"]
    if arrays:
        lines.append(f"    {', '.join(arrays)}, = arrays")
    if test and arrays:
        tests = " and ".join(test.format(x=x, i=i) for i, x in enumerate(arrays))
        lines.append(f"    if not ({tests}): return None")
    lines.append(f"    return ({''.join(address.format(x=x) + ', ' for x in arrays)})")
    exec("\n".join(lines), names)
    made: Reader = names["read"]
    return made


# ---- torch


def _torch_reader(torch: Any, arguments: Sequence[Argument], device: Device) -> Reader:
    """Returns a reader that checks tensors by torch's own guards, and attribute by attribute where no guard fits yet.

    A guard is made from tensors that passed and accepts tensors that look the same, in one call.  Guards are stricter
    than necessary, so a reader may make up to ``_LESSONS`` of them.  Tensors that require gradients have a guard of
    their own: they are accepted only while gradients are not recorded.
    """
    kinds = (torch.Tensor, torch.nn.Parameter)
    place = torch.device("cuda", device.index) if device.is_cuda else torch.device("cpu")
    expected = [(a.shape, a.strides, torch_dtype(torch, a.dtype)) for a in arguments]
    guards = _guards(torch)
    lessons = _LESSONS if guards is not None else 0
    is_recording, forward = torch.is_grad_enabled, torch.autograd.forward_ad
    check: _Check = _never
    check_of_leaves: _Check = _never
    # Asking a guard about a nested tensor, which has no strides, ends the process.
    addresses_of = _unrolled(len(expected), "{x}.data_ptr()", "not {x}.is_nested")

    def read(arrays: Sequence[Any], stream: int) -> tuple[int, ...] | None:
        nonlocal check, check_of_leaves, lessons
        if forward._current_level >= 0:
            return None  # one of them may have a tangent
        try:
            addresses = addresses_of(arrays, stream)
            if addresses is None or check(*arrays):
                return addresses
            recording = is_recording()
            if not recording and check_of_leaves(*arrays):
                return addresses
            for x, (shape, strides, dtype) in zip(arrays, expected):
                if type(x) not in kinds or x.dtype is not dtype or x.shape != shape or x.device != place:
                    return None
                if x.is_neg() or not (x.stride() == strides or same_strides(shape, x.stride(), strides)):
                    return None
            leaves = any(x.requires_grad for x in arrays)
        except (AttributeError, RuntimeError):  # not a tensor, sparse, or without memory of its own
            return None
        if leaves and recording:
            return None
        if lessons:
            lessons -= 1
            made = guards(*arrays, dynamic_dims_sizes=None, dynamic_dims_strides=None).check  # type: ignore[misc]
            if leaves:
                check_of_leaves = made
            else:
                check = made
        return addresses

    return read


def _never(*_: object) -> bool:
    return False


@cache
def _guards(torch: Any) -> Callable[..., Any] | None:
    """Returns the class with which torch's compiler guards its code.

    A guard tells whether tensors have the types, dtypes, devices, shapes, strides and flags of those that it was made
    from.  It is not a public interface: None if this torch lacks it, or if it fails a trial on tensors that differ.
    """
    try:
        guards: Callable[..., Any] = torch._C._dynamo.guards.TensorGuards
        x, y = torch.empty((2, 3)), torch.empty((2, 1))
        check = guards(x, y, dynamic_dims_sizes=None, dynamic_dims_strides=None).check
        others = [
            torch.empty((3, 2)),
            torch.empty((6,)),
            torch.empty((3, 2)).t(),
            torch.empty((2, 3), dtype=torch.int32),
            torch.empty((2, 3), device="meta"),
            torch.empty((2, 3), requires_grad=True),
            torch._neg_view(x),
            torch.nn.Parameter(x),
        ]
        if check(x, y) is True and not any(check(other, y) for other in others):
            return guards
    except Exception:  # other releases may fail in any way
        pass
    return None


# ---- CuPy, DeviceArray


def _cupy_reader(cupy: Any, arguments: Sequence[Argument], device: Device) -> Reader:
    expected: dict[str, object] = {}
    for i, argument in enumerate(arguments):
        expected[f"shape{i}"], expected[f"dtype{i}"] = argument.shape, argument.dtype.numpy
        expected[f"strides{i}"] = tuple(s * argument.dtype.itemsize for s in argument.strides)
    return _unrolled(
        len(arguments),
        "{x}.data.ptr",
        "type({x}) is kind and {x}.shape == shape{i} and {x}.strides == strides{i} and {x}.dtype == dtype{i}"
        " and {x}.data.device_id == index",
        kind=cupy.ndarray,
        index=device.index,
        **expected,
    )


def _device_array_reader(arguments: Sequence[Argument], device: Device) -> Reader:
    expected: dict[str, object] = {}
    for i, argument in enumerate(arguments):
        expected[f"shape{i}"], expected[f"dtype{i}"] = argument.shape, argument.dtype
        expected[f"strides{i}"] = argument.strides
    return _unrolled(
        len(arguments),
        "{x}.pointer",
        "type({x}) is kind and {x}.stream == stream and {x}.device is device and {x}.dtype is dtype{i}"
        " and {x}.shape == shape{i} and {x}.strides == strides{i}",
        kind=DeviceArray,
        device=device,
        **expected,
    )
