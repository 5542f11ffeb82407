"""The device library: what the headers of ``codegen/device`` define, and so which of them a kernel needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Set
from functools import cache, lru_cache
from pathlib import Path

DEVICE, CPU = Path(__file__).parent / "device", Path(__file__).parent / "cpu"
#: Every kernel includes it: the types are in its signature.
ALWAYS = "types.cuh"

_COMMENT = re.compile(r"//.*")
_MACRO = re.compile(r"^\s*#\s*define (\w+)", re.M)
_INCLUDE = re.compile(r'#include "([\w.]+)"')
_DIRECTIVE = re.compile(r"^\s*#(?:.*\\\n)*.*$", re.M)
#: A piece of code up to where a scope opens or closes, or a statement ends.
_PIECE = re.compile(r"[^{};]*[{};]")
_NAMESPACE = re.compile(r"\bnamespace (\w+)")
_ALIGNED = r"(?:alignas\((?:[^()]|\([^()]*\))*\)\s+)?"
_DEFINED = re.compile(rf"\b(?:struct|union|using)\s+{_ALIGNED}(\w+)|__device__[^()]*?\b(\w+)\s*\(")


@cache
def macros() -> frozenset[str]:
    """Returns the macros of the device library and of what stands for CUDA on a CPU."""
    files = [*DEVICE.glob("*.cuh"), *CPU.glob("*.h")]
    return frozenset(_MACRO.findall("\n".join(f.read_text("utf-8") for f in files)))


@cache
def _library() -> dict[str, frozenset[str]]:
    """Returns the headers of every function, type and macro, more than one for overloads of a function.

    What is in a namespace is called ``namespace.name``; ``namespace.`` is the header of the namespace itself.
    """
    found: dict[str, set[str]] = {}
    within: dict[str, set[str]] = {}
    for path in sorted(DEVICE.glob("*.cuh")):
        text = _COMMENT.sub("", path.read_text("utf-8"))
        within[path.name] = set(_INCLUDE.findall(text))
        names = _MACRO.findall(text)
        scopes: list[str | None] = []  # namespaces, and None for other braces
        for piece in _PIECE.findall(_DIRECTIVE.sub("", text)):
            namespace, defined = _NAMESPACE.search(piece), _DEFINED.search(piece)
            if defined and not namespace and None not in scopes:
                names.append(".".join((*(s for s in scopes if s), defined[1] or defined[2])))
            if namespace and path.stem == namespace[1]:
                names.append(f"{path.stem}.")
            if piece.endswith("{"):
                scopes.append(namespace[1] if namespace else None)
            elif piece.endswith("}") and scopes:
                scopes.pop()
        for name in names:
            found.setdefault(name, set()).add(path.name)
    for name, files in found.items():
        # What the header of a namespace includes need not be included beside it.
        own = f"{name.partition('.')[0]}.cuh"
        if files <= {own, *within.get(own, ())}:
            found[name] = {own}
    return {
        name: frozenset(f for f in files if not any(f in within[other] for other in files))
        for name, files in found.items()
    }


def headers(words: Set[str], dotted: Iterable[str]) -> list[str]:
    """Returns the headers of a kernel that has such words; those of a namespace are ``namespace..name``, ``dotted``."""
    return _headers(frozenset((*(words & _library().keys()), *(word for word in dotted if ".." in word))))


@lru_cache(1 << 10)
def _headers(words: frozenset[str]) -> list[str]:
    library = _library()
    needed = {ALWAYS}
    for word in words:
        first, *rest = word.split("..")
        if rest and f"{first}." in library:
            needed |= library.get(f"{first}.{rest[0]}", library[f"{first}."])
        else:
            needed |= library.get(first, frozenset())
    return sorted(needed)
