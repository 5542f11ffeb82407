"""What the renderers of direct convolution's forms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from codegen.buffers import Edge
from codegen.direct_convolution.schedule import DirectConvolutionSchedule, threads_of
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Epilogue, Run, operand_value
from codegen.iteration import coordinate, linear, unsigned
from codegen.kernel import Kernel, locate, parameter
from codegen.sizes import most
from codegen.spec import KernelSource

#: What lies along an axis, and the C variables that count its taps and the inputs under a patch.
_AXES = {1: ("row", "kr", "iy"), 2: ("column", "ks", "ix")}


class Renderer(ABC):
    """What all forms share: the heading, where a block is, which taps meet which rows."""

    barriers = True

    def __init__(self, spec: DirectConvolutionSpec, schedule: DirectConvolutionSchedule) -> None:
        self.spec, self.t, self.w = spec, schedule.itype, Kernel(spec.name)
        #: C type of small numbers that strides multiply: int, unless offsets need more
        self.small = "int" if self.t == "int32" else self.t
        self.threads, self.patch_rows = threads_of(spec, schedule), schedule.rows
        self.names = self.w.names
        self.x = self.names.unique(spec.x.name)
        self.weights = self.names.unique(spec.w.name)
        space = (spec.images, spec.groups, spec.filters, *spec.out)
        self.epilogue = Epilogue(self.w, spec.program, self.names, space, spec.accumulate, spec.result)
        #: where the block is: the C variable of each coordinate, "0" where there is only one
        self.at: dict[str, str] = {}
        #: and what the block takes of each
        self.edges: dict[str, Edge] = {}

    def render(self) -> KernelSource:
        w, spec = self.w, self.spec
        taps = " x ".join(str(n) for n in spec.taps if n > 1 or prod(spec.taps) == 1)
        details = [f"direct convolution, {taps} taps; {self.describe()}"]
        w.parameters += [parameter(spec.x, self.x), parameter(spec.w, self.weights)]
        w.parameters += self.epilogue.pointers.parameters()
        return w.source(
            spec.program,
            details,
            blocks=self.body(),
            threads=self.threads,
            barriers=self.barriers,
            blocks_per_sm=self.blocks_per_sm(),
        )

    def blocks_per_sm(self) -> int | None:
        """Returns how many blocks a multiprocessor should hold; None leaves this to ptxas."""
        return None

    @abstractmethod
    def describe(self) -> str:
        """Returns what a block and a thread compute, for the heading."""

    @abstractmethod
    def body(self) -> int:
        """Writes the kernel's body; returns the number of blocks."""

    # ---- where blocks and threads are

    def locate(self, rows: int, cols: int, **planes: Edge) -> int:
        """Writes which outputs the block computes, of so many rows and columns; returns the number of blocks."""
        edges = {"depth": 1, "row0": rows, "col0": cols}
        self.edges = planes | {name: Edge(n, size) for n, (name, size) in zip(self.spec.out, edges.items())}
        self.at = {name: name if most(edge.tiles) > 1 else "0" for name, edge in self.edges.items()}
        return locate(self.w, self.t, [(name, edge.tiles, edge.size) for name, edge in self.edges.items()])

    def locate_channels(self, rows: int, cols: int, channels: int) -> int:
        """Writes the same for blocks of so many neighbouring channels of an image."""
        return self.locate(rows, cols, image=Edge(self.spec.images, 1), channel0=Edge(self.spec.groups, channels))

    def channel(self, lanes: int, across: int, vector: int, cols: int = 1) -> tuple[str, str, str, str]:
        """Writes which channels and columns a thread takes, neighbouring threads taking neighbouring channels.

        Returns their C variables: both within the block, and both of the image.
        """
        shape = (across, lanes)
        places = [coordinate("threadIdx.x", shape, d) if shape[d] > 1 else "0" for d in (1, 0)]
        lane = self.constant("lane", linear([(places[0], vector)]), self.small)
        tx = self.constant("tx", linear([(places[1], cols)]), self.small)
        group = self.constant("group", linear([(self.at["channel0"], 1), (lane, 1)]))
        return lane, tx, group, self.constant("col", linear([(self.at["col0"], 1), (tx, 1)]))

    def constant(self, name: str, value: str, itype: str = "") -> str:
        """Writes a named constant, unless the value is a number or a name already; returns the C expression to use."""
        if value.isidentifier() or value.isdigit():
            return value
        self.w.line(f"const {itype or self.t} {name} = {value};")
        return name

    def places(
        self, position: str, sizes: Sequence[int], names: str, scales: Sequence[int] = (1,) * 4, itype: str = ""
    ) -> list[str]:
        """Writes the coordinates of a row-major position as constants, scaled; returns their C expressions."""
        found = []
        for d, (name, size, scale) in enumerate(zip(names.split(), sizes, scales)):
            text = coordinate(position, sizes, d) + (f" * {scale}" if scale > 1 else "")
            found.append(self.constant(name, text, itype) if size > 1 else "0")
        return found

    def loop(self, name: str, count: int, unroll: bool = True) -> str:
        """Opens a loop; returns its variable, or "0" without a loop if it runs once."""
        return self.w.each(name, count, self.small, unroll=unroll)

    # ---- taps

    def weight(self, group: str, filter: str, channel: str, taps: Sequence[str]) -> str:
        """Returns the C expression of the weight that a tap multiplies."""
        taps = [self._reversed(axis, tap) for axis, tap in enumerate(taps)]
        place = linear([*zip((group, filter, channel, *taps), self.spec.w.strides)])
        return self.weight_value(f"{self.weights}[{place}]")

    def weight_value(self, text: str) -> str:
        """Returns the C expression of a weight, given as it is stored, as it is multiplied."""
        return operand_value(self.spec.w, text, self.spec.accumulate)

    def _reversed(self, axis: int, tap: str) -> str:
        """Returns the filter coordinate that a tap multiplies."""
        return f"({self.spec.taps[axis] - 1} - {tap})" if self.spec.flip and self.spec.taps[axis] > 1 else tap

    def value(self, text: str) -> str:
        """Returns the C expression of an element of the image as it is multiplied."""
        return operand_value(self.spec.x, text, self.spec.accumulate)

    def under(self, axis: int, outputs: int, unroll: bool = True) -> tuple[str, str]:
        """Opens the loop over the tile's rows (or columns) under a patch; returns one, and its tap if it has one."""
        _, tap, name = _AXES[axis]
        if outputs > 1:
            return self.loop(name, self.spec.under(axis, outputs), unroll), ""
        tap = self.loop(tap, self.spec.taps[axis], unroll)
        return linear([(tap, self.spec.dilation[axis])]), tap

    def tap(self, axis: int, at: str, out: str) -> str:
        """Writes which row (or column) of taps meets row ``at`` for output row ``out``; skips it if none does."""
        w, spec = self.w, self.spec
        dilation, taps, (what, name, _) = spec.dilation[axis], spec.taps[axis], _AXES[axis]
        below = linear([(at, 1), (out, -spec.stride[axis])])
        conditions = [f"{below} >= 0", f"{below} < {(taps - 1) * dilation + 1}"] if taps > 1 else [f"{below} == 0"]
        if dilation > 1 and taps > 1:
            conditions.append(f"({below}) % {dilation} == 0")
        w.line(f"if (!({' && '.join(conditions)})) continue;  // no tap of output {what} {out} meets this {what}")
        if taps == 1:
            return "0"
        w.line(f"const {self.small} {name} = {below if dilation == 1 else f'({below}) / {dilation}'};")
        return name

    # ---- the image

    def source(self, axis: int, out: str, local: str) -> str:
        """Returns the input coordinate of a tile position along a spatial axis."""
        spec = self.spec
        return linear([(out, spec.stride[axis]), (local, 1)], -spec.before[axis])

    def exists(self, axis: int, position: str) -> str:
        """Returns the C condition that an input coordinate lies in the image, not in the padding."""
        return f"{unsigned(self.t)}({position}) < {self.spec.sizes[axis]}"

    def source_depth(self, iz: str) -> tuple[str, str]:
        """Writes the input plane that a tap plane reads; returns its C variable and the condition that it exists."""
        spec = self.spec
        if spec.flat:
            return "0", ""
        place = linear([(self.at["depth"], spec.stride[0]), (iz, spec.dilation[0])], -spec.before[0])
        self.w.line(f"const {self.t} in_d = {place};")
        return "in_d", self.exists(0, "in_d")

    # ---- results

    def patch_row(self, row: str, p: str) -> str:
        """Writes what leaves the loop over a patch's rows behind the last one; returns row ``p``."""
        down = linear([(row, 1), (p, 1)])
        self.w.leave(Edge(self.spec.out[1], self.patch_rows).outside(down), how="break")
        return down

    def columns(self, col: str, count: int) -> Run:
        """Returns a patch's columns as results that are handled together."""
        edge = Edge(self.spec.out[2], count)
        return Run(count, 5, "q", (lambda q: edge.outside(linear([(col, 1), (q, 1)]))) if edge.ragged else None)
