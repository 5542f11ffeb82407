"""Convolutions in groups of few channels, by mma.sync on a part of the image: every element is brought once for all
taps.

A block keeps the filters of some groups in shared memory, and brings the parts of the image under its tiles of results
there one after the other, the next one while a tile is computed.  Products read their windows where they lie: a chunk
of 8 bytes of a tap's channels is a thread's share of a step of the reduction, in either operand, so that taps need not
lie behind one another, and no product ever sees the channels of two groups.  Each warp has positions of its own, and
carries their results out through shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, prod

from codegen.buffers import Edge, every
from codegen.contraction.halo_schedule import STEP, HaloSchedule, HaloTile
from codegen.contraction.halo_windows import CHUNK, FRAGMENT_COLS, FRAGMENT_ROWS, Phase
from codegen.declined import Declined
from codegen.fragments import ResultFragments, Staging, space, staging
from codegen.iteration import collapse, coordinate, coordinates, linear, restrided, signed_index_type, unsigned
from codegen.kernel import Kernel, locate, parameter
from codegen.sizes import most
from codegen.spec import ContractionSpec, KernelSource

#: Most products of a thread that are spelled out, and steps of the reduction whose places lanes keep in registers.
UNROLLED, KEPT = 1024, 10
PLACES = ("image0", "depth0", "row0", "col0")


def render(spec: ContractionSpec, schedule: HaloSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return Renderer(spec, schedule).render()


def _results(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with the groups' filters side by side as columns: all that its results are concerned."""
    last = len(spec.batch) + len(spec.results or spec.m)
    turned = [(*s[1:last], s[0], *s[last:]) for s in spec.program.strides]
    places = tuple(replace(x, batch=x.batch[1:]) for x in spec.results)
    program = restrided(spec.program, turned)
    return replace(spec, batch=spec.batch[1:], n=(spec.batch[0], *spec.n), program=program, results=places)


class Renderer:
    def __init__(self, spec: ContractionSpec, schedule: HaloSchedule, tile: type[HaloTile] = HaloTile) -> None:
        self.spec, self.s = spec, schedule
        self.x = x = tile(spec, schedule)
        self.at = x.at
        #: whether lanes need no registers for the places of their chunks, and whether floats are still to be rounded
        self.whole, self.rounds = self.at.width % STEP == 0, self.at.types[0] == "tf32"
        self.w = Kernel(spec.name)
        self.image, self.filters = (self.w.names.unique(g.operand.name) for g in (spec.a, spec.b))
        total = prod(spec.m)
        ragged = any(edge.ragged for edge in x.edges) or x.positions % (x.own * FRAGMENT_ROWS * schedule.warps) > 0
        self.stage, self.first = ("part", "own") if len(self.at.phases) > 1 else ("stage", "first")
        self.edges = Edge(total, total + 1 if ragged else 1), Edge(self.at.groups * self.at.filters, x.cols)
        merged = _results(spec)
        self.space = space(merged)
        self.fragments = ResultFragments(self.w, self.space, self.w.names, merged, self.edges)
        reach = [
            bound for g, outer in ((spec.a, spec.m), (spec.b, spec.n)) for bound in g.reaches(spec.batch, outer, spec.k)
        ]
        self.t = signed_index_type(total, *reach)
        self.blocks = x.slabs.tiles * schedule.workers
        if max(self.blocks, x.tiles) >= 2**31:
            raise Declined(f"{x.tiles} tiles are more than a block can count")

    def render(self) -> KernelSource:
        w, s, x, at, spec = self.w, self.s, self.x, self.at, self.spec
        sizes = " x ".join(str(size) for size in s.tile if size > 1) or "1"
        details = [
            f"{spec.sums} of {at.types[0]}",
            f"tiles of {sizes} positions{f' of {s.groups} groups' if at.groups > 1 else ''}; {s.warps} warps, each "
            f"{x.own * FRAGMENT_ROWS} positions",
        ]
        w.parameters += [parameter(spec.a.operand, self.image), parameter(spec.b.operand, self.filters)]
        w.parameters += self.fragments.epilogue.pointers.parameters()
        w.share(x.buffers)
        w.line("const int t = threadIdx.x, lane = t % 32;")
        slabs = x.slabs.tiles
        if slabs > 1:
            w.line(f"const {self.t} group0 = blockIdx.x{f' % {slabs}' if s.workers > 1 else ''} * {s.groups};")
        self.group0 = "group0" if slabs > 1 else "0"
        (self._bring_matrix if s.wgmma else self._bring_filters)()
        self._bring_image()
        self.fragments.epilogue.scalars()
        self._windows()
        first = "blockIdx.x" if slabs == 1 else f"blockIdx.x / {slabs}" if s.workers > 1 else "0"
        w.line(f"int tile = {first};")
        with w.scope():
            self._walk()
            for number, phase in enumerate(at.phases):
                with w.block("", when=len(at.phases) > 1):
                    self._phase(number, phase)
        return w.source(
            self.space.program, details, blocks=self.blocks, threads=s.threads, barriers=True, blocks_per_sm=s.resident
        )

    def _phase(self, number: int, phase: Phase) -> None:
        """Writes the products and the results of a phase."""
        if len(self.at.phases) > 1:
            self.w.line(f"const {self.fragments.t} batch = {number};  // the phase")
            self.w.line("const int part = anew(stage), own = anew(first);  // of the phase before nothing is kept")
            self.fragments.batch()
        if self.s.wgmma:
            self._multiply_together(phase)
        else:
            self._multiply(phase)
        (self._write if self.x.direct else self._leave)()

    def _walk(self) -> None:
        """Opens the loop over a block's tiles, and writes what brings their parts of the image."""
        w, s, x = self.w, self.s, self.x
        if s.stages == 1:
            w.line("const int stage = 0;")
            w.open(f"for (; tile < {x.tiles}; tile += {s.workers})")
            w.line("__syncthreads();  // the part of the image before has been used")
            w.line("bring(tile, stage);")
            w.line("copy_async_commit();")
        else:
            w.line("bring(tile, 0);")
            w.line("copy_async_commit();")
            w.open(f"for (int stage = 0; tile < {x.tiles}; tile += {s.workers}, stage ^= 1)")
        w.line("copy_async_wait<0>();")
        if s.wgmma:
            w.line("fence_async_shared();  // wgmma reads the filters")
        w.line("__syncthreads();  // this part of the image is there")
        if s.stages > 1:
            w.line(f"if (tile + {s.workers} < {x.tiles}) bring(tile + {s.workers}, stage ^ 1);  // that before is used")
            w.line("copy_async_commit();")

    def _locate(self) -> list[str]:
        """Writes where a tile is; returns the C names of the coordinates of its first position."""
        axes = [(name, edge.tiles, edge.size) for name, edge in zip(PLACES, self.x.edges)]
        locate(self.w, self.t, axes, position="tile")
        return [name if most(count) > 1 else "0" for name, count, _ in axes]

    # ---- operands

    def _bring_image(self) -> None:
        """Writes the function that brings what lies under a tile; what is outside of the image is zero."""
        w, x, at, gather = self.w, self.x, self.at, self.spec.a
        bytes_ = x.image_vector or gcd(16, x.width, at.width * at.groups)
        pieces, each = x.width // bytes_, bytes_ // at.itemsize
        with w.block("const auto bring = [&](int tile, int stage)", "};"):
            places = self._locate()
            w.line("#pragma unroll 4")
            with w.block(f"for (int i = t; i < {x.pixels * pieces}; i += {self.s.threads})"):
                if x.image_vector:
                    w.line(f"const int pixel = i / {pieces}, piece = i % {pieces};")
                else:  # neighbours in a row of a plane
                    w.line(f"const int pixel = i % {x.pixels}, piece = i / {x.pixels};")
                exists, offset = self._source(places, linear([(self.group0, at.channels), ("piece", each)]))
                to = f"&shared.image[stage][pixel][piece * {bytes_}]"
                if x.image_vector:
                    w.line(f"copy_async<{bytes_}>({to}, {self.image} + ({offset}), {exists} ? {bytes_} : 0);")
                    return
                ctype = gather.operand.dtype.ctype
                w.line(f"Vector<{ctype}, {each}> value = {{}};")
                with w.block(f"if ({exists})"):
                    element = linear([(f"({offset})", 1), ("e", gather.inner[0])])
                    w.each_element(each, f"value[e] = {self.image}[{element}];")
                w.line(f"store_shared(reinterpret_cast<{ctype}*>({to}), value);")

    def _source(self, places: Sequence[str], channel: str) -> tuple[str, str]:
        """Writes where ``pixel`` lies; returns the C condition that it exists, and a channel's offset."""
        x, at = self.x, self.at
        inside, terms = self._under(places, "pixel", x.under)
        inside += [f"{channel} < {at.groups * at.channels}"] if x.slabs.ragged else []
        return every(*inside) or "true", linear([*terms, (channel, self.spec.a.inner[0])])

    def _under(self, places: Sequence[str], name: str, sizes: Sequence[int]) -> tuple[list[str], list[tuple[str, int]]]:
        """Writes where the part under a tile that ``name`` counts lies, of these sizes in the image's first dimensions.

        Returns the C conditions that it exists, and the terms of its offset.
        """
        at, t, inside, terms = self.at, self.t, [], []
        dims = zip(sizes, (at.images, *at.sizes), (self.spec.a.outer[0], *at.steps), (1, *at.stride), (0, *at.before))
        for d, (under, size, step, stride, before) in enumerate(dims):
            edge = self.x.edges[d]
            u = f"({coordinate(name, sizes, d)})" if under > 1 else "0"
            text = linear([(places[d], stride), (u, 1)], -before)
            padded = before > 0 or (edge.padded - edge.size) * stride - before + under > size
            if text != "0" or padded:
                self.w.line(f"const {t} h{d} = {text};")
                inside += [f"{unsigned(t)}(h{d}) < {size}"] if padded else []
                terms.append((f"h{d}", step))
        return inside, terms

    def _bring_matrix(self) -> None:
        """Writes the copies of a group's filters as wgmma reads them: 8 x 16 bytes of columns and terms lie together.

        A chunk of 8 bytes has its first half in the first 16 bytes of a step, and its second half in the others.
        """
        w, x, at, gather, taps = self.w, self.x, self.at, self.spec.b, self.spec.k[1:]
        words = at.chunks * 2
        w.line("#pragma unroll 4")
        with w.block(f"for (int i = t; i < {x.cols * words}; i += {self.s.threads})"):
            w.line(f"const int f = i / {words}, word = i % {words};")
            sizes = (*taps, at.width // 4)
            place = coordinates(w, "int", "k", "word", sizes)
            steps = (*gather.inner[1:], gather.inner[0] * (4 // at.itemsize))
            group, filter_ = (f"f / {at.filters}", f"f % {at.filters}") if self.s.groups > 1 else ("0", "f")
            first = [(self.group0, gather.batch[0]), (f"({group})", gather.batch[0]), (f"({filter_})", gather.outer[0])]
            offset = [*(first if self.s.groups > 1 else (first[0], ("f", gather.outer[0]))), *zip(place, steps)]
            exists = f"{self.group0} + f / {at.filters} < {at.groups}" if x.slabs.ragged else ""
            row = "f"
            if x.run == 4:  # rows in the order of `_bring_filters`
                row = "(f / 16 * 16 + f % 4 / 2 * 8 + f % 16 / 4 * 2 + f % 2)"
            to = f"&shared.filters[word / 8 * 2 + word % 2][{row} * 16 + word % 8 / 2 * 4]"
            valid = f", {exists} ? 4 : 0" if exists else ""
            w.line(f"copy_async<4>({to}, {self.filters} + ({linear(offset, gather.start)}){valid});")
        rest = x.steps * 8 - words
        if rest:
            with w.block(f"for (int i = t; i < {x.cols * rest}; i += {self.s.threads})"):
                w.line(f"const int f = i / {rest}, word = {words} + i % {rest};")
                to = "shared.filters[word / 8 * 2 + word % 2][f * 16 + word % 8 / 2 * 4]"
                w.line(f"*reinterpret_cast<uint32*>(&{to}) = 0;")

    def _bring_filters(self) -> None:
        """Writes the copies of the filters of a block's groups, each as one row: tap by tap, channel by channel."""
        begin = 0
        for phase in self.at.phases:
            if prod(phase.taps):
                with self.w.block("", when=len(self.at.phases) > 1):
                    self._bring_taps(phase, begin)
            begin += self.x.steps_of(phase) * STEP

    def _bring_taps(self, phase: Phase, begin: int) -> None:
        """Writes the copies of a phase's taps to the bytes of each row from ``begin`` on."""
        w, x, at, gather = self.w, self.x, self.at, self.spec.b
        row, bytes_ = x.buffers["filters"].shape[1], x.filter_vector or at.itemsize
        missing = len(phase.taps) - len(self.spec.k) + 1
        taps, first = phase.taps[missing:], phase.first[missing:]
        # Two fragments share 16 filters so that a thread has 4 neighbours: (4 threads, 2 fragments, 2 columns of each).
        filters = [(at.filters, 1, 1)]
        if x.run == 4:
            filters = [(at.filters // 16, 16, 16), (4, 4, 2), (2, 2, FRAGMENT_COLS), (2, 1, 1)]
        step = gather.outer[0]
        sizes = (self.s.groups, *(n for n, _, _ in filters), at.width // bytes_, *taps)
        source = (gather.batch[0], *(n * step for _, n, _ in filters), gather.inner[0] * (bytes_ // at.itemsize))
        source = (*source, *gather.inner[1:])
        to = (at.filters * row, *(n * row for _, _, n in filters), bytes_)
        to = (*to, *(at.width * prod(taps[d + 1 :]) for d in range(len(taps))))
        apart = (int(x.slabs.ragged), *(0 for _ in sizes[1:]))
        order = sorted(range(len(sizes)), key=lambda d: (-abs(source[d]), d))
        if x.slabs.ragged:
            order = [0, *(d for d in order if d)]
        sizes, (source, to, _) = collapse(sizes, [source, to, apart], order)
        start = gather.start + sum(b * step for b, step in zip(phase.batch, gather.batch[1:]))
        start += sum(tap * step for tap, step in zip(first, gather.inner[1:]))
        w.line("#pragma unroll 4")
        with w.block(f"for (int i = t; i < {prod(sizes)}; i += {self.s.threads})"):
            names = coordinates(w, "int", "f", "i", sizes)
            exists = f"{self.group0} + f0 < {at.groups}" if x.slabs.ragged and self.s.groups > 1 else ""
            terms = [(self.group0, gather.batch[0]), *zip(names, source)]
            place = f"&shared.filters[0][{linear(list(zip(names, to)), begin)}]"
            offset = linear(terms, start)
            if x.filter_vector:
                valid = f"{exists} ? {bytes_} : 0" if exists else str(bytes_)
                w.line(f"copy_async<{bytes_}>({place}, {self.filters} + ({offset}), {valid});")
            else:
                ctype = gather.operand.dtype.ctype
                guard = f"if ({exists}) " if exists else ""
                w.line(f"{guard}*reinterpret_cast<{ctype}*>({place}) = {self.filters}[{offset}];")
        chunks = at.chunks_of(phase)
        rest = x.steps_of(phase) * STEP // CHUNK - chunks
        if rest:
            with w.block(f"for (int i = t; i < {x.cols * rest}; i += {self.s.threads})"):
                at_ = begin + chunks * CHUNK
                place = f"shared.filters[{coordinate('i', (x.cols, rest), 0)}][{at_} + i % {rest} * {CHUNK}]"
                w.line(f"*reinterpret_cast<uint64*>(&{place}) = 0;")

    # ---- products

    def _windows(self, ctype: str = "int") -> None:
        """Writes where the windows of a thread's two rows of each fragment begin, in the part of the image."""
        w, x = self.w, self.x
        w.line()
        w.line(f"const int first = t / 32 * {x.own * FRAGMENT_ROWS};  // of the warp's positions")
        w.line(f"{ctype} window[{x.own}][2];")
        with w.unrolled(f"for (int i = 0; i < {2 * x.own}; ++i)"):
            place = f"first + lane / 4 + i * {FRAGMENT_ROWS // 2}"
            ragged = x.own * FRAGMENT_ROWS * self.s.warps > x.positions
            w.line(f"const int r = {f'min({place}, {x.positions - 1})' if ragged else place};")
            w.line(f"window[i / 2][i % 2] = {self._window()};")

    def _window(self) -> str:
        """Returns where the window of position ``r`` begins, as an offset."""
        x, at, tile, terms = self.x, self.at, self.s.tile, []
        for d, size in enumerate(tile):
            step = prod(x.under[d + 1 :]) * (at.stride[d - 1] if d else 1)
            terms += [(f"({coordinate('r', tile, d)})", step)] if size > 1 else []
        lane = [("lane % 4", CHUNK)] if at.width % STEP == 0 else []
        return linear([(f"({linear(terms)})", x.reads[0]), *lane])

    def _reach(self, phase: Phase) -> None:
        """Writes the function that returns how far from a window's begin a chunk of the reduction lies."""
        w, x, at = self.w, self.x, self.at
        each = at.width // CHUNK
        with w.block("const auto reach = [](int chunk)", "};"):
            count, first = prod(phase.taps), 0
            terms = [(f"({coordinate('chunk', (count, each), 1)})", CHUNK)] if each > 1 else []
            if count > 1:
                w.line(f"const int tap = {coordinate('chunk', (count, each), 0)};")
            for d, (size, reach) in enumerate(zip(phase.taps, phase.reach)):
                step = prod(x.under[d + 2 :]) * x.reads[0]
                terms += [(f"({coordinate('tap', phase.taps, d)})", step * at.dilation[d])] if size > 1 else []
                first += step * reach
            w.line(f"return {linear(terms, first)};")

    def _step(self, phase: Phase) -> None:
        """Writes where a lane's chunk of a step of the reduction lies in the image."""
        w, at, count = self.w, self.at, self.at.chunks_of(phase)
        chunk = "kk * 4"
        if at.width % STEP:
            chunk = "chunk"
            w.line("const int chunk = kk * 4 + lane % 4;")
        reached = f"reach({f'min({chunk}, {count - 1})' if count % 4 else chunk})"
        w.line(f"const unsigned char* const from = shared.image[{self.stage}][0] + {reached};")

    def _load_fragment(self, name: str, phase: Phase) -> None:
        """Writes how a fragment of the image is loaded, with zeros for chunks that do not exist."""
        w, at = self.w, self.at
        rows = (linear([("from", 1), (f"window[i][{half}]", 1), ("g", at.width)]) for half in range(2))
        w.line(f"load_chunks({name}, {', '.join(rows)});")
        if self.at.chunks_of(phase) % 4:
            w.line(f"if (chunk >= {at.chunks_of(phase)}) {name}[0] = {name}[1] = {name}[2] = {name}[3] = 0;")

    def _multiply(self, phase: Phase) -> None:
        """Writes the products of all steps of the reduction."""
        w, x, at, groups = self.w, self.x, self.at, self.s.groups
        steps = x.steps_of(phase)
        if steps:
            self._reach(phase)
        w.line(f"{self.fragments.total} sum[{groups}][{x.own}][{at.fragments}][4] = {{}};")
        if not steps:
            return
        short = steps * groups * x.own * at.fragments <= UNROLLED and (self.whole or steps <= KEPT)
        # Of several phases the compiler would load so many fragments ahead that registers do not suffice.
        w.line("#pragma unroll 1" if len(at.phases) > 1 else "#pragma unroll" if short else "#pragma unroll 2")
        with w.block(f"for (int kk = 0; kk < {steps}; ++kk)"):
            self._step(phase)
            with w.unrolled(f"for (int g = 0; g < {groups}; ++g)"):
                w.line(f"uint32 a[{x.own}][4];")
                with w.unrolled(f"for (int i = 0; i < {x.own}; ++i)"):
                    self._load_fragment("a[i]", phase)
                    if self.rounds:
                        w.line("round_to_tf32(a[i]);")
                with w.unrolled(f"for (int j = 0; j < {at.fragments}; ++j)"):
                    self._filter(phase)
                    w.unrolled_line(f"for (int i = 0; i < {x.own}; ++i)")
                    w.line(f"    mma<{at.types[0]}, {at.types[1]}>(sum[g][i][j], a[i], b);")

    def _multiply_together(self, phase: Phase) -> None:
        """Writes the same for warpgroups: the fragments of a step are read while those before are multiplied."""
        w, x, at = self.w, self.x, self.at
        columns = at.filters
        w.macros[f"FUSEGRAPH_WGMMA({columns})"] = None
        self._reach(phase)
        groups = self.s.groups
        w.line(f"float sum[{groups}][{x.own}][{columns // 2}] = {{}};")
        w.line(f"uint32 a[2][{groups}][{x.own}][4];  // of two steps in turn")
        each = f"for (int g = 0; g < {groups}; ++g)", f"for (int i = 0; i < {x.own}; ++i)"
        w.line("#pragma unroll" if self.whole and x.steps * groups * x.own <= 64 else "#pragma unroll 2")
        with w.block(f"for (int kk = 0; kk < {x.steps}; ++kk)"):
            self._step(phase)
            with w.unrolled(*each):
                w.line("uint32 (&part)[4] = a[kk % 2][g][i];")
                self._load_fragment("part", phase)
            w.line("wgmma_fence();")
            with w.unrolled(*each):
                w.line(f"wgmma<{at.types[0]}, {at.types[1]}, {columns}>(sum[g][i], a[kk % 2][g][i],")
                place = f"&shared.filters[kk * 2][g * {16 * columns}]"
                w.line(f"    matrix_descriptor<0>({place}, {x.cols * 16}, 128), true);")
            w.line("wgmma_commit();")
            w.line("wgmma_wait<1>();  // the fragments of the step before are free")
        w.line("wgmma_wait<0>();")
        with w.unrolled(*each):
            w.line("wgmma_hold(sum[g][i]);")

    def _filter(self, phase: Phase) -> None:
        """Writes the load of a thread's share of 8 filters of group g: those that do not exist are the last one."""
        w, at = self.w, self.at
        number = linear([("j", FRAGMENT_COLS), ("lane / 4", 1)])
        if at.filters % FRAGMENT_COLS:
            number = f"min({number}, {at.filters - 1})"
        before = at.phases[: at.phases.index(phase)]
        place = linear([("kk", STEP), ("lane % 4", CHUNK)], STEP * sum(map(self.x.steps_of, before)))
        w.line("uint32 b[2];")
        w.line(f"load_chunks(b, &shared.filters[g * {at.filters} + {number}][{place}]);")
        if self.rounds:
            w.line("round_to_tf32(b);")

    # ---- results

    def _staging(self) -> Staging:
        """Returns how sums are staged: neighbours that a thread takes together lie in one row of the tile."""
        x, out = self.x, (self.at.images, *self.at.out)
        found = staging(self.space, FRAGMENT_ROWS, x.cols)
        if found.by_rows:
            return found
        length, d = self.s.tile[-1], len(out) - 1
        while d > 0 and self.s.tile[d] == out[d]:
            d -= 1
            length *= self.s.tile[d]
        along = length if self.s.tile[-1] == out[-1] else gcd(length, out[-1])
        return replace(found, run=gcd(found.run, along))

    def _leave(self) -> None:
        """Writes how a warp's sums go to shared memory, a fragment of positions at a time, and the program on them."""
        w, x, at, staged = self.w, self.x, self.at, self._staging()
        places = self._locate()
        if len(at.phases) == 1:
            w.line(
                "const int own = anew(first);  // places of results are worked out again for each tile: they are many"
            )
        self._position(places)
        w.line(f"auto& staged = *reinterpret_cast<{self.fragments.total} (*){staged.dims}>(shared.sums[t / 32]);")
        with w.unrolled(f"for (int p = 0; p < {x.own}; ++p)"):
            w.line("__syncwarp();  // what was there has been taken")
            with w.unrolled(
                f"for (int g = 0; g < {self.s.groups}; ++g)",
                f"for (int j = 0; j < {at.fragments}; ++j)",
                "for (int f = 0; f < 2; ++f)",
            ):
                w.line(f"const int filter = {linear([('j', FRAGMENT_COLS), ('lane % 4', 2)])};")
                w.leave(Edge(at.filters, FRAGMENT_COLS).outside("filter"))
                column = linear([("g", at.filters), ("filter", 1)])
                total = lambda e, _: f"sum[g][p][j][f * 2 + {e}]"  # noqa: E731
                self.fragments.put(staged, "lane / 4 + f * 8", column, total)
            w.line("__syncwarp();")
            row = f"position(own + p * {FRAGMENT_ROWS} + {{r}})"
            self.fragments.take(staged, 32, row, linear([(self.group0, at.filters), ("{c}", 1)]), "lane")

    def _write(self) -> None:
        """Writes the program on a thread's sums, and its results from registers."""
        w, s, x, at, fragments = self.w, self.s, self.x, self.at, self.fragments
        self._position(self._locate())
        with w.unrolled(f"for (int i = 0; i < {2 * x.own}; ++i)"):
            w.line(f"const {fragments.t} m = position({self.first} + lane / 4 + i * {FRAGMENT_ROWS // 2});")
            w.leave(self.edges[0].outside("m"))
            run = x.run
            with w.unrolled(
                f"for (int g = 0; g < {s.groups}; ++g)", f"for (int j = 0; j < {at.fragments}; j += {run // 2})"
            ):
                w.line(f"const int filter = {linear([('j', FRAGMENT_COLS), ('lane % 4', run)])};")
                w.leave(Edge(at.filters, FRAGMENT_COLS).outside("filter"))
                n = linear([(self.group0, at.filters), ("g", at.filters), ("filter", 1)])
                w.line(f"const {fragments.t} n = {n};")
                w.leave(self.edges[1].outside("n"))
                half = f"i % 2 * 2 + e{' % 2' if run > 2 else ''}"
                total = f"sum[g][i / 2][j{' + e / 2' if run > 2 else ''}][{half}]"
                if s.wgmma:
                    total = f"sum[g][i / 2][j * 4{' + e / 2 * 4' if run > 2 else ''} + {half}]"
                fragments.run(total, run)

    def _position(self, places: Sequence[str]) -> None:
        """Writes the function that returns the row of a tile's result, or one beyond the last where there is none."""
        w, s, x, out = self.w, self.s, self.x, (self.at.images, *self.at.out)
        with w.block(f"const auto position = [&](int r) -> {self.fragments.t}", "};"):
            terms, exists = [], [Edge(x.positions, x.own * FRAGMENT_ROWS * s.warps).inside("r")]
            for d, edge in enumerate(x.edges):
                r = f"({coordinate('r', s.tile, d)})" if edge.size > 1 else "0"
                text = linear([(places[d], 1), (r, 1)])
                if text != "0":
                    w.line(f"const {self.fragments.t} o{d} = {text};")
                    exists += [edge.inside(f"o{d}")]
                    terms.append((f"o{d}", prod(out[d + 1 :])))
            row, inside = linear(terms), every(*exists)
            w.line(f"return {f'{inside} ? {row} : {prod(out)}' if inside else row};")
