"""Pointwise nodes in front of a contraction: an operand is computed element by element instead of being read.

An operand's tile is needed once for every tile of results across it, and a convolution takes each element under several
taps: the prologue is evaluated as often.  That is worth it as long as it costs less than writing the operand to memory
and reading it back.  What it costs is measured:

- The consumers of a Hopper kernel compute an operand in registers (`codegen.computed_tiles`) while the tensor cores
  multiply.  A relu costs nothing; whatever else they do takes the power, and the way to shared memory, of the product,
  half as much where one instruction computes two elements (`codegen.packed`).
- Where threads must fill the operand's tiles they share the way to shared memory with the tensor cores: a product of
  4096 x 4096 x 4096 takes 1.4 times as long as one that TMA brings.

What else threads that fill tiles take away from the product (a form that is faster, copies of 16 bytes) the cost models
of both kernels tell: what may be a prologue by the first estimate is a kernel of its own if they say that this is
clearly faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, prod

from codegen import best_schedule
from codegen.contraction import FAMILY
from codegen.contraction.wgmma_layout import WgmmaSchedule
from codegen.declined import Declined
from codegen.spec import ContractionSpec, Gather, Strides
from codegen.target import Target
from fusegraph.graph import Node, Tensor
from fusegraph.lowering import divided
from fusegraph.lowering.base import GroupView, Options, Part
from fusegraph.lowering.choices import Choice, Outweighed, weigh
from fusegraph.lowering.convolution import Product
from fusegraph.lowering.precision import in_parts
from fusegraph.lowering.program import ProgramBuilder, broadcast_strides, broadcasts_to
from fusegraph.ops.base import Cost, Kind, Role

#: Results across an operand that one computation of its tile serves.
SERVED = 256
#: Instructions an element that threads take to fill a tile of tensor cores, beside computing it, which TMA does not.
FILLING = 2.5
#: Instructions that are done for each one at the rate of data sheets; the share that a launch is worth of the bytes
#: that are moved in its time.
INSTRUCTIONS, LAUNCH = 1.295, 0.585
#: Instructions of an op that is a function or a division, and of an integer that becomes a float.  Others take one.
FUNCTION, CONVERSION = 20.0, 4.0
#: What each byte that is read of an element beyond its own size is worth: the L2 cache has to bring it every time.
READ = 2.0
#: Instructions that the consumers' work on an element is worth: a simple op, a function, an integer that becomes a
#: float, a tensor that has an element for each place of the reduction, and each byte beyond the operand's own size.
BESIDE_OP, BESIDE_FUNCTION, BESIDE_CONVERSION, BESIDE_VECTOR, BESIDE_BYTE = 0.75, 13.0, 0.65, 1.4, 1.5
#: The share of that which remains where one instruction computes two elements.
PAIR = 0.5
#: Instructions an element of a tensor that cannot be read in vectors of 16 bytes, as the operand can: each element is
#: then an access of its own to the L2 cache, most of whose bytes are for other elements.
SCATTERED = 64.0
#: Tensors as large as an operand that it is computed of: each takes registers while it is on its way.
MOST_READ, MOST_OPERANDS = 3, 8
VECTOR_BYTES = 16
#: How much slower a kernel with a prologue must be estimated to be than two kernels, to be two.
CLEARLY = 1.1
#: The same for an operand that is made of fewer bytes: the copy of it takes memory, too.
CLEARLY_LARGER = 1.5
#: What is chosen: a prologue is part of the contraction's kernel, or a kernel of its own in front of it.
NAME, PART, OWN = "prologue", "part of the product", "a kernel of its own"


def before(view: GroupView, tensor: Tensor) -> tuple[Node, ...]:
    """Returns the nodes of the group that compute a tensor, in order."""
    found = view.before([tensor])
    return tuple(n for n in view.nodes if n in found)


def behind(view: GroupView, anchors: Sequence[Node]) -> tuple[Node, ...]:
    """Returns the anchors and the nodes that compute the group's results from them, in order.

    Some may be in front of an anchor as well: they are evaluated twice.
    """
    found = {*anchors, *view.before(view.writes, anchors)}
    return tuple(n for n in view.nodes if n in found)


def accept(
    view: GroupView, options: Options, anchors: Sequence[Node], product: Callable[[Node], Product]
) -> list[Choice]:
    """Returns the choices by which the prologues of a kernel's anchors are part of it; none without prologues.

    Raises Declined, with the reason, if they cannot be, Outweighed if they should not.
    """
    choices = list[Choice]()
    for position, anchor in [(0, anchors[0]), *((len(a.inputs) - 1, a) for a in anchors)]:
        operand = anchor.inputs[position]
        nodes = before(view, operand)
        if nodes and anchor.kind is not Kind.CONTRACTION:
            raise Declined(
                f"{nodes[-1].op.name} {nodes[-1].name!r} comes before {anchor.op.name} {anchor.name!r}, "
                f"which reads {operand.name!r} as it lies in memory"
            )
        for node in nodes:
            if node.op.role is Role.CAST and node.inputs[0].dtype == node.output.dtype:
                raise Declined(
                    f"{node.name!r} is {node.inputs[0].name!r} laid out for tensor cores (`passes.operand_layouts`): "
                    f"{anchor.op.name} {anchor.name!r} reads it from memory"
                )
        if nodes:
            choices += _accept_operand(view, anchor, position, nodes, product(anchor), options)
    return choices


def _accept_operand(
    view: GroupView, anchor: Node, position: int, nodes: Sequence[Node], product: Product, options: Options
) -> list[Choice]:
    operand, alike = anchor.inputs[position], f"{anchor.op.name} {[t.type for t in anchor.inputs]}"
    moves = any(n.kind is Kind.MOVEMENT for n in nodes)
    if moves:
        divided.check(view, anchor, operand, nodes)
    # The estimate of what an operand costs does not know that codes may be multiplied themselves.
    if moves or divided.multiplies_codes(view.graph, anchor, options.target):
        what = f"{NAME} of operand {'AB'[position > 0]}"
        choice = weigh(what, anchor.name, {PART: None, OWN: None}, PART, options.settled, alike)
        if choice.taken == OWN:
            raise Outweighed("a kernel of its own was measured to be faster", choice)
        return [choice]
    for node in nodes:
        if node.kind is not Kind.POINTWISE:
            raise Declined(
                f"{node.op.name} {node.name!r} comes before {anchor.op.name} {anchor.name!r} and is not pointwise"
            )
        if not broadcasts_to(node.output.shape, operand.shape):
            raise Declined(
                f"{node.name!r} {list(node.output.shape)} does not broadcast to {operand.name!r} "
                f"{list(operand.shape)}, an operand of {anchor.op.name} {anchor.name!r}"
            )
        if node.output in view.writes:
            raise Declined(
                f"{node.output.name!r} is needed in memory as well: {anchor.op.name} {anchor.name!r} reads it there"
            )
    read, large = _read(nodes), _large(nodes, operand)
    if len(large) > MOST_READ or len(read) > MOST_OPERANDS:
        raise Declined(
            f"{operand.name!r} would be computed of {len(read)} tensors, {len(large)} of its own size, in front of "
            f"{anchor.op.name} {anchor.name!r}: the limits are {MOST_OPERANDS} and {MOST_READ}"
        )
    in_registers = _in_registers(view, anchor, position, nodes, large)
    if not operand.size:
        return []
    stored = divided.is_stored(view.graph, operand, nodes)
    return [_weighed(anchor, position, nodes, read, product, in_registers, stored, options)]


def confirmed(
    view: GroupView, options: Options, choice: Choice, spec_of: Callable[[GroupView], ContractionSpec]
) -> Choice:
    """Returns the choice of a prologue as the cost models of the kernels make it: of the group, and without it.

    What is computed in registers stays as it is: what that takes was measured.  ``spec_of`` returns a group's
    specification, or raises Declined.  Raises Outweighed if the prologue had better be a kernel of its own.
    """
    (anchor,) = (n for n in view.contractions if n.name == choice.node)
    operand = anchor.inputs[0 if choice.what.endswith("A") else -1]
    nodes, target = before(view, operand), options.target.planned
    try:
        spec = spec_of(view)
        schedule = best_schedule(spec, target)
        if isinstance(schedule, WgmmaSchedule) and schedule.computes:
            return choice
        apart = spec_of(Part(view, [n for n in view.nodes if n not in nodes]))
        part, own = FAMILY.cycles(spec, target), FAMILY.cycles(apart, target) + _moved(operand, target)
        computed, least = [t for t in anchor.inputs if before(view, t)], own
        if len(computed) > 1:
            alone = spec_of(Part(view, [n for n in view.nodes if not any(n in before(view, t) for t in computed)]))
            least = min(own, FAMILY.cycles(alone, target) + sum(_moved(t, target) for t in computed))
    except Declined:
        return choice
    margin = CLEARLY_LARGER if divided.is_smaller(operand, nodes) else CLEARLY
    slower = part > margin * own and not divided.is_stored(view.graph, operand, nodes)
    preferred = OWN if slower else PART
    found = weigh(choice.what, choice.node, {PART: part, OWN: least}, preferred, options.settled, choice.alike)
    if found.taken == OWN:
        raise Outweighed(
            f"with {nodes[-1].op.name} {nodes[-1].name!r} in front of it {anchor.op.name} {anchor.name!r} is estimated "
            f"to take {part / target.clock:.1f} us, two kernels {own / target.clock:.1f} us",
            found,
        )
    return found


def pays(choices: Sequence[Choice]) -> bool:
    """Returns true unless a prologue is part of a product that would take less time with all prologues apart."""
    known = [c for c in choices if PART in c.cycles and c.taken == PART]
    return all((c.cycles[PART] or 0.0) <= (c.cycles[OWN] or inf) for c in known)


def _read(nodes: Sequence[Node]) -> list[Tensor]:
    """Returns the tensors that nodes read, without those they make and numbers."""
    made = {n.output for n in nodes}
    every = dict.fromkeys(t for n in nodes for t in n.inputs if n.op.reads_values)
    return [t for t in every if t not in made and not (t.is_constant and t.size == 1)]


def _moved(operand: Tensor, target: Target) -> float:
    """Returns the cycles that it takes to write an operand and to read it, in a kernel of its own."""
    return 2 * operand.nbytes / target.bytes_per_cycle + LAUNCH * target.launch_cycles


def _large(nodes: Sequence[Node], operand: Tensor) -> list[Tensor]:
    """Returns the tensors as large as an operand that nodes read."""
    return [t for t in _read(nodes) if t.size == operand.size]


def _fillings(product: Product, position: int) -> int:
    """Returns how many elements of an operand are computed altogether."""
    own, other = (product.rows, product.cols) if position == 0 else (product.cols, product.rows)
    return prod(product.batch) * prod(own) * prod(product.inner) * -(-prod(other) // SERVED)


def _in_registers(view: GroupView, anchor: Node, position: int, nodes: Sequence[Node], large: Sequence[Tensor]) -> bool:
    """Returns true if the consumers of a Hopper kernel can compute an operand in registers.

    They can compute operand A, or B where the two can be exchanged, from what TMA can bring, if the other operand is in
    memory.
    """
    operand, other = anchor.inputs[position], anchor.inputs[1 - position]
    if any(not (t.dtype.is_float and t.dtype.itemsize == 2) for t in anchor.inputs) or before(view, other):
        return False
    role = anchor.op.role
    if role is not Role.MATMUL:
        strided = any(step != 1 for step in anchor.attributes["stride"])
        windows = role is Role.FPROP or (role is Role.DGRAD and not strided)
        if position == 1 or not windows or any(n.op.role is Role.INDEX for n in nodes):
            return False
    return bool(large) and all(t.dtype.itemsize <= 4 and _alike(t, operand) for t in large)


def _weighed(
    anchor: Node,
    position: int,
    nodes: Sequence[Node],
    read: Sequence[Tensor],
    product: Product,
    in_registers: bool,
    stored: bool,
    options: Options,
) -> Choice:
    """Returns the choice to compute an operand repeatedly, instead of writing and reading it.

    Raises Outweighed, with the numbers, if that costs more and the operand is not ``stored`` in fewer bytes.
    """
    target, operand, computed = options.target.planned, anchor.inputs[position], _fillings(product, position)
    per_byte = INSTRUCTIONS * target.fma * target.sms / target.bytes_per_cycle
    large = [t for t in read if t.size == operand.size]
    on_tensor_cores = _on_tensor_cores(anchor, options)
    if in_registers:
        each = _beside(anchor, operand, nodes, read, large)
        cost = computed * each / per_byte
    else:
        each = 1.0  # to round it
        for node in nodes:
            each += (FUNCTION if node.op.cost is Cost.FUNCTION else 1.0) * node.output.size / operand.size
        for tensor in large:
            each += CONVERSION if tensor.dtype.is_int and operand.dtype.is_float else 1.0
        each += READ * max(0, sum(t.dtype.itemsize for t in large) - operand.dtype.itemsize)
        each += FILLING if on_tensor_cores else 0.0
        cost = max(0, computed - operand.size) * each / per_byte
    scattered = [t for t in large if not _alike(t, operand)]
    if on_tensor_cores and scattered:
        cost += computed * SCATTERED * len(scattered) / per_byte
    saved = 2 * operand.nbytes + LAUNCH * target.launch_us * target.memory_rate
    without = _without(anchor, product, target, on_tensor_cores)
    cycles = {PART: without + cost / target.bytes_per_cycle, OWN: without + saved / target.bytes_per_cycle}
    alike = f"{anchor.op.name} {[t.type for t in anchor.inputs]} {[n.op.name for n in nodes]}"
    what = f"{NAME} of operand {'AB'[position > 0]}"
    preferred = OWN if cost > saved and not stored else PART
    choice = weigh(what, anchor.name, cycles, preferred, options.settled, alike)
    if choice.taken == OWN:
        lies = f" ({scattered[0].name!r} lies otherwise than tensor cores read it)" if scattered else ""
        raise Outweighed(
            f"in front of {anchor.op.name} {anchor.name!r} every element of {operand.name!r} would be computed "
            f"{computed / operand.size:.0f} times in about {each:.0f} instructions, which takes as long as moving "
            f"{cost / 1e6:.0f} MB, to save moving {saved / 1e6:.0f} MB{lies}",
            choice,
        )
    return choice


def _without(anchor: Node, product: Product, target: Target, on_tensor_cores: bool) -> float:
    """Returns the cycles that a contraction takes at least, whatever computes its operands."""
    products = prod(product.batch) * prod(product.rows) * prod(product.cols) * prod(product.inner)
    rate = (target.wgmma or target.mma) * 2 / max(2, anchor.inputs[0].dtype.itemsize) if on_tensor_cores else target.fma
    moved = sum(t.nbytes for t in {*anchor.inputs, anchor.output})
    return target.launch_cycles + max(products / (rate * target.sms), moved / target.bytes_per_cycle)


def _beside(
    anchor: Node, operand: Tensor, nodes: Sequence[Node], read: Sequence[Tensor], large: Sequence[Tensor]
) -> float:
    """Returns the instructions that computing an element beside the tensor cores is worth."""
    share = PAIR if _in_pairs(operand, nodes, read) else 1.0
    along = 1 if anchor.op.role is not Role.MATMUL else len(operand.shape) - (1 if operand is anchor.inputs[0] else 2)
    each = 0.0
    for node in nodes:
        if node.op.cost is not Cost.ROUNDING:
            each += (BESIDE_FUNCTION if node.op.cost is Cost.FUNCTION else BESIDE_OP) * node.output.size / operand.size
    each += BESIDE_CONVERSION * sum(t.dtype.is_int for t in large)
    each += BESIDE_VECTOR * sum(t not in large and broadcast_strides(t, operand.shape)[along] != 0 for t in read)
    each += BESIDE_BYTE * max(0, sum(t.dtype.itemsize for t in large) - operand.dtype.itemsize)
    return share * each


def _in_pairs(operand: Tensor, nodes: Sequence[Node], read: Sequence[Tensor]) -> bool:
    """Returns true if one instruction computes two elements; `codegen.packed` may still decline in detail."""
    rounding = [n.op.role is Role.PRODUCT for n in nodes if n.op.role in (Role.SUM, Role.DIFFERENCE, Role.PRODUCT)]
    if any(n.op.cost not in (Cost.ROUNDING, Cost.PAIR) for n in nodes) or rounding not in (
        [],
        [True],
        [False],
        [True, False],
    ):
        return False
    return all(t.dtype == operand.dtype for t in read)


def _alike(tensor: Tensor, operand: Tensor) -> bool:
    """Returns true if a tensor can be read in vectors where the operand can: contiguous alike, with rows aligned."""

    unit = next((d for d, (n, s) in enumerate(zip(operand.shape, operand.strides)) if n > 1 and s == 1), None)

    def rows(t: Tensor) -> bool:
        width = min(VECTOR_BYTES, t.dtype.itemsize * VECTOR_BYTES // operand.dtype.itemsize)
        strides = broadcast_strides(t, operand.shape)
        return all(s == 1 if d == unit else s * t.dtype.itemsize % width == 0 for d, s in enumerate(strides))

    return unit is None or not rows(operand) or rows(tensor)


def _on_tensor_cores(anchor: Node, options: Options) -> bool:
    """Returns true if the products can be made by tensor cores."""
    if anchor.attributes["compute_dtype"] == "tf32" or (options.target.planned.wgmma and in_parts(anchor, options)):
        return True
    return all(t.dtype.itemsize < 4 for t in anchor.inputs)


def epilogue_view(view: GroupView, anchors: Sequence[Node]) -> GroupView:
    """Returns the part of a group that computes its results, from its anchors on."""
    return Part(view, behind(view, anchors), *view.writes)


def computed(
    view: GroupView, options: Options, operand: Tensor, plain: Gather, gather_of: Callable[[Strides], Gather]
) -> tuple[Gather, tuple[Tensor, ...]]:
    """Returns an operand as its prologue computes it, and the tensors that are read.

    ``plain`` reads it as it would lie in memory; ``gather_of`` gives the steps of a tensor with other strides over its
    dimensions.
    """

    def strides(tensor: Tensor) -> Strides:
        return broadcast_strides(tensor, operand.shape)

    part = Part(view, before(view, operand), operand)
    program, reads, _ = ProgramBuilder(part, options, strides).build()
    every = [gather_of(s) for s in (*(op.strides for op in program.loads), *program.indices)]
    steps = [g.batch + g.outer + g.inner for g in every]
    loads = tuple(replace(op, strides=s) for op, s in zip(program.loads, steps))
    largest = max(range(len(reads)), key=lambda n: (reads[n].size, -n), default=None)
    if largest is not None:
        lead = every[largest]
        plain = replace(plain, batch=lead.batch, outer=lead.outer, inner=lead.inner, start=lead.start)
    program = replace(program, loads=loads, indices=tuple(steps[len(loads) :]))
    return replace(plain, program=program, starts=tuple(g.start for g in every)), reads
