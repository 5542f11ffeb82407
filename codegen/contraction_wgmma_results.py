"""The results of the Hopper kernels: the program on a consumer's sums, and the ways out of a block."""

from __future__ import annotations

from collections.abc import Callable

from codegen.contraction_wgmma_layout import GROUP, GROUP_ROWS, STAGING, Layout, WgmmaSchedule
from codegen.contraction_wgmma_partials import WgmmaPartials
from codegen.contraction_wgmma_producer import tidy
from codegen.epilogue import Epilogue, Run, placed
from codegen.expr import Operand
from codegen.iteration import coordinate, linear
from codegen.naming import Names, Writer
from codegen.spec import ContractionSpec
from codegen.tiles import Factors

#: Bytes: of shorter accesses than these fewer are needed if most have 16 aligned bytes and the rest one element.
SHORT = 8


class Results:
    """Writes what a consumer does with the sums of a tile."""

    spec: ContractionSpec
    s: WgmmaSchedule
    parts: Factors
    w: Writer
    names: Names
    layout: Layout
    epilogue: Epilogue
    partials: WgmmaPartials
    #: C names of the buffers of results on their way out, and of the outputs' tensor maps
    staged: list[str]
    store_maps: list[str]
    #: columns that a wgmma multiplies
    columns: int
    #: batches, and the C type of positions
    batch: int
    t: str

    @property
    def register_type(self) -> str:
        """C type of the sums as wgmma has them."""
        return "int32" if self.spec.accumulate == "uint32" else "float"

    def publish(self) -> None:
        """Shows the sums of a block to the others of its cluster."""
        w, s = self.w, self.s
        threads = s.groups * GROUP
        w.line("// Every block adds up a part of the columns of the tile; the ring is free for the exchange.")
        w.line(f"{self.register_type}* const exchange = reinterpret_cast<{self.register_type}*>(memory);")
        w.line(f"const int mine = threadIdx.x - {s.producers * GROUP};")
        if s.groups > 1:
            w.line(f"named_barrier_sync({s.groups + 1}, {threads});")
        w.line("#pragma unroll")
        w.line(f"for (int i = 0; i < {self.columns // 2}; ++i) exchange[i * {threads} + mine] = sum[i];")
        w.line("cluster_sync();")

    def add_up(self) -> None:
        """A block adds up its part of the columns, always in the same order."""
        w, s = self.w, self.s
        each, threads = s.part // 2, s.groups * GROUP
        products = self.spec.products
        w.line(f"{self.register_type} total[{each * products}] = {{}};")
        w.line("#pragma unroll")
        w.open(f"for (int q = 0; q < {s.split}; ++q)")
        w.line(f"const {self.register_type}* const theirs = cluster_map(exchange, q) + rank * {each * threads} + mine;")
        w.line("#pragma unroll")
        place = "i" if products == 1 else f"(i / {each} * {s.cols // 2} + i % {each})"
        w.line(f"for (int i = 0; i < {each * products}; ++i) total[i] += theirs[{place} * {threads}];")
        w.close()
        w.line()

    def pieces(self) -> None:
        """Opens the loop over a consumer's products of 64 rows."""
        if self.s.pieces > 1:
            self.w.line("#pragma unroll")
            self.w.open(f"for (int p = 0; p < {self.s.pieces}; ++p)")

    def end_pieces(self) -> None:
        if self.s.pieces > 1:
            self.w.close()

    @property
    def sum(self) -> str:
        """The sums of 64 rows."""
        return "sum[p]" if self.s.pieces > 1 else "sum"

    @property
    def rows(self) -> str:
        """Where those rows begin in the tile."""
        if self.s.turns:
            return f"p * {GROUP_ROWS}"
        return f"group * {GROUP_ROWS}" if self.s.groups > 1 else "0"

    def _row(self, position: str, clamp: bool) -> list[str]:
        """Writes the row m of a result; returns the C expressions of its coordinates, and of the batch's."""
        w, layout = self.w, self.layout
        position = f"m0 + {self.rows} + {position}" if self.s.turns else f"m0 + {position}"
        w.line(f"const {self.t} m = {f'min({position}, {self.parts.rows - 1})' if clamp else position};")
        batch = ["0"] * len(layout.batch)
        if self.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if size > 1 else "0" for d, size in enumerate(layout.batch)] if several else ["at.batch"]
        rows = ["m"]
        if len(layout.rows) > 1:
            rows = [f"m_{d}" for d in range(len(layout.rows))]
            for d, name in enumerate(rows):
                w.line(f"const {self.t} {name} = {coordinate('m', layout.rows, d)};")
        self._outside: list[str] = []
        if self.spec.results:
            known = [*zip(batch, layout.batch)], [*zip(rows, layout.rows)]
            rows, self._outside = placed(w, self.t, self.spec.results, *known)
        return [*batch, *rows]

    def _column(self, position: str, clamp: bool) -> str:
        """Writes the column n of a result, the first of two; returns its name."""
        position = f"{self._n0} + {position} + lane % 4 * 2"
        last = self.parts.cols - (1 if self.parts.cols % 2 else 2)
        self.w.line(f"const {self.t} n = {f'min({position}, {last})' if clamp else position};")
        return "n"

    def _batch_coordinates(self) -> None:
        if self.batch > 1 and len(self.layout.batch) > 1:
            for d, size in enumerate(self.layout.batch):
                if size > 1:
                    self.w.line(f"const int b{d} = {coordinate('at.batch', self.layout.batch, d)};")

    @property
    def _n0(self) -> str:
        """The first column of the tile that a block writes."""
        return f"n0 + rank * {self.s.part}" if self.s.split > 1 else "n0"

    @property
    def _barrier(self) -> str:
        """The named barrier of a consumer's threads (0 is that of __syncthreads)."""
        return "group + 1" if self.s.groups > 1 else "1"

    def _sums(self, element: str) -> list[str]:
        """The sums of an element of a thread's, one a product."""
        name = "total" if self.s.split > 1 else self.sum
        texts = []
        for number in range(self.spec.products):
            start = f"{number * self.s.part // 2} + " if number else ""
            texts.append(f"{name}[{start}{element}]")
        return [f"uint32({text})" if self.spec.accumulate == "uint32" else text for text in texts]

    def through_shared_memory(self) -> None:
        """Results through shared memory, a chunk of columns at a time: TMA copies it out, or the threads carry it."""
        w, s, layout = self.w, self.s, self.layout
        if not self.parts.reduction.skips:
            self._batch_coordinates()
        chunks = s.part // layout.chunk
        ragged_m, ragged_n = bool(self.parts.rows % s.rows), bool(self.parts.cols % s.cols)
        self.pieces()
        self.partials.begin_tile()
        w.line("#pragma unroll")
        w.open(f"for (int chunk = 0; chunk < {chunks}; ++chunk, buffer ^= 1)")
        if ragged_n:
            w.line(f"if ({self._n0} + chunk * {layout.chunk} >= {self.parts.cols}) break;")
        if not layout.carried:  # else the barrier of the chunk between tells that this buffer has been read
            w.line(f"if (t == 0) tma_wait_read<{STAGING - 1}>();  // the copies out of this buffer have read it")
            w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        elif self.partials.rows:
            w.line(f"named_barrier_sync({self._barrier}, {GROUP});  // what the warps left has been read")
        group = "group" if s.groups > 1 else "0"
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {layout.chunk}; j += 16)")
        self.partials.begin_columns()
        values = [self.names.unique(op.name, "_v") for op in layout.stores]
        for name, op in zip(values, layout.stores):
            w.line(f"Vector<{op.dtype.ctype}, 2> {name}[4];")
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 4; ++f)")
        position = self._row("row + f % 2 * 8", clamp=ragged_m)
        if self._outside:
            w.line(f"if ({' || '.join(self._outside)}) continue;")
        position.append(self._column(f"chunk * {layout.chunk} + j + f / 2 * 8", clamp=ragged_n))
        reads = any(op.strides[-1] for op in layout.program.loads)  # else a result too many does no harm in the buffer
        run = Run(2, len(layout.batch) + len(layout.rows), "e", self._missing if reads else None)
        sums = self._sums(f"(chunk * {layout.chunk} + j) / 2 + f / 2 * 4 + f % 2 * 2 + e")
        sinks = self.partials.sinks(f"chunk * {layout.chunk} + j", self._n0, ragged_m, ragged_n)
        self.epilogue.results(position, sums, run, staged=[f"{v}[f]" for v in values], sinks=sinks)
        w.close()
        self.partials.leave_columns()
        for name, value in zip(self.staged, values):
            tile = f"&shared.{name}[{group}][buffer][0][0]"
            if layout.turned:
                w.line(f"store_fragments_turned<{GROUP_ROWS}>({tile}, t / 32 * 16, j, {value});")
            else:
                w.line(f"store_fragments<{layout.chunk}>({tile}, t / 32 * 16, j, {value});")
        w.close()
        if layout.carried:
            w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
            for name, pointer, op in zip(self.staged, self.epilogue.pointers.stores, layout.stores):
                self._carry(name, pointer, op, group)
        else:
            self._copy_out(group, ragged_m)
        self.partials.finish_columns(self._n0, layout.chunk)
        w.close()
        self.partials.finish_tile(self._n0)
        self.end_pieces()

    def _carry(self, name: str, pointer: str, op: Operand, group: str) -> None:
        """Results of a chunk from shared memory: neighbouring threads write what are neighbours in memory."""
        vector = self._carried_vector(op)
        tile = f"&shared.{name}[{group}][buffer][0][0]"
        if vector:
            self._carry_vectors(tile, pointer, op, vector)
        elif self.layout.turned:
            self._carry_columns(tile, pointer, op)
        else:
            self._carry_rows(tile, pointer, op)

    def _carry_vectors(self, tile: str, pointer: str, op: Operand, vector: int) -> None:
        """Rows (columns) that begin at multiples of a vector, and have as many elements."""
        w, s, layout = self.w, self.s, self.layout
        wide, tall = (GROUP_ROWS, layout.chunk) if layout.turned else (layout.chunk, GROUP_ROWS)
        vector = min(vector, wide)
        w.line("#pragma unroll 4")
        w.open(f"for (int i = t; i < {wide * tall // vector}; i += {GROUP})")
        slow, fast = f"i / {wide // vector}", tidy(f"i % {wide // vector} * {vector}")
        r, c = (fast, slow) if layout.turned else (slow, fast)
        w.line(f"const int r = {r}, c = {c};")
        coordinates = self._carried_row()
        w.line(f"const {self.t} n = {self._n0} + chunk * {layout.chunk} + c;")
        outside = [f"m >= {self.parts.rows}"] if self.parts.rows % s.rows else []
        outside += [f"n >= {self.parts.cols}"] if self.parts.cols % s.cols else []
        if outside or self._outside:
            w.line(f"if ({' || '.join([*outside, *self._outside])}) continue;")
        place = "c, r" if layout.turned else "r, c"
        offset = linear(list(zip([*coordinates, "n"], op.strides)))
        w.line(f"store({pointer} + {offset}, load_results<{vector}, {wide}>({tile}, {place}));")
        w.close()

    def _carry_rows(self, tile: str, pointer: str, op: Operand) -> None:
        """Rows that begin anywhere."""
        w, s, chunk = self.w, self.s, self.layout.chunk
        lanes = chunk * op.dtype.itemsize // 16
        w.line("#pragma unroll 2")
        w.open(f"for (int i = t; i < {lanes * GROUP_ROWS}; i += {GROUP})")
        w.line(f"const int r = i / {lanes};" if lanes > 1 else "const int r = i;")
        w.line(f"const {self.t} n = {self._n0} + chunk * {chunk};")
        coordinates = self._carried_row()
        outside = [f"m >= {self.parts.rows}"] if self.parts.rows % s.rows else []
        if outside or self._outside:
            w.line(f"if ({' || '.join([*outside, *self._outside])}) continue;")
        count = str(chunk)
        if self.parts.cols % s.cols:
            count = f"min({chunk}, {self._count(f'{self.parts.cols} - n')})"
        to = f"{pointer} + {linear(list(zip([*coordinates, 'n'], op.strides)))}"
        w.line(f"carry_row<{chunk}>({to}, {tile}, r, 0, {count}, {f'i % {lanes}' if lanes > 1 else '0'});")
        w.close()

    def _carry_columns(self, tile: str, pointer: str, op: Operand) -> None:
        """Columns of results that are contiguous along rows: as many at a time as lie in one image."""
        w, s, layout = self.w, self.s, self.layout
        lanes = GROUP_ROWS * op.dtype.itemsize // 16
        w.open(f"for (int i = t; i < {lanes * layout.chunk}; i += {GROUP})")
        w.line(f"const int c = i / {lanes};")
        w.line(f"const {self.t} n = {self._n0} + chunk * {layout.chunk} + c;")
        if self.parts.cols % s.cols:
            w.line(f"if (n >= {self.parts.cols}) continue;")
        w.open(f"for (int r = 0, count; r < {GROUP_ROWS}; r += count)")
        coordinates = self._carried_row()
        if self.parts.rows % s.rows:
            w.line(f"if (m >= {self.parts.rows}) break;")
        left = self._count(f"{layout.rows[-1]} - {coordinates[-1]}")
        w.line(f"count = min({GROUP_ROWS} - r, {left});")
        offset = linear(list(zip([*coordinates, "n"], op.strides)))
        w.line(f"carry_row<{GROUP_ROWS}>({pointer} + {offset}, {tile}, c, r, count, i % {lanes});")
        w.close()
        w.close()

    def _carried_row(self) -> list[str]:
        """Writes row r of a consumer's; returns its coordinates."""
        return self._row("r" if self.s.turns or self.s.groups == 1 else f"{self.rows} + r", clamp=False)

    def _carried_vector(self, op: Operand) -> int:
        """Results that every access to an output can have at aligned addresses; 0 if they would be short."""
        along = len(self.layout.batch) + len(self.layout.rows) - (1 if self.layout.turned else 0)
        size = self.layout.rows[-1] if self.layout.turned else self.parts.cols
        vector = 16 // op.dtype.itemsize
        while vector > 1 and (size % vector or not self.epilogue.wide(op, vector, along)):
            vector //= 2
        return vector if vector * op.dtype.itemsize >= SHORT else 0

    @property
    def carries_anywhere(self) -> bool:
        """Whether threads carry results to rows that begin anywhere."""
        return self.layout.carried and not all(map(self._carried_vector, self.layout.stores))

    def _count(self, text: str) -> str:
        """A number of results as an int."""
        return text if self.t == "int32" else f"int({text})"

    def _copy_out(self, group: str, ragged_m: bool) -> None:
        """One thread tells the copy engine to take the results of a chunk."""
        w, s, layout = self.w, self.s, self.layout
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        rows = f"m0 + {self.rows}".removesuffix(" + 0")
        w.open("if (t == 0)")
        # A consumer whose rows lie outside commits an empty group: tma_wait_read counts groups.
        inside = f"if ({rows} < {self.parts.rows}) " if ragged_m and s.rows > GROUP_ROWS else ""
        batch: list[str] = []
        if self.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if several else "at.batch" for d, size in enumerate(layout.batch) if size > 1]
        place = [f"{self._n0} + chunk * {layout.chunk}", rows]
        where = ", ".join([*(reversed(place) if layout.turned else place), *reversed(batch)])
        for name, tensor_map in zip(self.staged, self.store_maps):
            w.line(f"{inside}tma_store({tensor_map}, shared.{name}[{group}][buffer], {where});")
        w.line("tma_commit();")
        w.close()

    @property
    def _missing(self) -> Callable[[str], str] | None:
        """Whether one of two columns does not exist."""
        return (lambda e: f"n + {e} >= {self.parts.cols}") if self.parts.cols % 2 else None

    def direct(self) -> None:
        """Results from registers: outputs that no tensor map describes."""
        w, s, layout = self.w, self.s, self.layout
        if not self.parts.reduction.skips:
            self._batch_coordinates()
        ragged_m, ragged_n = bool(self.parts.rows % s.rows), bool(self.parts.cols % s.cols)
        self.pieces()
        self.partials.begin_tile()
        if self.partials.rows:
            self.direct_by_columns()
            return
        w.line("#pragma unroll")
        w.open("for (int i = 0; i < 2; ++i)")
        coordinates = self._row("row + i * 8", clamp=False)
        outside = [*([f"m >= {self.parts.rows}"] if ragged_m else []), *self._outside]
        if outside:
            w.line(f"if ({' || '.join(outside)}) continue;")
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {s.part}; j += 8)")
        coordinates.append(self._column("j", clamp=False))
        if ragged_n:
            w.line(f"if (n >= {self.parts.cols}) continue;")
        run = Run(2, len(layout.batch) + len(layout.rows), "e", self._missing)
        sinks = self.partials.sinks("j", self._n0, False, False, row="i")
        self.epilogue.results(coordinates, self._sums("j / 2 + i * 2 + e"), run, sinks=sinks)
        w.close()
        w.close()
        self.partials.finish_tile(self._n0)
        self.end_pieces()

    def direct_by_columns(self) -> None:
        """The same, 16 columns at a time: columns are reduced."""
        w, s, length = self.w, self.s, self.layout.chunk
        w.line("#pragma unroll")
        w.open(f"for (int chunk = 0; chunk < {s.part // length}; ++chunk)")
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});  // what the warps left has been read")
        w.line("#pragma unroll")
        w.open(f"for (int j = 0; j < {length}; j += 16)")
        self.partials.begin_columns()
        w.line("#pragma unroll")
        w.open("for (int f = 0; f < 4; ++f)")
        column = f"chunk * {length} + j"
        position = self._row("row + f % 2 * 8", clamp=False)
        position.append(self._column(f"{column} + f / 2 * 8", clamp=False))
        outside = [f"m >= {self.parts.rows}"] if self.parts.rows % s.rows else []
        outside += [f"n >= {self.parts.cols}"] if self.parts.cols % s.cols else []
        if outside:
            w.line(f"if ({' || '.join(outside)}) continue;")
        run = Run(2, len(position) - 1, "e", self._missing)
        sums = self._sums(f"({column}) / 2 + f / 2 * 4 + f % 2 * 2 + e")
        self.epilogue.results(position, sums, run, sinks=self.partials.sinks(column, self._n0, False, False))
        w.close()
        self.partials.leave_columns()
        w.close()
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        self.partials.finish_columns(self._n0, length)
        w.close()
        self.partials.finish_tile(self._n0)
        self.end_pieces()
