"""CUDA C for a host C++ compiler: what to include, and one translation unit made of many kernels.

The headers here give the emitted CUDA C a meaning on a CPU; ``runtime.cpp`` runs it, one fiber per CUDA thread.  This
package only makes text; finding and calling a compiler is the part of ``fusegraph.runtime.host_compiler``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from codegen.cpu.guarded import GuardedArray, describe_address
from codegen.spec import KernelSource

__all__ = ["CPU_DIR", "DEVICE_DIR", "GuardedArray", "describe_address", "headers", "translation_unit"]

CPU_DIR = Path(__file__).resolve().parent
DEVICE_DIR = CPU_DIR.parent / "device"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INCLUDE = re.compile(r"\s*#\s*include\s*([\"<][^\">]+[\">])")
_SUFFIXES = {".h", ".cpp", ".cuh"}
_DEFINE = re.compile(r"^[ \t]*#[ \t]*define[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def headers() -> list[Path]:
    """Returns every file that a kernel's or the runtime's compilation may read, in a fixed order: for cache keys."""
    return sorted(path for folder in (CPU_DIR, DEVICE_DIR) for path in folder.iterdir() if path.suffix in _SUFFIXES)


def translation_unit(kernels: Sequence[KernelSource]) -> str:
    """Returns one C++ source with all ``kernels`` and the table of their entries, ``fusegraph_cpu_module``.

    Entry i of the table is ``kernels[i]``; equal kernels share one code.  Each kernel's code lies in a namespace of its
    own and its name is renamed by the preprocessor, so that kernels of different graphs may share names of kernels,
    helpers and macros.  For that the ``#include`` lines are moved to the top: only comments and other preprocessor
    lines may come before them.  A macro defined before an ``#include`` does not reach the header, which all kernels
    share.

    Raises ``ValueError`` for a name that is no C identifier and for an ``#include`` further down.
    """
    included: dict[str, None] = {}
    bodies: list[str] = []
    entries: list[str] = []
    entry_of: dict[KernelSource, str] = {}
    for number, kernel in enumerate(kernels):
        if kernel in entry_of:
            entries.append(entry_of[kernel])
            continue
        if not _IDENTIFIER.fullmatch(kernel.name):
            raise ValueError(f"kernel name {kernel.name!r} is not a C identifier")
        names, body = _split_includes(kernel)
        included.update(dict.fromkeys(names))
        space, symbol = f"fusegraph_kernel_{number}", f"{kernel.name}__{number}"
        macros = sorted(set(_DEFINE.findall(body)))
        factory = "with_fibers" if kernel.uses_barriers or kernel.cluster != (1, 1, 1) else "without_fibers"
        entry_of[kernel] = f'    fusegraph_cpu::Entry<&{space}::{symbol}>::{factory}("{kernel.name}"),'
        entries.append(entry_of[kernel])
        bodies.append(
            f"#define {kernel.name} {symbol}\n"
            f"namespace {space} {{\n"
            f'#line 1 "{kernel.name}.cu"\n'
            f"{body.rstrip()}\n"
            f"}}  // namespace {space}\n"
            f"#undef {kernel.name}\n" + "".join(f"#undef {macro}\n" for macro in macros)
        )
    includes = "".join(f"#include {name}\n" for name in included)
    table = "\n".join(entries)
    return (
        f'{includes}#include "entry.h"\n\n' + "\n".join(bodies) + '\n#line 1 "kernel table"\n'
        f"static const fusegraph_cpu::Kernel fusegraph_kernels[] = {{\n{table}\n"
        "    {nullptr, nullptr, nullptr, 0, nullptr},\n};\n"
        'extern "C" FUSEGRAPH_EXPORT const fusegraph_cpu::Module fusegraph_cpu_module;\n'
        "const fusegraph_cpu::Module fusegraph_cpu_module = "
        f"{{fusegraph_kernels, {len(entries)}, &fusegraph_cpu::slot}};\n"
    )


def _split_includes(kernel: KernelSource) -> tuple[list[str], str]:
    """Returns the headers that the code includes, and the code with empty lines in their place."""
    names: list[str] = []
    lines: list[str] = []
    in_comment = in_code = False
    for number, line in enumerate(kernel.code.splitlines(), start=1):
        text = line.strip()
        if in_comment:
            in_comment = "*/" not in text
        elif match := _INCLUDE.match(line):
            if in_code:
                raise ValueError(
                    f"kernel {kernel.name}, line {number}: {text} comes after code; includes must come first"
                )
            names.append(match[1])
            line = ""
        elif text.startswith("/*"):
            in_comment = "*/" not in text
        elif text and not text.startswith(("//", "#")):
            in_code = True
        lines.append(line)
    return names, "\n".join(lines)
