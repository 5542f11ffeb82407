"""Pointwise nodes -> the scalar program a kernel evaluates for every element of its space."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import ceil, prod

import numpy as np

from codegen.declined import Declined
from codegen.dtypes import DType
from codegen.expr import (
    Anchor,
    Index,
    Instruction,
    Literal,
    Load,
    Operand,
    Pointer,
    Program,
    Reduced,
    Reduction,
    Result,
    Store,
    Value,
    compute_type,
    ctype_of,
    literal,
)
from codegen.records import changed
from codegen.sizes import Size
from fusegraph.errors import GraphError
from fusegraph.graph import Node, Tensor
from fusegraph.layout import packed_strides
from fusegraph.lowering.base import GroupView, Options
from fusegraph.lowering.views import strides_over
from fusegraph.ops.base import REQUIRED, Kind, Role
from fusegraph.ops.convert import convert, to_reference
from fusegraph.ops.evaluate import compute_dtype, widens
from fusegraph.ops.random import inner_dims

#: (tensor) -> strides over the kernel's iteration space, 0 where the tensor is repeated.
StridesOf = Callable[[Tensor], tuple[int, ...]]


def broadcast_strides(tensor: Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns a tensor's strides over a shape it broadcasts to."""
    return strides_over(tensor.shape, tensor.strides, shape)


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Returns true if a shape broadcasts to another without changing it."""
    if shape == target:
        return True
    return len(shape) <= len(target) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(target)))


def check_broadcasts(node: Node, shape: Sequence[int], what: str = "the space") -> None:
    """Raises Declined unless a node's result broadcasts to a shape, that of ``what``."""
    if not broadcasts_to(node.output.shape, shape):
        raise Declined(f"{node.name!r} {list(node.output.shape)} does not broadcast to {what} {list(shape)}")


def describe(node: Node) -> str:
    """Returns ``y = relu(x, upper_clip=6.0)``: a node as one line of a kernel's heading."""
    operands = [_shown(t) for t in node.inputs]
    given = [f"{k}={v!r}" for k, v in node.attributes.items() if v is not None and not _is_usual(node, k)]
    return f"{node.name} = {node.op.name}({', '.join(operands + given)})"


def _is_usual(node: Node, key: str) -> bool:
    """Returns true if an attribute has the value that it has when it is not given."""
    usual = node.op.attributes.get(key)
    if usual is REQUIRED:
        return False
    if node.kind is not Kind.POINTWISE and node.op.normalize is not None:
        try:
            types = tuple(t.type for t in node.inputs)
            usual = node.op.normalize(types, {**node.attributes, key: usual}).get(key)
        except GraphError:  # the others do not go with it
            return False
    return bool(node.attributes[key] == usual)


def _shown(tensor: Tensor) -> str:
    return f"{tensor.value.reshape(-1)[0]}" if tensor.value is not None and tensor.size == 1 else tensor.name


class ProgramBuilder:
    """Builds the program of a group; ``anchors`` are the nodes whose values the kernel's main loop computes."""

    def __init__(self, view: GroupView, options: Options, strides: StridesOf, *anchors: Node) -> None:
        self._view, self._options, self._strides = view, options, strides
        self._loads: list[Operand] = []
        self._reads: list[Tensor] = []
        self._tables: list[Operand] = []
        self._table_reads: list[Tensor] = []
        self._indices: list[tuple[int, ...]] = []
        self._itype = "int32"
        self._instructions: list[Instruction] = []
        self._reductions: list[Reduction] = []
        self._values: dict[Tensor, Value] = {}
        #: what was rounded -> (its exact value, the dtype it was rounded to)
        self._exact: dict[Value, tuple[Value, DType]] = {}
        self._real_dtype = view.graph.compute_dtype
        self.real = compute_type(self._real_dtype)
        self._anchors = anchors
        self._anchor_type = compute_type(anchors[0].output.dtype, self.real) if anchors else "float"

    def build(self) -> tuple[Program, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns (program, tensors read, tensors written) in the order of the program's operands."""
        self._evaluate()
        stores = [Store(self._operand(t), self._stored(t)) for t in self._view.writes]
        return self._finished(stores)

    def _finished(self, stores: Sequence[Store]) -> tuple[Program, tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Returns what `build` returns, of a program with these stores."""
        program = Program(
            tuple(self._loads),
            tuple(self._indices),
            tuple(self._instructions),
            tuple(stores),
            tuple(describe(n) for n in self._view.nodes),
            self.real,
            self._options.strict,
            tuple(self._reductions),
            tuple(self._tables),
            self._itype,
        )
        program, reads, tables = _without_dead_code(program, self._parameter_order())
        read = (*(self._reads[n] for n in reads), *(self._table_reads[n] for n in tables))
        return program, read, self._view.writes

    def _evaluate(self) -> None:
        """Adds the values of all nodes, those of written tensors among them."""
        for node in self._view.nodes:
            self._add(node)

    def _add(self, node: Node) -> None:
        """Adds what a node computes."""
        if node in self._anchors:
            self._values[node.output] = self._rounded(node.output, self._anchor(node))
        else:
            self._values[node.output] = self._apply(node)

    def _anchor(self, node: Node) -> Value:
        """Returns what the kernel's main loop computes of a node."""
        return Anchor(self._anchors.index(node))

    def _parameter_order(self) -> list[int]:
        """Returns the loads in the order of a kernel's parameters: graph inputs as declared, then the others."""
        inputs = self._view.graph.input_numbers
        return sorted(range(len(self._reads)), key=lambda n: (inputs.get(self._reads[n].base, len(inputs)), n))

    def _operand(self, tensor: Tensor) -> Operand:
        return Operand(tensor.name, tensor.dtype, self._strides(tensor), self._view.alignment(tensor, self._options))

    def _value(self, tensor: Tensor) -> Value:
        if tensor not in self._values:
            if tensor.value is not None and tensor.size == 1:
                number = tensor.value.reshape(-1)[0]
                self._values[tensor] = Literal(
                    number.item() if not tensor.dtype.is_float else float(number), compute_type(tensor.dtype, self.real)
                )
            else:
                self._loads.append(self._operand(tensor))
                self._reads.append(tensor)
                self._values[tensor] = Load(len(self._loads) - 1)
        return self._values[tensor]

    def _ctype(self, value: Value) -> str:
        reductions = tuple(self._reductions)
        instructions = tuple(self._instructions)
        partial = Program(
            tuple(self._loads), (), instructions, real=self.real, reductions=reductions, itype=self._itype
        )
        return ctype_of(partial, value, self._anchor_type)

    def _apply(self, node: Node) -> Value:
        if node.op.role is Role.INDEX:
            source, axis = node.inputs[0], node.attributes["axis"]
            return self._numbered(source, tuple(int(d == axis) for d in range(source.rank)))
        if node.op.role is Role.SIZE:
            return Literal(node.attributes["number"], compute_type(node.output.dtype, self.real))
        dtypes = node.op.operand_dtypes(tuple(t.type for t in node.inputs))
        common = node.op.promoted(tuple(t.type for t in node.inputs))
        if node.op.role is Role.CAST:
            return self._cast(node)
        if node.op.role is Role.GE and (compared := self._at_least(node)) is not None:
            return compared
        template = node.op.expression(common.kind, node.attributes)
        compute = compute_type(common, self.real)
        args: list[Value] = []
        fields: dict[str, str] = {
            key: literal(value, compute)
            for key, value in node.attributes.items()
            if isinstance(value, (bool, int, float))
        }
        if node.op.shapes:
            fields["element"], fields["above"] = self._positions(node.inputs[0], args)
        fields["compute"] = compute
        for key, tensor, dtype in zip(node.op.operands, node.inputs, dtypes):
            if key in node.op.shapes:
                continue
            value, text = self._converted(self._value(tensor), tensor.dtype, dtype, len(args))
            args.append(value)
            fields[key] = text
        text, result = template.format(**fields), compute_type(node.output.dtype, self.real)
        value = args[0] if text == "{0}" and result == compute else self._emit(node.name, text, args, result)
        return self._rounded(node.output, value)

    def _at_least(self, node: Node) -> Value | None:
        """Returns dropout's mask, whether a uniform random number is at least a constant, by comparing integers.

        None for other comparisons.
        """
        value, least = (self._value(t) for t in node.inputs)
        if not isinstance(value, Result) or not isinstance(least, Literal) or not 0 <= least.value <= 1:
            return None
        random = self._instructions[value.instruction]
        function, _, arguments = random.template.partition("(")
        if function.partition("<")[0] != "philox::uniform":
            return None
        multiple = ceil(least.value * 2**24)
        text = f"philox::at_least({arguments.removesuffix(')')}, {multiple})"
        return self._emit(node.name, text, list(random.args), "bool")

    def _positions(self, tensor: Tensor, args: list[Value]) -> tuple[str, str]:
        """Returns the template texts of an element's row-major position in a tensor, in two numbers.

        The first is the position within the last dimensions, as many as an int32 can number, the second the position in
        the dimensions before these.
        """
        packed = packed_strides(tensor.shape)
        first = tensor.rank - inner_dims(tensor.shape)
        whole = prod(tensor.shape[first:])
        texts = []
        for strides in (
            tuple(s if d >= first else 0 for d, s in enumerate(packed)),
            tuple(s // whole if d < first else 0 for d, s in enumerate(packed)),
        ):
            if not any(n > 1 and s for n, s in zip(tensor.shape, strides)):
                texts.append("0")
                continue
            args.append(self._numbered(tensor, strides))
            texts.append(f"{{{len(args) - 1}}}")
        return texts[0], texts[1]

    def _numbered(self, tensor: Tensor, strides: tuple[int, ...]) -> Value:
        """Returns the sum of an element's coordinates in a tensor times ``strides``, an int32."""
        numbered = Tensor(tensor.graph, tensor.name, tensor.shape, strides, tensor.dtype)
        self._indices.append(self._strides(numbered))
        return Index(len(self._indices) - 1)

    def _converted(self, value: Value, source: DType, target: DType, position: int) -> tuple[Value, str]:
        """Returns a value in the compute type of a dtype: the value and the template text that stands for it."""
        wanted = compute_type(target, self.real)
        if isinstance(value, Literal) and not isinstance(value.value, Size):
            if value.ctype != wanted:
                number = to_reference(np.asarray(value.value).astype(source.numpy), source)
                value = Literal(convert(number, source, compute_dtype(target, self._real_dtype)).item(), wanted)
            return value, f"{{{position}}}"
        same = self._ctype(value) == wanted
        return value, f"{{{position}}}" if same else f"convert<{wanted}>({{{position}}})"

    def _typed(self, name: str, value: Value, source: str, wanted: str) -> Value:
        """Returns a value of one C type in another."""
        return value if source == wanted else self._emit(name, f"convert<{wanted}>({{0}})", [value], wanted)

    def _cast(self, node: Node) -> Value:
        """Returns the value of a cast: the operand's, or a conversion.  One that can lose digits rounds, as asked."""
        source, target = node.inputs[0].dtype, node.output.dtype
        value = self._value(node.inputs[0])
        if source == target:
            return value
        wanted = compute_type(target, self.real)
        if target.is_float and target.ctype != wanted and not widens(source, target):
            return self._round(node.name, self._limited(node, value), target)
        value, text = self._converted(value, source, target, 0)
        return value if text == "{0}" else self._emit(node.name, text, [value], wanted)

    def _limited(self, node: Node, value: Value) -> Value:
        """Returns what a cast rounds, with numbers beyond an 8-bit float as the cast wants them (`convert.limited`).

        Storing turns them into the largest number and leaves infinity, if the dtype has one.
        """
        source, target = node.inputs[0].dtype, node.output.dtype
        if not target.saturates or (source.max <= target.max and not source.has_infinity):
            return value
        if not node.attributes["saturate"]:
            return self._emit(node.name, f"overflowing<{target.ctype}>({{0}})", [value], "float")
        if target.has_infinity and source.has_infinity:
            return self._emit(node.name, f"saturating<{target.ctype}>({{0}})", [value], "float")
        return value

    def _round(self, name: str, value: Value, dtype: DType) -> Value:
        """Returns the value rounded, once, to what a float dtype narrower than its compute type holds."""
        wanted, ctype = compute_type(dtype, self.real), dtype.ctype
        text = (
            f"round_to<{ctype}>({{0}})"
            if self._ctype(value) == wanted
            else f"convert<{wanted}>(convert<{ctype}>({{0}}))"
        )
        result = self._emit(name, text, [value], wanted)
        self._exact[result] = value, dtype
        return result

    def _stored(self, tensor: Tensor) -> Value:
        """Returns what to store: the exact value of one that was only rounded to the same dtype, as storing rounds."""
        value = self._values[tensor]
        exact, dtype = self._exact.get(value, (value, tensor.dtype))
        return exact if dtype == tensor.dtype else value

    def _rounded(self, tensor: Tensor, value: Value) -> Value:
        """Returns the value, in strict mode rounded to the tensor's dtype."""
        dtype = tensor.dtype
        if self._options.strict and dtype.is_float and dtype.ctype != compute_type(dtype, self.real):
            return self._round(tensor.name, value, dtype)
        return value

    def _emit(self, name: str, template: str, args: list[Value], ctype: str) -> Result:
        self._instructions.append(Instruction(name, template, tuple(args), ctype))
        return Result(len(self._instructions) - 1)


def _without_dead_code(program: Program, order: Sequence[int]) -> tuple[Program, list[int], list[int]]:
    """Returns the program without what no store needs, loads in the given order; and the loads and tables left."""
    live: set[Value] = set()
    stack: list[Value] = [s.value for s in program.stores]
    while stack:
        value = stack.pop()
        if value not in live:
            live.add(value)
            if isinstance(value, Result):
                stack += program.instructions[value.instruction].args
            if isinstance(value, Reduced):
                reduction = program.reductions[value.reduction]
                stack += [v for v in (reduction.value, reduction.at) if v is not None]
            if isinstance(value, Load) and (begin := program.loads[value.operand].begin) is not None:
                stack.append(begin.value)
    loads = [n for n in order if Load(n) in live]
    tables = [n for n in range(len(program.tables)) if Pointer(n) in live]
    indices = [n for n in range(len(program.indices)) if Index(n) in live]
    kept = [n for n in range(len(program.instructions)) if Result(n) in live]
    reductions = [n for n in range(len(program.reductions)) if Reduced(n) in live]
    new: dict[Value, Value] = {}  # those that get another number
    for kind, numbers in ((Load, loads), (Pointer, tables), (Index, indices), (Result, kept), (Reduced, reductions)):
        new |= {kind(n): kind(k) for k, n in enumerate(numbers) if n != k}
    every = (program.loads, program.tables, program.indices, program.instructions, program.reductions)
    if not new and list(map(len, every)) == list(map(len, (loads, tables, indices, kept, reductions))):
        return program, loads, tables

    def moved(value: Value) -> Value:
        return new.get(value, value)

    def moved_load(operand: Operand) -> Operand:
        begin = operand.begin
        return operand if begin is None else replace(operand, begin=replace(begin, value=moved(begin.value)))

    def moved_instruction(instruction: Instruction) -> Instruction:
        args = tuple(map(moved, instruction.args))
        return instruction if args == instruction.args else changed(instruction, args=args)

    def moved_reduction(reduction: Reduction) -> Reduction:
        at = None if reduction.at is None else moved(reduction.at)
        return replace(reduction, value=moved(reduction.value), at=at)

    return (
        replace(
            program,
            loads=tuple(moved_load(program.loads[n]) for n in loads),
            tables=tuple(program.tables[n] for n in tables),
            indices=tuple(program.indices[n] for n in indices),
            instructions=tuple(moved_instruction(program.instructions[n]) for n in kept),
            stores=tuple(Store(s.operand, moved(s.value)) for s in program.stores),
            reductions=tuple(moved_reduction(program.reductions[n]) for n in reductions),
        ),
        loads,
        tables,
    )
