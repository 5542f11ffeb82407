"""The stages of a rows kernel: when its values are known, and what is made in one loop over the row.

A softmax needs the maximum of its row, m, and then the sum of exp(x - m).  One loop can make both, with the greatest
element so far instead of m: where that grows, the sum so far is multiplied by exp(smaller - greater) (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018).  Such a sum is called running here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from codegen.combiners import ADD, MAX
from codegen.expr import Index, Load, Reduced, Result, Value
from codegen.records import once
from codegen.rows.space import Space

#: Elements of a vector from which on reading shared memory once less is worth the exponentials of running sums.
LEAST_NEIGHBOURS = 4


@dataclass(frozen=True)
class Running:
    """The sum of exp(x - shift), made in the loop of the maximum of x.

    most   the number of that maximum's reduction.
    value  what is summed.
    shift  a value of the row that is known once its maximum is, such as the maximum itself.
    """

    most: int
    value: Value
    shift: Value


class Stages:
    """When values are known: stage 0 needs no reduction, stage n + 1 those over values of stage n."""

    def __init__(self, space: Space, running: dict[int, Running] | None = None) -> None:
        self._space, program, self._sums = space, space.program, space.sums
        self.running = running or {}
        self._stage: list[int] = []
        self._varies: list[bool] = []
        for instruction in program.instructions:
            self._stage.append(max((self.stage(v) for v in instruction.args), default=0))
            self._varies.append(any(self.varies(v) for v in instruction.args))
        self.last = max((self.stage(v) for v in self._ends()), default=0)

    def _ends(self) -> list[Value]:
        """Returns the values that are stored, or combined in reductions of columns or segments."""
        program, sums = self._space.program, self._sums
        return [program.reductions[sums[n]].value if n in sums else s.value for n, s in enumerate(program.stores)]

    def stage(self, value: Value) -> int:
        """Returns the first stage in which a value is known."""
        if isinstance(value, Result):
            return self._stage[value.instruction]
        if isinstance(value, Reduced):
            return self.made(value.reduction) + 1
        return 0

    def made(self, reduction: int) -> int:
        """Returns the stage whose loop makes a reduction."""
        if reduction in self.running:
            reduction = self.running[reduction].most
        return self.stage(self._space.program.reductions[reduction].value)

    def varies(self, value: Value) -> bool:
        """Tells whether a value differs from element to element of a row."""
        if isinstance(value, Result):
            return self._varies[value.instruction]
        if isinstance(value, Load):
            return self._space.varies(self._space.program.loads[value.operand])
        if isinstance(value, Index):
            return any(self._space.program.indices[value.index][len(self._space.outer) :])
        return False

    def ends(self, stage: int) -> list[Value]:
        """Returns the values a stage's loop is for: stored for each element, or reduced but for running sums."""
        program = self._space.program
        reduced = [program.reductions[k].value for k in self.reduced(stage)]
        return reduced + [program.stores[n].value for n in self.stored(stage)]

    def reduced(self, stage: int) -> list[int]:
        """Returns the reductions that a stage's loop makes, but for running sums."""
        count = len(self._space.program.reductions)
        return [k for k in range(count) if k not in self.running and self.made(k) == stage]

    def stored(self, stage: int) -> list[int]:
        """Returns the stores of a stage that have a value for each element."""
        stores = enumerate(self._space.program.stores)
        elements = [(n, s.value) for n, s in stores if self._space.varies(s.operand) and n not in self._sums]
        return [n for n, value in elements if self.stage(value) == stage]

    @once
    def needed(self) -> list[set[Value]]:
        """By stage: all varying values that its loop computes or reads, except for running sums."""
        return [self.behind(self.ends(stage)) for stage in range(self.last + 1)]

    def of_row(self, stage: int) -> list[int]:
        """Returns the instructions that follow from the reductions of the stage before, once for each row."""
        return [k for k, at in enumerate(self._stage) if at == stage and not self._varies[k]]

    def behind(self, ends: Iterable[Value]) -> set[Value]:
        """Returns all varying values that ``ends`` depend on, themselves included."""
        return {value for value in self._space.program.needed(ends) if self.varies(value)}

    @property
    def loops(self) -> int:
        """How many loops over the row there are."""
        return sum(bool(self.ends(stage)) for stage in range(self.last + 1))

    def kept(self, form: str = "registers", *, early: bool = False) -> list[int]:
        """Returns the loads that more than one stage needs, and that should stay on the chip in between.  In shared
        memory, loads whose elements repeat along a row are left out, for each would take a place of its own.

        early  whether to add the loads of later stages, so that all are in flight at once.
        """
        loads = self._space.program.loads
        whole = [n for n, op in enumerate(loads) if form == "registers" or op.strides[-1] != 0]
        late = {n for n in whole if early and any(Load(n) in needed for needed in self.needed[1:])}
        return [n for n in whole if n in late or sum(Load(n) in needed for needed in self.needed) > 1]


def stages_along(space: Space, form: str, vector: int) -> Stages:
    """Returns the stages of a kernel whose threads read vectors of a row.

    Running sums are worth their exponentials where they save a loop over memory, or shared memory in long vectors.
    """
    plain = Stages(space)
    again = form == "memory" or (form == "shared" and vector >= LEAST_NEIGHBOURS)
    if not again or space.walk is not None or space.segments is not None:
        return plain
    found = Stages(space, _running(space, plain))
    # With running sums, a maximum may be known sooner than the value that is subtracted.
    together = all(found.stage(one.shift) == found.stage(Reduced(one.most)) for one in found.running.values())
    return found if together and found.loops < plain.loops else plain


def _running(space: Space, plain: Stages) -> dict[int, Running]:
    """Returns the reductions that can be running sums, at most one for each maximum."""
    program, found = space.program, dict[int, Running]()
    for k, reduction in enumerate(program.reductions):
        value = reduction.value
        if reduction.combiner is not ADD or not isinstance(value, Result) or not plain.varies(value):
            continue
        power = program.instructions[value.instruction]
        if power.template != "math::exp({0})" or not isinstance(power.args[0], Result):
            continue
        difference = program.instructions[power.args[0].instruction]
        if difference.template != "{0} - {1}":
            continue
        x, shift = difference.args
        for m, most in enumerate(program.reductions):
            same = most.combiner is MAX and most.value == x and most.ctype == reduction.ctype == power.ctype
            known = not plain.varies(shift) and plain.stage(shift) == plain.stage(Reduced(m))
            if same and known and all(running.most != m for running in found.values()):
                found[k] = Running(m, value, shift)
                break
    return found
