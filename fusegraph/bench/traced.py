"""Graphs of torch code without its tensors: parameters and inputs have shapes and dtypes, but no memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fusegraph.bench.precision import allow_tf32
from fusegraph.graph import Graph


def graphs_of(
    call: Callable[..., Any], inputs: Sequence[Any], dtype: str, device: str, module: Any = None
) -> tuple[Graph, ...]:
    """Returns the graphs of a function of tensors, whose inputs are given as tensors of torch's device "meta".

    dtype   decides on tf32 (`fusegraph.bench.precision`).
    device  whose kernels torch would choose, such as "cuda:0"; torch need not have any.
    module  the module that the function calls, if any, whose parameters are on "meta", too.

    Raises what torch's tracer raises where it cannot follow the function.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from fusegraph.frontends.torch.exported import import_module

    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def fake(tensor: Any) -> Any:
        return FakeTensor(mode, tensor.detach(), torch.device(device))

    for part in module.modules() if module is not None else ():
        for name, weight in part._parameters.items():
            if weight is not None:
                part._parameters[name] = torch.nn.Parameter(fake(weight), requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = fake(buffer)
    traced = torch.nn.Module()
    traced.held = module
    traced.forward = call
    allow_tf32(dtype)
    with mode:
        return import_module(traced, *map(fake, inputs)).graphs
