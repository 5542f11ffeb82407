"""Simulates a GPU for torch: tensors that claim to be on it, in host memory.

`install` lets code written for CUDA run unchanged with a torch that has none.  A tensor made for a device "cuda" is a
`CudaTensor`, as are results of functions that take one; `.cpu()` takes it back.  Streams, events and generators are
there and do nothing that can be seen: all work is done when its call returns.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
import torch._dynamo  # looks at torch's functions when it is imported: before some of them are replaced
from torch._library.custom_ops import OPDEFS
from torch.overrides import TorchFunctionMode

_TO = {torch.Tensor.to, torch.nn.Module.to}
_CONVOLUTIONS = {torch.conv2d, torch.conv3d, torch.nn.functional.conv2d, torch.nn.functional.conv3d}
_PRODUCTS = {*_CONVOLUTIONS, torch.matmul, torch.bmm, torch.einsum, torch.nn.functional.linear, torch.Tensor.matmul}
_COUNTS = {torch.count_nonzero, torch.Tensor.count_nonzero}
_NORMS = {torch.nn.functional.layer_norm, torch.nn.functional.batch_norm, torch.nn.functional.instance_norm}
_CUDA = torch.device("cuda", 0)
_FUNCTIONAL = torch._C.DisableTorchFunctionSubclass


class CudaTensor(torch.Tensor):
    """A host tensor that claims to be on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return _CUDA

    @property
    def is_cuda(self) -> bool:  # type: ignore[override]
        return True

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        with _FUNCTIONAL():
            found = torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]
        return None if found is None else on_gpu(found)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        with _FUNCTIONAL():
            torch.Tensor.grad.__set__(self, None if value is None else on_host(value))  # type: ignore[attr-defined]

    def get_device(self) -> int:
        return 0


def on_gpu(found: Any) -> Any:
    """Returns a tensor (or several) that claims to be on a GPU.

    It shares memory with the original, and is a leaf if that is one.
    """
    if isinstance(found, (list, tuple)):
        return type(found)(map(on_gpu, found))
    if not isinstance(found, torch.Tensor) or isinstance(found, CudaTensor):
        return found
    if found.is_leaf:
        return found.detach().as_subclass(CudaTensor).requires_grad_(found.requires_grad)
    return found.as_subclass(CudaTensor)


def on_host(tensor: Any) -> Any:
    """Returns the host tensor behind a `CudaTensor`; anything else is returned as it is."""
    return tensor.detach().as_subclass(torch.Tensor) if isinstance(tensor, CudaTensor) else tensor


def _place(device: Any) -> str | None:
    """Returns "cuda" or "cpu" if a value names such a device."""
    if isinstance(device, torch.Tensor):
        return "cuda" if isinstance(device, CudaTensor) else "cpu"
    text = str(device) if isinstance(device, (str, torch.device)) else ""
    found = re.fullmatch(r"(cuda|cpu)(:\d+)?", text)
    return found[1] if found else None


class _Devices(TorchFunctionMode):
    """Creates on the host what is requested on a GPU, and marks it; reports the number of multiplications before they
    are done.
    """

    def __init__(self, before_products: Callable[[int], None]) -> None:
        super().__init__()
        self.before_products = before_products

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return on_gpu(args[0])
        if func is torch.Tensor.cpu:
            return _copied_back(args[0])
        if (written := _written_in_python(func)) is not None:
            with self:  # of the calls in it, too
                return written(*args, **kwargs)
        if func in _PRODUCTS and isinstance(args[0], CudaTensor):
            self.before_products(_multiplications(func, args))
        if Autocast.dtype is not None and func in _PRODUCTS:
            args = [a.to(Autocast.dtype) if isinstance(a, CudaTensor) and a.is_floating_point() else a for a in args]
        if func in _NORMS and isinstance(args[0], CudaTensor):
            return _norm(func, args, kwargs)
        if func in _COUNTS and isinstance(args[0], CudaTensor) and args[0].dtype.is_floating_point:
            return func(args[0].float(), *args[1:], **kwargs)  # the host's does not count 8-bit floats
        if func in _CONVOLUTIONS and isinstance(args[0], CudaTensor):
            if not args[0].is_floating_point():
                raise RuntimeError("torch has no convolution of integers on a GPU")
            return _channels_last(func(*args, **kwargs), args[:2])
        place = _place(kwargs.get("device"))
        if place is not None:
            kwargs["device"] = "cpu"
        if func in _TO:
            named = next((k for k, a in enumerate(args[1:], 1) if _place(a) is not None), None)
            if named is not None:
                place, given = _place(args[named]), args[named]
                dtype = (given.dtype,) if isinstance(given, torch.Tensor) else ()
                args = (*args[:named], *dtype, *args[named + 1 :])
            if len(args) == 1 and not kwargs:
                kwargs["device"] = "cpu"
            if place == "cpu":
                return func(_copied_back(args[0]), *args[1:], **kwargs)
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return on_gpu(func(*args, **kwargs)) if place == "cuda" else func(*args, **kwargs)


def _written_in_python(func: Any) -> Callable[..., Any] | None:
    """Returns the Python function that implements an operator of a library written in Python; None for others."""
    name = getattr(func, "_qualified_op_name", None) or getattr(func, "_name", "")
    found = OPDEFS.get(str(name).removesuffix(".default"))
    return None if found is None else found._init_fn


def _multiplications(func: Any, factors: Any) -> int:
    """Returns an upper bound on the multiplications of a convolution or a matrix product; 0 for einsum."""
    first, second = factors[:2]
    if func in _CONVOLUTIONS:
        return int(first.numel() * second.numel() // max(second.shape[1], 1))
    return 0 if func is torch.einsum else int(first.numel() * second.shape[-1])


def _norm(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """Computes a norm, or its gradients, as a GPU does: 16-bit numbers are summed in 32 bits, unlike in torch's host
    kernels; weights may have any shape.
    """
    flat = func is not torch.nn.functional.layer_norm

    def given(value: Any, x: bool = False) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
        return value if x or not flat else value.flatten()

    weights = (given(value) for value in args[1:])
    found: torch.Tensor = func(given(args[0], True), *weights, **{key: given(kwargs[key]) for key in kwargs})
    return found.to(args[0].dtype)


def _channels_last(result: torch.Tensor, factors: Any) -> torch.Tensor:
    """Returns a convolution's result in the memory format of a GPU: channels last if an operand has it."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(result.dim())
    if layout is None or not any(t.is_contiguous(memory_format=layout) for t in factors):
        return result
    return result.to(memory_format=layout)


def _copied_back(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, CudaTensor):
        return tensor
    with _FUNCTIONAL():
        return tensor.clone().as_subclass(torch.Tensor)


class Autocast(contextlib.ContextDecorator):
    """torch.autocast of a GPU: products are computed in its dtype."""

    dtype: torch.dtype | None = None

    def __init__(self, _: str = "cuda", dtype: torch.dtype = torch.float16, enabled: bool = True, **__: Any) -> None:
        self._dtype = dtype if enabled else None
        self._before: list[torch.dtype | None] = []

    def __enter__(self) -> None:
        self._before.append(Autocast.dtype)
        Autocast.dtype = self._dtype

    def __exit__(self, *_: Any) -> None:
        Autocast.dtype = self._before.pop()


# ---- streams and the like


class Stream:
    """A stream that has always finished."""

    cuda_stream, device, device_index = 0, _CUDA, 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def wait_stream(self, _: Any) -> None: ...

    def wait_event(self, _: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or Event()

    def query(self) -> bool:
        return True


class Event:
    """An event that has completed, a millisecond after any other."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: Any) -> float:
        return 1.0


class _Generators(type):
    made = torch.Generator

    def __call__(cls, device: Any = "cpu") -> torch.Generator:
        return cls.made("cpu")

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, cls.made)


class Generator(metaclass=_Generators):
    """Creates host generators, whatever device is given."""


class Profile:
    """torch.profiler.profile that records nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __enter__(self) -> Profile:
        return self

    def __exit__(self, *_: Any) -> None: ...

    def key_averages(self, *_: Any, **__: Any) -> Any:
        return torch.autograd.profiler_util.EventList([])

    events = key_averages


@contextlib.contextmanager
def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def install(capability: Callable[[], tuple[int, int]], before_products: Callable[[int], None]) -> None:
    """Makes torch behave as if it had one GPU of a compute capability, for the rest of the process; before_products is
    called with the number of multiplications before torch does them, and may raise."""

    def properties(*_: Any) -> Any:
        major, minor = capability()
        return SimpleNamespace(
            name="cpu engine", major=major, minor=minor, multi_processor_count=132, total_memory=1 << 36, warp_size=32
        )

    def ignore(*_: Any, **__: Any) -> None: ...

    torch.autocast = torch.amp.autocast = Autocast  # type: ignore[assignment,misc]
    torch.profiler.profile = Profile  # type: ignore[assignment,misc]
    torch.Generator = Generator  # type: ignore[assignment,misc]
    seed = torch.get_rng_state
    doubles: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "init": ignore,
        "_lazy_init": ignore,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": ignore,
        "get_device_capability": lambda *_: capability(),
        "get_device_properties": properties,
        "get_device_name": lambda *_: properties().name,
        "synchronize": ignore,
        "empty_cache": ignore,
        "reset_peak_memory_stats": ignore,
        "mem_get_info": lambda *_: (1 << 36, 1 << 36),
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "get_rng_state": lambda *_: seed(),
        "set_rng_state": ignore,
        "manual_seed": torch.manual_seed,
        "manual_seed_all": ignore,
        "Stream": Stream,
        "Event": Event,
        "current_stream": Stream,
        "default_stream": Stream,
        "stream": _nothing,
        "device": _nothing,
    }
    for name, double in doubles.items():
        setattr(torch.cuda, name, double)
    for name in ("range_push", "range_pop", "mark"):
        setattr(torch.cuda.nvtx, name, ignore)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _Devices(before_products).__enter__()
