"""Attention of a few queries to many keys, which are read once, straight to registers, as when a text is continued.

Every warp has the same 16 queries, and some of the keys: those of a tile lie in its registers as mma.sync wants them,
for the order of the terms of a product does not matter, nor which of a warp's columns is which element of a value.  So
there are no tiles of keys in shared memory, and nothing to wait for but memory.  The results of warps are combined
in a fixed order: those of a block through its shared memory, then those of a cluster's blocks through one another's.
(Flash-decoding: Dao, Haziza, Massa and Sizov, 2023.)

Where the kernel is launched while the one before ends, the first keys and values are on their way to the L2 cache
before it waits (`codegen.kernel.in_sequence`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from codegen.attention.fragments import ScoreFragments, check_types
from codegen.attention.scores import argument_names, merged, stored
from codegen.attention.spec import AttentionSpec
from codegen.attention.tiles import VECTOR, Source, VectorTiles, forward_sources, of_vectors
from codegen.buffers import VECTORS, Buffer, Buffers, Edge
from codegen.declined import Declined
from codegen.family import Schedule
from codegen.iteration import linear
from codegen.kernel import UNTIL_HERE, Kernel
from codegen.sizes import most
from codegen.spec import KernelSource
from codegen.target import Target

#: Most queries, and the most elements of one or of a value, that a warp has registers for.
ROWS, TALL = 16, 128
#: Elements of a key that four lanes read at once, and of a value that eight do.
OF_KEY, OF_VALUE = 32, 64
#: Elements behind the queries' rows and behind those of results, so that rows begin in different banks.
QUERY_PAD, SUM_PAD = 8, 4
#: Bytes of a line of the L2 cache.
LINE = 128
#: The number of keys up to which the divisor is the sum of the rounded exponentials: more of them even out errors.
FEW_KEYS = 64
CHAINS = 2  # of maxima and sums
#: What is tried: warps of a block, keys of a warp's tile, blocks of a cluster.
WARPS, KEYS, CLUSTERS = (4, 8), (16, 32), (1, 2, 4, 8)
#: Registers of a thread that hold keys, values, results and scores; and others.
HELD, OTHERS = 200, 48
#: Cycles of a kernel beside its tiles, of a cluster's exchange, and of a tile from its reads on until it is multiplied;
#: bytes that a multiprocessor gets in a cycle meanwhile.  Fitted to measurements of 60 kernels.
BEGIN, EXCHANGE, LATENCY, RATE = 4000.0, 1500.0, 1300.0, 30.0


@dataclass(frozen=True)
class AttentionThinSchedule(Schedule):
    """A cluster of so many blocks has the keys of 16 queries.

    warps   of a block.
    keys    of a warp's tile, a multiple of 16.

    Raises ValueError for other numbers of keys.
    """

    warps: int
    keys: int
    cluster: int = 1

    def __post_init__(self) -> None:
        if self.keys < 16 or self.keys % 16:
            raise ValueError(f"{self}: a tile has a multiple of 16 keys")

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def workers(self) -> int:
        """Warps that share the keys of the same queries."""
        return self.warps * self.cluster


def _pieces(elements: int, each: int) -> int:
    return Edge(elements, each).tiles


def _held(spec: AttentionSpec, keys: int) -> int:
    """Returns how many registers keys and values of a tile, results, scores and probabilities take."""
    of_keys = keys // 8 * _pieces(spec.depth, OF_KEY) * 4
    of_values = keys // 4 * _pieces(spec.width, OF_VALUE) * 4
    return of_keys + of_values + _pieces(spec.width, OF_VALUE) * OF_VALUE // 2 + keys // 2 + keys // 4


def _rows(spec: AttentionSpec) -> int:
    """Returns how many rows of results are kept."""
    return max(1, min(ROWS, most(spec.rows)))


def buffers(spec: AttentionSpec, s: AttentionThinSchedule, element: str = "float16") -> Buffers:
    """Returns what a block has in shared memory."""
    deep, wide = _pieces(spec.depth, OF_KEY) * OF_KEY, _pieces(spec.width, OF_VALUE) * OF_VALUE
    rows = _rows(spec)
    found = [
        Buffer("queries", element, (ROWS, deep), pad=QUERY_PAD, align=VECTORS),
        Buffer("sums", "float", (s.warps, rows, wide), pad=SUM_PAD, align=VECTORS),
        Buffer("most", "float", (s.warps, rows)),
        Buffer("total", "float", (s.warps, rows)),
    ]
    if s.cluster > 1:
        found += [
            Buffer("block_sums", "float", (rows, wide)),
            Buffer("block_most", "float", (rows,)),
            Buffer("block_total", "float", (rows,)),
        ]
    return Buffers(found)


def takes(rows: int, depth: int, width: int) -> bool:
    """Tells whether attention of such sizes has this form, if its keys and values lie so that lanes read vectors."""
    return 0 < most(rows) <= ROWS and all(0 < n <= TALL and n % VECTOR == 0 for n in (depth, width))


def schedules(spec: AttentionSpec, target: Target) -> tuple[AttentionThinSchedule, ...]:
    """Returns schedules worth trying, best guess first.  Raises Declined with a reason."""
    check_types(spec)
    if spec.empty:
        raise Declined("there is nothing to multiply")
    if most(spec.rows) > ROWS:
        raise Declined(f"there are more than {ROWS} queries")
    if any(c is not None for c in spec.computed[1:]):
        raise Declined("keys and values are computed, which wants shared memory")
    if not takes(spec.rows, spec.depth, spec.width):
        raise Declined(f"keys and values have multiples of {VECTOR} elements, at most {TALL}")
    pages = (0, 0) if spec.pages is None else [p.step for p in spec.pages]
    for op, elements, page in zip((spec.k, spec.v), (spec.depth, spec.width), pages):
        if not of_vectors(op, (*spec.batch, spec.keys), elements, VECTOR, page):
            raise Declined(f"rows of {op.name!r} are no vectors of 16 bytes")
    clusters = [n for n in CLUSTERS if n == 1 or target.arch.has_clusters]
    every = [AttentionThinSchedule(*of) for of in ((w, k, c) for w in WARPS for k in KEYS for c in clusters)]
    fitting = [s for s in every if _held(spec, s.keys) <= HELD]
    return tuple(sorted(fitting, key=lambda s: cost(spec, s, target)))


def cost(spec: AttentionSpec, s: AttentionThinSchedule, target: Target) -> float:
    """Returns the cycles that a schedule is estimated to take if all keys are met."""
    row = (spec.depth + spec.width) * spec.k.dtype.itemsize
    blocks = prod(spec.batch) * s.cluster
    held = max(1, target.arch.blocks_per_sm(s.threads, _held(spec, s.keys) + OTHERS, buffers(spec, s).bytes))
    at_once = target.clusters_of(s.cluster) * s.cluster * held
    turns, together = Edge(blocks, at_once).tiles, min(held, Edge(blocks, target.sms).tiles)
    passes = Edge(spec.keys, s.keys * s.workers).tiles
    memory = blocks / s.cluster * spec.keys * row / target.bytes_per_cycle
    busy = turns * passes * (LATENCY + together * s.warps * s.keys * row / RATE)
    return BEGIN + EXCHANGE * (s.cluster > 1) + max(memory, busy)


def render(spec: AttentionSpec, schedule: AttentionThinSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C."""
    return _Renderer(merged(spec), schedule).render()


class _Renderer:
    def __init__(self, spec: AttentionSpec, schedule: AttentionThinSchedule) -> None:
        self.spec, self.s = spec, schedule
        self.w = Kernel(spec.name)
        self.arguments = argument_names(spec, self.w.names)
        self.scores = ScoreFragments(self.w, spec, schedule.keys, "m0", ROWS, ROWS, 1)
        self.written = self.scores.written()
        self.element = self.scores.element
        self.tiles = VectorTiles(self.w, self.scores, self.element)
        self.queries, self.keys, self.values = forward_sources(self.scores, self.arguments)
        self.deep, self.wide = _pieces(spec.depth, OF_KEY), _pieces(spec.width, OF_VALUE)

    def render(self) -> KernelSource:
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        w.share(buffers(spec, s, self.element))
        w.line("const int t = threadIdx.x, warp = t / 32, lane = t % 32;")
        w.line("const int row = lane / 4;  // of a thread's first score")
        if s.cluster > 1:
            w.line("const int rank = cluster_rank();")
        scores.begin(f"blockIdx.x / {s.cluster}" if s.cluster > 1 else "blockIdx.x")
        worker = linear([("rank", s.warps if s.cluster > 1 else 0), ("warp", 1)])
        w.line(f"const int worker = {worker};  // of {s.workers} warps that share the keys")
        self._ahead()
        w.line(UNTIL_HERE)
        scores.bound_numbers()
        scores.keys_met("m0", ROWS)
        scores.unit()
        scores.scalars()
        self._fetches()
        self.tiles.fill(self.queries, "m0", s.threads)
        w.line("copy_async_commit();")
        w.line("copy_async_wait<0>();")
        w.line("__syncthreads();")
        part = f"Packed<{self.element}, {VECTOR}>"
        w.line(f"{part} queries[2][{self.deep}];")
        with w.unrolled("for (int f = 0; f < 2; ++f)", f"for (int c = 0; c < {self.deep}; ++c)"):
            at = f"&shared.queries[row + f * 8][c * {OF_KEY} + lane % 4 * {VECTOR}]"
            w.line(f"queries[f][c] = load_shared<{VECTOR}>({at});")
        self._mainloop()
        self._results()
        detail = (
            f"tiles of {s.keys} keys in registers, shared out among {s.warps} warps"
            f"{f' of each of {s.cluster} blocks' if s.cluster > 1 else ''}"
        )
        return scores.complete(
            self.arguments, self.written, detail, tiles=s.cluster, threads=s.threads, cluster=s.cluster
        )

    # ---- keys and values

    def _ahead(self) -> None:
        """Writes requests for the warp's first tile to the L2 cache, as if queries met all keys."""
        w, s, spec = self.w, self.s, self.spec
        if spec.pages is not None or spec.parts > 1:
            return
        w.line("// While the kernel before ends, the first keys and values are on their way to the L2 cache.")
        with w.block(f"for (int i = lane; i < {s.keys}; i += 32)"):
            w.line(f"const {self.scores.t} r = worker * {s.keys} + i;")
            with w.block(f"if (r < {spec.keys})"):
                for source in (self.keys, self.values):
                    place = linear(self.scores.row_terms(source.operand, None, "r", source.total))
                    for line in range(0, source.elements * source.operand.dtype.itemsize, LINE):
                        element = line // source.operand.dtype.itemsize
                        w.line(f"prefetch({source.name} + ({linear([(f'({place})', 1)], element)}));")

    def _fetches(self) -> None:
        """Writes the functions that read the keys and the values of a tile."""
        w, s = self.w, self.s
        part = f"Packed<{self.element}, {VECTOR}>"
        w.line(f"{part} keys[{s.keys // 8}][{self.deep}], values[{s.keys // 16}][4][{self.wide}];")
        with (
            w.block("const auto fetch_keys = [&](int tile)", "};"),
            w.unrolled(f"for (int j = 0; j < {s.keys // 8}; ++j)"),
        ):
            self._fetch(self.keys, "j * 8 + lane / 4", "keys[j][c]", self.deep, OF_KEY, f"lane % 4 * {VECTOR}")
        with (
            w.block("const auto fetch_values = [&](int tile)", "};"),
            w.unrolled(f"for (int i = 0; i < {s.keys // 16}; ++i)", "for (int n = 0; n < 4; ++n)"),
        ):
            place = "i * 16 + n / 2 * 8 + lane % 4 * 2 + n % 2"
            self._fetch(self.values, place, "values[i][n][c]", self.wide, OF_VALUE, f"lane / 4 * {VECTOR}")

    def _fetch(self, source: Source, place: str, to: str, pieces: int, each: int, first: str) -> None:
        """Writes the reads of a row's pieces, the lane's elements beginning at ``first`` of each."""
        w, t, edge = self.w, self.scores.t, self.scores.key_tiles
        text = f"{t}(tile * {self.s.keys} + {place})"
        w.line(f"const {t} r = {f'min({text}, {t}({source.total - 1}))' if edge.ragged else text};")
        terms = self.scores.row_terms(source.operand, source.pages, "r", source.total)
        w.line(f"const auto* from = {source.name} + ({linear([*terms, (f'({first})', 1)])});")
        with w.unrolled(f"for (int c = 0; c < {pieces}; ++c)"):
            value = f"load_packed<{VECTOR}>(from + c * {each})"
            if source.elements % each:
                value = f"c * {each} + {first} < {source.elements} ? {value} : Packed<{self.element}, {VECTOR}>{{}}"
            w.line(f"{to} = {value};")

    def _mainloop(self) -> None:
        w, s, spec, scores = self.w, self.s, self.spec, self.scores
        w.line("const int begin = first + worker;")
        with w.block("if (begin < last)"):
            w.line("fetch_keys(begin);")
            w.line("fetch_values(begin);")
        scores.state(self.arguments[-1] if spec.sink is not None else "", self.wide * OF_VALUE)
        if spec.sink is not None:
            w.line("if (worker > 0) rows = attention::Rows();  // the first warp has the further key")
        w.line(f"float s[{s.keys // 2}], rescale[2];")
        w.line(f"uint32 probability[{s.keys // 16}][4];")
        scores.define()
        following = f"tile + {s.workers}"
        with w.block(f"for (int tile = begin; tile < last; tile += {s.workers})"):
            w.line(f"attention::multiply_keys<{self.element}>(s, queries, keys);")
            w.line(f"if ({following} < last) fetch_keys({following});")
            scores.make("tile")
            few = most(spec.keys) <= FEW_KEYS and spec.stats is None
            scores.softmax(CHAINS, self.element if few else "")
            w.line("attention::scale(o, rescale);")
            w.line(f"attention::round_to_fragments<{self.element}>(s, probability);")
            w.line(f"attention::add_values<{self.element}>(o, probability, values);")
            w.line(f"if ({following} < last) fetch_values({following});")
        w.line("attention::finish(rows);")

    # ---- results

    def _results(self) -> None:
        """Writes the exchange of what warps have, and the results."""
        w, s, spec = self.w, self.s, self.spec
        rows, wide = _rows(spec), self.wide * OF_VALUE
        with w.unrolled("for (int f = 0; f < 2; ++f)"), w.block(f"if (row + f * 8 < {rows})"):
            with w.block("if (lane % 4 == 0)"):
                w.line("shared.most[warp][row + f * 8] = rows.largest[f];")
                w.line("shared.total[warp][row + f * 8] = rows.total[f];")
            w.line("attention::store_values(&shared.sums[warp][row + f * 8][0], o, f);")
        w.line("__syncthreads();")
        with w.block(f"for (int i = t; i < {rows * wide}; i += {s.threads})"):
            self._combined(s.warps, *(f"shared.{name}[part]" for name in ("most", "total", "sums")))
            if s.cluster == 1:
                self._store()
                return
            w.line("shared.block_sums[r][d] = sum;")
            with w.block("if (d == 0)"):
                w.line("shared.block_most[r] = largest;")
                w.line("shared.block_total[r] = total;")
        w.line("cluster_sync();")
        with w.block(f"for (int i = rank * {s.threads} + t; i < {rows * wide}; i += {s.cluster * s.threads})"):
            names = ("block_most", "block_total", "block_sums")
            self._combined(s.cluster, *(f"cluster_map(shared.{name}, part)" for name in names))
            self._store()
        w.line("cluster_sync();  // others may still read what this block has")

    def _combined(self, parts: int, most_of: str, total_of: str, sum_of: str) -> None:
        """Writes ``largest``, ``total`` and ``sum`` of row ``r`` and element ``d``, the ``i``-th, of all parts."""
        w, wide = self.w, self.wide * OF_VALUE
        w.line(f"const int r = i / {wide}, d = i % {wide};")
        w.line("float largest = -infinity<float>(), total = 0.0f, sum = 0.0f;")
        w.unrolled_line(f"for (int part = 0; part < {parts}; ++part) largest = fmaxf(largest, {most_of}[r]);")
        with w.unrolled(f"for (int part = 0; part < {parts}; ++part)"):
            w.line(f"const float own = {most_of}[r];")
            w.line("const float by = own == -infinity<float>() ? 0.0f : math::fast_exp2(unit * (own - largest));")
            w.line(f"total += by * {total_of}[r];")
            w.line(f"sum += by * {sum_of}[r][d];")

    def _store(self) -> None:
        """Writes the store of element ``d`` of row ``r``, and of the logarithm of its sum."""
        w, spec, scores = self.w, self.spec, self.scores
        conditions = list(self._exists())
        with w.block(f"if ({' && '.join(conditions)})", when=bool(conditions)):
            w.line(f"const {scores.t} m = m0 + r, n = d;")
            w.line("const bool met = total != 0.0f;  // whether there is a key, if only one of NaN")
            w.line(f"const float value = met ? sum * (1.0f / total) : {'0.0f' if spec.zero else 'quiet_nan<float>()'};")
            if scores.epilogue is None:
                place = scores.offset(spec.out, "m", "n")
                w.line(f"{self.written[0]}[{place}] = {stored(spec.out, 'value', 'float')};")
            else:
                scores.epilogue.results([*scores.batch, "m", "n"], ["value"])
            if spec.stats is not None:
                text = stored(spec.stats, f"met ? {scores.log_sum('largest', 'total')} : -infinity<float>()", "float")
                w.line(f"if (n == 0) {self.written[-1]}[{scores.offset(spec.stats, 'm')}] = {text};")

    def _exists(self) -> Iterator[str]:
        """Yields the C conditions under which there is an element ``d`` of row ``r``."""
        if Edge(self.spec.rows, _rows(self.spec)).ragged:
            yield f"r < {self.spec.rows}"
        if self.spec.width % OF_VALUE:
            yield f"d < {self.spec.width}"
