"""Makes sure that the `codegen` that Python finds is fusegraph's: other distributions have a package of this name."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

#: What fusegraph's codegen has in its folder, and others have not.
_OWN = os.path.join("device", "types.cuh")


def codegen_folder() -> str:
    """Returns the folder of `codegen`, found but not imported: the one beside fusegraph's own.

    Raises InstallationError where Python finds another one, or none.
    """
    parent = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    wanted, found = os.path.join(parent, "codegen"), _found()
    if found is not None and os.path.realpath(found) == os.path.realpath(wanted):
        if os.path.exists(os.path.join(wanted, _OWN)):
            return wanted
        advice = "pip uninstall codegen, if that is installed; then pip install --force-reinstall --no-deps fusegraph"
    elif found is None or not os.path.exists(os.path.join(wanted, _OWN)):
        advice = "pip install --force-reinstall --no-deps fusegraph"
    else:
        advice = (
            "take its folder off sys.path (PYTHONPATH, the folder of the script that is run), or rename it if it is "
            "yours; a script imports fusegraph before another codegen"
        )
    from fusegraph.errors import InstallationError

    what = "none" if found is None else f"another one: {found}"
    raise InstallationError(
        f"fusegraph needs its own package codegen, whose place is {wanted}; Python finds {what}.  What to do: {advice}."
    )


def _found() -> str | None:
    """Returns the folder of the package that ``import codegen`` gives, or the file of a module; None without one."""
    try:
        spec = sys.modules["codegen"].__spec__ if "codegen" in sys.modules else find_spec("codegen")
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        return getattr(sys.modules.get("codegen"), "__file__", None)
    return next(iter(spec.submodule_search_locations or ()), spec.origin)
