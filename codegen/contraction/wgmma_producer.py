"""The producer of the Hopper kernels: what fills the ring of stages with tiles of both operands, and from where."""

from __future__ import annotations

from math import prod

from codegen.contraction.wgmma_layout import GROUP, PIECES, Layout, WgmmaSchedule, brought, panel_size, round_up
from codegen.epilogue import Epilogue
from codegen.iteration import coordinate, coordinates, linear, long
from codegen.kernel import Kernel
from codegen.operands import ROW_BYTES, Brought, Gathered, MappedOperand, OperandTiles
from codegen.spec import ContractionSpec
from codegen.tile_loader import TileLoader

#: Stages that are in flight while one that was gathered is rounded, unless the ring is shorter.
LATE = 2


class Producer:
    """Writes the loop over a block's tiles, and the producer."""

    spec: ContractionSpec
    s: WgmmaSchedule
    parts: OperandTiles
    w: Kernel
    #: C names of operand A, and of the tensor maps of the first and the operands B
    a: str
    a_map: str
    b_maps: list[str]
    itemsize: int
    #: types in which the operands are multiplied
    types: tuple[str, str]
    layout: Layout
    epilogue: Epilogue
    #: what fills the tiles of each operand; None for those that TMA brings
    loaders: tuple[TileLoader | None, TileLoader | None]
    #: for an operand A that the consumers compute: the tiles brought, their place in a stage, and their tensor maps
    brought: list[tuple[Brought, str, str]]
    #: tiles along rows and columns, batches, and tiles in all
    tiles_m: int
    tiles_n: int
    batch: int
    work: int
    #: C type of positions
    t: str

    def tiles(self, consumer: bool = False) -> None:
        """Opens the loop over a block's tiles, or those of one of its consumers, and writes where each is."""
        w, s = self.w, self.s
        if s.split_k > 1:
            w.line(f"const int tile = blockIdx.x / {s.split_k};")
        elif consumer and s.pingpong:
            every, stages = "tile += 2 * gridDim.x", f"stage += {self.parts.reduction.stages}"
            w.line(f"if (group == 1) {stages};  // the stages of the other's first tile")
            w.open(f"for (int tile = blockIdx.x + group * gridDim.x; tile < {self.work}; {every}, {stages})")
        elif s.pingpong or self.work > s.blocks:
            w.open(f"for (int tile = blockIdx.x; tile < {self.work}; tile += gridDim.x)")
        else:
            w.line("const int tile = blockIdx.x;")
        w.line(f"const Tile at = tile_at<{self.tiles_m}, {self.tiles_n}, {s.raster_group}>(tile);")
        w.line(f"const int m0 = at.row * {s.tile_m}, n0 = at.col * {s.tile_n};")

    def phase_range(self) -> tuple[str, str]:
        """Returns the first stage of a tile whose batch is a phase, and the one behind its last; writes what they
        depend on.
        """
        w, k = self.w, self.parts.reduction
        values = self.batch_values()
        counts = []
        for d, (size, skip) in enumerate(zip(k.taps, k.skips)):
            if skip == "0":
                counts.append(str(size))
            else:
                w.line(f"const int skip{d} = {skip.format(**values)};  // first taps that the phase does not have")
                counts.append(f"({size} - skip{d})")
        chunks = [str(k.chunks)] if k.chunks > 1 else []
        w.line(f"const int last = {' * '.join([*(c for c in counts if c != '1'), *chunks]) or '1'};")
        return "0", "last"

    def batch_values(self) -> dict[str, str]:
        """Returns the C expressions of a tile's batch coordinates, by name."""
        return {
            f"b{d}": "0" if extent_ == 1 else "at.batch" if self.batch == extent_ else f"b{d}"
            for d, extent_ in enumerate(self.parts.batch)
        }

    def end_tiles(self) -> None:
        if self.s.split_k == 1 and (self.s.pingpong or self.work > self.s.blocks):
            self.w.close()

    def stage_range(self, stages: int) -> tuple[str, str]:
        """Returns the first stage of the reduction that a block has, and the one behind its last."""
        if self.s.split_k == 1:
            return "0", str(stages)
        self.w.line("const int rank = cluster_rank();")
        split_k = self.s.split_k
        self.w.line(f"const int first = rank * {stages} / {split_k}, last = (rank + 1) * {stages} / {split_k};")
        return "first", "last"

    @property
    def _first_rows(self) -> int:
        """Rows of operand A that TMA brings to a stage."""
        return brought(self.parts.a, self.s.tile_m, self.parts.rows)

    @property
    def _second_cols(self) -> int:
        """Columns of all operands B that TMA brings to a stage."""
        return brought(self.parts.b, self.s.tile_n, self.parts.cols) * len(self.b_maps)

    def copying_producer(self, stages: int) -> None:
        w, s = self.w, self.s
        k = self.parts.reduction
        w.line(f"registers_decrease<{s.registers[0]}>();")
        with w.block("if (threadIdx.x == 0)"):
            w.line(f"Ring<{s.stages}> stage;")
            first, last = self.stage_range(stages)
            self.tiles()
            if self.batch > 1 and len(self.parts.batch) > 1:
                coordinates(w, "int", "b", "at.batch", self.parts.batch, long(self.parts.batch))
            if k.skips:
                first, last = self.phase_range()
            operand_a = self.parts.a
            sides = [operand_a] if isinstance(operand_a, MappedOperand) else [b.side for b, *_ in self.brought]
            if any(side.im2col and side.along_k for side in sides):
                coordinates(w, "int", "m_", "m0", self.spec.m)
            with w.block(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
                w.line("Barrier& full = shared.full[stage.index];")
                w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
                first_bytes = sum(b.bytes(s.tile_m) for b, *_ in self.brought) or ROW_BYTES * self._first_rows
                w.line(f"barrier_expect(full, {first_bytes + ROW_BYTES * self._second_cols});")
                with w.unrolled(f"for (int u = 0; u < {k.per_stage}; ++u)", when=k.per_stage > 1):
                    if k.per_stage > 1:
                        w.line(f"const int item = k * {k.per_stage} + u;")
                    self._walk("item" if k.per_stage > 1 else "k")
                    if isinstance(operand_a, MappedOperand):
                        coordinates(w, "int", "p", "c", operand_a.pixels)
                        self._load(operand_a, "a", self.a_map, "m0", s.tile_m)
                    for b, member, tensor_map in self.brought:
                        several = b.panels > 1
                        with w.unrolled(f"for (int u = 0; u < {b.panels}; ++u)", when=several):
                            self._load(b.side, member, tensor_map, "m0", s.tile_m, part=b.panel if several else 0)
                    self._load_seconds()
            self.end_tiles()

    def gathering_producer(self, a: Gathered, stages: int) -> None:
        """Writes a producer whose threads copy 16 bytes at a time, each the same piece of some rows of the tile."""
        w, s, image = self.w, self.s, a.image
        rank, t = len(image.sizes), "int32"
        step = s.producers * GROUP // PIECES
        count = s.tile_m // step
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.line("const int t = threadIdx.x;")
        w.line(f"const int piece = t % {PIECES}, row = t / {PIECES};  // of its copies: rows {step} apart")
        w.line(f"Ring<{s.stages}> stage;")
        late = min(LATE, s.stages - 2)  # consumers free a stage when they have the next one
        if self._rounds:
            w.line(f"Ring<{s.stages}> landed;  // the stage whose copies are waited for, to be rounded: {late} behind")
            w.line("int late = 0;")
        self.tiles()
        w.line(f"{t} base[{count}];  // of a row's window")
        w.line(f"int16 {', '.join(f'o{d}[{count}]' for d in range(rank))};")
        with w.unrolled(f"for (int i = 0; i < {count}; ++i)"):
            w.line(f"const {t} m = m0 + row + i * {step};")
            for d in range(rank):
                position = coordinate("m", a.rows, d + 1)
                position = tidy(
                    f"{position if ' ' not in position else f'({position})'} * {image.stride[d]} - {image.before[d]}"
                )
                if d == 0 and self.parts.rows % s.tile_m:
                    position = f"m < {self.parts.rows} ? {position} : -32768"
                w.line(f"o{d}[i] = {position};")
            batch = [("at.batch", a.steps[1])] if self.batch > 1 else []
            terms = [
                (coordinate("m", a.rows, 0), a.steps[0]),
                *batch,
                *((f"o{d}[i]", image.steps[d]) for d in range(rank)),
            ]
            w.line(f"base[i] = {linear(terms)};")
        with w.block(f"for (int k = 0; k < {stages}; ++k, ++stage)"):
            w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
            with w.block("if (t == 0)"):
                w.line("Barrier& full = shared.full[stage.index];")
                w.line(f"barrier_expect(full, {ROW_BYTES * self._second_cols});")
                w.line(f"const int c = k * {self.parts.reduction.panel};")
                self._load_seconds()
            each = 16 // self.itemsize
            w.line(f"const int k0 = k * {self.parts.reduction.panel} + piece * {each};")
            sizes = (*a.taps, a.channels)
            coordinates(w, "int", "t", "k0", sizes, long(a.taps))
            taps = [(f"t{d}" if size > 1 else "0", image.dilation[d]) for d, size in enumerate(a.taps)]
            channel = coordinate("k0", sizes, rank)
            reach = [(name, dilation * image.steps[d]) for d, (name, dilation) in enumerate(taps)]
            w.line(f"const {t} tap = {linear([*reach, (channel, 1)])};")
            with w.unrolled(f"for (int i = 0; i < {count}; ++i)"):
                conditions = [
                    f"uint32({linear([(f'o{d}[i]', 1), tap])}) < {size}"
                    for d, (size, tap) in enumerate(zip(image.sizes, taps))
                ]
                if self.parts.reduction.channels % self.parts.reduction.panel:
                    conditions.append(f"k0 < {self.parts.reduction.channels}")
                w.line(f"const bool inside = {' && '.join(conditions)};")
                w.line(f"const int at = swizzle<128>((row + i * {step}) * 128 + piece * 16);")
                tile = "reinterpret_cast<unsigned char*>(shared.a[stage.index]) + at"
                # Windows that overlap are copied more than once: they come from the L1 cache.
                overlap = any(
                    size * dilation > step for size, dilation, step in zip(a.taps, image.dilation, image.stride)
                )
                copy = "copy_async_cached" if overlap else "copy_async<16>"
                w.line(f"{copy}({tile},")
                w.line(f"{' ' * len(copy)} {self.a} + (base[i] + tap), inside ? 16 : 0);")
            if not self._rounds:
                w.line("copy_async_arrive(shared.full[stage.index]);")
            else:
                w.line("copy_async_commit();")
                with w.block(f"if (++late > {late})"):
                    w.line(f"copy_async_wait<{late}>();")
                    self._round_landed(count, step)
        self.end_tiles()
        if self._rounds:
            w.line("copy_async_wait<0>();")
            with w.block("while (late > 0)"):
                self._round_landed(count, step)

    @property
    def _rounds(self) -> bool:
        """Whether gathered elements are rounded to tf32: asynchronous copies do not round, and tensor cores
        truncate.
        """
        return self.types[0] == "tf32"

    def _round_landed(self, count: int, step: int) -> None:
        """Writes how a thread rounds what it has copied of a stage, and hands the stage over."""
        w = self.w
        with w.unrolled(f"for (int i = 0; i < {count}; ++i)"):
            w.line(f"const int at = swizzle<128>((row + i * {step}) * 128 + piece * 16);")
            w.line("round_to_tf32(reinterpret_cast<unsigned char*>(shared.a[landed.index]) + at);")
        w.line("barrier_arrive(shared.full[landed.index]);")
        w.line("++landed;")
        w.line("--late;")

    def filling_producer(self, stages: int) -> None:
        """Writes a producer whose threads fill computed or converted tiles; one of them has TMA bring the others."""
        w, s = self.w, self.s
        loaders = [x for x in self.loaders if x is not None]
        w.line(f"registers_decrease<{s.registers[0]}>();")
        w.line("const int t = threadIdx.x;")
        for loader in loaders:
            loader.prologue.scalars()
        w.line(f"Ring<{s.stages}> stage;")
        first, last = self.stage_range(stages)
        self.tiles()
        if self.batch > 1:
            w.line("const int batch = at.batch;")
            if len(self.parts.batch) > 1 and len(loaders) == 1:
                coordinates(w, "int", "b", "batch", self.parts.batch)
        if isinstance(self.parts.a, MappedOperand) and self.parts.a.im2col:
            coordinates(w, "int", "m_", "m0", self.spec.m)
        for loader in loaders:
            loader.prepare()
        w.line()
        for loader in loaders:
            loader.registers()
        for loader in loaders:
            loader.fetch(first)
        with w.block(f"for (int k = {first}; k < {last}; ++k, ++stage)"):
            w.line("Barrier& full = shared.full[stage.index];")
            w.line("barrier_wait(shared.empty[stage.index], stage.parity ^ 1);")
            rows = self._first_rows if isinstance(self.parts.a, MappedOperand) else 0
            cols = self._second_cols if isinstance(self.parts.b, MappedOperand) else 0
            if rows or cols:
                with w.block("if (t == 0)"):
                    w.line(f"barrier_expect(full, {ROW_BYTES * (rows + cols)});")
                    self._walk("k")
                    if isinstance(self.parts.a, MappedOperand):
                        self._load(self.parts.a, "a", self.a_map, "m0", s.tile_m)
                    if cols:
                        self._load_seconds()
            # After the last stage it is brought once more: this costs a few loads, but saves a branch among them.
            w.line(f"const int next = min(k + 1, {f'{last} - 1' if s.split_k > 1 else stages - 1});")
            for loader in loaders:
                p = loader.label
                w.line(f"unsigned char* const {p}_tile = reinterpret_cast<unsigned char*>(shared.{p}[stage.index]);")
                loader.renew("next")
            w.line("fence_async_shared();  // wgmma reads what ordinary stores wrote")
            w.line("__syncwarp();")
            w.line("if (t % 32 == 0) barrier_arrive(full);")
        self.end_tiles()

    def _walk(self, item: str) -> None:
        """Writes the channel and the taps of panel number ``item``."""
        w, k = self.w, self.parts.reduction
        sizes = (*k.taps, k.chunks)
        if k.skips:
            chunk = self._walk_phase(item)
        else:
            coordinates(w, "int", "t", item, sizes, long(k.taps))
            chunk = coordinate(item, sizes, len(sizes) - 1)
        channel = f"{chunk} * {k.panel}" if k.chunks > 1 else "0"
        if k.panels % k.per_stage:
            # Past the last panel both operands are read beyond their channels, where they are zero.
            channel = f"{item} < {k.panels} ? {channel} : {round_up(k.channels, 16 // self.itemsize)}"
        if k.step:
            channel = f"at.batch * {k.step} + {channel}"
        w.line(f"const int c = {channel};")

    def _walk_phase(self, item: str) -> str:
        """Writes the taps of panel number ``item`` of a phase; returns the C expression of its chunk of channels."""
        w, k = self.w, self.parts.reduction
        rest = item
        if k.chunks > 1:
            rest = f"{item} / {k.chunks}"
        for d in reversed(range(len(k.taps))):
            if k.taps[d] == 1:
                continue
            skip = "" if k.skips[d] == "0" else f"skip{d}"
            count = f"({k.taps[d]} - {skip})" if skip else str(k.taps[d])
            first = all(size == 1 for size in k.taps[:d])
            w.line(f"const int t{d} = {rest if first else f'{rest} % {count}'}{f' + {skip}' if skip else ''};")
            rest = f"{rest} / {count}"
        return f"{item} % {k.chunks}" if k.chunks > 1 else "0"

    def _load_seconds(self) -> None:
        """Writes the loads of the operands B's tiles, one behind another."""
        side = self.parts.b
        assert isinstance(side, MappedOperand)
        for number, tensor_map in enumerate(self.b_maps):
            self._load(side, "b", tensor_map, "n0", self.s.tile_n, number * self.s.tile_n)

    def _load(
        self, side: MappedOperand, name: str, tensor_map: str, origin: str, size: int, start: int = 0, part: int = 0
    ) -> None:
        """Writes the load of a tile of ``size`` rows or columns to a stage, from its row or column ``start`` on.

        With ``part``, of part u of it, which has so many columns.
        """
        w, k = self.w, self.parts.reduction
        values = {"c": f"c + u * {part}" if part else "c", "o": origin}
        for d, tap in enumerate(k.taps):
            values[f"t{d}"] = f"t{d}" if tap > 1 else "0"
        values |= self.batch_values()
        if side.im2col:
            values |= {f"o{d}": f"m_{d}" for d in range(len(self.spec.m))}
            values |= {f"p{d}": f"p{d}" for d in range(len(side.pixels))}

        def text(term: str) -> str:
            return tidy(term.format(**values))

        at = f"shared.{name}[stage.index]"
        if side.im2col and not side.along_k:
            self._load_windows_across(side, name, tensor_map, size, values)
            return
        if side.im2col:
            coordinates = ", ".join(text(term) for term in side.terms)
            offsets = ", ".join(f"uint16({text(term)})" for term in side.offsets)
            target = f"{at}[u]" if k.per_stage > 1 or part else at
            w.line(f"tma_load_im2col({target}, {tensor_map}, full,")
            w.line(f"                {coordinates}, {offsets});")
            return
        if side.along_k:
            target = f"{at}[u]" if k.per_stage > 1 or part else at
            target = f"{target}[{start}]" if start else target
            coordinates = ", ".join(text(term) for term in side.terms)
            w.line(f"tma_load({target}, {tensor_map}, full, {coordinates});")
            return
        across = panel_size(size, self.itemsize)
        several = size > across
        if several:
            values["o"] = f"{origin} + i * {across}"
        coordinates = ", ".join(text(term) for term in side.terms)
        panel = linear([("i", 1)] if several else [], start // across)
        with w.unrolled(f"for (int i = 0; i < {size // across}; ++i)", when=several):
            w.line(f"tma_load({at}[{panel}], {tensor_map}, full, {coordinates});")

    def _load_windows_across(
        self, side: MappedOperand, name: str, tensor_map: str, size: int, values: dict[str, str]
    ) -> None:
        """Writes the loads of panels of rows, each some channels of one tap, for the pixels of a stage."""
        w, across = self.w, ROW_BYTES // self.itemsize
        with w.unrolled(f"for (int i = 0; i < {size // across}; ++i)"):
            w.line(f"const int panel = m0 / {across} + i;")
            for d, tap in enumerate(side.taps[:-1]):
                # Past the last row every tap is in range; the channel is not.
                place = (
                    f"panel / {prod(side.taps[d + 1 :])} % {tap}" if prod(side.taps[d + 1 :]) > 1 else f"panel % {tap}"
                )
                w.line(f"const int t{d} = {place};") if tap > 1 else None
                values[f"t{d}"] = f"t{d}" if tap > 1 else "0"
            channels = side.taps[-1] * across
            w.line(
                f"const int channel = panel < {prod(side.taps)} ? panel % {side.taps[-1]} * {across} : "
                f"{round_up(side.map.sizes[0], 16 // self.itemsize) if self.batch > 1 else channels};"
            )
            values["c"] = "channel"
            coordinates = ", ".join(tidy(term.format(**values)) for term in side.terms)
            offsets = ", ".join(f"uint16({tidy(term.format(**values))})" for term in side.offsets)
            w.line(f"tma_load_im2col(shared.{name}[stage.index][i], {tensor_map}, full,")
            w.line(f"                {coordinates}, {offsets});")


def tidy(text: str) -> str:
    """Returns a C term simplified: ``0 * 3`` is 0, ``x * 1`` is x, ``x - 0`` is x."""
    for before, after in ((" * 1", ""), (" - 0", ""), ("0 * ", "0 * ")):
        if text.endswith(before):
            text = text[: -len(before)] + after
    text = text.replace(" * 1 ", " ")
    return "0" if text.startswith("0 * ") and "-" not in text and "+" not in text else text
