"""Attention's gradients on Hopper: all products by warpgroups (wgmma), of tiles that TMA brings.

A block keeps a tile of queries, or of keys, and one of its threads brings tiles of the other side in a ring of stages.
Each consumer, a warpgroup, has 64 rows.  Probabilities and gradients stay in registers: as the first products leave
them, they are the operands A of the sums.  Where rows are keys, the scores are therefore computed transposed.  While
the tensor cores multiply a tile, the consumer computes the exponentials of the next one or the gradients of this one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from codegen.attention.backward_scores import INTERVALS, without_places
from codegen.attention.backward_spec import AttentionBackwardSpec
from codegen.attention.backward_wgmma_block import Block
from codegen.attention.backward_wgmma_schedule import AttentionBackwardWgmmaSchedule, buffers, registers
from codegen.kernel import parameter
from codegen.pipeline import GROUP, Meeting, await_products, results, use
from codegen.spec import KernelSource

NUMBERS = 4  #: First named barrier between consumers and the warps that bring numbers of queries; others begin at 1.


def render(spec: AttentionBackwardSpec, schedule: AttentionBackwardWgmmaSchedule) -> KernelSource:
    """Returns the kernel of a spec as CUDA C.  Raises Declined if the spec cannot have this form."""
    return _Separate(without_places(spec), schedule).render()


class _Separate(Block):
    """Writes a kernel of the gradients for queries, or of those for keys and values."""

    def __init__(self, spec: AttentionBackwardSpec, schedule: AttentionBackwardWgmmaSchedule) -> None:
        super().__init__(spec, schedule, registers(spec, schedule))
        self.by_scores = ""
        if spec.by_scores is not None:
            self.by_scores = self.w.names.unique(spec.by_scores.name)
            self.w.take(parameter(spec.by_scores, self.by_scores, written=True))
        #: whether results leave while the next tile of rows is worked on
        self.late = schedule.ahead > 1 and bool(self.mapped)
        self.numbers = Meeting(self.w, "numbers", NUMBERS, numbers=32, consumer=GROUP)

    def render(self) -> KernelSource:
        w = self.w
        with self.begin(buffers(self.spec, self.s)):
            pass
        with w.block("if (group < 0)"):
            self.producer(self._work())
            if not self.spec.queries:
                self._bring_numbers()
        with w.role("consumer", otherwise=True, groups=self.s.groups):
            self._consumer()
        return self.source(min(self.work, self.s.blocks))

    @contextmanager
    def _work(self) -> Iterator[None]:
        """Writes a loop over the block's tiles of rows."""
        with self.w.loop(f"for (int work = blockIdx.x; work < {self.work}; work += gridDim.x, ++held)"):
            self.scores.place("work", self.s.heads)
            yield

    def _bring_numbers(self) -> None:
        """Writes the warps that bring the numbers of queries by ordinary loads, each for one warpgroup of consumers.

        There is room for the numbers of two tiles, in turn.  Writer and readers of a tile's numbers meet at a barrier
        when they are there: by then the tile before has been read.
        """
        w, warps = self.w, f"threadIdx.x >= 32 && threadIdx.x < {32 + 32 * self.s.groups}"
        with w.role("numbers", warps, otherwise=True):
            w.line("const int reader = threadIdx.x / 32 - 1;  // the warpgroup that they are for")
            w.line("int place = 0;")
            with self._work():
                self.scores.intervals()
                with self.scores.met(), w.loop("for (int tile = first; tile < last; ++tile, place ^= 1)"):
                    self.bring_numbers("[reader][place]")
                    self.numbers.sync("reader")

    # ---- the consumers

    def _consumer(self) -> None:
        w, s, queries = self.w, self.s, self.spec.queries
        self.begin_consumer()
        if not queries:
            w.line("int place = 0;  // of the queries' numbers")
        w.line(f"Ring<{s.ahead}> held;")
        if self.late:
            w.line("bool stored = false;  // whether results are on their way out of the tile before")
        with self._work():
            self.fragments()
            if queries:
                self.scores.row_numbers(self.lse, self.row_dot)
            self.rows.wait("held")
            if self.scores.ranged:
                every = (f"{name} = shared.met[held.index][{n}]" for n, name in enumerate(INTERVALS))
                w.line(f"const int {', '.join(every)};")
            with self.scores.met():
                self.scores.define()
                w.line(f"Ring<{s.stages}> previous = stage;")
                w.moved("previous", "out of scope")
                with w.loop("for (int tile = first; tile < last; ++tile)"):
                    self._work_on_tile()
                await_products(w)
                self.ring.release("previous", condition="t == 0 && first < last")
            self._release_rows("t == 0 && stored")
            use(w, *(r.sums for r in self.results))
            self.store()
        if self.late:
            w.line("if (t == 0) tma_wait_read<0>();  // shared memory must outlive the copies out of it")

    def _work_on_tile(self) -> None:
        """Writes the work on a tile of columns; the sums of the tile before are made meanwhile."""
        w, spec = self.w, self.spec
        self.ring.wait()
        self.multiply("s", 0)
        await_products(w, 1, "the sums of the tile before are made")
        self.ring.release("previous", condition="t == 0 && tile > first")
        self._release_rows("t == 0 && stored && tile > first")
        if spec.with_loss:
            self.multiply("d", 1)
        self.scores.draw("tile")
        results(w, "s", "the products of queries and keys are there")
        if not spec.queries:
            self.numbers.sync("group", note="so are the queries' numbers")
        self.probabilities("[group][place]")
        self.add(self.by_p)
        if spec.with_loss:
            results(w, "d", "those with the loss are there")
            self.gradients("[group][place]", self.by_scores)
        self.add(self.by_s)
        w.line("previous = stage;")
        w.moved("stage", "previous")
        w.line("++stage;" if spec.queries else "++stage, place ^= 1;")

    def _release_rows(self, condition: str) -> None:
        """Writes that the tile of rows before may be overwritten, once its results have been read from its place."""
        w = self.w
        if self.late:
            with w.block(f"if ({condition})"):
                w.line("tma_wait_read<0>();")
                self.rows.release("held before", condition="", at="held.index ^ 1")
                w.line("stored = false;")
