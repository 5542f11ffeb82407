"""The scatter family: each value of a program is put to, or combined with, the element that an index selects.

Elements begin as neutral values.  A thread has one update, and combines integers atomically: whatever the order, the
result is the same.  Products, for which there is no atomic with a reliable order, have one thread for all updates that
share their other coordinates: it walks them.  Values that are only put replace what is there; no two of them have one
place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod

from codegen.buffers import Edge
from codegen.combiners import Combiner
from codegen.expr import Operand, Program
from codegen.family import Family, Form, Schedule
from codegen.iteration import Coordinates, Strides, bounds, far, index_type, leader, linear, memory_order, rebase
from codegen.kernel import thread_number
from codegen.pointwise.body import Body, plus
from codegen.spec import KernelSource, KernelSpec
from codegen.target import Target


@dataclass(frozen=True)
class ScatterSpec(KernelSpec):
    """result[..., index, ...] = itself combined with a value, for each value; where the index is outside, nothing.

    shape     sizes of the values' dimensions.
    axes      the dimensions along which the index varies; the others are the result's, too.
    program   over these dimensions.  Its first store is of the value, to the result, whose strides along the axes are
              0; its second one, which has no memory, of the index.
    size      places along the axis; ``step`` elements of the result from one to the next.
    elements  of the result, which is contiguous.
    combiner  how values are combined: atomically, or by threads that walk them; None: they are put.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    program: Program
    size: int
    step: int
    elements: int
    combiner: Combiner | None


@dataclass(frozen=True)
class ScatterSchedule(Schedule):
    """Threads of a block; each has one update, or walks all updates along the axes."""

    threads: int
    itype: str


def schedules(spec: ScatterSpec, target: Target) -> Iterator[ScatterSchedule]:
    """Yields schedules worth trying, best guess first."""
    itype = index_type(*bounds(spec.program.operands, spec.shape), spec.elements, *far(spec.program))
    for threads in (32, 128) if _walks(spec) else (256, 128):
        yield ScatterSchedule(threads, itype)


def _walks(spec: ScatterSpec) -> bool:
    """Returns true if a thread has all values that may have one place."""
    return spec.combiner is not None and not spec.combiner.atomic


class _Renderer:
    def __init__(self, spec: ScatterSpec, schedule: ScatterSchedule) -> None:
        self.s, self.walks = schedule, _walks(spec)
        if not self.walks:
            order = memory_order(spec.shape, leader(spec.program).strides)
            shape, program = rebase(spec.program, spec.shape, order)
            spec = replace(spec, shape=shape, program=program, axes=())
        self.spec, self.program = spec, spec.program
        self.body = Body(spec.name, self.program)
        self.w = self.body.w
        self.result = self.body.pointers.stores[0]

    def render(self) -> KernelSource:
        w, spec, threads = self.w, self.spec, self.s.threads
        outer = [d for d in range(len(spec.shape)) if d not in spec.axes]
        count = prod(spec.shape[d] for d in outer)
        details = f"{prod(spec.shape)} updates of {spec.size} places" + (", walked by a thread" if self.walks else "")
        del w.parameters[-1]  # what is updated is both read and written
        blocks = thread_number(w, self.s.itype, "i", Edge(count, threads))
        self.body.scalars()
        if self.walks:
            self._walk(outer)
        else:
            self._update(dict(enumerate(self._split("i", spec.shape))))
        operands = len(self.program.loads) + len(self.program.tables)
        zeroed = (
            () if self.walks or spec.combiner is None else ((operands, spec.elements * self._stored.dtype.itemsize),)
        )
        return w.source(self.program, [details], blocks=blocks, threads=threads, zeroed=zeroed)

    @property
    def _stored(self) -> Operand:
        return self.program.stores[0].operand

    def _split(self, position: str, shape: tuple[int, ...]) -> list[str]:
        """Returns the coordinates of a position as C expressions, and writes those that are needed."""
        own = Coordinates(self.w, position, shape, self.s.itype, position)
        return [own[d] for d in range(len(shape))]

    def _walk(self, outer: list[int]) -> None:
        w, spec = self.w, self.spec
        row = dict(zip(outer, self._split("i", tuple(spec.shape[d] for d in outer)))) if outer else {}
        base, combiner = self._offset(row, self._stored.strides), spec.combiner
        assert combiner is not None
        step = linear([("n", spec.step)])
        start = f"{self.result}[{base} + {step}] = {combiner.neutral:g};"
        w.line(f"for ({self.s.itype} n = 0; n < {spec.size}; ++n) {start}")
        sizes = tuple(spec.shape[d] for d in spec.axes)
        with w.block(f"for ({self.s.itype} m = 0; m < {prod(sizes)}; ++m)"):
            self._update(row | dict(zip(spec.axes, self._split("m", sizes))))

    def _offset(self, at: dict[int, str], strides: Strides) -> str:
        return linear([(at[d], stride) for d, stride in enumerate(strides) if stride])

    def _update(self, at: dict[int, str]) -> None:
        """Writes the statements of the update at these coordinates."""
        w, spec = self.w, self.spec
        loaded = {}
        for n in self.body.varying_loads():
            operand = self.program.loads[n]
            loaded[n] = self.body.register(n)
            text = f"{self.body.pointers.loads[n]}[{self._offset(at, operand.strides)}]"
            w.line(f"const {operand.dtype.ctype} {loaded[n]} = {text};")
        value, place = self.body.element(loaded, [self._offset(at, strides) for strides in self.program.indices])
        w.line(f"const {self.program.stores[1].operand.dtype.ctype} place = {place};")
        to = linear([(f"{self.s.itype}(place)", spec.step)])
        base = self._offset(at, self._stored.strides)
        target = f"{base} + {to}" if base != "0" else to
        with w.block(f"if (place >= 0 && place < {spec.size})"):
            if spec.combiner is None:
                w.line(f"{self.result}[{target}] = {value};")
            elif self.walks:
                w.line(f"{self.result}[{target}] = {spec.combiner.functor}::of({self.result}[{target}], {value});")
            else:
                w.line(f"{spec.combiner.atomic}({plus(self.result, target)}, {value});")


FORM = Form("scatter", ScatterSchedule, schedules, lambda spec, schedule: _Renderer(spec, schedule).render())
FAMILY = Family("scatter", ScatterSpec, (FORM,))
