"""The winograd family: the transforms of Winograd's convolution, one patch per thread, all of it in registers.

Neighbouring threads take neighbouring channels, ``width`` each, where these are neighbours in memory (NHWC); else they
take neighbouring tiles.  Either way, what a warp reads or writes for one element of its patches is contiguous, or is so
together with the next elements, which the L1 cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.direct_convolution.spec import WinogradSpec
from codegen.epilogue import Epilogue, Run
from codegen.family import Family, Form, Schedule
from codegen.iteration import coordinate, extent, linear, signed_index_type, unsigned
from codegen.kernel import Kernel, parameter
from codegen.spec import KernelSource
from codegen.target import Target

#: Most elements of all patches of a thread; the transforms need further registers.
_MOST_ELEMENTS = 144


@dataclass(frozen=True)
class WinogradSchedule(Schedule):
    """Neighbouring channels of a thread (1, 2 or 4), and threads of a block."""

    width: int
    threads: int
    itype: str


def schedules(spec: WinogradSpec, target: Target) -> tuple[WinogradSchedule, ...]:
    """Returns the schedules worth trying: with one channel per thread, most patches are in flight."""
    itype = _itype(spec)
    widths = [w for w in (1, 2, 4) if _takes(spec, w)]
    return tuple(WinogradSchedule(w, threads, itype) for w in widths for threads in (256, 128))


def _takes(spec: WinogradSpec, width: int) -> bool:
    """Tells whether a thread can read ``width`` neighbouring channels at once and keep their patches in registers."""
    if width == 1:
        return True
    source = spec.source
    others = [s for d, (s, size) in enumerate(zip(source.strides, _source_space(spec))) if d != 1 and size > 1]
    return (
        source.strides[1] == 1
        and spec.channels % width == 0
        and all(s % width == 0 for s in (*others, spec.start))
        and source.alignment % (width * source.dtype.itemsize) == 0
        and width * spec.sides[0] ** 2 <= _MOST_ELEMENTS
    )


def _source_space(spec: WinogradSpec) -> tuple[int, ...]:
    return (spec.images, spec.channels, *spec.tiles, spec.sides[0], spec.sides[0])


def _itype(spec: WinogradSpec) -> str:
    reach = [
        prod(spec.space[:4]),
        extent(_source_space(spec), spec.source.strides) + abs(spec.start),
        *(extent(spec.space, op.strides) for op in spec.program.operands),
    ]
    return signed_index_type(*reach)


def render(spec: WinogradSpec, schedule: WinogradSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises ValueError for a width that does not suit the spec."""
    if not _takes(spec, schedule.width):
        raise ValueError(f"{schedule}: {spec.name} cannot read {schedule.width} channels at a time")
    return _Renderer(spec, schedule).render()


FAMILY = Family("winograd", WinogradSpec, (Form("winograd", WinogradSchedule, schedules, render),))


class _Renderer:
    def __init__(self, spec: WinogradSpec, schedule: WinogradSchedule) -> None:
        self.spec, self.s, self.t, self.w = spec, schedule, schedule.itype, Kernel(spec.name)
        self.names = self.w.names
        self.source = self.names.unique(spec.source.name)
        self.epilogue = Epilogue(self.w, spec.program, self.names, spec.space, "float", "float")
        self.subscript = "[e]" if schedule.width > 1 else ""

    def render(self) -> KernelSource:
        w, spec, s = self.w, self.spec, self.s
        program = spec.program
        before, after = spec.sides
        each = f"{s.width} channels of a tile" if s.width > 1 else "a tile of a channel"
        details = [
            f"Winograd F({spec.tile}x{spec.tile},3x3), {spec.transform} transform: {before} x {before} -> "
            f"{after} x {after}, {each} a thread"
        ]
        w.parameters += [parameter(spec.source, self.source), *self.epilogue.pointers.parameters()]
        position = self._locate()
        self.epilogue.scalars()
        self._read(position)
        self._transform()
        self._write(position)
        blocks = -(-self._threads() // s.threads)
        # Told that one block a multiprocessor is enough, ptxas does not spill to fit more of them.
        return w.source(program, details, blocks=blocks, threads=s.threads, blocks_per_sm=1)

    def _threads(self) -> int:
        return prod(self.spec.space[:4]) // self.s.width

    def _locate(self) -> list[str]:
        """Writes which patch a thread has: its image, channel, tile row and tile column."""
        w, spec, s = self.w, self.spec, self.s
        threads = self._threads()
        first = "blockIdx.x" if self.t == "int32" else "int64(blockIdx.x)"
        w.line(f"const {self.t} t = {first} * {s.threads} + threadIdx.x;")
        if threads % s.threads:
            w.line(f"if (t >= {threads}) return;")
        of = "filter" if spec.transform == "filter" else "image"
        shape = {of: spec.images, "row": spec.tiles[0], "col": spec.tiles[1]}
        if self._channels_fast():
            shape["channel"] = spec.channels // s.width
        else:
            shape = {"channel": spec.channels, **shape}
        found = {}
        for d, (name, size) in enumerate(shape.items()):
            found[name] = name if size > 1 else "0"
            if size > 1:
                step = f" * {s.width}" if name == "channel" and s.width > 1 else ""
                w.line(f"const {self.t} {name} = {coordinate('t', list(shape.values()), d)}{step};")
        return [found[name] for name in (of, "channel", "row", "col")]

    def _channels_fast(self) -> bool:
        """Tells whether neighbouring threads take neighbouring channels, as the larger of input and output lies in
        memory.
        """
        spec = self.spec
        larger = spec.source if spec.transform == "output" else spec.program.stores[0].operand
        return larger.strides[1] == 1

    def _read(self, position: list[str]) -> None:
        w, spec, width = self.w, self.spec, self.s.width
        side, strides = spec.sides[0], spec.source.strides
        w.line()
        conditions = []
        if spec.window:
            for name, tile, (before, size), count in zip(("row", "col"), position[2:], spec.window, spec.tiles):
                w.line(f"const {self.t} {name}0 = {linear([(tile, spec.tile)], -before)};")
                if before > 0 or (count - 1) * spec.tile + side - before > size:
                    place = f"{name}0 + {'i' if name == 'row' else 'j'}"
                    conditions.append(f"{unsigned(self.t)}({place}) < {size}")
        w.line(f"const {self.t} base = {linear(list(zip(position, strides)), spec.start)};")
        array = f"[{width}]" if width > 1 else ""
        w.line(f"float patch{array}[{side}][{side}];")
        with w.unrolled(*(f"for (int {name} = 0; {name} < {side}; ++{name})" for name in "ij")):
            inside = "inside" if len(conditions) > 1 else "".join(conditions)
            if len(conditions) > 1:
                w.line(f"const bool inside = {' && '.join(conditions)};")
            offset = linear([("base", 1), ("i", strides[4]), ("j", strides[5])])
            if width == 1:
                value = f"{self.source}[{offset}]"
                w.line(f"patch[i][j] = {f'{inside} ? {value} : 0.0f' if inside else value};")
            else:
                where = f"{self.source} + {offset}"
                read = f"load_if<{width}>({inside}, {where})" if inside else f"load<{width}>({where})"
                w.line(f"const Vector<float, {width}> part = {read};")
                w.unrolled_line(f"for (int e = 0; e < {width}; ++e) patch[e][i][j] = part[e];")

    def _transform(self) -> None:
        w, width, side = self.w, self.s.width, self.spec.sides[1]
        w.line()
        w.line(f"float result{f'[{width}]' if width > 1 else ''}[{side}][{side}];")
        call = f"winograd::{self.spec.transform}(patch{self.subscript}, result{self.subscript});"
        if width > 1:
            w.unrolled_line(f"for (int e = 0; e < {width}; ++e) {call}")
        else:
            w.line(call)

    def _write(self, position: list[str]) -> None:
        """Writes the program on every element of the result; on several neighbours at once where this makes an access
        wide.
        """
        w, spec, width = self.w, self.spec, self.s.width
        side = spec.sides[1]
        w.line()
        run = Run(width, 1, "e") if width > 1 else None
        beyond = {}
        if spec.results:
            for name, tile, size in zip("ij", position[2:], spec.results):
                if size % spec.tile:
                    beyond[name] = f"{linear([(tile, spec.tile), (name, 1)])} >= {size}"
        looped, places = "ij", ["i", "j"]
        if run is None and any(self.epilogue.wide(op, side, 5) for op in spec.program.operands):
            run = Run(side, 5, "j", (lambda _: beyond["j"]) if "j" in beyond else None)
            looped, places = "i", ["i", "0"]
        with w.scope():
            for name in looped:
                w.line("#pragma unroll")
                w.open(f"for (int {name} = 0; {name} < {side}; ++{name})")
                if name in beyond:
                    w.line(f"if ({beyond[name]}) continue;")
            self.epilogue.results([*position, *places], [f"result{self.subscript}[i][j]"], run)
