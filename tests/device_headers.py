"""Finds headers of the device library that a kernel lacks.

On the CPU, many kernels are compiled as one file, so another kernel's include would hide this.
"""

from __future__ import annotations

import re
from functools import cache

from fusegraph.runtime.nvrtc import HEADER_FOLDER, headers_of

_COMMENT = re.compile(r"//.*")
_DEFINITION = re.compile(r"\b(?:struct|namespace|using)\s+(\w+)|(?<!static )__device__[^;{}()]*?\b(\w+)\(")
#: A name that is called, or in which another one is: no member's.
_USE = re.compile(r"(?<![\w.])(\w+)(?:<[^;(){}]*>)?(?=::|\()")
#: Functions that CUDA has itself, for some types.
_BUILT_IN = {"abs", "copysign", "erf", "erfc", "exp", "expm1", "fma", "remainder", "rsqrt", "sqrt", "tanh"}
_LIBRARY: dict[str, str | None] = {}


@cache
def _definitions() -> dict[str, set[str]]:
    """Maps functions, types and namespaces of the device library (no static members) to their headers."""
    found: dict[str, set[str]] = {}
    for path in HEADER_FOLDER.glob("*.cuh"):
        for names in _DEFINITION.findall(_COMMENT.sub("", path.read_text("utf-8"))):
            found.setdefault("".join(names), set()).add(path.name)
    return found


def missing_headers(code: str) -> dict[str, list[str]]:
    """Returns the names of the device library that a kernel uses without including a header that defines them, with
    these headers.
    """
    included, defined = headers_of(code, _LIBRARY).keys(), _definitions()
    used = dict.fromkeys(_USE.findall(_COMMENT.sub("", code)))
    own = (
        _BUILT_IN
        | {names[0] or names[1] for names in _DEFINITION.findall(code)}
        | set(re.findall(r"\bauto (\w+) =", code))
    )
    return {n: sorted(defined[n]) for n in used if n in defined and n not in own and not defined[n] & included}
