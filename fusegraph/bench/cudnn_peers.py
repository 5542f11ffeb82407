"""Workloads for which cuDNN's frontend takes other tensors than the graph, by the name `Workload.torch`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from fusegraph.bench.workload import Workload
from fusegraph.engines.cudnn import device_handle
from fusegraph.errors import NotSupportedError
from fusegraph.lowering.cudnn import frontend
from fusegraph.runtime import driver
from fusegraph.runtime.arrays import DeviceArray, to_device
from fusegraph.runtime.timing import ColdTimer

#: A function that runs the workload, and the name of the plan that it runs.
Made = tuple[Callable[[], object], str]


def functions() -> dict[str, Callable[..., Made]]:
    return {"sdpa_packed": sdpa_packed}


def sdpa_packed(workload: Workload, arrays: Sequence[DeviceArray], timer: ColdTimer) -> Made:
    """Returns causal attention over a packed batch by the fastest of cuDNN's plans.

    The workload's queries, keys, values and results have shape (1, heads, tokens, d) in bfloat16; its offsets, of shape
    (sequences + 1,), are in tokens.  cuDNN's tensors are ragged (sequences, heads, longest, d), with offsets in
    elements, and sequence lengths that exclude the padding.  Raises cuDNN's own error if it refuses the graph,
    NotSupportedError if no plan runs.
    """
    cudnn, device = frontend(), arrays[0].device.index
    kinds, handle = cudnn.data_type, device_handle(device).value
    offsets = np.array(workload.inputs[3].values, np.int32)
    count, longest = offsets.size - 1, int(np.diff(offsets).max())
    graph = cudnn.pygraph(
        io_data_type=kinds.BFLOAT16, intermediate_data_type=kinds.FLOAT, compute_data_type=kinds.FLOAT, handle=handle
    )
    out = DeviceArray.empty(arrays[0].shape, arrays[0].dtype, strides=arrays[0].strides, device=device)
    held: list[DeviceArray] = []

    def known(tensor: Any, array: DeviceArray) -> Any:
        held.append(array)
        return tensor.set_uid(len(held))

    def numbers(values: Any) -> Any:
        column = graph.tensor(dim=[values.size, 1, 1, 1], stride=[1, 1, 1, 1], data_type=kinds.INT32)
        return known(column, to_device(values, device))

    def ragged(tensor: Any, array: DeviceArray) -> Any:
        _, heads, _, size = array.shape
        tensor.set_dim([count, heads, longest, size]).set_stride([longest * heads * size, size, heads * size, 1])
        return known(tensor.set_ragged_offset(numbers(offsets * (heads * size))), array)

    q, k, v = (ragged(graph.tensor(dim=[1] * 4, stride=[1] * 4, data_type=kinds.BFLOAT16), a) for a in arrays[:3])
    lengths = numbers(np.diff(offsets))
    told = {"use_padding_mask": True, "seq_len_q": lengths, "seq_len_kv": lengths, "use_causal_mask": True}
    o, _ = graph.sdpa(q=q, k=k, v=v, generate_stats=False, attn_scale=arrays[0].shape[3] ** -0.5, **told)
    ragged(o.set_output(True).set_data_type(kinds.BFLOAT16), out)
    with driver.using(device):
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
    cudnn.set_stream(handle, 0)  # the timer's stream
    pack = {n + 1: array.pointer for n, array in enumerate(held)}

    def plan(index: int) -> Callable[[], DeviceArray]:
        graph.build_plan_at_index(index)
        workspace = driver.allocate(max(int(graph.get_workspace_size_plan_at_index(index)), 1), device)

        def run() -> DeviceArray:
            graph.execute_plan_at_index(pack, workspace.pointer, index, handle=handle)
            return held[-1]  # the results

        return run

    times: dict[int, float] = {}
    reasons = ""
    for index in range(graph.get_execution_plan_count()):
        try:
            times[index] = timer.median(plan(index), repeats=7)
        except Exception as error:  # some do not build
            reasons += f"; {error}"
    if not times:
        raise NotSupportedError(f"none of cuDNN's plans runs{reasons}")
    best = min(times, key=times.__getitem__)
    return plan(best), str(graph.get_plan_name_at_index(best))
