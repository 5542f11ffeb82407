"""One launch for a program over several tensors of different sizes, the members: many small ones keep a GPU busy.

A block belongs to one member.  It finds out which by comparing its number with where each member's blocks begin, a
binary search that is written out, and takes that member's pointers and numbers; from there on the kernel is that of
one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from codegen.expr import Program
from codegen.kernel import Kernel, Pointers, block_number, parameter
from codegen.spec import MembersSpec

#: The most pointers that a kernel takes: its parameters have 4096 bytes.
MOST_POINTERS = 500
#: A member has at most so many elements: more keep a GPU busy by themselves, and positions are of 32 bits.
MOST_ELEMENTS = 1 << 30


class Membership:
    """Writes which member a block belongs to, and takes what is that member's.

    blocks  of all members.
    begin   the C name of the number of the member's first block.
    """

    def __init__(
        self,
        w: Kernel,
        spec: MembersSpec,
        pointers: Pointers,
        blocks: Sequence[int],
        numbers: Mapping[str, Sequence[int]],
    ) -> None:
        """blocks: of each member.  numbers: those of each member, by their C names."""
        self._w, self._spec = w, spec
        self._begins = [*accumulate(blocks, initial=0)]
        self.blocks = self._begins[-1]
        self.begin = w.names.unique("first_block")
        self._numbers = {**numbers, self.begin: self._begins}
        self._take(pointers)
        w.line(f"uint32 {', '.join(self._numbers)};")
        self._choose(0, len(spec.sizes))

    def _take(self, pointers: Pointers) -> None:
        """Takes the pointers of every member as parameters, and declares those of one."""
        w, program = self._w, self._spec.program
        operands = [*((op, False) for op in program.loads), *((x.operand, True) for x in program.stores)]
        names = [*pointers.loads, *pointers.stores]
        w.parameters = []
        self._own: list[tuple[str, list[str]]] = []
        for (operand, written), name, shared in zip(operands, names, self._spec.shared):
            if shared:
                w.parameters.append(parameter(operand, name, written=written))
                continue
            each = [w.names.unique(operand.name, f"_{k}") for k in range(len(self._spec.sizes))]
            w.parameters += [parameter(operand, own, written=written) for own in each]
            w.line(f"{parameter(operand, name, written=written).replace('* __restrict__ ', '* ')};")
            self._own.append((name, each))

    def _choose(self, first: int, stop: int) -> None:
        """Writes which of the members from ``first`` to ``stop`` a block belongs to, and takes what is that one's."""
        w = self._w
        if stop - first == 1:
            taken = [*((name, each[first]) for name, each in self._own)]
            taken += [(name, str(each[first])) for name, each in self._numbers.items()]
            w.line(" ".join(f"{name} = {own};" for name, own in taken))
            return
        middle = (first + stop) // 2
        with w.block(f"if ({block_number('uint32')} < {self._begins[middle]})"):
            self._choose(first, middle)
            w.otherwise()
            self._choose(middle, stop)


def alike(spec: MembersSpec) -> MembersSpec:
    """Returns what specifications of one member have in common if they can be one: all but sizes and alignments."""
    return replace(spec, sizes=(), chunks=(), program=_aligned(spec.program, [1] * len(spec.program.operands)))


def together(members: Sequence[MembersSpec], shared: tuple[bool, ...]) -> MembersSpec:
    """Returns the specification of several members that are `alike`, of which some operands are ``shared``."""
    worst = [min(op.alignment for op in ops) for ops in zip(*(m.program.operands for m in members))]
    sizes, chunks = (tuple(n for each in every for n in each) for every in zip(*((m.sizes, m.chunks) for m in members)))
    return MembersSpec(members[0].name, sizes, _aligned(members[0].program, worst), shared, chunks)


def _aligned(program: Program, alignments: Sequence[int]) -> Program:
    """Returns a program whose operands have other alignments."""
    count = len(program.loads)
    loads = tuple(replace(op, alignment=a) for op, a in zip(program.loads, alignments))
    stores = zip(program.stores, alignments[count:])
    return replace(
        program, loads=loads, stores=tuple(replace(x, operand=replace(x.operand, alignment=a)) for x, a in stores)
    )
