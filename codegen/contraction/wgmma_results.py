"""The results of the Hopper kernels: the program on a consumer's sums, and how results leave a block."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property

from codegen.contraction.wgmma_layout import GROUP, GROUP_ROWS, STAGING, Layout, WgmmaSchedule
from codegen.contraction.wgmma_partials import WgmmaPartials
from codegen.contraction.wgmma_producer import tidy
from codegen.epilogue import Epilogue, Run, placed
from codegen.expr import Operand
from codegen.iteration import coordinates, extent, linear, long, unsigned
from codegen.kernel import Kernel
from codegen.naming import Names
from codegen.operands import OperandTiles
from codegen.spec import ContractionSpec

#: Where accesses would be shorter than so many bytes, it takes fewer of them if most have 16 aligned bytes and the rest
#: one element.
SHORT = 8


class ContractionResults:
    """Writes what a consumer does with the sums of a tile."""

    spec: ContractionSpec
    s: WgmmaSchedule
    parts: OperandTiles
    w: Kernel
    names: Names
    layout: Layout
    epilogue: Epilogue
    partials: WgmmaPartials
    #: C names of the buffers of results on their way out, and of the outputs' tensor maps
    staged: list[str]
    store_maps: list[str]
    #: the same of operands that TMA brings, by number
    operand_maps: dict[int, str]
    #: columns that a wgmma multiplies
    columns: int
    #: batches, tiles in all, and the C type of positions
    batch: int
    work: int
    t: str

    @property
    def register_type(self) -> str:
        """C type of the sums as wgmma leaves them."""
        return "int32" if self.spec.accumulate == "uint32" else "float"

    def publish(self) -> None:
        """Writes how the sums of a block are shown to the other blocks of its cluster."""
        w, s = self.w, self.s
        threads = s.groups * GROUP
        w.line("// Every block adds up a part of the columns of the tile; the ring is free for the exchange.")
        w.line(f"{self.register_type}* const exchange = reinterpret_cast<{self.register_type}*>(memory);")
        w.line(f"const int mine = threadIdx.x - {s.producers * GROUP};")
        if s.groups > 1:
            w.line(f"named_barrier_sync({s.groups + 1}, {threads});")
        w.unrolled_line(f"for (int i = 0; i < {self.columns // 2}; ++i) exchange[i * {threads} + mine] = sum[i];")
        w.line("cluster_sync();")

    def add_up(self) -> None:
        """Writes how a block adds up its part of the columns, in a fixed order."""
        w, s = self.w, self.s
        each, threads = s.part // 2, s.groups * GROUP
        products = self.spec.products
        w.line(f"{self.register_type} total[{each * products}] = {{}};")
        with w.unrolled(f"for (int q = 0; q < {s.split_k}; ++q)"):
            w.line(
                f"const {self.register_type}* const theirs = cluster_map(exchange, q) + rank * {each * threads} + mine;"
            )
            w.line("#pragma unroll")
            place = "i" if products == 1 else f"(i / {each} * {s.tile_n // 2} + i % {each})"
            w.line(f"for (int i = 0; i < {each * products}; ++i) total[i] += theirs[{place} * {threads}];")
        w.line()

    def pieces(self) -> AbstractContextManager[None]:
        """Opens the loop over a consumer's products of 64 rows."""
        return self.w.unrolled(f"for (int p = 0; p < {self.s.pieces}; ++p)", when=self.s.pieces > 1)

    @property
    def sum(self) -> str:
        """C name of the sums of 64 rows."""
        return "sum[p]" if self.s.pieces > 1 else "sum"

    @property
    def rows(self) -> str:
        """C expression of where those rows begin in the tile."""
        if self.s.pingpong:
            return f"p * {GROUP_ROWS}"
        return f"group * {GROUP_ROWS}" if self.s.groups > 1 else "0"

    def _row(self, position: str, clamp: bool) -> list[str]:
        """Writes the row m of a result; returns the C expressions of the coordinates of batch and row."""
        w, layout = self.w, self.layout
        position = f"m0 + {self.rows} + {position}" if self.s.pingpong else f"m0 + {position}"
        w.line(f"const {self.t} m = {f'min({position}, {self.parts.rows - 1})' if clamp else position};")
        batch = ["0"] * len(layout.batch)
        if self.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if size > 1 else "0" for d, size in enumerate(layout.batch)] if several else ["at.batch"]
        rows = ["m"]
        if len(layout.rows) > 1:
            rows = coordinates(w, self.t, "m_", "m", layout.rows)
        self._outside: list[str] = []
        if self.spec.results:
            known = [*zip(batch, layout.batch)], [*zip(rows, layout.rows)]
            rows, self._outside = placed(w, self.t, self.spec.results, *known)
        return [*batch, *rows]

    def _column(self, position: str, clamp: bool) -> str:
        """Writes the column n of a result, the first of two; returns its C name."""
        position = f"{self._n0} + {position} + lane % 4 * 2"
        last = self.parts.cols - (1 if self.parts.cols % 2 else 2)
        self.w.line(f"const {self.t} n = {f'min({position}, {last})' if clamp else position};")
        return "n"

    def _batch_coordinates(self) -> None:
        if self.batch > 1 and len(self.layout.batch) > 1:
            coordinates(self.w, "int", "b", "at.batch", self.layout.batch, long(self.layout.batch))

    @property
    def _n0(self) -> str:
        """The first column of the tile that a block writes."""
        return f"n0 + rank * {self.s.part}" if self.s.split_k > 1 else "n0"

    @property
    def _barrier(self) -> str:
        """The named barrier of a consumer's threads (0 is that of __syncthreads)."""
        return "group + 1" if self.s.groups > 1 else "1"

    def _sums(self, element: str) -> list[str]:
        """Returns the C expressions of the sums of a thread's element, one for each product."""
        name = "total" if self.s.split_k > 1 else self.sum
        texts = []
        for number in range(self.spec.products):
            start = f"{number * self.s.part // 2} + " if number else ""
            texts.append(f"{name}[{start}{element}]")
        return [f"uint32({text})" if self.spec.accumulate == "uint32" else text for text in texts]

    def begin_buffers(self) -> None:
        """Declares, before all tiles, the variable that says which buffer is next."""
        layout = self.layout
        if layout.operand_maps:
            if self.persistent:
                self.w.line("uint32 brought = 0;  // the phase in which a tile's operands come")
        elif layout.maps is not None or (layout.carried and not layout.by_warps):
            self.w.line("int buffer = 0;")

    def bring_operands(self) -> None:
        """Writes the TMA loads of a tile's part of operands as large as the results, before its products."""
        w, layout = self.w, self.layout
        if not layout.operand_maps:
            return
        self._batch_coordinates()
        size = GROUP_ROWS * layout.chunk * sum(layout.program.loads[n].dtype.itemsize for n in layout.operand_maps)
        w.line("// What the epilogue reads comes meanwhile, to where the results will be.")
        idle = f" && rank < {self.s.tile_n // self.s.part}" if self.s.part * self.s.split_k > self.s.tile_n else ""
        with w.block(f"if (t == 0{idle})"):
            if self.persistent:
                w.line("tma_wait_read<0>();  // the copies of the results before have read it")
            group = "group" if self.s.groups > 1 else "0"
            w.line(f"barrier_expect(shared.operands[{group}], {size * layout.chunks});")
            loop = f"for (int chunk = 0; chunk < {self.s.part // layout.chunk}; ++chunk)"
            with self.pieces(), w.unrolled(loop):
                where = self._box("chunk")
                for n, (k, _) in layout.operand_maps.items():
                    tile = f"shared.{self.staged[k]}[{group}][{self._static_buffer}]"
                    w.line(f"tma_load({tile}, {self.operand_maps[n]}, shared.operands[{group}], {where});")

    @property
    def _static_buffer(self) -> str:
        """C expression of the buffer of a chunk where every chunk of a tile has one."""
        chunks = self.s.part // self.layout.chunk
        return f"p * {chunks} + chunk" if self.s.pieces > 1 else "chunk"

    @property
    def persistent(self) -> bool:
        """Whether a block may have several tiles."""
        return self.s.split_k == 1 and (self.s.pingpong or self.work > self.s.blocks)

    def _box(self, chunk: str) -> str:
        """Returns the coordinates of a chunk of a consumer's results."""
        layout = self.layout
        batch: list[str] = []
        if self.batch > 1:
            several = len(layout.batch) > 1
            batch = [f"b{d}" if several else "at.batch" for d, size in enumerate(layout.batch) if size > 1]
        place = [f"{self._n0} + {chunk} * {layout.chunk}", f"m0 + {self.rows}".removesuffix(" + 0")]
        return ", ".join([*(reversed(place) if layout.turned else place), *reversed(batch)])

    def through_shared_memory(self) -> None:
        """Writes results through shared memory, a chunk of columns at a time: TMA copies them out, or threads do."""
        w, s, layout = self.w, self.s, self.layout
        brought = bool(layout.operand_maps)
        if not self.parts.reduction.skips and not brought:
            self._batch_coordinates()
        chunks = s.part // layout.chunk
        ragged_m, ragged_n = bool(self.parts.rows % s.tile_m), bool(self.parts.cols % s.tile_n)
        if brought:
            phase = "brought" if self.persistent else "0"
            w.line(f"barrier_wait(shared.operands[{'group' if s.groups > 1 else '0'}], {phase});")
            if self.persistent:
                w.line("brought ^= 1;")
        with self.pieces():
            self.partials.begin_tile()
            with w.unrolled(
                f"for (int chunk = 0; chunk < {chunks}; ++chunk{'' if layout.by_warps or brought else ', buffer ^= 1'})"
            ):
                if ragged_n:
                    w.line(f"if ({self._n0} + chunk * {layout.chunk} >= {self.parts.cols}) break;")
                if brought:
                    w.line(f"const int buffer = {self._static_buffer};")
                    if self.partials.rows:
                        w.line(f"named_barrier_sync({self._barrier}, {GROUP});  // what the warps left has been read")
                elif not layout.carried:  # else a barrier of the chunk in between tells that this buffer has been read
                    w.line(
                        f"if (t == 0) tma_wait_read<{STAGING - 1}>();  // the copies out of this buffer have read it"
                    )
                    w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
                elif self.partials.rows:
                    w.line(f"named_barrier_sync({self._barrier}, {GROUP});  // what the warps left has been read")
                elif layout.by_warps:
                    w.line("__syncwarp();  // the warp has carried out what the buffer held")
                    self._fetch()
                with w.unrolled(f"for (int j = 0; j < {layout.chunk}; j += 16)"):
                    self.partials.begin_columns()
                    values = [self.names.unique(op.name, "_v") for op in layout.stores]
                    for name, op in zip(values, layout.stores):
                        w.line(f"Vector<{op.dtype.ctype}, 2> {name}[4];")
                    with w.unrolled("for (int f = 0; f < 4; ++f)"):
                        position = self._row("row + f % 2 * 8", clamp=ragged_m)
                        if self._outside:
                            w.line(f"if ({' || '.join(self._outside)}) continue;")
                        position.append(self._column(f"chunk * {layout.chunk} + j + f / 2 * 8", clamp=ragged_n))
                        inside = f"min(n + e, {self.parts.cols - 1})"  # an extra result in the buffer does no harm
                        run = Run(2, len(layout.batch) + len(layout.rows), "e", self._missing, inside)
                        sums = self._sums(f"(chunk * {layout.chunk} + j) / 2 + f / 2 * 4 + f % 2 * 2 + e")
                        sinks = self.partials.sinks(f"chunk * {layout.chunk} + j", self._n0, ragged_m, ragged_n)
                        given = self._fetched_pairs()
                        self.epilogue.results(position, sums, run, [f"{v}[f]" for v in values], sinks, given)
                    self.partials.leave_columns()
                    for name, value in zip(self.staged, values):
                        tile = self._buffer(name)
                        if layout.turned:
                            w.line(f"store_fragments_turned<{GROUP_ROWS}>({tile}, t / 32 * 16, j, {value});")
                        else:
                            w.line(f"store_fragments<{layout.chunk}>({tile}, t / 32 * 16, j, {value});")
                if layout.carried:
                    if layout.by_warps:
                        w.line("__syncwarp();  // a warp carries out its own rows")
                    else:
                        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
                    for name, pointer, op in zip(self.staged, self.epilogue.pointers.stores, layout.stores):
                        self._carry(name, pointer, op)
                else:
                    self._copy_out(ragged_m)
                self.partials.finish_columns(self._n0, layout.chunk)
            self.partials.finish_tile(self._n0)

    def _buffer(self, name: str) -> str:
        """Returns the C expression of a consumer's staging buffer."""
        buffer = "" if self.layout.by_warps else "[buffer]"
        return f"&shared.{name}[{'group' if self.s.groups > 1 else '0'}]{buffer}[0][0]"

    @cached_property
    def _fetched(self) -> dict[int, int]:
        """Operands as large as the results whose rows begin anywhere, by number, and the output whose buffer each uses.

        That output has elements of the same type: results take the place of what was read.
        """
        found: dict[int, int] = {}
        for n, op in enumerate(self.layout.program.loads if self.layout.by_warps else ()):
            if op.strides[-1] != 1 or not any(op.strides[:-1]) or self._vector(op) * op.dtype.itemsize >= SHORT:
                continue
            alike = [k for k, out in enumerate(self.layout.stores) if out.dtype == op.dtype]
            fitting = [k for k in alike if k not in found.values()]
            found |= {n: fitting[0]} if fitting else {}
        return found

    def _fetch(self) -> None:
        """Writes the loads of a warp's rows of these operands to its buffers."""
        w, layout, unsigned_ = self.w, self.layout, unsigned(self.t)
        for n, k in self._fetched.items():
            op = layout.program.loads[n]
            lanes = layout.chunk * op.dtype.itemsize // 16
            w.line("#pragma unroll 2")
            with w.block(f"for (int i = lane; i < {GROUP_ROWS // 4 * lanes}; i += 32)"):
                w.line(f"const int r = t / 32 * 16 + i / {lanes};")
                coordinates = self._row(self._carried_row, clamp=bool(self.parts.rows % self.s.tile_m))
                w.line(f"const {self.t} n = {self._n0} + chunk * {layout.chunk};")
                if self._outside:
                    w.line(f"if ({' || '.join(self._outside)}) continue;")
                at = f"{unsigned_}({linear(list(zip([*coordinates, 'n'], op.strides)))})"
                size = f"{unsigned_}({extent(layout.space, op.strides)})"
                source = f"{self.epilogue.pointers.loads[n]}, {at}, {size}"
                w.line(f"fetch_row<{layout.chunk}>({self._buffer(self.staged[k])}, r, {source}, i % {lanes});")
        if self._fetched:
            w.line("__syncwarp();")

    def _fetched_pairs(self) -> dict[int, str]:
        """Writes the loads of a thread's pairs of what was fetched; returns their C names."""
        found = {}
        brought = {n: k for n, (k, _) in self.layout.operand_maps.items()}
        for n, k in (*self._fetched.items(), *brought.items()):
            found[n] = self.names.unique(self.layout.program.loads[n].name, "_v")
            tile = self._buffer(self.staged[k])
            place = "t / 32 * 16 + lane / 4 + f % 2 * 8, j + f / 2 * 8 + lane % 4 * 2"
            self.w.line(f"const auto {found[n]} = load_results<2, {self.layout.chunk}>({tile}, {place});")
        return found

    @property
    def _carried_row(self) -> str:
        """C expression of where row r of a consumer lies in the tile."""
        return "r" if self.s.pingpong or self.s.groups == 1 else f"{self.rows} + r"

    def _carry(self, name: str, pointer: str, op: Operand) -> None:
        """Writes results of a chunk from shared memory: neighbouring threads write neighbours in memory."""
        w, s, layout = self.w, self.s, self.layout
        wide, tall = (GROUP_ROWS, layout.chunk) if layout.turned else (layout.chunk, GROUP_ROWS)
        anywhere, own = self._anywhere(op), layout.by_warps
        vector = 16 // op.dtype.itemsize if anywhere else min(self._vector(op), wide)
        lanes = wide // vector
        w.line("#pragma unroll 4")
        if own:
            w.open(f"for (int i = lane; i < {tall // 4 * lanes}; i += 32)")
        else:
            w.open(f"for (int i = t; i < {tall * lanes}; i += {GROUP})")
        slow, fast = f"{'t / 32 * 16 + ' if own else ''}i / {lanes}", tidy(f"i % {lanes} * {vector}")
        r, c = (fast, slow) if layout.turned else (slow, fast)
        if anywhere:
            self._carry_anywhere("carry_row", r, f"i % {lanes}", name, pointer, op)
            w.close()
            with w.block(""):
                self._carry_anywhere("carry_end", "t / 32 * 16 + lane / 2", "lane % 2", name, pointer, op)
            return
        w.line(f"const int r = {r}, c = {c};")
        coordinates = self._row(self._carried_row, clamp=False)
        w.line(f"const {self.t} n = {self._n0} + chunk * {layout.chunk} + c;")
        outside = [f"m >= {self.parts.rows}"] if self.parts.rows % s.tile_m else []
        outside += [f"n >= {self.parts.cols}"] if self.parts.cols % s.tile_n else []
        if outside or self._outside:
            w.line(f"if ({' || '.join([*outside, *self._outside])}) continue;")
        to = f"{pointer} + {linear(list(zip([*coordinates, 'n'], op.strides)))}"
        place = "c, r" if layout.turned else "r, c"
        w.line(f"store({to}, load_results<{vector}, {wide}>({self._buffer(name)}, {place}));")
        w.close()

    def _carry_anywhere(self, function: str, r: str, part: str, name: str, pointer: str, op: Operand) -> None:
        """Writes a call of one of the functions of carry.cuh for row r of the consumer's, and a part of it."""
        w, chunk, rows, cols = self.w, self.layout.chunk, self.parts.rows, self.parts.cols
        w.line(f"const int r = {r};")
        coordinates = self._row(self._carried_row, clamp=False)
        w.line(f"const {self.t} n = {self._n0} + chunk * {chunk};")
        left = f"{cols} - n" if self.t == "int32" else f"int({cols} - n)"
        count = f"min({chunk}, {left})" if cols % self.s.tile_n else str(chunk)
        to = f"{pointer} + {linear(list(zip([*coordinates, 'n'], op.strides)))}"
        outside = [*([f"m >= {rows}"] if rows % self.s.tile_m else []), *self._outside]
        guard = f"if (!({' || '.join(outside)})) " if outside else ""
        w.line(f"{guard}{function}<{chunk}>({to}, {self._buffer(name)}, r, {count}, {part});")

    def _vector(self, op: Operand) -> int:
        """Returns how many elements every access to an operand can have at aligned addresses."""
        along = len(self.layout.batch) + len(self.layout.rows) - (1 if self.layout.turned else 0)
        size = self.layout.rows[-1] if self.layout.turned else self.parts.cols
        vector = 16 // op.dtype.itemsize
        while vector > 1 and (size % vector or not self.epilogue.wide(op, vector, along)):
            vector //= 2
        return vector

    def _anywhere(self, op: Operand) -> bool:
        """Tells whether rows of an output begin anywhere in memory, and are carried out as they lie there."""
        return self.layout.by_warps and self._vector(op) * op.dtype.itemsize < SHORT

    @property
    def carries_anywhere(self) -> bool:
        """Whether rows that begin anywhere are carried out or fetched."""
        return bool(self._fetched) or any(map(self._anywhere, self.layout.stores))

    def _copy_out(self, ragged_m: bool) -> None:
        """Writes how one thread has TMA copy out the results of a chunk."""
        w, s = self.w, self.s
        w.line("fence_async_shared();")
        w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
        rows = f"m0 + {self.rows}".removesuffix(" + 0")
        with w.block("if (t == 0)"):
            # A consumer whose rows lie outside commits an empty group: tma_wait_read counts groups.
            inside = f"if ({rows} < {self.parts.rows}) " if ragged_m and s.tile_m > GROUP_ROWS else ""
            where = self._box("chunk")
            for name, tensor_map in zip(self.staged, self.store_maps):
                group = "group" if s.groups > 1 else "0"
                w.line(f"{inside}tma_store({tensor_map}, shared.{name}[{group}][buffer], {where});")
            w.line("tma_commit();")

    @property
    def _missing(self) -> Callable[[str], str] | None:
        """The C condition that one of two columns does not exist; None where all exist."""
        return (lambda e: f"n + {e} >= {self.parts.cols}") if self.parts.cols % 2 else None

    def direct(self) -> None:
        """Writes results from registers: those of outputs that no tensor map describes."""
        if not self.parts.reduction.skips:
            self._batch_coordinates()
        with self.pieces():
            self.partials.begin_tile()
            if self.partials.rows:
                self._direct_by_columns()
            else:
                self._direct_by_rows()
            self.partials.finish_tile(self._n0)

    def _direct_by_rows(self) -> None:
        """Writes the two rows of a thread, one after the other."""
        w, s, layout = self.w, self.s, self.layout
        with w.unrolled("for (int i = 0; i < 2; ++i)"):
            coordinates = self._row("row + i * 8", clamp=False)
            outside = [*([f"m >= {self.parts.rows}"] if self.parts.rows % s.tile_m else []), *self._outside]
            if outside:
                w.line(f"if ({' || '.join(outside)}) continue;")
            with w.unrolled(f"for (int j = 0; j < {s.part}; j += 8)"):
                coordinates.append(self._column("j", clamp=False))
                if self.parts.cols % s.tile_n:
                    w.line(f"if (n >= {self.parts.cols}) continue;")
                run = Run(2, len(layout.batch) + len(layout.rows), "e", self._missing)
                sinks = self.partials.sinks("j", self._n0, False, False, row="i")
                self.epilogue.results(coordinates, self._sums("j / 2 + i * 2 + e"), run, sinks=sinks)

    def _direct_by_columns(self) -> None:
        """Writes the same, 16 columns at a time, where columns are reduced."""
        w, s, length = self.w, self.s, self.layout.chunk
        with w.unrolled(f"for (int chunk = 0; chunk < {s.part // length}; ++chunk)"):
            w.line(f"named_barrier_sync({self._barrier}, {GROUP});  // what the warps left has been read")
            with w.unrolled(f"for (int j = 0; j < {length}; j += 16)"):
                self.partials.begin_columns()
                with w.unrolled("for (int f = 0; f < 4; ++f)"):
                    column = f"chunk * {length} + j"
                    position = self._row("row + f % 2 * 8", clamp=False)
                    position.append(self._column(f"{column} + f / 2 * 8", clamp=False))
                    outside = [f"m >= {self.parts.rows}"] if self.parts.rows % s.tile_m else []
                    outside += [f"n >= {self.parts.cols}"] if self.parts.cols % s.tile_n else []
                    if outside:
                        w.line(f"if ({' || '.join(outside)}) continue;")
                    run = Run(2, len(position) - 1, "e", self._missing)
                    sums = self._sums(f"({column}) / 2 + f / 2 * 4 + f % 2 * 2 + e")
                    sinks = self.partials.sinks(column, self._n0, False, False)
                    self.epilogue.results(position, sums, run, sinks=sinks)
                self.partials.leave_columns()
            w.line(f"named_barrier_sync({self._barrier}, {GROUP});")
            self.partials.finish_columns(self._n0, length)
