"""Pointwise kernels whose operands lie in memory in different orders: tiles transposed in shared memory.

An operand that is contiguous along the rows is *turned*.  A block reads its tile of every turned operand along the
rows, writes it to shared memory column by column, and waits at a barrier.  Its threads then walk the tile along the
columns, reading all other operands directly.  Turned results go the same way in reverse.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from codegen.buffers import Edge
from codegen.expr import Index
from codegen.iteration import Point, at_most, linear
from codegen.kernel import locate
from codegen.l2_policy import streams
from codegen.pointwise.body import Body, apart, kept_type, packs, plus, read, vector_type
from codegen.pointwise.schedule import THREADS
from codegen.pointwise.tiling import Stage, TilesSchedule, Tiling
from codegen.sizes import most
from codegen.spec import KernelSource, PointwiseSpec


class TilesRenderer:
    """Writes a kernel in tiles."""

    def __init__(self, spec: PointwiseSpec, schedule: TilesSchedule) -> None:
        self.t = tiling = Tiling(spec, schedule)
        self.s = schedule
        self.program = tiling.program
        self.body = Body(spec.name, self.program)
        self.w = self.body.w
        count = len(self.program.loads)
        self.turned_loads = {n: stage for n, stage in tiling.stages.items() if n < count}
        self.turned_reads = {n: stage for n, stage in tiling.stages.items() if n in tiling.reads}
        stores = {n: stage for n, stage in tiling.stages.items() if count <= n < len(self.program.operands)}
        self.turned_stores = {n - count: stage for n, stage in stores.items()}
        self.direct_loads = [n for n in self.body.varying_loads() if n not in self.turned_loads]
        self.kinds = {n: tiling.direct(self.program.loads[n]) for n in self.direct_loads}
        self.load_tiles = {n: self.body.names.unique(self.program.loads[n].name, "_tile") for n in self.turned_loads}
        self.read_tiles = {n: self.body.names.unique(tiling.operand(n).name, "_tile") for n in self.turned_reads}
        self.read_registers = {n: self.body.names.unique(tiling.operand(n).name, "_v") for n in self.turned_reads}
        self.store_tiles = {
            n: self.body.names.unique(self.program.stores[n].operand.name, "_tile") for n in self.turned_stores
        }
        #: loads that are read once
        self.once = streams(self.program, tiling.shape)
        #: vectors of a tile, in turns of all threads
        self.vectors = Edge(schedule.rows * schedule.cols // schedule.vector, THREADS)
        self.outer: list[str] = []
        self.row0 = self.col0 = ""

    # ---- structure

    def _notes(self) -> list[str]:
        """Returns the heading's lines about the tiles."""
        s, t = self.s, self.t
        dims = " x ".join(str(size) for size in t.shape)
        turned = [t.operand(n).name for n in t.stages]
        return [
            f"{dims} elements in tiles of {s.rows} x {s.cols}, {s.vector} a vector",
            f"{', '.join(turned)}: across the tiles in memory, turned in shared memory",
        ]

    def render(self) -> KernelSource:
        s, t, w = self.s, self.t, self.w
        tiles = *self.load_tiles.values(), *self.store_tiles.values(), *self.read_tiles.values()
        for n, name in zip(t.stages, tiles):
            w.line(t.tile(n, name).static)
        outer = [(f"i{d}", size, 1) for d, size in enumerate(t.shape[: s.outer])]
        down, across = t.blocks
        axes = [*outer, ("row0", down, s.rows), ("col0", across, s.cols)]
        blocks = locate(w, s.itype, axes)
        self.outer = [name if most(size) > 1 else "0" for name, size, _ in outer]
        self.row0, self.col0 = (f"{name} + " if most(size) > 1 else "" for name, size, _ in axes[-2:])
        self.body.scalars()
        for n, stage in self.turned_loads.items():
            w.line(f"{self._kept(n, stage)} {self.body.register(n)}{array(self._accesses(stage).tiles)};")
            self._turning(n, stage, self._fetch)
        for n, stage in self.turned_reads.items():
            kind = vector_type(t.operand(n), stage.vector)
            w.line(f"{kind} {self.read_registers[n]}{array(self._accesses(stage).tiles)};")
            self._turning(n, stage, self._fetch_read)
        self._direct()
        for n, stage in (*self.turned_loads.items(), *self.turned_reads.items()):
            self._turning(n, stage, self._scatter)
        if self.turned_loads or self.turned_reads:
            w.line("__syncthreads();")
        self._walk(self._compute)
        if self.turned_stores:
            w.line("__syncthreads();")
        for n, stage in self.turned_stores.items():
            self._turning(n, stage, self._gather)
        blocks = blocks if all(t.shape) else 0
        return w.source(self.program, self._notes(), blocks=blocks, threads=THREADS, barriers=True)

    def _loop(self, count: int) -> AbstractContextManager[None]:
        """Writes a scope for so many passes, which are unrolled."""
        return self.w.unrolled(f"for (int u = 0; u < {count}; ++u)") if count > 1 else self.w.block("")

    def _numbered(self, count: int, period: int, apart: int) -> tuple[str, str]:
        """Writes an access's number if passes differ in more than rows or columns; returns it, and what passes add."""
        if count > 1 and THREADS % period:
            self.w.line(f"const uint32 k = threadIdx.x + u * {THREADS};")
            return "k", ""
        return "threadIdx.x", f" + u * {THREADS // apart}" if count > 1 else ""

    # ---- along the rows

    def _kept(self, n: int, stage: Stage) -> str:
        """Returns the C type of the registers for an access to a turned operand."""
        return kept_type(self.program.loads[n], stage.vector, self._rows_left(stage) != "")

    def _accesses(self, stage: Stage) -> Edge:
        """Returns the accesses that the tile of a turned operand takes, in turns of all threads."""
        return Edge(self.s.rows // stage.vector * (-(-self.t.frame // stage.lanes) * stage.lanes), THREADS)

    def _turning(self, n: int, stage: Stage, body: Callable[[int, Stage, Point, str], None]) -> None:
        """Writes a loop over accesses along rows of operand n: ``at`` is where one's first element is in the tile."""
        w, s, t = self.w, self.s, self.t
        accesses, groups, lanes = self._accesses(stage), s.rows // stage.vector, stage.lanes
        count, per = accesses.tiles, lanes * groups  # accesses to `lanes` columns
        in_tile = not accesses.ragged and t.frame % lanes == 0
        with self._loop(count):
            k, step = self._numbered(count, per, groups)
            row = over(k, lanes)
            col = [f"{k} % {lanes}"] if lanes > 1 else []
            if accesses.ragged or per != accesses.total:
                row += f" % {groups}"
                col.append(f"{over(k, per)}{times(lanes)}")
            col_text = f"{' + '.join(col) or '0'}{step}"
            w.line(f"const {s.itype} row = {row}{times(stage.vector)}, col = {col_text};")
            tests = ["" if in_tile else f"col < {t.frame}", Edge(t.height, s.rows).inside(f"{self.row0}row")]
            tests.append(f"{self._turned_col} < {t.width}" if t.overhangs else "")
            point = self._at(f"{self.row0}row", self._turned_col)
            if self._rows_left(stage) == "" and body in (self._fetch, self._fetch_read):
                # No load waits for a condition: accesses outside of the space read its last row or column.
                last_row = t.height - stage.vector if t.height % s.rows and not stage.shifted else None
                last_col = t.width - 1 if t.overhangs or (not in_tile and not stage.shifted) else None
                point, tests = self._at_most(last_row, last_col), tests[:1] if stage.shifted else []
            elif self._rows_left(stage) == "" and body == self._scatter:
                tests = tests[:1]
            with w.guarded(*tests):
                if body not in (self._fetch, self._fetch_read):
                    w.line(f"const uint32 at = {self._place(stage)};")
                body(n, stage, point, array_at(count))

    @property
    def _turned_col(self) -> str:
        """The column of the space that is column ``col`` of the tile; those before column 0 wrap around."""
        return f"{self.col0}col{f' - {self.s.vector}' if self.t.skewed else ''}"

    def _at_most(self, row: int | None, col: int | None) -> Point:
        """Returns the element (row, col) of the tile, held inside these rows and columns of the space."""
        texts = f"{self.row0}row", self._turned_col
        bounded = [text if n is None else at_most(text, n, self.s.itype) for text, n in zip(texts, (row, col))]
        return self._at(*bounded)

    def _place(self, stage: Stage) -> str:
        """Returns the C expression of where element (row, col) lies in the tile."""
        skew = f" + {over('row', stage.vector)}{times(stage.skew)}" if stage.skew else ""
        return f"row * {stage.width}{skew} + col"

    def _rows_left(self, stage: Stage) -> str:
        ragged = self.t.height % stage.vector != 0 and not stage.shifted
        return f", {self.t.height} - ({self.row0}row)" if ragged else ""

    def _how(self, n: int, packed: bool, left: str) -> str:
        """Returns the C function that loads a vector, of whose elements ``left`` exist."""
        return ("load_packed" if packed else "load") + ("_once" if n in self.once and not left else "")

    def _fetch(self, n: int, stage: Stage, point: Point, at: str) -> None:
        operand, left = self.program.loads[n], self._rows_left(stage)
        load = self._how(n, packs(operand, stage.vector, left != ""), left)
        target, offset = f"{self.body.register(n)}{at}", point.offset(operand.strides)
        read(self.w, target, self.body.pointers.loads[n], offset, stage.vector, load=load, more=left)

    def _fetch_read(self, n: int, stage: Stage, point: Point, at: str) -> None:
        k = self.t.reads[n]
        needed = self.program.needed(self.program.instructions[k].args)
        indices = [point.offset(s) if Index(i) in needed else "0" for i, s in enumerate(self.program.indices)]
        text = self.body.read_at(k, stage.vector, indices)
        self.w.line(f"{self.read_registers[n]}{at} = {text};")

    def _scatter(self, n: int, stage: Stage, _: Point, at: str) -> None:
        tile = self._tile(n)
        register = f"{self.read_registers[n] if n in self.read_registers else self.body.register(n)}{at}"
        if stage.vector == 1:
            self.w.line(f"{tile}[at] = {register};")
        else:
            self.w.each_element(stage.vector, f"{tile}[at + e * {stage.width}] = {register}[e];")

    def _gather(self, n: int, stage: Stage, point: Point, _: str) -> None:
        operand, pointer, tile = self.program.stores[n].operand, self.body.pointers.stores[n], self.store_tiles[n]
        offset = point.offset(operand.strides)
        if stage.vector == 1:
            self.w.line(f"{pointer}[{offset}] = {tile}[at];")
            return
        name = f"{tile.removesuffix('_tile')}_v"
        self.w.line(f"{vector_type(operand, stage.vector)} {name};")
        self.w.each_element(stage.vector, f"{name}[e] = {tile}[at + e * {stage.width}];")
        self.w.line(f"store({plus(pointer, offset)}, {name}{self._rows_left(stage)});")

    # ---- along the columns

    def _walk(self, body: Callable[[Point], None]) -> None:
        """Writes a loop over a thread's vectors along the columns; ``body`` gets the first element of one."""
        # No load waits for a condition: vectors outside of the space read its last one, if that is whole.
        clamped = body == self._load and self._left() == "" and not self.s.unaligned
        with self._loop(self.vectors.tiles):
            point, *tests = self._through_tile(clamped) if self.t.flat else self._in_rows(clamped)
            with self.w.guarded(*([] if clamped else tests)):
                body(point)

    def _through_tile(self, clamped: bool) -> tuple[Point, str, str]:
        """Writes where in a flat tile a vector is; returns its first element, and the conditions that it exists."""
        w, s, t = self.w, self.s, self.t
        step, end, size = f" + u * {THREADS}" if self.vectors.tiles > 1 else "", "", s.rows * s.cols
        position = f"{f'(threadIdx.x{step})' if step else 'threadIdx.x'} * {s.vector}"
        if t.height % s.rows:
            left = f"({t.height} - {self.row0.removesuffix(' + ')})" if self.row0 else str(t.height)
            w.line(f"const {s.itype} end = {left} * {s.cols};  // of the space")
            end = "t < end"
        within = f"t < {size}" if self.vectors.ragged else ""
        if clamped and (end or within):
            last = f"end - {s.vector}" if end else f"{s.itype}({size - s.vector})"
            position = f"min({position if s.itype == 'uint32' else f'{s.itype}({position})'}, {last})"
        w.line(f"const {s.itype} t = {position};")
        return self._point(), end, within

    def _in_rows(self, clamped: bool) -> tuple[Point, str, str, str]:
        """Writes in which row and column a vector is; returns its first element, and the conditions that it exists."""
        s, t, across = self.s, self.t, self.s.cols // self.s.vector
        rows, cols = Edge(t.height, s.rows), Edge(t.width, s.cols)
        within = f"row < {s.rows}" if self.vectors.ragged else ""
        k, down = self._numbered(self.vectors.tiles, across, across)
        col = f"{k} % {across}{times(s.vector)}" if across > 1 else "0"
        self.w.line(f"const {s.itype} row = {over(k, across)}{down}, col = {col};")
        point = self._point()
        if clamped:
            last_row = t.height - 1 if rows.ragged or within else None
            point = self._at_most(last_row, t.width - s.vector if cols.ragged else None)
        right = "" if s.unaligned else cols.inside(f"{self.col0}col")  # else stores see to it
        return point, within, rows.inside(f"{self.row0}row"), right

    def _at(self, row: str, col: str, suffix: str = "") -> Point:
        """Returns an element of the space, given its positions over the row and the column dimensions in C."""
        parts = [(row, f"r{suffix}", self.t.row_dims), (col, f"c{suffix}", self.t.col_dims)]
        return Point(self.w, self.s.itype, self.outer, parts)

    def _point(self) -> Point:
        """Returns the first element of the vector."""
        if self.t.flat:
            return self._at(f"{self.row0}t / {self.s.cols}", f"t % {self.s.cols}")
        return self._at(f"{self.row0}row", f"{self.col0}col")

    def _own_point(self) -> Point:
        """Returns element ``e`` of the vector."""
        c = self.s.cols
        if self.t.flat:
            return self._at(f"{self.row0}(t + e) / {c}", f"(t + e) % {c}", "e")
        return self._at(f"{self.row0}row", f"({self.col0}col + e)", "e")

    def _left(self) -> str:
        """Returns the C expression of how many elements are left for the vector; "" if it is whole."""
        s, t = self.s, self.t
        if t.flat:
            return "end - t" if t.height % s.rows and t.height * t.width % s.vector else ""
        return f"{t.width} - ({self.col0}col)" if t.width % s.vector else ""

    def _vector_offset(self, point: Point, strides: tuple[int, ...]) -> str:
        """Returns the C expression of a vector's offset in an operand that is accessed in vectors."""
        if not self.t.flat:
            return point.offset(strides)
        # Rows follow each other: row0 + t / width rows and t % width columns are row0 * width + t elements.
        base = linear([*zip(self.outer, strides), (self.row0.removesuffix(" + ") or "0", self.t.width)])
        return "t" if base == "0" else f"{base} + t"

    def _direct(self) -> None:
        """Writes loads of the operands that are contiguous along the columns, all before the first is used."""
        if not self.direct_loads:
            return
        for n in self.direct_loads:
            self.w.line(f"{self._register_type(n)} {self.body.register(n)}{array(self.vectors.tiles)};")
        self._walk(self._load)

    def _load(self, point: Point) -> None:
        left = self._left()
        for n in self.direct_loads:
            operand, pointer, kind = self.program.loads[n], self.body.pointers.loads[n], self.kinds[n]
            register = f"{self.body.register(n)}{array_at(self.vectors.tiles)}"
            if kind == "vector" and self.s.vector > 1:
                offset, more = self._vector_offset(point, operand.strides), f", {left}" if left else ""
                load = self._how(n, packs(operand, self.s.vector, left != ""), left)
                read(self.w, register, pointer, offset, self.s.vector, load=load, more=more)
            elif self.s.vector == 1 or kind == "uniform":
                self.w.line(f"{register} = {pointer}[{point.offset(operand.strides)}];")
            else:
                self._each(point, operand.strides, kind, f"{register}[e] = {pointer}[{{}}];")

    def _register_type(self, n: int) -> str:
        operand, kind = self.program.loads[n], self.kinds[n]
        if kind == "vector":
            return kept_type(operand, self.s.vector, self._left() != "")
        return vector_type(operand, 1 if kind == "uniform" else self.s.vector)

    def _loaded(self, n: int) -> str:
        """Returns the C expression of element ``e`` of a direct operand."""
        element = "" if self.s.vector == 1 or self.kinds[n] == "uniform" else "[e]"
        return f"{self.body.register(n)}{array_at(self.vectors.tiles)}{element}"

    def _each(self, point: Point, strides: tuple[int, ...], kind: str, line: str) -> None:
        """Writes a loop over a vector's elements with one access each: ``line``, with the offset in place of ``{}``."""
        w, left = self.w, self._left()
        guard = f"if (e < {left}) " if left else ""
        if kind == "element":
            with w.unrolled(f"for (int e = 0; e < {self.s.vector}; ++e)"):
                offset = self._own_point().offset(strides)
                w.line(f"{guard}{line.format(offset)}")
            return
        w.each_element(self.s.vector, f"{guard}{line.format(apart(point.offset(strides), strides[-1]))}")

    def _compute(self, point: Point) -> None:
        """Writes the program for one vector, and its stores."""
        w, s, t, program = self.w, self.s, self.t, self.program
        loaded = {n: self._loaded(n) for n in self.direct_loads}
        for n, stage in self.turned_loads.items():
            loaded[n] = self._picked_up(n, stage)
        for n, stage in self.turned_reads.items():
            self.body.given(t.reads[n], self._picked_up(n, stage))
        own = s.vector > 1 and (t.flat or (len(t.col_dims) > 1 and t.col_dims[-1] % s.vector != 0))
        each = [strides[-1] if s.vector > 1 else 0 for strides in program.indices]
        indices = [] if own else [apart(point.offset(x), step) for x, step in zip(program.indices, each)]
        if s.vector == 1:
            offsets = [
                "" if n in self.turned_stores else point.offset(store.operand.strides)
                for n, store in enumerate(program.stores)
            ]
            for n, text in enumerate(self.body.element(loaded, indices)):
                stage_ = self.turned_stores.get(n)
                target = f"{self.store_tiles[n]}[{self._place(stage_)}]" if stage_ else ""
                w.line(f"{target or f'{self.body.pointers.stores[n]}[{offsets[n]}]'} = {text};")
            return

        def own_indices() -> list[str]:
            element = self._own_point()
            return [element.offset(strides) for strides in program.indices]

        for n, name in enumerate(self.body.elements(s.vector, loaded, own_indices if own else lambda: indices)):
            if n in self.turned_stores:
                self._put_down(n, self.turned_stores[n], name)
            else:
                self._store(n, name, point)

    def _store(self, n: int, name: str, point: Point) -> None:
        """Writes the store of a vector of results to memory."""
        operand, pointer, left = self.program.stores[n].operand, self.body.pointers.stores[n], self._left()
        kind = self.t.direct(operand)
        if kind == "vector":
            offset = self._vector_offset(point, operand.strides)
            self.w.line(f"store({plus(pointer, offset)}, {name}{', ' + left if left else ''});")
        else:
            kind = "element" if kind == "element" else "strided"
            self._each(point, operand.strides, kind, f"{pointer}[{{}}] = {name}[e];")

    # ---- shared memory along the columns

    def _tile(self, n: int) -> str:
        """Returns the C name of the tile of a load or of a read of a table."""
        return self.read_tiles[n] if n in self.read_tiles else self.load_tiles[n]

    def _pieces(self, n: int, stage: Stage) -> tuple[int, str]:
        """Returns how a vector lies in the tile of operand n: (elements of one access, place of access ``e``)."""
        s, t = self.s, self.t
        group = stage.vector * stage.width  # elements between two skews
        piece, size = s.vector, t.operand(n).dtype.itemsize
        while piece > 1 and stage.skew and (min(16, piece * size) > stage.chunk or group % piece):
            piece //= 2
        step = "" if piece == s.vector else " + e" if piece == 1 else f" + e * {piece}"
        if not t.flat:
            over = f" + {s.vector}" if t.skewed else ""  # columns before the block's first in the tile
            return piece, f"{self._place(stage)}{over}{step}"
        if not stage.skew:
            return piece, f"t{step}"
        over = "t" if group % s.vector == 0 else f"(t{step})"  # else a vector may lie in two groups
        return piece, f"t{step} + {over} / {group}{times(stage.skew)}"

    def _picked_up(self, n: int, stage: Stage) -> str:
        """Writes the read of the vector from shared memory; returns the C expression of its element ``e``."""
        operand, tile, w, s = self.t.operand(n), self._tile(n), self.w, self.s
        piece, place = self._pieces(n, stage)
        if s.vector == 1:
            return f"{tile}[{place}]"
        name = self.body.names.unique(operand.name, "_t")
        ctype, count = vector_type(operand, piece), s.vector // piece
        if count == 1:
            w.line(f"const {ctype} {name} = load_shared<{piece}>({tile} + {place});")
            return f"{name}[e]"
        w.line(f"{ctype} {name}[{count}];")
        value = f"{tile}[{place}]" if piece == 1 else f"load_shared<{piece}>({tile} + {place})"
        w.each_element(count, f"{name}[e] = {value};")
        return f"{name}[e / {piece}][e % {piece}]" if piece > 1 else f"{name}[e]"

    def _put_down(self, n: int, stage: Stage, name: str) -> None:
        """Writes the store of a vector of results to shared memory."""
        operand, tile, w, s = self.program.stores[n].operand, self.store_tiles[n], self.w, self.s
        piece, place = self._pieces(len(self.program.loads) + n, stage)
        if piece == s.vector:
            w.line(f"store_shared({tile} + {place}, {name});")
            return
        with w.unrolled(f"for (int e = 0; e < {s.vector // piece}; ++e)"):
            if piece == 1:
                w.line(f"{tile}[{place}] = {name}[e];")
            else:
                w.line(f"{vector_type(operand, piece)} piece;")
                w.unrolled_line(f"for (int p = 0; p < {piece}; ++p) piece[p] = {name}[e * {piece} + p];")
                w.line(f"store_shared({tile} + {place}, piece);")


def array(count: int) -> str:
    return f"[{count}]" if count > 1 else ""


def array_at(count: int) -> str:
    return "[u]" if count > 1 else ""


def over(text: str, divisor: int) -> str:
    return f"{text} / {divisor}" if divisor > 1 else text


def times(factor: int) -> str:
    return f" * {factor}" if factor > 1 else ""
