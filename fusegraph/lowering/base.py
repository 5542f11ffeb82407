"""What every lowering says: yes with a kernel specification, or no with a reason."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from codegen.declined import Declined
from codegen.sizes import aligned
from codegen.target import PORTABLE, Target
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.choices import Choice, Settling
from fusegraph.ops.base import Kind

#: More operands or nodes than this make one kernel run out of registers before it saves any memory traffic.
MAX_OPERANDS = 28
MAX_NODES = 160
#: Bytes that intermediates and constants are aligned to.
INNER_ALIGNMENT = 16
#: Bytes that tensors at a position are known to be aligned to, at most: less than TMA needs, which stores where the
#: host says.
POSITION_ALIGNMENT = 8


class TooLarge(Declined):
    """A group has more nodes or tensors than one kernel should have; with another group beside it, it still has."""


def check_program(operands: int, values: int, of: str) -> None:
    """Raises TooLarge for a kernel of so many operands, or that computes so many values for every one ``of`` what."""
    if operands > MAX_OPERANDS:
        raise TooLarge(f"one kernel would have {operands} tensors in flight, the limit is {MAX_OPERANDS}")
    if values > MAX_NODES:
        raise TooLarge(f"one kernel would compute {values} values for every {of}, the limit is {MAX_NODES}")


#: Rewrites that are not made, by the name of the pass and of what it would rewrite, and why.
LeftOut: TypeAlias = Mapping[tuple[str, str], str]


@dataclass(frozen=True)
class Options:
    """What the compiled graph should promise, and what passes know beside the graph.

    strict     rounds every intermediate to its tensor's dtype, as one kernel a node would.
    alignment  bytes that pointers of the graph's inputs and outputs are multiples of (intermediates: always 256).
    workspace  the most bytes that a convolution's algorithm may put between kernels of its own.
    target     the architecture and the machine that it is planned for.
    prepack    the most bytes of packed copies of parameters; None: a quarter of the parameters', or 256 MB if more.
    memory     the most bytes that are kept for a backward pass, as far as they can be computed again; None: any.
    left_out   what passes are not to rewrite, as no kernel takes it (`passes.speculation`).
    settled    choices that were measured (`choices`); estimates decide on others.
    """

    strict: bool = False
    alignment: int = 16
    workspace: int = 1 << 32
    target: Target = PORTABLE
    prepack: int | None = None
    memory: int | None = None
    left_out: LeftOut = field(default_factory=dict, hash=False)
    settled: Settling = field(default_factory=dict, hash=False)


DEFAULTS: Options = Options()


@dataclass(frozen=True)
class Lowered:
    """One kernel: its family and specification, the tensors it reads and writes in the order of its parameters.

    The family "view" is no kernel and has no specification: what is written lies in memory already.  ``choices`` are
    those that made it one kernel.
    """

    family: str
    spec: Any
    reads: tuple[Tensor, ...]
    writes: tuple[Tensor, ...]
    choices: tuple[Choice, ...] = field(default=(), compare=False)


class GroupView:
    """A set of nodes as a lowering sees it: in topological order, with what enters and what leaves."""

    def __init__(self, graph: Graph, nodes: Iterable[Node], order: Mapping[Node, int]) -> None:
        """``order`` is a topological one of the graph's nodes."""
        self.graph = graph
        self.nodes: tuple[Node, ...] = tuple(sorted(nodes, key=order.__getitem__))
        self.members = members = frozenset(self.nodes)
        outputs, readers = graph.output_numbers, graph.readers
        self._kinds: dict[Kind, list[Node]] = {}
        made: set[Tensor] = set()
        reads: dict[Tensor, None] = {}
        writes: list[Tensor] = []
        for node in self.nodes:
            if (same := self._kinds.get(node.kind)) is None:
                self._kinds[node.kind] = [node]
            else:
                same.append(node)
            for tensor in node.inputs:
                if tensor not in made:
                    reads[tensor] = None
            for tensor in node.outputs:
                made.add(tensor)
                if tensor in outputs or not members.issuperset(readers.get(tensor, ())):
                    writes.append(tensor)
        self.reads = tuple(reads)
        self.writes = tuple(writes)
        #: what is read, to look up
        self.entering: Collection[Tensor] = reads.keys()

    @property
    def kinds(self) -> Set[Kind]:
        """The kinds of its nodes."""
        return self._kinds.keys()

    def of(self, kind: Kind) -> list[Node]:
        """Returns its nodes of a kind."""
        return list(self._kinds.get(kind, ()))

    def before(self, tensors: Iterable[Tensor], known: Iterable[Node] = ()) -> set[Node]:
        """Returns its nodes that compute tensors, followed back up to ``known`` nodes, which are left out."""
        ends = set(known)
        found: set[Node] = set()
        stack = list(tensors)
        while stack:
            node = self.graph.producer(stack.pop())
            if node in self.members and node not in ends and node not in found:
                found.add(node)
                stack += node.inputs
        return found

    @property
    def contractions(self) -> list[Node]:
        return self.of(Kind.CONTRACTION)

    @property
    def anchors(self) -> list[Node]:
        """What a kernel is about, with pointwise nodes on its result: contractions, or a transform of Winograd's."""
        contractions, transforms = self._kinds.get(Kind.CONTRACTION), self._kinds.get(Kind.TRANSFORM)
        if not (contractions and transforms):
            return [*(contractions or transforms or ())]
        return [n for n in self.nodes if n.kind in (Kind.CONTRACTION, Kind.TRANSFORM)]

    def alignment(self, tensor: Tensor, options: Options) -> int:
        """Returns the bytes that a tensor's pointer is a multiple of.

        The caller has promised them; for inner tensors the memory planner sees to it.
        """
        return alignment(self.graph, tensor, options)


class Part(GroupView):
    """Some nodes of a group, of which certain results are wanted."""

    def __init__(self, view: GroupView, nodes: Sequence[Node], *writes: Tensor) -> None:
        super().__init__(view.graph, nodes, {n: k for k, n in enumerate(view.nodes)})
        self.writes = writes or self.writes


def alignment(graph: Graph, tensor: Tensor, options: Options) -> int:
    """Returns the bytes that a tensor's pointer is a multiple of: see `GroupView.alignment`."""
    base = tensor.base
    ours = base.is_constant or base in graph.packed
    inner = ours or (graph.producer(base) is not None and base not in graph.output_numbers)
    steps = [tensor.start * tensor.dtype.itemsize]
    if tensor.position is not None:
        steps += [tensor.position.step * tensor.dtype.itemsize, POSITION_ALIGNMENT]
    return aligned(INNER_ALIGNMENT if inner else options.alignment, *steps)


@dataclass(eq=False)
class FamilyLowering:
    """How groups become kernels of a family.

    about   what in a group its kernels are about; nothing of another family's group.
    accept  raises Declined, whose text is the reason, if such a group cannot be one kernel, Outweighed if it should not
            be; returns the choices by which it is, if there are any.
    lower   the kernel, with a name, of a group that it accepts.  Raises Declined as well.
    """

    about: Callable[[GroupView], object]
    accept: Callable[[GroupView, Options], Sequence[Choice] | None]
    lower: Callable[[GroupView, Options, str], Lowered]


class Lowering(Protocol):
    """What groups are lowered to, kernels or cuDNN: says which it takes, and lowers them."""

    def accept(self, view: GroupView, options: Options) -> None:
        """Raises Declined, whose text is the reason, if the group cannot be one unit."""

    def lower(self, view: GroupView, options: Options) -> Lowered:
        """Returns the unit of a group.  Raises Declined if it cannot be one."""
