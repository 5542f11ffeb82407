"""Checks on partitions for the tests of fusion."""

from __future__ import annotations

from collections import Counter
from typing import Any

import networkx as nx

import fusegraph as fg
from fusegraph.passes.partition import Partition, edges
from fusegraph.plan import plan


def partition_of(graph: fg.Graph, **options: Any) -> Partition:
    return plan(graph, **options).partition


def groups(partition: Partition) -> list[list[str]]:
    return [[n.name for n in g.nodes] for g in partition.groups]


def check_decisions(partition: Partition) -> None:
    """Checks that each edge has one decision with a reason, and is fused exactly when both ends share a kernel."""
    place = {n: k for k, g in enumerate(partition.groups) for n in g.nodes}
    by_name = {n.name: n for n in partition.graph.nodes}
    decided = [d for d in partition.decisions if d.shared_input is None]
    assert Counter((d.producer, d.consumer) for d in decided) == Counter(
        (p.name, c.name) for p, c, _ in edges(partition.graph)
    )
    for d in partition.decisions:
        together = place[by_name[d.producer]] == place[by_name[d.consumer]]
        assert d.fused == together, d
        assert d.reason
        assert (d.bytes_saved > 0) == d.fused or by_name[d.producer].output.nbytes == 0


def quotient(partition: Partition) -> Any:
    place = {n: k for k, g in enumerate(partition.groups) for n in g.nodes}
    network = nx.DiGraph()
    network.add_nodes_from(range(len(partition.groups)))
    network.add_edges_from((place[p], place[c]) for p, c, _ in edges(partition.graph) if place[p] != place[c])
    return network
