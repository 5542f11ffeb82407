"""What lower modules call and upper ones define: `fusegraph/__init__.py`, which is always imported first, says what."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

#: `fusegraph.compile`: engines know graphs, not graphs engines.
compile_graph: Callable[..., Any]
