"""Lines of CUDA C: the colours of their words, and the nodes that they compute."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from codegen.naming import identifier
from codegen.spec import KernelSource
from fusegraph.errors import ToolchainError
from fusegraph.graph import Node
from fusegraph.report.page import NEEDS

_WORD = re.compile(r"[A-Za-z_]\w*")
#: How a kernel's heading lists a node.
_LISTED = re.compile(r"//     (\S.*?) = \w")


@cache
def _pygments() -> Any:
    try:
        import pygments.lexers
        import pygments.styles
        import pygments.token
    except ImportError:
        raise ToolchainError(NEEDS) from None
    return pygments


def marked(source: KernelSource) -> dict[str, Any]:
    """Returns a kernel's code as plain data.

    name, code  as the source has them.
    marks       pairs of numbers: of characters, and of the class in `classes` that they have; from the first on.
    """
    pygments = _pygments()
    marks: list[int] = []
    names = list(classes())
    lexer = pygments.lexers.get_lexer_by_name("cuda", stripnl=False, ensurenl=False)
    for kind, text in lexer.get_tokens(source.code):
        number = names.index(_class_of(kind))
        if marks and marks[-1] == number:
            marks[-2] += len(text)
        else:
            marks += [len(text), number]
    return {"name": source.name, "code": source.code, "marks": marks}


@cache
def classes() -> tuple[str, ...]:
    """Returns the short names of the kinds of words, of which the first is for plain text."""
    pygments = _pygments()
    return tuple(dict.fromkeys(("", *pygments.token.STANDARD_TYPES.values())))


def _class_of(kind: Any) -> str:
    names = _pygments().token.STANDARD_TYPES
    while kind not in names:
        kind = kind.parent
    return str(names[kind])


def colours(style: str, scope: str) -> str:
    """Returns the rules in CSS of a style of Pygments, for words within ``scope``."""
    from pygments.formatters import HtmlFormatter

    _pygments()
    rules = HtmlFormatter(style=style).get_style_defs(scope).splitlines()
    return "\n".join(rule for rule in rules if rule.startswith(f"{scope} .") and "linenos" not in rule)


def lines_of_nodes(source: KernelSource, nodes: Sequence[Node]) -> dict[int, list[int]]:
    """Returns the numbers of lines, from 1 on -> the positions of the nodes that a kernel computes or uses there.

    A kernel names its variables after nodes, and what it computes for them after these; its heading lists nodes.
    """
    names = {identifier(node.name): at for at, node in reversed([*enumerate(nodes)])}
    found: dict[int, list[int]] = {}
    for number, line in enumerate(source.code.splitlines(), start=1):
        listed = _LISTED.match(line)
        words = [identifier(listed[1])] if listed else _WORD.findall(line.partition("//")[0])
        ats = [at for word in dict.fromkeys(words) if (at := _named(word, names)) is not None]
        if ats:
            found[number] = [*dict.fromkeys(ats)]
    return found


def _named(word: str, names: Mapping[str, int]) -> int | None:
    """Returns what a word is the name of, or begins with the name of, in whole words."""
    while word not in names:
        word, _, rest = word.rpartition("_")
        if not rest or not word:
            return None
    return names[word]
