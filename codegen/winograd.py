"""The winograd family: the transforms of Winograd's convolution, one patch per thread, all of it in registers.

Neighbouring threads take neighbouring channels, ``width`` each, where these are neighbours in memory (NHWC); else they
take neighbouring tiles.  Either way, what a warp reads or writes for one element of its patches is contiguous, or is so
together with the next elements, which the L1 cache holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from codegen.buffers import Edge, where
from codegen.epilogue import Epilogue, Run
from codegen.expr import Operand, Program
from codegen.family import Family, Form, Schedule
from codegen.iteration import extent, linear, signed_index_type, unsigned
from codegen.kernel import Kernel, locate, parameter
from codegen.spec import KernelSource, KernelSpec
from codegen.target import Target

#: Most elements of all patches of a thread; the transforms need further registers.
_MOST_ELEMENTS = 144


@dataclass(frozen=True)
class WinogradSpec(KernelSpec):
    """One of the three linear transforms of Winograd's convolution: of patches of an image, of filters, or of products.

    transform         "input", "filter" or "output": B^T d B, G g G^T or A^T m A in `codegen/device/winograd.cuh`.
    tile              M, the number of results along a side of a tile: 2 or 4.
    images, channels  of an input or output, or the filters and channels of a filter.
    tiles             rows and columns of tiles of an image; (1, 1) for filters.
    source            strides over (image, channel, tile row, tile column, patch row, patch column), in elements.
    start             the offset in the source of the first element of all.
    window            input: for rows and columns (before, size); element i of the patch of tile t is t * tile + i -
                      before of the image, 0 outside of its size.  Else None: there is every element.
    results           output: rows and columns of results; those of tiles beyond are not written.  Else None.
    program           on every element of the transformed patch, over (image, channel, tile row, tile column, row,
                      column).
    """

    transform: str
    tile: int
    images: int
    channels: int
    tiles: tuple[int, int]
    source: Operand
    start: int
    window: tuple[tuple[int, int], tuple[int, int]] | None
    results: tuple[int, int] | None
    program: Program

    @property
    def sides(self) -> tuple[int, int]:
        """Elements along a side of a patch, before and after the transform."""
        whole = self.tile + 2
        return {"input": (whole, whole), "filter": (3, whole), "output": (whole, self.tile)}[self.transform]

    @property
    def space(self) -> tuple[int, ...]:
        """Sizes of the program's space."""
        return (self.images, self.channels, *self.tiles, self.sides[1], self.sides[1])


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
        self.threads = Edge(prod(spec.space[:4]) // schedule.width, schedule.threads)

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
        # Told that one block a multiprocessor is enough, ptxas does not spill to fit more of them.
        return w.source(program, details, blocks=self.threads.tiles, threads=s.threads, blocks_per_sm=1)

    def _locate(self) -> list[str]:
        """Writes which patch a thread has: its image, channel, tile row and tile column."""
        w, spec, s = self.w, self.spec, self.s
        first = "blockIdx.x" if self.t == "int32" else "int64(blockIdx.x)"
        w.line(f"const {self.t} t = {first} * {s.threads} + threadIdx.x;")
        w.leave(self.threads.outside("t"), how="return")
        of = "filter" if spec.transform == "filter" else "image"
        channels = ("channel", spec.channels // s.width, s.width)
        axes = [(of, spec.images, 1), ("row", spec.tiles[0], 1), ("col", spec.tiles[1], 1)]
        # Neighbouring threads take neighbouring channels where the larger of input and output has them so.
        larger = spec.source if spec.transform == "output" else spec.program.stores[0].operand
        axes = [*axes, channels] if larger.strides[1] == 1 else [channels, *axes]
        locate(w, self.t, axes, "t")
        several = {name for name, size, _ in axes if size > 1}
        return [name if name in several else "0" for name in (of, "channel", "row", "col")]

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
            inside = w.inside(*conditions)
            offset = linear([("base", 1), ("i", strides[4]), ("j", strides[5])])
            if width == 1:
                w.line(f"patch[i][j] = {where(inside, f'{self.source}[{offset}]', '0.0f')};")
            else:
                place = f"{self.source} + {offset}"
                read = f"load_if<{width}>({inside}, {place})" if inside else f"load<{width}>({place})"
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
        """Writes the program on every element of the result, on several neighbours where this makes an access wide."""
        w, spec, width = self.w, self.spec, self.s.width
        side = spec.sides[1]
        w.line()
        run = Run(width, 1, "e") if width > 1 else None
        beyond = {}
        if spec.results:
            for name, tile, size in zip("ij", position[2:], spec.results):
                beyond[name] = Edge(size, spec.tile).outside(linear([(tile, spec.tile), (name, 1)]))
        looped, places = "ij", ["i", "j"]
        if run is None and any(self.epilogue.wide(op, side, 5) for op in spec.program.operands):
            run = Run(side, 5, "j", (lambda _: beyond["j"]) if beyond.get("j") else None)
            looped, places = "i", ["i", "0"]
        with w.scope():
            for name in looped:
                w.each(name, side)
                w.leave(beyond.get(name, ""))
            self.epilogue.results([*position, *places], [f"result{self.subscript}[i][j]"], run)
