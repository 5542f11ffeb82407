"""Partitions of any graph: every node in one group, groups in order, the same ones each time, soon enough."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import permutations
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partitions import check_decisions, groups, quotient

import fusegraph as fg
from fusegraph.errors import GraphError
from fusegraph.lowering import KERNELS, GroupView, Lowered, Options
from fusegraph.passes.fuse import fuse
from fusegraph.passes.partition import Partition
from fusegraph.passes.quotient import Quotient
from fusegraph.passes.simplify import remove_dead_nodes, simplify

OPS: dict[str, Callable[..., fg.Tensor]] = {
    "relu": lambda g, a, b: g.relu(a),
    "tanh": lambda g, a, b: g.tanh(a),
    "add": lambda g, a, b: g.add(a, b),
    "mul": lambda g, a, b: g.mul(a, b),
    "select": lambda g, a, b: g.binary_select(a, b, a > b),
    "index": lambda g, a, b: g.gen_index(a, axis=0),
    "matmul": lambda g, a, b: g.matmul(a, b),
}
Recipe = tuple[list[tuple[int, ...]], list[tuple[str, int, int, bool]]]


def build(recipe: Recipe) -> fg.Graph:
    """Builds a graph from input shapes and nodes (op, first operand, second operand, whether it is an output)."""
    shapes, nodes = recipe
    graph = fg.Graph("random")
    tensors = [graph.tensor(f"x{k}", shape) for k, shape in enumerate(shapes)]
    for op, first, second, shown in nodes:
        try:
            made = OPS[op](graph, tensors[first % len(tensors)], tensors[second % len(tensors)])
        except GraphError:
            continue  # shapes that do not fit
        tensors.append(made)
        if shown:
            graph.output(made)
    used = {t for n in graph.nodes for t in n.inputs}
    for tensor in tensors[len(shapes) :]:
        if tensor not in used and tensor not in graph.outputs:
            graph.output(tensor)
    if not graph.outputs:
        graph.output(graph.relu(tensors[0]))
    return graph


recipes = st.tuples(
    st.lists(st.sampled_from([(4, 4), (1, 4), (4, 1), (4,), (1, 1)]), min_size=1, max_size=4),
    st.lists(
        st.tuples(st.sampled_from(sorted(OPS)), st.integers(0, 99), st.integers(0, 99), st.booleans()),
        min_size=1,
        max_size=24,
    ),
)


def check_partition(partition: Partition) -> None:
    """Checks all properties of a partition, independently of `Partition.check`."""
    nodes = [n for g in partition.groups for n in g.nodes]
    assert Counter(nodes) == Counter(partition.graph.nodes)
    network = quotient(partition)
    assert nx.is_directed_acyclic_graph(network)
    assert all(a < b for a, b in network.edges())  # they can run in the order given
    outputs = set(partition.graph.outputs)
    for group in partition.groups:
        inside, made = set(group.nodes), {n.output for n in group.nodes}
        order = {n: k for k, n in enumerate(partition.graph.nodes)}
        assert [order[n] for n in group.nodes] == sorted(order[n] for n in group.nodes)
        assert not set(group.reads) & made
        needed = {t for t in made if t in outputs or set(partition.graph.consumers(t)) - inside}
        assert set(group.writes) == needed
        assert len(set(group.writes)) == len(group.writes)
    check_decisions(partition)
    partition.check()


def signature(partition: Partition) -> str:
    decisions = [f"{d.producer} {d.consumer} {d.fused} {d.reason} {d.bytes_saved}" for d in partition.decisions]
    families = [f"{g.family} {[t.name for t in (*g.reads, *g.writes)]}" for g in partition.groups]
    return "\n".join([repr(groups(partition)), *families, *decisions])


@settings(max_examples=100, deadline=None)
@given(recipes)
def test_partitions_of_random_graphs(recipe):
    partition = fuse(simplify(build(recipe)).graph)
    check_partition(partition)
    assert signature(fuse(simplify(build(recipe)).graph)) == signature(partition)
    check_partition(fuse(remove_dead_nodes(build(recipe)).graph, enabled=False))


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(recipes)
def test_partitions_of_many_random_graphs(recipe):
    partition = fuse(simplify(build(recipe)).graph)
    check_partition(partition)
    assert signature(fuse(simplify(build(recipe)).graph)) == signature(partition)


def seeded(seed: int, count: int) -> fg.Graph:
    """Builds a random DAG of about ``count`` nodes."""
    r = random.Random(seed)
    shapes = [r.choice([(4, 4), (1, 4), (4, 1), (4, 4)]) for _ in range(8)]
    nodes = []
    for k in range(count):
        first, second = (r.randrange(max(0, k - 30), k + 8) for _ in range(2))
        nodes.append(
            (r.choice(["relu", "tanh", "add", "mul", "add", "mul", "matmul"]), first, second, r.random() < 0.05)
        )
    return build((shapes, nodes))


@pytest.mark.slow
def test_partitions_do_not_depend_on_hashes_or_addresses():
    """Sets of nodes and tensors are ordered by addresses, sets of names by the hash seed: neither may show."""
    script = (
        "import test_partitions as t, sys\n"
        "padding = [bytearray(k) for k in range(int(sys.argv[1]))]\n"
        "print(*(t.signature(t.fuse(t.simplify(t.seeded(k, 50)).graph)) for k in range(5)), sep='\\n')\n"
    )
    seen = set()
    here = Path(__file__).parent
    for seed in ("1", "4242"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": f"{here}{os.pathsep}{here.parent}"}
        done = subprocess.run(
            [sys.executable, "-c", script, str(int(seed) * 3 % 1000)],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.count("pointwise ") > 10
        seen.add(done.stdout)
    assert len(seen) == 1


# ---- large graphs


def _network(layers: int) -> fg.Graph:
    graph = fg.Graph("network")
    y = graph.tensor("x", (1, 16, 8, 8))
    for k in range(layers):
        z = graph.conv_fprop(y, graph.tensor(f"w{k}", (16, 16, 3, 3)), padding=1)
        z = graph.relu(z + graph.tensor(f"b{k}", (16, 1, 1)))
        y = z + y if k % 3 == 2 else z
    graph.output(y, name="y")
    return graph


def _chain(length: int) -> fg.Graph:
    graph = fg.Graph("chain")
    y = graph.tensor("x", (64,))
    for k in range(length // 2):
        y = graph.tanh(y) + float(k + 1)
    graph.output(y, name="y")
    return graph


def _readers(count: int, reduced: bool = False) -> fg.Graph:
    """Builds a graph in which ``count`` products read one tensor; ``reduced``: each product is summed along rows."""
    graph = fg.Graph("readers")
    x = graph.tensor("x", (8, 64))
    for k in range(count):
        y = x * graph.tensor(f"b{k}", (8, 64))
        graph.output(graph.reduction(y, axes=(1,)) if reduced else y, name=f"y{k}")
    return graph


class _Counted:
    """The kernel families, counting how often they are asked."""

    def __init__(self) -> None:
        self.asked = 0

    def accept(self, view: GroupView, options: Options) -> None:
        self.asked += 1
        KERNELS.accept(view, options)

    def lower(self, view: GroupView, options: Options) -> Lowered:
        return KERNELS.lower(view, options)


@pytest.mark.parametrize("reduced", [False, True])
def test_tries_grow_with_the_readers_of_a_tensor_not_with_their_pairs(reduced):
    graph, counted = _readers(300, reduced), _Counted()
    partition = fuse(graph, backend=counted)
    check_partition(partition)
    assert len(partition.groups) <= -(-300 // 13) + 1, "kernels of 28 tensors"
    assert counted.asked < 4 * len(graph.nodes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "nodes"),
    [(_chain(2000), 2000), (seeded(1, 1100), 1000), (_network(150), 450), (_readers(1000, True), 2000)],
    ids=["chain", "random", "convolutions", "readers"],
)
def test_large_graphs_take_seconds(graph, nodes):
    simplified = simplify(graph).graph
    assert len(simplified.nodes) >= nodes
    start = time.process_time()
    partition = fuse(simplified)
    taken = time.process_time() - start
    assert taken < 10, f"{len(simplified.nodes)} nodes took {taken:.1f} s of the processor"
    check_partition(partition)
    if nodes == 450:
        assert len(partition.groups) == 150


def test_what_groups_reach_is_known_after_merges():
    """Whatever groups are merged, in whatever order, that makes no cycle."""
    for seed in range(4):
        groups, chance = Quotient(simplify(seeded(seed, 40)).graph, {}), random.Random(seed)
        while len(groups.members) > 1:
            pairs = [(a, b) for a, b in permutations(groups.members, 2) if groups.path_outside(a, b) is None]
            groups.merge(*chance.choice(pairs))
            network = nx.DiGraph((a, b) for a in groups.members for b in groups.successors[a])
            network.add_nodes_from(groups.members)
            first = {g: min(groups.order[n] for n in nodes) for g, nodes in groups.members.items()}
            assert groups.topological() == list(nx.lexicographical_topological_sort(network, key=first.__getitem__))
            for a in groups.members:
                assert {b for b in groups.members if groups.reach[a] >> groups.bit[b] & 1} == nx.descendants(network, a)


def test_a_network_is_one_kernel_a_layer():
    partition = fuse(simplify(_network(12)).graph)
    check_partition(partition)
    assert [g.family for g in partition.groups] == ["contraction"] * 12
