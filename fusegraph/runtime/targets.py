"""Which target a build is for: one by name, or that of the GPU that is there."""

from __future__ import annotations

from codegen.target import Target, target
from fusegraph.errors import CompileError
from fusegraph.runtime import driver

#: The target of kernels that are looked at where there is no GPU.
DEFAULT = "sm_90a"


def named(name: str) -> Target:
    """Returns the target of a name or an architecture.  Raises CompileError, with the known ones, for other text."""
    try:
        return target(name)
    except ValueError as error:
        raise CompileError(str(error)) from None


def present() -> Target:
    """Returns the first GPU's, or the default one where there is none."""
    return driver.properties(0).target if driver.available() else named(DEFAULT)
