"""The target of a build: by name, or that of the machine's GPU."""

from __future__ import annotations

from codegen.target import Target, target
from fusegraph.errors import CompileError
from fusegraph.runtime import driver

#: The target for which kernels are shown on a machine without a GPU.
DEFAULT = "sm_90a"


def named(name: str) -> Target:
    """Returns the target of a name or an architecture.  Raises CompileError, which lists those known, for others."""
    try:
        return target(name)
    except ValueError as error:
        raise CompileError(str(error)) from None


def present() -> Target:
    """Returns the target of the first GPU, or the default one if there is no GPU."""
    return driver.properties(0).target if driver.available() else named(DEFAULT)
