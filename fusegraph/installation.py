"""Makes sure that the `codegen` that Python finds is fusegraph's: other distributions have a package of this name."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec


def codegen_folder() -> str:
    """Returns the folder of `codegen`, found but not imported.  Raises InstallationError if it is not fusegraph's."""
    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "codegen")
    found, whole = _found(), os.path.exists(os.path.join(folder, "device", "types.cuh"))
    if whole and found is not None and os.path.realpath(found) == os.path.realpath(folder):
        return folder
    from fusegraph.errors import InstallationError

    raise InstallationError(
        f"fusegraph needs its own package codegen, whose place is {folder}; Python finds "
        + ("none" if found is None else f"another one: {found}")
        + ".  What to do: "
        + (
            "take its folder off sys.path (PYTHONPATH, the folder of the script that runs), or rename it if yours."
            if whole
            else "pip uninstall codegen, if that is installed, then pip install --force-reinstall --no-deps fusegraph."
        )
    )


def _found() -> str | None:
    """Returns the folder of the package that ``import codegen`` gives, or the file of a module; None without one."""
    try:
        spec = find_spec("codegen")
    except ValueError:  # it is imported already, as a module without a spec
        return getattr(sys.modules["codegen"], "__file__", None)
    return None if spec is None else next(iter(spec.submodule_search_locations or ()), spec.origin)
