"""Checks the environment variables that fusegraph reads together, so that an invalid one is an error at once."""

from __future__ import annotations

from fusegraph.engines.autotune import from_environment
from fusegraph.runtime import host_compiler, nvtx
from fusegraph.runtime.cache import environment_folder, environment_limit


def check_environment() -> None:
    """Raises an error that names the variable if an environment variable has an invalid value.

    FusegraphError for ``FUSEGRAPH_AUTOTUNE`` and ``FUSEGRAPH_NVTX``, ToolchainError for ``FUSEGRAPH_CPU_THREADS``,
    CacheError for ``FUSEGRAPH_CACHE_LIMIT`` and ``FUSEGRAPH_CACHE_DIR``.  The compiler's variables
    (``FUSEGRAPH_CXX``, ``CXX``) are checked only when a compiler is needed.
    """
    from_environment()
    host_compiler.host_threads()
    environment_limit()
    environment_folder()
    nvtx.from_environment()
