"""What every rendered kernel has in common: its heading, its signature and how operands become C expressions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import prod

from codegen.expr import Load, Operand, Program, Value, compute_type, ctype_of
from codegen.iteration import coordinate
from codegen.naming import Names, Writer, comment
from codegen.spec import KernelSource


def heading(w: Writer, title: str, program: Program, headers: Sequence[str], details: Iterable[str] = ()) -> None:
    """Writes the comment that names the kernel and its nodes, and the includes."""
    w.line(comment(title))
    for note in program.notes:
        w.line(comment(f"    {note}"))
    for detail in details:
        w.line(comment(detail))
    if program.approximate:
        w.line("#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer")
    for header in headers:
        w.line(f'#include "{header}"')
    w.line()


def title(name: str, program: Program) -> str:
    """Returns the title of a kernel of one node or several."""
    count = len(program.notes)
    return f"{name}: {count} {'nodes in one kernel' if count != 1 else 'node'}"


def headers(program: Program, *more: str, programs: Sequence[Program | None] = ()) -> list[str]:
    """Returns the device headers that a program needs, and ``more`` ones of the same kernel, in order."""
    every = (program, *(p for p in programs if p is not None))
    templates = [i.template for p in every for i in p.instructions]
    random = any("philox::" in text for text in templates)
    scattered = any("scatter::" in text for text in templates)
    needed = ["types.cuh", *(["math.cuh"] if templates else []), *(["philox.cuh"] if random else [])]
    needed += [*(["scatter.cuh"] if scattered else []), *more]
    return list(dict.fromkeys(needed))


def signature(w: Writer, name: str, threads: int, parameters: Sequence[str], blocks_per_sm: int | None = None) -> None:
    """Writes the kernel's first lines, up to its opening brace."""
    bounds = f"{threads}, {blocks_per_sm}" if blocks_per_sm else str(threads)
    w.line(f'extern "C" __global__ void __launch_bounds__({bounds}) {name}(')
    for number, parameter in enumerate(parameters):
        w.line(f"    {parameter}{',' if number < len(parameters) - 1 else ')'}")
    w.open("")


@contextmanager
def shared_memory(w: Writer) -> Iterator[None]:
    """Writes the struct ``Shared`` around its members, and the variable ``shared``."""
    with w.block("struct Shared", "};"):
        yield
    w.line("FUSEGRAPH_DYNAMIC_SHARED(memory);")
    w.line("Shared& shared = *reinterpret_cast<Shared*>(memory);")


def from_the_end(source: KernelSource) -> KernelSource:
    """Returns a kernel with a one-dimensional grid in reverse order: its first block takes the place of its last."""
    head, body = _ordered(source.code)
    return replace(source, code=head + body.replace("blockIdx.x", "block_from_the_end()"))


def in_sequence(source: KernelSource, *, first: bool, early: bool) -> KernelSource:
    """Returns a kernel that is one of several launched one after the other, so that launches overlap.

    first  whether none of them is launched before it.
    early  whether the next one's blocks may come in as soon as all of its own have begun.

    Memory that earlier kernels write changes while it waits.  So its inputs may not be __restrict__: the compiler would
    take that as a promise that they do not change, and might move reads to before the wait.
    """
    calls = ["grid_dependency_launch"] * early + ["grid_dependency_wait"] * (not first)
    if not calls:
        return source
    head, body = _ordered(source.code)
    begin = body.index('extern "C" __global__')
    at = body.index("\n{\n", begin) + len("\n{\n")
    if not first:
        opening = re.sub(r"(?m)^(    const \w+\*) __restrict__ ", r"\1 ", body[begin:at])
        body, at = body[:begin] + opening + body[at:], begin + len(opening)
    code = head + body[:at] + "".join(f"    {call}();\n" for call in calls) + body[at:]
    return replace(source, code=code, dependent=not first)


def sharing(source: KernelSource) -> KernelSource:
    """Returns a kernel without __restrict__: arguments that it reads and writes may be the same memory."""
    begin = source.code.index('extern "C" __global__')
    at = source.code.index("\n{\n", begin)
    opening = source.code[begin:at].replace("* __restrict__ ", "* ")
    return replace(source, code=source.code[:begin] + opening + source.code[at:])


def _ordered(code: str) -> tuple[str, str]:
    """Returns a kernel's code up to its last include, that of order.cuh, and the rest."""
    head, include, rest = code.rpartition("#include ")
    last, _, body = rest.partition("\n")
    own = '"order.cuh"'
    return f"{head}{include}{last}\n" + ("" if last == own else f"#include {own}\n"), body


def block_number(itype: str) -> str:
    """Returns the C expression of the block's number, in a type wide enough for products with it."""
    return "uint64(blockIdx.x)" if itype.endswith("64") else "blockIdx.x"


def parameter(operand: Operand, name: str, *, written: bool = False) -> str:
    """Returns the C declaration of a pointer parameter."""
    return f"{'' if written else 'const '}{operand.dtype.ctype}* __restrict__ {name}"


def locate(w: Writer, itype: str, axes: Sequence[tuple[str, int, int]]) -> int:
    """Writes where a block is along each axis, (C variable, number of blocks, positions of a block), slowest first.

    An axis with one block gets no variable: its position is 0.  Returns the number of blocks.
    """
    sizes = [blocks for _, blocks, _ in axes]
    position = "block" if sum(size > 1 for size in sizes) > 1 else f"{itype}(blockIdx.x)"
    if position == "block":
        w.line(f"const {itype} block = blockIdx.x;")
    for d, (name, size, scale) in enumerate(axes):
        if size > 1:
            w.line(f"const {itype} {name} = {coordinate(position, sizes, d)}{f' * {scale}' if scale > 1 else ''};")
    return prod(sizes)


class Pointers:
    """C names of a program's operands: pointers, in the order of the kernel's parameters."""

    def __init__(self, program: Program, names: Names) -> None:
        self.loads = [names.unique(op.name) for op in program.loads]
        self.tables = [names.unique(op.name) for op in program.tables]
        self.stores = [names.unique(store.operand.name) for store in program.stores]
        self._program = program

    def parameters(self) -> list[str]:
        program = self._program
        read = zip((*program.loads, *program.tables), (*self.loads, *self.tables))
        return [parameter(op, n) for op, n in read] + [
            parameter(store.operand, n, written=True) for store, n in zip(program.stores, self.stores)
        ]


def converted(operand: Operand, text: str, real: str) -> str:
    """Returns the C expression of an operand's value, given as it is stored, in its compute type."""
    target = compute_type(operand.dtype, real)
    return text if operand.dtype.ctype == target else f"convert<{target}>({text})"


def constant(w: Writer, names: Names, program: Program, n: int, text: str, suffix: str) -> str:
    """Writes an element of a load, given as it is stored, as a constant of its compute type; returns its C name."""
    name = names.unique(program.loads[n].name, suffix)
    w.line(f"const {ctype_of(program, Load(n))} {name} = {converted(program.loads[n], text, program.real)};")
    return name


def uses(program: Program) -> Counter[Value]:
    """Returns how often each value is used by instructions, reductions and stores."""
    every = [v for i in program.instructions for v in i.args] + [r.value for r in program.reductions]
    return Counter([*every, *(s.value for s in program.stores)])
