"""Parameters: the inputs that seldom change, and what depends on them and on constants alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from codegen.sizes import varies
from fusegraph.graph import Graph, Tensor
from fusegraph.layout import extent
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.passes.rewrite import Rewrite, Rewritten, same

#: The name of the pass, as `LeftOut` knows it.
PARAMETERS = "parameters"
#: Packed copies may take this share of the parameters' bytes, or so many bytes if that is more.
SHARE, LEAST_LIMIT = 0.25, 256 << 20


def mark_parameters(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Decides which inputs are parameters: all that are marked, unless their packed copies take too much memory.

    Those that the graph assigns to are none.
    """
    marked = graph.parameters.difference(graph.updates.values())
    kept = {t for t in marked if options.prepack != 0 and (PARAMETERS, t.name) not in options.left_out}
    made = same(graph)
    if kept != graph.parameters:
        rewrite = Rewrite(graph)
        for node in graph.nodes:
            rewrite.take_over(node)
        made = rewrite.done()
        made.graph.parameters = {made.counterparts[t] for t in kept}
    if not kept:
        return made
    limit = most_bytes(graph, options)
    return replace(made, declined=lambda partition: _beyond(partition.graph, limit))


def most_bytes(graph: Graph, options: Options) -> int:
    """Returns how many bytes packed copies may take."""
    if options.prepack is not None:
        return options.prepack
    return max(int(SHARE * sum(t.nbytes for t in graph.parameters)), LEAST_LIMIT)


def fixed(graph: Graph, options: Options) -> set[Tensor]:
    """Returns the tensors that depend on parameters and constants alone: these themselves, and what is made of them.

    What depends on sizes that vary is none of them.  None if nothing is to be packed.
    """
    if options.prepack == 0:
        return set()
    found = {t for t in graph.tensors.values() if t.is_constant} | graph.parameters | graph.packed.keys()
    found = {t for t in found if not varies((t.shape, t.strides))}
    for node in graph.nodes:
        shapes = [(t.shape, t.strides) for t in node.outputs]
        if found.issuperset(node.inputs) and not varies((dict(node.attributes), shapes)):
            found.update(node.outputs)
    return found


def memory(tensor: Tensor) -> int:
    """Returns the bytes that a tensor takes, with the gaps between its rows."""
    return tensor.dtype.nbytes(extent(tensor.shape, tensor.strides))


def _beyond(graph: Graph, limit: int) -> Mapping[str, str]:
    """Returns the parameters whose packed copies are beyond a limit, the smallest being made first, and the reason."""
    left, declined = limit, dict[str, str]()
    for tensor, sources in sorted(graph.packed.items(), key=lambda item: memory(item[0])):
        left -= memory(tensor) if sources else 0
        if left < 0:
            declined |= dict.fromkeys(sources, f"packed copies of parameters may take {limit} bytes")
    return declined
