"""Random assignments to inputs of a random graph: whole, slices, by an index tensor, at a position that is data."""

from __future__ import annotations

from math import prod

from random_nodes import NodeAuthor


def assign(author: NodeAuthor) -> None:
    """Assigns some tensor to a new input or to a part of one, and sometimes reads the input, or the new value."""
    draw = author.draw
    value = author.any()
    shape, dtype = author.tensor(value).shape, author.tensor(value).dtype.name
    if prod(shape) > 5000:
        return
    kind = draw.pick(("whole", "slice", "index", "position")) if shape else "whole"
    axis = draw.integer(0, max(len(shape) - 1, 0))
    grown = [n + draw.integer(0, 4) * (d == axis and kind != "whole") for d, n in enumerate(shape)]
    target = {"whole": "{x}", "slice": "{x}[{part}]", "index": "g.gather({x}, {at}, {axis})"}
    index = ""
    if kind == "index":
        index = author.input((shape[axis],), draw.pick(("int32", "int64")))
    if kind == "position":
        index, target["position"] = author.input((), "int32"), "{x}[{dots}{at}]"
        value = author.define(f"{value}[{', '.join([':'] * axis + ['0'])}]") if shape[axis] else value
        if not shape[axis]:
            return
    start = draw.integer(0, grown[axis] - shape[axis]) if shape else 0
    part = ", ".join([":"] * axis + [f"{start}:{start + shape[axis]}"]) if shape else ""
    x = author.input(tuple(grown), dtype)
    if 0 in author.tensor(x).strides and prod(grown) > 1:  # elements would be one memory
        x = author.define(f"g.tensor('state{len(author.names)}', {tuple(grown)}, {dtype!r})")
    if author.chance(40):  # readers of the old value come first
        author.consumed.add(x)
        author.define(f"g.identity({x})")
    place = target[kind].format(x=x, part=part, at=index, axis=axis, dots=":, " * axis)
    new = author.define(f"g.assign({place}, {value})")
    author.consumed |= {x, new, index}
    if author.chance(40):
        author.define(f"g.identity({new})")
