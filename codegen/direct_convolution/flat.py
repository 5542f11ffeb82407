"""The flat form of direct convolution: convolutions of single channels, whole planes of which lie in shared memory.

Planes that follow each other in memory are one run of bytes, whatever their rows are: a block copies several of them to
shared memory 16 bytes at a time.  Its threads slide down over strips of columns there and put their results into shared
memory, too, from where they are written as they were read, or in the order of the output, if it has another one.
"""

from __future__ import annotations

from math import prod

from codegen.buffers import Edge, every
from codegen.direct_convolution.flat_schedule import (
    FlatSchedule,
    flat_blocks,
    flat_buffers,
    flat_copy,
    flat_pitches,
    flat_stored,
    units,
)
from codegen.direct_convolution.sliding import Sliding
from codegen.direct_convolution.spec import DirectConvolutionSpec, contiguous
from codegen.expr import Operand
from codegen.iteration import linear
from codegen.kernel import locate
from codegen.sizes import most


class Flat(Sliding):
    def __init__(self, spec: DirectConvolutionSpec, schedule: FlatSchedule) -> None:
        self.runs, total = spec.runs
        self.s, self.planes = schedule, Edge(total, schedule.planes)
        super().__init__(spec, schedule)
        self.cols, self.count, self.vector, self.ahead = schedule.cols, spec.filters, 1, 1

    def describe(self) -> str:
        s = self.s
        return f"a block {s.planes} planes, a thread slides down over {s.rows} rows of {s.cols} columns"

    def blocks_per_sm(self) -> int:
        """Returns how many blocks a multiprocessor should hold.  Left alone, ptxas spills to fit one more."""
        return max(1, flat_blocks(self.spec, self.s))

    def body(self) -> int:
        w, s, spec = self.w, self.s, self.spec
        w.carve(flat_buffers(spec, s))
        where = {"run": Edge(self.runs, 1), "plane0": self.planes}
        blocks = locate(w, self.t, [(name, edge.tiles, edge.size) for name, edge in where.items()])
        self.run, self.first = (name if most(edge.tiles) > 1 else "0" for name, edge in where.items())
        self._copy()
        shape = units(spec, s)
        idle = Edge(prod(shape), self.threads).ragged
        own, depth, row, col = self.places(
            "threadIdx.x", shape, "own depth row col", (1, 1, s.rows, s.cols), self.small
        )
        plane = self.constant("plane", linear([(self.first, 1), (own, 1)]))
        there = every(f"threadIdx.x < {prod(shape)}" if idle else "", self.planes.inside(plane))
        if there:
            w.line(f"const bool there = {there};")
            # A thread without a plane takes the first one, and writes nothing.
            plane = self.constant("known", f"there ? {plane} : 0")
        image, group = self._place(plane)
        self.at = {"image": image, "group": group, "depth": depth, "row0": row, "col0": col, "own": own}
        self.load_weights(group)
        fixed = {0: image, 1: group, 3: depth} | ({2: "0"} if spec.filters == 1 else {})
        self.epilogue.scalars(fixed)
        w.line("copy_async_wait<0>();")
        w.line("__syncthreads();  // the planes are there")
        with w.block("if (there)", when=bool(there)):
            w.line(f"const {self.small} in_h = {self.origin(1, row)}, in_w = {self.origin(2, col)};")
            self.plan_walk()
            early = [("shift", 1)] if flat_copy(spec, s.planes)[1] else []
            w.line(
                f"const {spec.x.dtype.ctype}* const image_plane = tile + {linear([(own, prod(spec.sizes)), *early])};"
            )
            self.slide(row)
        w.line("__syncthreads();  // the results are there")
        for n, store in enumerate(spec.program.stores):
            self._write(n, store.operand)
        return blocks

    def _place(self, plane: str) -> tuple[str, str]:
        """Writes the image and the group of a plane of the block's run."""
        if self.runs > 1:
            return self.run, plane
        image, group = self.places(plane, (self.spec.images, self.spec.groups), "image group")
        return image, group

    def _start(self, operand: Operand, plane: int) -> list[tuple[str, int]]:
        """Returns where the block's planes of so many elements begin in an operand."""
        return [(self.run, operand.strides[0]), (self.first, plane)]

    def _copy(self) -> None:
        """Writes the copies of the block's planes."""
        w, s, spec = self.w, self.s, self.spec
        (count, early), plane, size = flat_copy(spec, s.planes), prod(spec.sizes), spec.x.dtype.itemsize
        chunks = Edge(s.planes * plane + (count - 1 if early else 0), count).tiles
        if early:
            w.line(f"const int shift = ({linear(self._start(spec.x, plane))}) % {count};  // copies are aligned")
        behind = [("shift", -1)] if early else []
        w.line("#pragma unroll 4")
        with w.block(f"for ({self.small} at = threadIdx.x; at < {chunks}; at += {self.threads})"):
            valid = ""
            if self.planes.ragged or early:
                total = self.planes.total * plane
                w.line(f"const {self.t} rest = {total} - ({linear([(self.first, plane), ('at', count), *behind])});")
                valid = f", rest >= {count} ? {count * size} : rest > 0 ? int(rest) * {size} : 0"
            source = linear([(self.x, 1), *self._start(spec.x, plane), ("at", count), *behind])
            w.line(f"copy_async<{count * size}>(tile + {linear([('at', count)])}, {source}{valid});")
        w.line("copy_async_commit();")

    def read(self, step: str, iy: str) -> None:
        w, s, spec = self.w, self.s, self.spec
        _, height, width = spec.sizes
        own = self.along(1, iy)
        w.line(f"const bool row_exists = {self.exists(1, linear([('in_h', 1), (own, 1)]))};")
        with w.scope():
            iz = self.loop("iz", spec.taps[0])
            in_d, there = self.source_depth(iz)
            ix = self.loop("ix", spec.under(2, s.cols))
            w.leave(self.no_column(ix))
            rows = [("in_h", width), (own, width)]
            place = linear([(in_d, height * width), *rows, ("in_w", 1), (self.along(2, ix), 1)])
            inside = every("row_exists", there, self.column(ix))
            # Told to choose between them, NVRTC multiplies the zeros and the weights ahead, and keeps the products.
            w.line(f"under[{iz}][{ix}][0] = 0;")
            w.line(f"if ({inside}) under[{iz}][{ix}][0] = {self.value(f'image_plane[{place}]')};")

    def finish(self, row: str, sums: str) -> None:
        w, s, spec = self.w, self.s, self.spec
        stores = [store.operand.dtype.ctype for store in spec.program.stores]
        with w.scope():
            f = self.loop("f", spec.filters)
            for n, ctype in enumerate(stores):
                w.line(f"{ctype} row{n}[{s.cols}];")
            position = [self.at["image"], self.at["group"], f, self.at["depth"], row, self.at["col0"]]
            run = self.columns(self.at["col0"], s.cols)
            staged = [f"row{n}" for n in range(len(stores))]
            q = "q" if s.cols > 1 else "0"
            self.epilogue.results(position, [f"{sums}[{q}][{f}]"], run, staged=staged)
            place = [(f, prod(spec.out)), (self.at["depth"], prod(spec.out[1:])), (row, spec.out[2])]
            q = self.loop("q", s.cols)
            w.leave(run.missing(q) if run.missing else "")
            for n, pitch in enumerate(flat_pitches(spec)):
                own = (self.at["own"], pitch)
                w.line(f"out{n}[{linear([own, *place, (self.at['col0'], 1), (q, 1)])}] = row{n}[{q}];")

    def _write(self, n: int, operand: Operand) -> None:
        """Writes an output from shared memory."""
        w, s, spec = self.w, self.s, self.spec
        plane, to = spec.filters * prod(spec.out), self.epilogue.pointers.stores[n]
        block, total = s.planes * plane, self.planes.total * plane
        if contiguous(operand, spec.space, 1 if self.runs > 1 else 0):
            count = flat_stored(spec, s.planes, operand)
            head = f"for ({self.small} at = threadIdx.x * {count}; at < {block}; at += {self.threads * count})"
            with w.block(head):
                last = linear([(self.first, plane), ("at", 1)])
                w.leave(f"{last} >= {total}" if self.planes.ragged else "", how="break")
                place = linear([(to, 1), *self._start(operand, plane), ("at", 1)])
                w.line(f"store({place}, load_shared<{count}>(out{n} + at));")
            return
        # Neighbouring threads write neighbouring elements: of a plane, or of a pixel of all planes.
        with w.block(f"for ({self.small} at = threadIdx.x; at < {block}; at += {self.threads})"):
            order = (s.planes, spec.filters, *spec.out)
            turned = (*spec.out, s.planes, spec.filters) if spec.across[n] else order
            names = "od oh ow own of" if spec.across[n] else "own of od oh ow"
            found = dict(zip(names.split(), self.places("at", turned, names, (1,) * 5, self.small)))
            w.line(f"const {self.t} to = {linear([(self.first, 1), (found['own'], 1)])};")
            w.leave(self.planes.outside("to"), how="continue")
            image, group = self._place("to")
            position = [image, group, *(found[name] for name in ("of", "od", "oh", "ow"))]
            sizes = (flat_pitches(spec)[n], prod(spec.out), prod(spec.out[1:]), spec.out[2], 1)
            source = linear([*zip((found["own"], *position[2:]), sizes)])
            w.line(f"{to}[{linear([*zip(position, operand.strides)])}] = out{n}[{source}];")
