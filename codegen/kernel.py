"""What every rendered kernel has in common: its heading, its signature and how operands become C expressions."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TypeAlias

from codegen.buffers import Buffer, Buffers, Edge
from codegen.declined import Declined
from codegen.expr import Index, Load, Operand, Program, Value, compute_type, ctype_of
from codegen.iteration import coordinate
from codegen.naming import INCLUDES, Names, Scope, Writer, comment
from codegen.sizes import Size, ctype, least, most, named
from codegen.spec import KernelSource, Scalar, TensorMap
from codegen.trace import Trace

#: The line in front of which a kernel touches no memory but by `prefetch`: where it waits for kernels launched before.
UNTIL_HERE = "// What kernels launched before write is read from here on."
#: The same for a kernel that may touch operands before that are known not to be written by these.
UNTIL_HERE_BUT_KNOWN = "// All else that kernels launched before write is read from here on."
#: The line from which on a kernel asks memory for little: blocks of the next one may begin to ask for theirs.
FROM_HERE = "// What is left to do needs little of memory."


class Kernel(Writer):
    """A kernel in the making: the lines of its body, and what its heading, signature and launch follow from.

    name        its C identifier.
    names       gives the names of its parameters and variables (`codegen.naming.Names`).
    parameters  declarations, in order; passed is what `take` has added to them.
    buffers     what lies in shared memory.
    macros      what defines functions of the device library for this kernel, in front of it.
    trace       what its roles do with pipelines and asynchronous products, checked when it is complete.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.depth = name, 1
        self.names = Names()
        self.parameters: list[str] = []
        self.passed: list[int | TensorMap] = []
        self.buffers = Buffers()
        self.macros: dict[str, None] = {}
        self.trace = Trace()

    def take(self, *declarations: str, map_: TensorMap | None = None) -> None:
        """Adds parameters: the arguments with their numbers, declared so, or a tensor map with this C name."""
        for text in declarations:
            self.parameters.append(f"const __grid_constant__ TensorMap {text}" if map_ else text)
            self.passed.append(map_ or len(self.passed))

    def share(self, buffers: Iterable[Buffer]) -> None:
        """Declares what lies in shared memory: the struct ``Shared``, and the variable ``shared``."""
        self.buffers = Buffers(buffers)
        members = [
            f"        {buffer.declaration}" for buffer in self.buffers if 0 not in buffer.dims
        ]  # C has no others
        self.line("\n".join(("struct Shared {", *members, "    };")))
        self.line("FUSEGRAPH_DYNAMIC_SHARED(memory);")
        self.line("Shared& shared = *reinterpret_cast<Shared*>(memory);")

    def exchange(self, name: str, suffix: str, ctype: str, *shape: int) -> str:
        """Declares an array in static shared memory, through which threads exchange values; returns its C name."""
        unique = self.names.unique(name, suffix)
        self.line(Buffer(unique, ctype, shape).static)
        return unique

    def carve(self, buffers: Iterable[Buffer]) -> None:
        """Declares pointers to arrays that lie one behind the other in dynamic shared memory."""
        self.buffers = Buffers(buffers)
        self.line("FUSEGRAPH_DYNAMIC_SHARED(shared);")
        for place, buffer in zip(self.buffers.places, self.buffers):
            at = f"shared + {place}" if place else "shared"
            self.line(f"{buffer.ctype}* const {buffer.name} = reinterpret_cast<{buffer.ctype}*>({at});")

    def role(self, name: str, condition: str = "", *, otherwise: bool = False, groups: int = 0) -> Scope:
        """Writes what some warps do, under the condition that tells them apart.

        otherwise  whether they are none of those of the role in front of it, or of the block in front of it.
        groups     of threads, one thread of each of which releases stages; 0: that is not known.
        """
        before = self.trace.role, self.trace.groups

        def restore() -> None:
            self.trace.role, self.trace.groups = before

        self.trace.role, self.trace.groups = name, groups
        text = f"if ({condition})" if condition else ""
        if otherwise:
            self.lines.pop()  # the brace that closes the role in front
            text = f"}} else {text}".rstrip()
        return self.block(text, when=text != "", then=restore)

    def loop(self, text: str, *, when: bool = True) -> Scope:
        """Writes a loop, which the trace follows; none unless ``when``."""
        if when:
            self.trace.begin("loop")
        return self.block(text, when=when, then=self.trace.end if when else None)

    def branch(self, condition: str) -> Scope:
        """Writes a block under a condition, which the trace follows apart from what is done without it."""
        self.trace.begin("branch")
        return self.block(f"if ({condition})", then=self.trace.end)

    def alternative(self) -> None:
        """Writes where what is done without the condition of a branch begins."""
        self.trace.add("otherwise")
        self.otherwise()

    def moved(self, stage: str, to: str) -> None:
        """Notes that a stage is called otherwise from now on, by what has been written."""
        self.trace.add("rename", stage, to)

    def reads(self, *sums: str) -> None:
        """Notes that what is written next reads the results of asynchronous products."""
        for name in sums:
            self.trace.add("read", name)

    def writes(self, *registers: str) -> None:
        """Notes that what is written next overwrites operands of asynchronous products that lie in registers."""
        for name in registers:
            self.trace.add("write", name)

    def source(
        self,
        program: Program,
        details: Iterable[str] = (),
        *,
        blocks: int,
        threads: int,
        barriers: bool = False,
        blocks_per_sm: int | None = None,
        shared_bytes: int | None = None,
        arguments: Sequence[int | TensorMap] | None = None,
        cluster: int = 1,
        zeroed: tuple[tuple[int, int], ...] = (),
    ) -> KernelSource:
        """Returns the kernel, whose body is complete.  Raises PipelineError if its trace shows a mistake.

        details        lines of its heading, behind its title and the nodes of the program.
        blocks         of its grid; threads those of a block.
        barriers       whether threads of a block depend on each other.
        blocks_per_sm  the least that are to fit a multiprocessor.
        shared_bytes   of dynamic shared memory, where it is not for the buffers alone.
        arguments      of its parameters (`KernelSource.parameters`), if they are not those that `take` has added.
        cluster        blocks of a cluster; zeroed as `KernelSource` has it.
        """
        self.trace.check()
        head = Writer()
        count = len(program.notes)
        title = f"{self.name}: {count} {'nodes in one kernel' if count != 1 else 'node'}"
        for text in (title, *(f"    {note}" for note in program.notes), *details):
            head.line(comment(text))
        if program.approximate:
            head.line("#define APPROXIMATE_MATH  // everything is stored in 16 bits or fewer")
        head.line(INCLUDES)
        for macro in self.macros:
            head.line(macro)
        head.line()
        bounds = f"{most(threads)}, {least(blocks_per_sm)}" if blocks_per_sm else str(most(threads))
        head.line(f'extern "C" __global__ void __launch_bounds__({bounds}) {self.name}(')
        passed: Sequence[int | TensorMap | Scalar] | None = (self.passed or None) if arguments is None else arguments
        varying = self._varying()
        if varying:
            passed = [*(range(len(self.parameters)) if passed is None else passed), *varying]
        declared = [*self.parameters, *(f"const {x.ctype} {x.value}" for x in varying)]
        for number, text in enumerate(declared):
            head.line(f"    {text}{',' if number < len(declared) - 1 else ')'}")
        return KernelSource(
            self.name,
            self.names.chosen([*head.lines, "{", *self.lines, "}"]),
            (blocks, 1, 1),
            (threads, 1, 1),
            self.buffers.bytes if shared_bytes is None else shared_bytes,
            uses_barriers=barriers,
            parameters=None if passed is None else tuple(passed),
            cluster=(cluster, 1, 1),
            zeroed=zeroed,
        )

    def _varying(self) -> list[Scalar]:
        """Returns parameters for the sizes that the body mentions and that vary."""
        found = named("\n".join(line.partition("//")[0] for line in self.lines))
        return [_scalar(size) for size in found]


def _scalar(size: Size) -> Scalar:
    return Scalar(ctype(size.expression, size.dims), size)


def from_the_end(source: KernelSource) -> KernelSource:
    """Returns a kernel with a one-dimensional grid in reverse order: its first block takes the place of its last."""
    head, body = _ordered(source.code)
    return replace(source, code=head + body.replace("blockIdx.x", "block_from_the_end()"))


def in_sequence(source: KernelSource, *, first: bool, early: bool, known: bool = False) -> KernelSource:
    """Returns a kernel that is one of several launched one after the other, so that launches overlap.

    first  whether none of them is launched before it.
    early  whether the next one's blocks may come in before it ends: as soon as all of its own have begun and waited, or
           are as far as `FROM_HERE`.  What they ask the L2 cache for would only be in the way before.

    known  whether they do not write what it reads in front of `UNTIL_HERE_BUT_KNOWN`.

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
    until = body.find(f"    {UNTIL_HERE_BUT_KNOWN if known else UNTIL_HERE}\n", at)
    at = until if until >= 0 else at
    further = re.search(rf"(?m)^ *{re.escape(FROM_HERE)}\n", body)
    if early and further:
        indent = body[further.start() : further.end() - len(FROM_HERE) - 1]
        body = f"{body[: further.end()]}{indent}grid_dependency_launch();\n{body[further.end() :]}"
        calls.remove("grid_dependency_launch")
    text = "".join(f"    {call}();\n" for call in reversed(calls))
    return replace(source, code=head + body[:at] + text + body[at:], dependent=not first)


def sharing(source: KernelSource) -> KernelSource:
    """Returns a kernel without __restrict__: arguments that it reads and writes may be the same memory."""
    begin = source.code.index('extern "C" __global__')
    at = source.code.index("\n{\n", begin)
    opening = source.code[begin:at].replace("* __restrict__ ", "* ")
    return replace(source, code=source.code[:begin] + opening + source.code[at:])


def at_position(source: KernelSource, steps: Mapping[int, int], ctype: str, size: int, *, last: int) -> KernelSource:
    """Returns a kernel that writes each of some arguments its step of elements further on for each that another one
    says.

    That is argument ``last``, the kernel's last one, a pointer to one ``ctype``; unless it is in [0, size), the kernel
    does nothing.  Raises Declined if the kernel does not write such an argument through a pointer that it is given.
    """
    passed = source.parameters if source.parameters is not None else tuple(range(last))
    maps = {p.argument for p in passed if isinstance(p, TensorMap)}
    if maps.intersection(steps) or any(n in steps for n, _ in source.zeroed):
        raise Declined("it stores by TMA, or adds up what it writes")
    begin = source.code.index('extern "C" __global__')
    body = source.code.index("\n{\n", begin)
    opening = source.code[begin:body]
    _, _, declared = opening.rpartition("(\n")
    names = [text.split()[-1] for text in declared.removesuffix(")").split(",\n")]
    moved = {names[passed.index(n)]: step for n, step in steps.items()}
    first = next(iter(moved))
    sizes = (size, *moved.values())
    fresh = {str(x): _scalar(x) for x in sizes if isinstance(x, Size) and str(x) not in names}
    at = body + len("\n{\n")
    wait = source.code.find("grid_dependency_wait();\n", at)
    at = wait + len("grid_dependency_wait();\n") if wait >= 0 else at
    lines = [
        f"const int64 position_of_{first} = int64(at_{first}[0]);",
        f"if (position_of_{first} < 0 || position_of_{first} >= {size}) return;",
        *(f"{name} += position_of_{first} * {step};" for name, step in moved.items()),
    ]
    text = "".join(f"    {line}\n" for line in lines)
    more = [f"const {ctype}* at_{first}", *(f"const {x.ctype} {text}" for text, x in fresh.items())]
    opening = ",\n    ".join([opening.removesuffix(")"), *more]) + ")"
    code = source.code[:begin] + opening + source.code[body:at] + text + source.code[at:]
    return replace(source, code=code, parameters=(*passed, last, *fresh.values()))


def _ordered(code: str) -> tuple[str, str]:
    """Returns a kernel's code up to its last include, that of order.cuh, and the rest."""
    head, include, rest = code.rpartition("#include ")
    last, _, body = rest.partition("\n")
    own = '"order.cuh"'
    return f"{head}{include}{last}\n" + ("" if last == own else f"#include {own}\n"), body


def block_number(itype: str) -> str:
    """Returns the C expression of the block's number, in a type wide enough for products with it."""
    return "uint64(blockIdx.x)" if itype.endswith("64") else "blockIdx.x"


def thread_number(w: Writer, itype: str, name: str, threads: Edge) -> int:
    """Writes a thread's number in the grid, of so many in blocks of so many: those beyond are done.

    Returns the number of blocks.
    """
    w.line(f"const {itype} {name} = {block_number(itype)} * {threads.size} + threadIdx.x;")
    if threads.ragged:
        w.line(f"if ({name} >= {threads.total}) return;")
    return threads.tiles


def row_number(w: Writer, itype: str, name: str, rows: Edge, lanes: int) -> None:
    """Writes which row a thread is in, of so many in blocks of so many, and its number ``lane`` among the threads of
    the row, which are neighbours.
    """
    mine = f" * {rows.size} + threadIdx.x{f' / {lanes}' if lanes > 1 else ''}" if rows.size > 1 else ""
    held_row(w, itype, name, rows, block_number(itype) + mine)
    if lanes > 1:
        w.line(f"const uint32 lane = threadIdx.x{f' % {lanes}' if rows.size > 1 else ''};")


def held_row(w: Writer, itype: str, name: str, rows: Edge, text: str, each: int = 1) -> None:
    """Writes which row a thread is in, and ``inside``, whether there is one, if that is not sure.

    A thread without a row computes the last one again, or the last ``each``, for the others wait for it.
    """
    if rows.ragged:
        w.line(f"const bool inside = {text} < {rows.total};")
        text = f"inside ? {text} : {rows.total - each}"
    w.line(f"const {itype} {name} = {text};")


def parameter(operand: Operand, name: str, *, written: bool = False) -> str:
    """Returns the C declaration of a pointer parameter."""
    return f"{'' if written else 'const '}{operand.dtype.ctype}* __restrict__ {name}"


def locate(w: Writer, itype: str, axes: Sequence[tuple[str, int, int]], position: str = "") -> int:
    """Writes where a block is along each axis, (C variable, number of blocks, positions of a block), slowest first.

    An axis with one block gets no variable: its position is 0.  Returns the number of blocks.  With the C variable
    ``position`` the same is written for what that counts.
    """
    sizes = [blocks for _, blocks, _ in axes]
    position = position or ("block" if sum(most(size) > 1 for size in sizes) > 1 else f"{itype}(blockIdx.x)")
    if position == "block":
        w.line(f"const {itype} block = blockIdx.x;")
    for d, (name, size, scale) in enumerate(axes):
        if most(size) > 1:
            w.line(f"const {itype} {name} = {coordinate(position, sizes, d)}{f' * {scale}' if scale > 1 else ''};")
    return prod(sizes)


def tile_at(number: str, rows: int, cols: int, group: int) -> str:
    """Returns the C expression of the place of a tile of this number (``codegen/device/pipeline.cuh``)."""
    if any(isinstance(size, Size) for size in (rows, cols, group)):
        return f"tile_at({number}, {rows}, {cols}, {group})"
    return f"tile_at<{rows}, {cols}, {group}>({number})"


#: Gives the C expression of an element's offset in an operand with some strides.
Offset: TypeAlias = Callable[[tuple[int, ...]], str]


class Pointers:
    """C names of a program's operands: pointers, in the order of the kernel's parameters."""

    def __init__(self, program: Program, names: Names) -> None:
        self.loads = [names.unique(op.name) for op in program.loads]
        self.tables = [names.unique(op.name) for op in program.tables]
        self.stores = [names.unique(store.operand.name) for store in program.stores]
        self._program, self._names = program, names

    def read(
        self, w: Writer, needed: Container[Value], offset: Offset, suffix: str, known: Mapping[Value, str] | None = None
    ) -> dict[Value, str]:
        """Writes the reads of one element of each load that is needed and not ``known``, as constants.

        Returns the C expressions of loads and indices; ``offset`` gives those of the element's offsets.
        """
        program, terms = self._program, dict(known or {})
        for n, operand in enumerate(program.loads):
            if Load(n) in needed and Load(n) not in terms:
                text = f"{self.loads[n]}[{offset(operand.strides)}]"
                terms[Load(n)] = constant(w, self._names, program, n, text, suffix)
        return terms | {Index(n): f"int32({offset(strides)})" for n, strides in enumerate(program.indices)}

    def parameters(self) -> list[str]:
        program = self._program
        read = zip((*program.loads, *program.tables), (*self.loads, *self.tables))
        written = zip((store.operand for store in program.stores), self.stores)
        return [*(parameter(*both) for both in read), *(parameter(*both, written=True) for both in written)]


def converted(operand: Operand, text: str, real: str) -> str:
    """Returns the C expression of an operand's value, given as it is stored, in its compute type."""
    target = compute_type(operand.dtype, real)
    return text if operand.dtype.ctype == target else f"convert<{target}>({text})"


def constant(w: Writer, names: Names, program: Program, n: int, text: str, suffix: str) -> str:
    """Writes an element of a load, given as it is stored, as a constant of its compute type; returns its C name."""
    name = names.unique(program.loads[n].name, suffix)
    w.line(f"const {ctype_of(program, Load(n))} {name} = {converted(program.loads[n], text, program.real)};")
    return name
