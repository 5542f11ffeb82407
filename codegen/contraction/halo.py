"""Convolutions in groups of few channels, by mma.sync on a part of the image: every element is brought once for all
taps.

A block brings the part of the image under its results to shared memory, the channels of several groups of it, and their
filters.  Products then read their windows where they lie: a chunk of 8 bytes of a tap's channels is a thread's share of
a step of the reduction, in either operand, so that taps need not lie behind one another, and no product ever sees the
channels of two groups.  Sums leave through shared memory, in the place of the operands.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd, prod

from codegen.buffers import Edge, every
from codegen.contraction.halo_schedule import CHUNK, FRAGMENT_COLS, FRAGMENT_ROWS, STEP, HaloSchedule, HaloTile
from codegen.declined import Declined
from codegen.fragments import ResultFragments, Staging, space, staging
from codegen.iteration import collapse, coordinate, coordinates, linear, restrided, signed_index_type, unsigned
from codegen.kernel import Kernel, locate, parameter
from codegen.spec import ContractionSpec, KernelSource

#: Products of a thread that are spelled out; more stay a loop over the steps of the reduction.
UNROLLED = 800
PLACES = ("image0", "depth0", "row0", "col0")


def render(spec: ContractionSpec, schedule: HaloSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Renderer(spec, schedule).render()


def _results(spec: ContractionSpec) -> ContractionSpec:
    """Returns the spec with the groups' filters side by side as columns: all that its results are concerned."""
    rows = len(spec.m)
    turned = [(*s[1 : 1 + rows], s[0], *s[1 + rows :]) for s in spec.program.strides]
    return replace(spec, batch=(), n=(spec.batch[0], *spec.n), program=restrided(spec.program, turned))


class _Renderer:
    def __init__(self, spec: ContractionSpec, schedule: HaloSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.x = x = HaloTile(spec, schedule)
        self.at = x.at
        if not x.fits:
            raise Declined(f"{schedule.warps_n} warps cannot share the filters of {schedule.groups} groups evenly")
        self.w = Kernel(spec.name)
        self.image, self.filters = (self.w.names.unique(g.operand.name) for g in (spec.a, spec.b))
        total = prod(spec.m)
        ragged = any(edge.ragged for edge in x.edges)
        self.edges = Edge(total, total + 1 if ragged else 1), Edge(self.at.groups * self.at.filters, x.cols)
        merged = _results(spec)
        self.space = space(merged)
        self.fragments = ResultFragments(self.w, self.space, self.w.names, merged, self.edges)
        reach = [
            bound for g, outer in ((spec.a, spec.m), (spec.b, spec.n)) for bound in g.reaches(spec.batch, outer, spec.k)
        ]
        self.t = signed_index_type(total, *reach)
        if x.blocks >= 2**31:
            raise Declined(f"{x.blocks} tiles are more than a grid has blocks")

    def render(self) -> KernelSource:
        w, s, x, at, spec = self.w, self.s, self.x, self.at, self.spec
        sizes = " x ".join(str(size) for size in s.tile if size > 1) or "1"
        details = [
            f"{spec.sums} of {at.types[0]}",
            f"{sizes} positions of {s.groups} groups a block; {s.warps_m} x {s.warps_n} warps, each "
            f"{x.own_m * FRAGMENT_ROWS} x {x.own_groups * x.own_n * FRAGMENT_COLS}",
        ]
        w.parameters += [parameter(spec.a.operand, self.image), parameter(spec.b.operand, self.filters)]
        w.parameters += self.fragments.epilogue.pointers.parameters()
        w.share(x.buffers)
        w.line("const int t = threadIdx.x, lane = t % 32;")
        axes = [(name, edge.tiles, edge.size) for name, edge in zip(PLACES, x.edges)]
        blocks = locate(w, self.t, [*axes, ("group0", x.slabs.tiles, s.groups)])
        self.places = [name if count > 1 else "0" for name, count, _ in axes]
        self.group0 = "group0" if x.slabs.tiles > 1 else "0"
        self._bring_image()
        self._bring_filters()
        w.line("copy_async_commit();")
        self.fragments.epilogue.scalars()
        self._windows()
        w.line("copy_async_wait<0>();")
        w.line("__syncthreads();")
        self._multiply()
        w.line("__syncthreads();  // sums take the place of the operands")
        self._leave()
        return w.source(
            self.space.program,
            details,
            blocks=blocks,
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            shared_bytes=x.bytes,
        )

    # ---- operands

    def _bring_image(self) -> None:
        """Writes the copies of what lies under the tile; what is outside of the image is zero."""
        w, x, at, gather, t = self.w, self.x, self.at, self.spec.a, self.t
        bytes_ = x.image_vector or gcd(16, x.width, at.width * at.groups)
        pieces, each = x.width // bytes_, bytes_ // at.itemsize
        w.line()
        w.line("#pragma unroll 4")
        with w.block(f"for (int i = t; i < {x.pixels * pieces}; i += {self.s.threads})"):
            order = (x.pixels, pieces) if x.image_vector else (pieces, x.pixels)
            first, second = (coordinate("i", order, d) for d in range(2))
            pixel, piece = (first, second) if x.image_vector else (second, first)
            w.line(f"const int pixel = {pixel}, piece = {piece};")
            inside, terms = [], []
            for d, (edge, under) in enumerate(zip(x.edges, x.under)):
                u = f"({coordinate('pixel', x.under, d)})" if under > 1 else "0"
                place, step = self.places[d], gather.outer[0] if d == 0 else at.steps[d - 1]
                if d == 0:
                    text, size, padded = linear([(place, 1), (u, 1)]), at.images, edge.ragged
                else:
                    text = linear([(place, at.stride[d - 1]), (u, 1)], -at.before[d - 1])
                    size, low = at.sizes[d - 1], -at.before[d - 1]
                    padded = low < 0 or low + (edge.padded - edge.size) * at.stride[d - 1] + under > size
                if text == "0" and not padded:
                    continue
                w.line(f"const {t} h{d} = {text};")
                inside += [f"{unsigned(t)}(h{d}) < {size}"] if padded else []
                terms.append((f"h{d}", step))
            channel = linear([(self.group0, at.channels), ("piece", each)])
            inside += [f"{channel} < {at.groups * at.channels}"] if x.slabs.ragged else []
            offset = linear([*terms, (channel, gather.inner[0])])
            exists = every(*inside) or "true"
            to = f"&shared.image[pixel][piece * {bytes_}]"
            if x.image_vector:
                w.line(f"copy_async<{bytes_}>({to}, {self.image} + ({offset}), {exists} ? {bytes_} : 0);")
                return
            ctype = gather.operand.dtype.ctype
            w.line(f"Vector<{ctype}, {each}> value = {{}};")
            with w.block(f"if ({exists})"):
                element = linear([(f"({offset})", 1), ("e", gather.inner[0])])
                w.each_element(each, f"value[e] = {self.image}[{element}];")
            w.line(f"store_shared(reinterpret_cast<{ctype}*>({to}), value);")

    def _bring_filters(self) -> None:
        """Writes the copies of the filters of a block's groups, each as one row: tap by tap, channel by channel."""
        w, x, at, gather = self.w, self.x, self.at, self.spec.b
        row, bytes_ = x.buffers["filters"].shape[1], x.filter_vector or at.itemsize
        taps = self.spec.k[1:]
        sizes = (self.s.groups, at.filters, at.width // bytes_, *taps)
        source = (gather.batch[0], gather.outer[0], gather.inner[0] * (bytes_ // at.itemsize), *gather.inner[1:])
        to = (at.filters * row, row, bytes_, *(at.width * prod(taps[d + 1 :]) for d in range(len(taps))))
        apart = (int(x.slabs.ragged), *(0 for _ in sizes[1:]))
        order = sorted(range(len(sizes)), key=lambda d: (-abs(source[d]), d))
        if x.slabs.ragged:
            order = [0, *(d for d in order if d)]
        sizes, (source, to, _) = collapse(sizes, [source, to, apart], order)
        w.line("#pragma unroll 4")
        with w.block(f"for (int i = t; i < {prod(sizes)}; i += {self.s.threads})"):
            names = coordinates(w, "int", "f", "i", sizes)
            exists = f"{self.group0} + f0 < {at.groups}" if x.slabs.ragged and self.s.groups > 1 else ""
            terms = [(self.group0, gather.batch[0]), *zip(names, source)]
            place = f"&shared.filters[0][{linear(list(zip(names, to)))}]"
            offset = linear(terms, gather.start)
            if x.filter_vector:
                valid = f"{exists} ? {bytes_} : 0" if exists else str(bytes_)
                w.line(f"copy_async<{bytes_}>({place}, {self.filters} + ({offset}), {valid});")
            else:
                ctype = gather.operand.dtype.ctype
                guard = f"if ({exists}) " if exists else ""
                w.line(f"{guard}*reinterpret_cast<{ctype}*>({place}) = {self.filters}[{offset}];")
        rest = x.steps * STEP // CHUNK - at.chunks
        if rest:
            with w.block(f"for (int i = t; i < {x.cols * rest}; i += {self.s.threads})"):
                place = (
                    f"shared.filters[{coordinate('i', (x.cols, rest), 0)}][{at.chunks * CHUNK} + i % {rest} * {CHUNK}]"
                )
                w.line(f"*reinterpret_cast<uint64*>(&{place}) = 0;")

    # ---- products

    def _windows(self) -> None:
        """Writes which fragments a warp has, and where the windows of a thread's two rows of each begin."""
        w, s, x, at = self.w, self.s, self.x, self.at
        pitch, whole = x.reads[0], x.at.width % STEP == 0
        w.line()
        warps = (s.warps_m, s.warps_n)
        row, col = (f"{coordinate('t / 32', warps, d)}" if warps[d] > 1 else "0" for d in range(2))
        w.line(f"const int first_row = {linear([(row, x.own_m * FRAGMENT_ROWS), ('lane / 4', 1)])};")
        if s.warps_n > s.groups:
            each = s.warps_n // s.groups
            group, fragment = (f"({text})" for text in (f"{col} / {each}", f"{col} % {each} * {x.own_n}"))
        else:
            group, fragment = linear([(f"({col})", x.own_groups)]), "0"
        w.line(f"const int group = {group}, column = {linear([(fragment, FRAGMENT_COLS)])};  // the warp's first ones")
        w.line(f"int window[{x.own_m}][2];  // bytes in the image")
        with w.unrolled(f"for (int i = 0; i < {2 * x.own_m}; ++i)"):
            place = f"first_row + i * {FRAGMENT_ROWS // 2}"
            ragged = x.own_m * FRAGMENT_ROWS * s.warps_m > x.positions
            w.line(f"const int r = {f'min({place}, {x.positions - 1})' if ragged else place};")
            terms = []
            for d, size in enumerate(s.tile):
                step = prod(x.under[d + 1 :]) * (at.stride[d - 1] if d else 1)
                terms += [(f"({coordinate('r', s.tile, d)})", step)] if size > 1 else []
            pixel = linear(terms)
            lane = [("lane % 4", CHUNK)] if whole else []
            w.line(f"window[i / 2][i % 2] = {linear([(f'({pixel})', pitch), ('group', at.width), *lane])};")

    def _reach(self) -> None:
        """Writes the function that returns how far from a window's begin a chunk of the reduction lies."""
        w, x, at = self.w, self.x, self.at
        each = at.width // CHUNK
        with w.block("const auto reach = [](int chunk)", "};"):
            terms = [(f"({coordinate('chunk', (prod(at.taps), each), 1)})", CHUNK)] if each > 1 else []
            if prod(at.taps) > 1:
                w.line(f"const int tap = {coordinate('chunk', (prod(at.taps), each), 0)};")
            for d, size in enumerate(at.taps):
                step = prod(x.under[d + 2 :]) * at.dilation[d] * x.reads[0]
                terms += [(f"({coordinate('tap', at.taps, d)})", step)] if size > 1 else []
            w.line(f"return {linear(terms)};")

    def _multiply(self) -> None:
        """Writes the products of all steps of the reduction."""
        w, x, at, total = self.w, self.x, self.at, self.fragments.total
        self._reach()
        whole = at.width % STEP == 0
        last = at.chunks % 4
        short = x.steps * x.own_groups * x.own_m * x.own_n <= UNROLLED
        w.line(f"{total} sum[{x.own_groups}][{x.own_m}][{x.own_n}][4] = {{}};")
        w.line("#pragma unroll" if short else "#pragma unroll 2")
        with w.block(f"for (int kk = 0; kk < {x.steps}; ++kk)"):
            if whole:
                w.line("const int at = reach(kk * 4);")
            else:
                w.line("const int chunk = kk * 4 + lane % 4;")
                w.line(f"const int at = reach({f'min(chunk, {at.chunks - 1})' if last else 'chunk'});")
            with w.unrolled(f"for (int g = 0; g < {x.own_groups}; ++g)"):
                w.line(f"uint32 a[{x.own_m}][4];")
                with w.unrolled(f"for (int i = 0; i < {x.own_m}; ++i)"):
                    offset = f"at{f' + g * {at.width}' if x.own_groups > 1 else ''}"
                    rows = ", ".join(f"&shared.image[0][window[i][{half}] + {offset}]" for half in range(2))
                    w.line(f"load_chunks(a[i], {rows});")
                    if last:
                        w.line(f"if (chunk >= {at.chunks}) a[i][0] = a[i][1] = a[i][2] = a[i][3] = 0;")
                    if at.types[0] == "tf32":
                        w.line("round_to_tf32(a[i]);")
                with w.unrolled(f"for (int j = 0; j < {x.own_n}; ++j)"):
                    self._filter()
                    w.unrolled_line(f"for (int i = 0; i < {x.own_m}; ++i)")
                    w.line(f"    mma<{at.types[0]}, {at.types[1]}>(sum[g][i][j], a[i], b);")

    def _filter(self) -> None:
        """Writes the load of a thread's share of 8 filters of group g: those that do not exist are the last one."""
        w, at = self.w, self.at
        number = f"column + j * {FRAGMENT_COLS} + lane / 4"
        if at.filters % FRAGMENT_COLS:
            number = f"min({number}, {at.filters - 1})"
        w.line(f"const int row = (group + g) * {at.filters} + {number};")
        w.line("uint32 b[2];")
        w.line(f"load_chunks(b, &shared.filters[row][kk * {STEP} + lane % 4 * {CHUNK}]);")
        if at.types[0] == "tf32":
            w.line("round_to_tf32(b);")

    # ---- results

    def _staging(self) -> Staging:
        """Returns how sums are staged: neighbours that a thread takes together lie in one row of the tile."""
        x, out = self.x, (self.at.images, *self.at.out)
        found = staging(self.space, x.positions, x.cols)
        if found.by_rows:
            return found
        length, d = 1, len(out) - 1
        while d > 0 and self.s.tile[d] == out[d]:
            length, d = length * out[d], d - 1
        length *= self.s.tile[d]
        along = length if self.s.tile[-1] == out[-1] else gcd(length, out[-1])
        return replace(found, run=gcd(found.run, along))

    def _leave(self) -> None:
        """Writes how sums go to shared memory, and the program on them."""
        w, x, at, staged = self.w, self.x, self.at, self._staging()
        w.line(f"auto& staged = *reinterpret_cast<{self.fragments.total} (*){staged.dims}>(memory);")
        with w.unrolled(
            f"for (int g = 0; g < {x.own_groups}; ++g)",
            f"for (int i = 0; i < {2 * x.own_m}; ++i)",
            f"for (int j = 0; j < {x.own_n}; ++j)",
        ):
            w.line(f"const int place = first_row + i * {FRAGMENT_ROWS // 2};")
            w.line(f"const int filter = column + j * {FRAGMENT_COLS} + lane % 4 * 2;")
            rows = Edge(x.positions, x.own_m * FRAGMENT_ROWS * self.s.warps_m)
            w.leave(rows.outside("place"), Edge(at.filters, FRAGMENT_COLS).outside("filter"))
            column = f"(group + g) * {at.filters} + filter"
            self.fragments.put(staged, "place", column, lambda e, _: f"sum[g][i / 2][j][i % 2 * 2 + {e}]")
        w.line("__syncthreads();")
        self._position()
        first = linear([(self.group0, at.filters)])
        self.fragments.take(staged, self.s.threads, "position({r})", linear([(first, 1), ("{c}", 1)]))

    def _position(self) -> None:
        """Writes the function that returns the row of a tile's result, or one beyond the last where there is none."""
        w, x, out = self.w, self.x, (self.at.images, *self.at.out)
        t = self.fragments.t
        with w.block(f"const auto position = [&](int r) -> {t}", "};"):
            terms, exists = [], []
            for d, edge in enumerate(x.edges):
                r = f"({coordinate('r', self.s.tile, d)})" if edge.size > 1 else "0"
                text = linear([(self.places[d], 1), (r, 1)])
                if text != "0":
                    w.line(f"const {t} o{d} = {text};")
                    exists += [edge.inside(f"o{d}")]
                    terms.append((f"o{d}", prod(out[d + 1 :])))
            row = linear(terms)
            w.line(f"return {f'{every(*exists)} ? {row} : {prod(out)}' if every(*exists) else row};")
