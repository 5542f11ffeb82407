"""The kernels whose schedules are compared: each once, of models of the zoo and of cases of the sweep."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from codegen import KernelSpec
from codegen.spec_data import spec_data, spec_from_data
from codegen.target import Target
from fusegraph.bench.sweep.cases import case
from fusegraph.bench.sweep.measured import operands
from fusegraph.bench.traced import graphs_of
from fusegraph.bench.zoo.models import MODELS, called
from fusegraph.dtypes import BY_NAME, DType
from fusegraph.engines.autotune import fingerprint
from fusegraph.graph import Graph
from fusegraph.lowering.base import Options
from fusegraph.plan import plan


@dataclass(frozen=True)
class Argument:
    """What a kernel reads or writes: an array to be made for it."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType


@dataclass(frozen=True)
class Kernel:
    """A kernel, whatever its schedule.

    ops   the ops that it computes.
    uses  how often each source has it.
    """

    spec: KernelSpec
    family: str
    ops: str
    arguments: tuple[Argument, ...]
    nbytes: int
    uses: dict[str, int] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return fingerprint(self.spec)


@dataclass(frozen=True)
class Source:
    """What kernels are from: a model of the zoo in a dtype, or a case of the sweep by its number."""

    model: str = ""
    dtype: str = ""
    seed: int = 0
    number: int = 0

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype}" if self.model else f"sweep {self.seed} #{self.number}"


def graphs(source: Source, device: str) -> tuple[Graph, ...]:
    """Returns the graphs of a source, as torch traces it for a device.  Raises what torch's tracer raises."""
    if source.model:
        module, names, inputs = MODELS[source.model].loaded(source.dtype, "meta")
        return graphs_of(called(module, names), inputs, source.dtype, device, module)
    drawn = case(source.seed, source.number)
    return graphs_of(drawn.function, operands(drawn, "meta"), drawn.dtype, device)


def kernels_of(source: Source, target: Target, device: str) -> list[Kernel]:
    """Returns the kernels that a source is planned as for a target, each once."""
    found: dict[str, Kernel] = {}
    for graph in graphs(source, device):
        for planned in plan(graph, Options(target=target)).kernels:
            group = planned.group
            spec = group.lowered.spec
            alike = found.setdefault(
                fingerprint(spec),
                Kernel(
                    spec,
                    group.family,
                    " ".join(n.op.name for n in group.nodes),
                    tuple(_argument(t, n < len(group.reads)) for n, t in enumerate(planned.arguments)),
                    sum(t.nbytes for t in planned.arguments),
                ),
            )
            alike.uses[source.name] = alike.uses.get(source.name, 0) + 1
    return list(found.values())


def _argument(tensor: Any, read: bool) -> Argument:
    """Returns the array for a tensor: of integers that are read, which may be indices, one without negative values."""
    dtype = tensor.dtype
    return Argument(tensor.shape, tensor.strides, BY_NAME[f"u{dtype.name}"] if read and dtype.is_int else dtype)


def merged(lists: Iterable[Sequence[Kernel]]) -> list[Kernel]:
    """Returns the kernels of several sources, each once, with the uses of all."""
    found: dict[str, Kernel] = {}
    for kernels in lists:
        for kernel in kernels:
            for source, count in kernel.uses.items():
                found.setdefault(kernel.key, kernel).uses[source] = count
    return list(found.values())


def kernel_data(kernel: Kernel) -> dict[str, Any]:
    """Returns a kernel as data for JSON."""
    arguments = [[a.dtype.name, a.shape, a.strides] for a in kernel.arguments]
    return {
        "key": kernel.key,
        "family": kernel.family,
        "ops": kernel.ops,
        "arguments": arguments,
        "bytes": kernel.nbytes,
        "uses": kernel.uses,
        "spec": spec_data(kernel.spec),
    }


def kernel_from_data(data: dict[str, Any]) -> Kernel:
    """Returns the kernel of which `kernel_data` made this data."""
    arguments = tuple(
        Argument(tuple(shape), tuple(strides), BY_NAME[dtype]) for dtype, shape, strides in data["arguments"]
    )
    return Kernel(spec_from_data(data["spec"]), data["family"], data["ops"], arguments, data["bytes"], data["uses"])
