"""Attention on Hopper: what the roles of a block share, which are the kernel, its operands and its pipelines."""

from __future__ import annotations

from contextlib import suppress
from math import prod

from codegen.attention import wgmma_schedule as schedules
from codegen.attention.fragments import ScoreFragments, padded
from codegen.attention.scores import approximated, argument_names, kernel_detail
from codegen.attention.spec import AttentionSpec
from codegen.attention.wgmma_schedule import PANEL, ROWS, AttentionWgmmaSchedule, box, buffers
from codegen.declined import Declined
from codegen.kernel import UNTIL_HERE, Kernel, parameter
from codegen.pipeline import GROUP, Meeting, Pipeline, initialize
from codegen.sizes import smaller
from codegen.spec import KernelSource, TensorMap

#: The largest power of two that is an 8-bit float, nearly: what the largest exponential of a row becomes.
LIFT = {"float8_e4m3": 8, "float8_e5m2": 15}


class Block:
    """The kernel, and what its roles share.

    arguments   C names of queries, keys, values, tables of pages and the sink.
    maps        by which TMA brings operands 0 to 2 (queries, unless they are computed, keys, values): C name and map.
    out_map     by which TMA stores the results, if it does.
    written     C names of the results; stats is that of the log-sum-exp, order that of the counter of tiles of queries
                that blocks take as they come to them: empty if there is none.
    panel       elements of queries and keys in a row of 128 bytes; step those that a wgmma adds up.
    width       columns of the products with values.
    part, top   the first row of a consumer: in a tile of queries, and of all.
    work        tiles of queries of all batches.
    joined      whether the first product of a tile of queries begins while the one before ends.
    spread      whether lanes of a warp bring the pages of a tile side by side.
    queries, keys, values  the pipelines of their tiles; without that of queries consumers compute them.
    warps       where all warps of a consumer meet.
    """

    def __init__(self, spec: AttentionSpec, s: AttentionWgmmaSchedule) -> None:
        self.spec, self.s, self.w = spec, s, Kernel(spec.name)
        names, size = self.w.names, spec.q.dtype.itemsize
        self.arguments = argument_names(spec, names)
        called = [name and names.unique(name, "_map") for name in self.arguments[:3]]
        self.part, self.top = (f"group * {ROWS}", f"m0 + group * {ROWS}") if s.groups > 1 else ("0", "m0")
        known = {"listed": schedules.listed(spec), "spanned": schedules.spanned(spec)}
        self.scores = ScoreFragments(self.w, spec, s.keys, self.top, ROWS, s.rows, s.heads, **known)
        self.scores.lift = LIFT.get(spec.q.dtype.name, 0)
        self.narrow, self.element, self.width = size == 1, spec.q.dtype.ctype, padded(spec.width)
        self.panel, self.step = 2 * PANEL // size, 32 // size
        made = schedules.maps(spec, s.rows, s.keys)
        self.scores.quads = made[1].box[1] == 2
        self.maps = {n: (called[n], x) for n, x in made.items()}
        self.out_map: TensorMap | None = None
        with suppress(Declined):
            if spec.out.dtype.itemsize == 2 and spec.epilogue is None:
                self.out_map = box(spec, spec.out, len(spec.read) + len(spec.loads), spec.rows, spec.width, ROWS)
        self.out = names.unique(spec.out.name, "_map")
        self.written = self.scores.written()
        self.stats = self.written[-1] if spec.stats is not None else ""
        # Where tiles take different times, and it is known early, a block with short ones takes more.
        self.order = names.unique(spec.order.name) if spec.order is not None and self.scores.spanned else ""
        self.joined, self.work = s.joined(spec), self.scores.tiles * prod(spec.batch)
        self.spread = spec.pages is not None and not spec.ranges and min(p.size for p in spec.pages) < s.keys
        self.warps = Meeting(self.w, "warps", s.groups + 1, consumer=GROUP)
        self.keys, self.values = (Pipeline(self.w, name, s.stages, releases=s.groups) for name in ("keys", "values"))
        self.queries = Pipeline(self.w, "queries", s.ahead, releases=s.groups) if 0 in made else None

    def begin(self) -> None:
        """Writes what precedes the roles: what lies in shared memory, and the initialisation of barriers."""
        w, s, spec = self.w, self.s, self.spec
        w.macros |= dict.fromkeys(f"FUSEGRAPH_WGMMA({n})" for n in (s.keys, self.width))
        for name, brought in self.maps.values():
            w.take(name, map_=brought)
        w.take(*(parameter(op, name) for op, name in zip(spec.arguments[3:], self.arguments[3:])))
        w.take(*self.scores.parameters())
        written = [parameter(op, name, written=True) for op, name in zip(spec.written, self.written)]
        w.take(self.out if self.out_map else written[0], map_=self.out_map)
        w.take(*written[1:])
        if spec.order is not None and self.order:
            w.take(parameter(spec.order, self.order, written=True))
        w.share(buffers(spec, s))
        w.line(f"const int group = int(threadIdx.x / {GROUP}) - 1;  // a warpgroup: consumers count from 0")
        of_keys = [self.keys, self.values]
        every = [p for p in w.trace.pipelines.values() if isinstance(p, Pipeline)]
        initialize(w, [p for p in every if p not in of_keys], of_keys)
        w.line(UNTIL_HERE)

    def source(self) -> KernelSource:
        """Returns the kernel, whose roles are written."""
        s, spec = self.s, self.spec
        tiles = f"{s.rows} queries a block, tiles of {s.keys} keys in {s.stages} stages filled by TMA"
        consumers = f"{s.groups} consumer warpgroup{'s' if s.groups > 1 else ''}"
        atoms = f"m64n{s.keys}k{self.step}, m64n{self.width}k{self.step}"
        details = kernel_detail(spec), f"{tiles}, {consumers} ({atoms})"
        zeroed = ((len(self.w.parameters) - 1, 4),) if self.order else ()
        return self.w.source(
            approximated(spec),
            details,
            blocks=self._grid(),
            threads=s.threads,
            barriers=True,
            blocks_per_sm=1,
            zeroed=zeroed,
        )

    def _grid(self) -> int:
        """Returns the number of blocks: where all tiles take the same time no more than the number of rounds asks for,
        as the last round is as long as the others.
        """
        s, spec = self.s, self.spec
        if s.groups == 1 or spec.ranges or any(bound.key for bound in spec.bounds):
            return smaller(self.work, s.blocks)
        return -(-self.work // -(-self.work // s.blocks))
