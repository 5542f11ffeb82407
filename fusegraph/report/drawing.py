"""Graphs as pictures and tables: DOT for Graphviz, HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from fusegraph.graph import Graph, Node, Tensor

#: Nodes that a graph's table in a notebook has at most.
MOST_ROWS = 200


def to_dot(graph: Graph) -> str:
    """Returns the graph in DOT, which Graphviz draws: inputs, nodes, outputs, and edges with shape and dtype.

    Constants of several elements are drawn; single numbers stand in the nodes that take them.
    """
    lines = [f"digraph {_quoted(graph.name)} {{", "  node [shape=box, style=rounded, fontname=sans];", "  rankdir=TB;"]
    drawn = [t for t in graph.tensors.values() if graph.producer(t) is None and not _is_number(t)]
    names = {t: f"t{n}" for n, t in enumerate(drawn)}
    places = {node: f"n{n}" for n, node in enumerate(graph.nodes)}
    for tensor, name in names.items():
        shape = "cylinder" if tensor.is_constant or tensor in graph.parameters else "ellipse"
        lines.append(f"  {name} [label={_quoted(tensor.name, _type(tensor))}, shape={shape}, style=solid];")
    for node, place in places.items():
        numbers = [str(t.value) for t in node.inputs if _is_number(t)]
        operands = f" ({', '.join(numbers)})" if numbers else ""
        lines.append(f"  {place} [label={_quoted(node.name, node.op.name + operands)}];")
        for tensor in node.inputs:
            made = graph.producer(tensor)
            start = names.get(tensor) if made is None else places[made]
            if start is not None:
                label = "" if made is None else f" [label={_quoted(_type(tensor))}]"
                lines.append(f"  {start} -> {place}{label};")
    for number, tensor in enumerate(graph.outputs):
        made = graph.producer(tensor)
        assert made is not None
        lines.append(f"  o{number} [label={_quoted(tensor.name, _type(tensor))}, shape=ellipse, style=bold];")
        lines.append(f"  {places[made]} -> o{number};")
    return "\n".join([*lines, "}"]) + "\n"


def to_html(graph: Graph) -> str:
    """Returns a graph as HTML: its inputs and outputs, and a table of its nodes to unfold."""
    rows = [_row(node) for node in graph.nodes[:MOST_ROWS]]
    more = graph.node_count - len(rows)
    rest = f"<p>and {more} nodes more</p>" if more > 0 else ""
    ends = "".join(
        f"<br>{what}: {escape(', '.join(f'{t.name} {_type(t)}' for t in tensors)) or 'none'}"
        for what, tensors in (("inputs", graph.inputs), ("outputs", graph.outputs))
    )
    nodes = table(("node", "op", "takes", "result", "attributes"), rows)
    return (
        f"<p><b>{escape(graph.name)}</b>, a graph of {graph.node_count} nodes{ends}</p>"
        f"<details><summary>nodes</summary>{nodes}{rest}</details>"
    )


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Returns a table as HTML."""
    head = "".join(f"<th>{escape(text)}</th>" for text in headings)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _row(node: Node) -> list[str]:
    attributes = ", ".join(f"{key} = {value}" for key, value in node.attributes.items() if value is not None)
    results = ", ".join(map(_type, node.outputs))
    return [node.name, node.op.name, ", ".join(t.name for t in node.inputs), results, attributes]


def _is_number(tensor: Tensor) -> bool:
    return tensor.is_constant and tensor.size == 1


def _type(tensor: Tensor) -> str:
    return f"{tensor.dtype} {'x'.join(map(str, tensor.shape)) or 'scalar'}"


def _quoted(*lines: str) -> str:
    """Returns lines of text as a string of DOT; names hold nothing that it would have to escape."""
    return '"' + "\\n".join(lines) + '"'
