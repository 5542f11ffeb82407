"""Sums of logarithms of probabilities, as losses are written out, become sums of logits and the logarithm of a sum.

The kernel of the product that makes logits reduces parts of both.  Written as log_softmax, of which a few elements are
summed up, all logits would be kept in memory until their logarithm is known.  (The gradient is another matter: where
log_softmax is kept for it, nothing changes.)
"""

from __future__ import annotations

from dataclasses import replace

from codegen.combiners import ADD
from codegen.sizes import Size
from fusegraph.dtypes import float32, float64
from fusegraph.graph import Graph, Node, Tensor
from fusegraph.lowering.base import DEFAULTS, Options
from fusegraph.ops import TABLE
from fusegraph.ops.base import Kind, Role
from fusegraph.passes.rewrite import Rewrite, Rewritten, named, same
from fusegraph.pattern import constant, only_consumer

#: Fewer bytes of logits, in float32, are no burden.
LEAST_BYTES = 32 << 20


def sum_logits(graph: Graph, options: Options = DEFAULTS) -> Rewritten:
    """Takes the logarithm of the sum of exponentials out of sums of log_softmax of a product's results."""
    found: dict[Node, Node] = {}
    for node in graph.nodes if not options.strict else ():
        if node.op.role is Role.LOG_SOFTMAX and _of_product(graph, node):
            sums = _sums(graph, node)
            found |= dict.fromkeys([node, *sums], node) if sums else {}
    if not found:
        return same(graph)
    rewrite = Rewrite(graph)
    logs: dict[Node, Tensor] = {}
    for node in graph.nodes:
        if node not in found:
            rewrite.take_over(node)
        elif found[node] is node:
            logs[node] = _logarithm(graph, rewrite, node)
            rewrite.new[node.output] = rewrite.new[node.inputs[0]]  # for its shape, and selections written below
        else:
            _sum(rewrite, node, found[node], logs[found[node]])
    made = rewrite.done()
    chosen = (n for of in found.values() for n in graph.consumers(of.output) if n.op.role is Role.SELECT)
    gone = {*(of.output for of in found.values()), *(n.output for n in chosen)}
    return replace(made, counterparts={old: new for old, new in made.counterparts.items() if old not in gone})


def _of_product(graph: Graph, node: Node) -> bool:
    """Returns true for log_softmax along the columns of a large product, or of what follows from it."""
    x, last = node.inputs[0], node.output.rank - 1
    if any(isinstance(n, Size) for n in x.shape) or 4 * x.size < LEAST_BYTES or node.attributes["axis"] != last:
        return False
    stack = [x]
    while stack:
        producer = graph.producer(stack.pop())
        if producer is None or producer.output.shape[-1:] != x.shape[-1:] or producer.output.size != x.size:
            continue
        if producer.op.role is Role.MATMUL:
            return True
        if producer.kind is Kind.POINTWISE or producer.op.role is Role.RESHAPE:
            stack += producer.inputs
    return False


def _sums(graph: Graph, node: Node) -> list[Node]:
    """Returns the sums, along rows, of all of a log_softmax or of selected elements; none if it is needed otherwise."""
    y, found = node.output, list[Node]()
    for consumer in graph.consumers(y) if y not in graph.outputs else ():
        if not consumer.op.reads_values:
            continue
        last: Node | None = consumer
        if consumer.op.role is Role.SELECT and _selects(consumer, y):
            last = only_consumer(graph, consumer.output)
        if last is None or last.op.role is not Role.REDUCE or last.attributes["mode"] != ADD.name:
            return []
        if last.attributes["axes"] != (y.rank - 1,) or last.inputs[0].shape != y.shape:
            return []
        found.append(last)
    return found


def _selects(node: Node, y: Tensor) -> bool:
    """Returns true if a node is y or 0, by a condition."""
    first, second, _ = node.inputs
    return (first is y and constant(second) == 0) or (second is y and constant(first) == 0)


def _in_rows(graph: Graph, rewrite: Rewrite, x: Tensor) -> Tensor | None:
    """Returns logits of a product whose rows are joined behind it, made of rows that are joined before; None if not so.

    A kernel of a product reduces what has its shape alone.
    """
    joined = graph.producer(x)
    if joined is None or joined.op.role is not Role.RESHAPE or x.shape[-1:] != joined.inputs[0].shape[-1:]:
        return None
    (logits,) = joined.inputs
    if logits in graph.outputs or any(n.op.role is not Role.RESHAPE for n in graph.consumers(logits)):
        return None  # they are in memory anyway

    def flat(tensor: Tensor) -> Tensor | None:
        node = graph.producer(tensor)
        if tensor.shape != logits.shape:
            return rewrite.new[tensor] if tensor.rank <= 1 else None
        if tensor is not logits and only_consumer(graph, tensor) is None:
            return None
        if node is not None and node.op.role is Role.MATMUL and node.inputs[1].rank == 2:
            a, b = rewrite.inputs(node)
            rows = rewrite.graph.apply(TABLE["reshape"], (a,), {"shape": (-1, a.shape[-1])})
            return rewrite.graph.apply(node.op, (rows, b), {**node.attributes, "dtype": tensor.dtype})
        if node is None or node.kind is not Kind.POINTWISE or node.op.shapes:
            return None
        operands = [flat(t) for t in node.inputs]
        if any(t is None for t in operands):
            return None
        return named(rewrite.graph.apply(node.op, operands, node.attributes), tensor.name, "in rows")

    made = flat(logits) if x.rank == 2 else None
    return made if made is None or made.dtype == x.dtype else None


def _logarithm(old: Graph, rewrite: Rewrite, node: Node) -> Tensor:
    """Adds the logarithms of the sums of rows; NaN where they are infinite, as log_softmax is."""
    graph, x = rewrite.graph, node.inputs[0]
    casts = [x]
    while (producer := old.producer(casts[-1])) is not None and producer.op.role is Role.CAST:
        casts.append(producer.inputs[0])
    z = None if any(t in old.outputs for t in casts) else _in_rows(old, rewrite, casts[-1])
    if z is None:
        z = rewrite.new[x]
    else:
        for tensor in reversed(casts[:-1]):
            z = graph.cast(z, tensor.dtype)
        rewrite.new[x] = z
    how = {"mode": "logaddexp", "axes": (z.rank - 1,), "dtype": float64 if z.dtype == float64 else float32}
    total = named(graph.apply(TABLE["reduction"], (z,), how), node.name, "log sums")
    return named(total + total * 0.0, node.name, "finite log sums")


def _sum(rewrite: Rewrite, node: Node, of: Node, log: Tensor) -> None:
    """Adds a sum of logits, less the logarithm for each of them."""
    graph, z = rewrite.graph, rewrite.new[of.inputs[0]]
    logits, taken = rewrite.new[node.inputs[0]], log * float(z.shape[-1])
    producer = of.output.graph.producer(node.inputs[0])
    if producer is not None and producer is not of:
        chosen = (1.0, 0.0) if producer.inputs[0] is of.output else (0.0, 1.0)
        one, other = (graph.constant(v, dtype=log.dtype) for v in chosen)
        ones = graph.apply(producer.op, (one, other, rewrite.new[producer.inputs[2]]), {})
        ones = ones if ones.shape == z.shape else graph.broadcast(ones, z.shape)
        count = graph.reduction(ones, "add", z.rank - 1)
        taken = graph.apply(producer.op, (0.0, log * count, graph.cmp_eq(count, 0.0)), {})
    total = graph.reduction(logits, "add", z.rank - 1, dtype=log.dtype)
    made, result = total - taken, rewrite.result(node.output)
    made = made if made.shape == result.shape else graph.reshape(made, result.shape)
    graph.add_node(Node(TABLE["identity"], (made,), {**TABLE["identity"].attributes, "dtype": result.dtype}, result))
