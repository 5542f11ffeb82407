"""The environment variables that fusegraph reads, checked together: one that makes no sense is an error at once, and
not only on the day that something needs it.
"""

from __future__ import annotations

from fusegraph.engines.autotune import from_environment
from fusegraph.runtime import host_compiler
from fusegraph.runtime.cache import environment_folder, environment_limit


def check_environment() -> None:
    """Raises FusegraphError, ToolchainError or CacheError, which name the variable, for one with a value that it cannot
    have: ``FUSEGRAPH_AUTOTUNE``, ``FUSEGRAPH_CPU_THREADS``, ``FUSEGRAPH_CACHE_LIMIT``, ``FUSEGRAPH_CACHE_DIR``.

    A compiler (``FUSEGRAPH_CXX``, ``CXX``) is looked for where one is needed.
    """
    from_environment()
    host_compiler.host_threads()
    environment_limit()
    environment_folder()
