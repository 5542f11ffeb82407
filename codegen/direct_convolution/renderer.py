"""What the renderers of direct convolution's forms share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from math import prod

from codegen.direct_convolution.schedule import DirectConvolutionSchedule
from codegen.direct_convolution.spec import DirectConvolutionSpec
from codegen.epilogue import Epilogue
from codegen.iteration import linear, unsigned
from codegen.kernel import headers, heading, locate, parameter, signature, title
from codegen.naming import Names, Writer
from codegen.spec import KernelSource


class Renderer(ABC):
    """What all forms share: the heading, where a block is, which taps meet which rows."""

    headers: tuple[str, ...] = ("memory.cuh",)
    barriers = True
    dynamic_shared_bytes = 0

    def __init__(self, spec: DirectConvolutionSpec, schedule: DirectConvolutionSchedule) -> None:
        self.spec, self.t, self.w = spec, schedule.itype, Writer()
        #: C type of small numbers that strides multiply: int, unless offsets need more
        self.small = "int" if self.t == "int32" else self.t
        self.threads, self.patch_rows = schedule.threads, schedule.rows
        self.names = Names()
        self.x = self.names.unique(spec.x.name)
        self.weights = self.names.unique(spec.w.name)
        space = (spec.images, spec.groups, spec.filters, *spec.out)
        self.epilogue = Epilogue(self.w, spec.program, self.names, space, spec.accumulate, spec.result)
        #: where the block is: the C variable of each coordinate, "0" where there is only one
        self.at: dict[str, str] = {}

    def render(self) -> KernelSource:
        w, spec = self.w, self.spec
        program = spec.program
        taps = " x ".join(str(n) for n in spec.taps if n > 1 or prod(spec.taps) == 1)
        details = [f"direct convolution, {taps} taps; {self.describe()}"]
        heading(w, title(spec.name, program), program, headers(program, *self.headers), details)
        parameters = [parameter(spec.x, self.x), parameter(spec.w, self.weights)]
        signature(w, spec.name, self.threads, parameters + self.epilogue.pointers.parameters(), self.blocks_per_sm())
        blocks = self.body()
        w.close()
        return KernelSource(
            spec.name,
            w.text(),
            grid=(blocks, 1, 1),
            block=(self.threads, 1, 1),
            dynamic_shared_bytes=self.dynamic_shared_bytes,
            uses_barriers=self.barriers,
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

    def locate(self, axes: list[tuple[str, int, int]]) -> int:
        """Writes which outputs the block computes; returns the number of blocks."""
        self.at = {name: name if blocks > 1 else "0" for name, blocks, _ in axes}
        return locate(self.w, self.t, axes)

    def constant(self, name: str, value: str, itype: str | None = None) -> str:
        """Writes a named constant, unless the value is a number or a name already; returns the C expression to use."""
        if value.isidentifier() or value.isdigit():
            return value
        self.w.line(f"const {itype or self.t} {name} = {value};")
        return name

    def loop(self, name: str, count: int, unroll: bool = True) -> str:
        """Opens a loop; returns its variable, or "0" without a loop if it runs once."""
        if count == 1:
            return "0"
        self.w.line("#pragma unroll" if unroll else "#pragma unroll 1")
        self.w.open(f"for ({self.small} {name} = 0; {name} < {count}; ++{name})")
        return name

    def rows(self, unroll: bool) -> tuple[str, str]:
        """Opens the loop over the rows of the tile under a patch; returns (row, row of taps if it is the same for the
        patch).
        """
        spec = self.spec
        if self.patch_rows == 1:
            kr = self.loop("kr", spec.taps[1], unroll)
            return linear([(kr, spec.dilation[1])]), kr
        count = spec.under(1, self.patch_rows)
        return self.loop("iy", count, unroll), ""

    def tap_row(self, iy: str, p: str) -> str:
        """Writes which row of taps meets row ``iy`` of the tile for output row ``p``; skips it if none."""
        return self._tap(1, "kr", iy, p)

    def tap_column(self, ix: str, q: str) -> str:
        """Writes the same for columns."""
        return self._tap(2, "ks", ix, q)

    def _tap(self, axis: int, name: str, at: str, out: str) -> str:
        w, spec = self.w, self.spec
        dilation, taps, what = spec.dilation[axis], spec.taps[axis], ("row", "column")[axis - 1]
        below = linear([(at, 1), (out, -spec.stride[axis])])
        conditions = [f"{below} >= 0", f"{below} < {(taps - 1) * dilation + 1}"] if taps > 1 else [f"{below} == 0"]
        if dilation > 1 and taps > 1:
            conditions.append(f"({below}) % {dilation} == 0")
        w.line(f"if (!({' && '.join(conditions)})) continue;  // no tap of output {what} {out} meets this {what}")
        if taps == 1:
            return "0"
        w.line(f"const {self.small} {name} = {below if dilation == 1 else f'({below}) / {dilation}'};")
        return name

    def source(self, axis: int, out: str, local: str) -> str:
        """Returns the input coordinate of a tile position along a spatial axis."""
        spec = self.spec
        return linear([(out, spec.stride[axis]), (local, 1)], -spec.before[axis])

    def source_depth(self, iz: str) -> tuple[str, list[str]]:
        """Writes the input plane that a tap plane reads; returns its C variable and the conditions under which it
        exists.
        """
        spec = self.spec
        if spec.flat:
            return "0", []
        place = linear([(self.at["depth"], spec.stride[0]), (iz, spec.dilation[0])], -spec.before[0])
        self.w.line(f"const {self.t} in_d = {place};")
        return "in_d", [f"{unsigned(self.t)}(in_d) < {spec.sizes[0]}"]

    def reversed_tap(self, axis: int, tap: str) -> str:
        """Returns the filter coordinate that a tap multiplies."""
        return f"({self.spec.taps[axis] - 1} - {tap})" if self.spec.flip and self.spec.taps[axis] > 1 else tap
