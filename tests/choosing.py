"""Chooses for passes what estimates would otherwise decide."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fusegraph.graph import Node
from fusegraph.lowering.choices import Choice

CHOICE = Choice("what a test says", "", {}, "", "")


def always(how: Callable[[Node], Any]) -> Callable[..., tuple[Choice, Any]]:
    """Returns what can stand for a pass's ``weighed``: ``how`` says what is done with a node."""
    return lambda node, *_: (CHOICE, how(node))
