"""Reads the resources of a compiled kernel: registers, stack, spills and shared memory."""

from __future__ import annotations

import re
import struct

_PROPERTIES = re.compile(
    r"Function properties for (\S+)\s*\n.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)


def resources_in_log(log: str, name: str) -> dict[str, int]:
    """Returns the resources of kernel ``name`` that ``ptxas -v`` reports; those that it does not mention are missing.

    A function that is not inlined has a report of its own, and is no entry point; its spills count as the kernel's.
    """
    entries = set(re.findall(r"Compiling entry function '([^']+)'", log))
    found: dict[str, int] = {}
    for report in _PROPERTIES.finditer(log):
        if report[1] == name or report[1] not in entries:
            found["spill_bytes"] = found.get("spill_bytes", 0) + int(report[3]) + int(report[4])
        if report[1] == name:
            found["stack_bytes"] = int(report[2])
    own = log.partition(f"Compiling entry function '{name}'")[2].partition("Compiling entry function")[0]
    if used := re.search(r"Used (\d+) registers[^\n]*", own):
        found["registers"] = int(used[1])
        shared = re.search(r"(\d+) bytes smem", used[0])
        found["shared_bytes"] = int(shared[1]) if shared else 0
        if stack := re.search(r"(\d+) bytes cumulative stack size", used[0]):
            found["stack_bytes"] = int(stack[1])
    return found


_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_ATTRIBUTE = struct.Struct("<BBH")
_REGISTER_COUNT, _MIN_STACK_SIZE = 0x2F, 0x12
_RESERVED_SHARED = 1024


def resources_of_cubin(cubin: bytes, name: str) -> dict[str, int] | None:
    """Returns the resources of kernel ``name`` from the ELF image; None if it does not hold that kernel.

    Registers and stack are in ``.nv.info``, a list of attributes (format, tag, length, symbol and value).  Static
    shared memory is the size of ``.nv.shared.<name>``, which from compute capability 9.0 on starts with 1024 bytes
    reserved by the system.  The layout is what cuobjdump -elf prints.
    """
    (offset,) = struct.unpack_from("<Q", cubin, 0x28)
    _, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [_SECTION.unpack_from(cubin, offset + index * _SECTION.size) for index in range(count)]

    def text(table: int, at: int) -> str:
        start = headers[table][4] + at
        return cubin[start : cubin.index(b"\0", start)].decode()

    sections = {text(names_index, header[0]): header for header in headers}
    if f".text.{name}" not in sections:
        return None
    symbols = sections[".symtab"]
    kernel_symbol = next(
        index
        for index in range(symbols[5] // _SYMBOL.size)
        if text(symbols[6], _SYMBOL.unpack_from(cubin, symbols[4] + index * _SYMBOL.size)[0]) == name
    )
    found = {"registers": 0, "stack_bytes": 0, "shared_bytes": 0}
    at, end = sections[".nv.info"][4], sections[".nv.info"][4] + sections[".nv.info"][5]
    while at < end:
        kind, tag, length = _ATTRIBUTE.unpack_from(cubin, at)
        at += _ATTRIBUTE.size
        if kind != 4:  # only this format carries a payload; the others hold their value in the length field
            continue
        if length == 8:
            symbol, value = struct.unpack_from("<II", cubin, at)
            if symbol == kernel_symbol and tag == _REGISTER_COUNT:
                found["registers"] = value
            if symbol == kernel_symbol and tag == _MIN_STACK_SIZE:
                found["stack_bytes"] = value
        at += length
    if shared := sections.get(f".nv.shared.{name}"):
        reserved = _RESERVED_SHARED if ".nv.shared.reserved.0" in sections else 0
        found["shared_bytes"] = max(0, shared[5] - reserved)
    return found
