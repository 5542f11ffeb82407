"""Identifiers and comments: text from users becomes C only through here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from codegen.device_library import headers, macros

#: Words that are no identifiers in C++, macros of the C library for the CPU, and names that `codegen.kernel` puts into
#: kernels that are launched one after the other.
RESERVED = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t
    class co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue
    decltype default delete do double dynamic_cast else enum explicit export extern false float for friend
    goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private
    protected public register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename union
    unsigned using virtual void volatile wchar_t while xor xor_eq
    APPROXIMATE_MATH NULL INFINITY NAN HUGE_VAL EOF assert errno stdin stdout stderr linux unix near far main
    block_from_the_end grid_dependency_launch grid_dependency_wait
    """.split()  # noqa: SIM905 - a list of a hundred quoted words is no easier to read
)
#: Marks around a name not chosen yet, and between its stem, suffix and number: letters, so that it is an identifier.
_EDGE, _BETWEEN = "ʘ", "ǀ"
#: The line in whose place the device library's headers are included.
INCLUDES = "#include"
#: Structs, and their members: names that only mean something within a struct.
_STRUCT, _MEMBER = re.compile(r"struct \w+ \{.*?\};", re.S), re.compile(r"\b\w+(?=(?:\[[^;]*\])?;)")
#: Characters that are neither in a word nor between a variable and its member become spaces.
_APART = str.maketrans({c: " " for c in map(chr, range(128)) if not (c.isalnum() or c in "_.")})
_BEFORE, _BEHIND = re.compile(r"[A-Za-z0-9_]*\Z"), re.compile(r"[A-Za-z0-9_]*")
#: Most characters around a name that belong to the same identifier.
_LONGEST = 128


def identifier(text: str) -> str:
    """Returns a C identifier that resembles a text.

    It has ASCII letters, digits and single underscores, at most 49 characters, and is not reserved.
    """
    name = re.sub(r"_+", "_", re.sub(r"[^0-9A-Za-z]+", "_", text)).strip("_")[:48].rstrip("_")
    if not name:
        name = "t"
    if name[0].isdigit():
        name = f"t{name}"
    # Macros of the headers for the CPU begin with the project's name.
    return f"{name}_" if name in RESERVED or name.startswith("FUSEGRAPH_") else name


def _candidates(stem: str, suffix: str) -> Iterator[str]:
    """Yields identifiers that resemble a stem, ending in a suffix: the plain one, then numbered ones."""
    yield stem + suffix if not stem.endswith("_") else stem[:-1] + suffix if suffix else stem
    yield from (f"{stem.rstrip('_')}_{count}{suffix}" for count in itertools.count(2))


class Identifiers:
    """Gives every text a C identifier of its own."""

    def __init__(self) -> None:
        self._taken: set[str] = set()

    def unique(self, text: str) -> str:
        """Returns an unused identifier resembling the text."""
        name = next(n for n in _candidates(identifier(text), "") if n not in self._taken)
        self._taken.add(name)
        return name


class Names:
    """Gives every text a name of its own in a kernel.

    The names are marks until the kernel is written: `Writer.text` replaces them by identifiers that nothing else in the
    kernel has, so writers need not know each other's.
    """

    _numbers = itertools.count()

    def unique(self, text: str, suffix: str = "") -> str:
        """Returns the mark of an identifier that will resemble the text, ending in ``suffix``."""
        _, *mark = text.split(_EDGE)
        stem = "".join(mark[0].split(_BETWEEN)[:2]) if mark else identifier(text)
        return f"{_EDGE}{stem}{_BETWEEN}{suffix}{_BETWEEN}{next(self._numbers)}{_EDGE}"


def _words(lines: Sequence[str]) -> set[str]:
    """Returns the words of lines of C, with what they are members of; those of a namespace are ``namespace.name``."""
    code = "\n".join(line.partition("//")[0] for line in lines if not line.startswith("#include"))
    plain = "".join(code.split(_EDGE)[::2])
    if "struct " in plain:
        plain = _STRUCT.sub(lambda m: _MEMBER.sub("", m[0]), plain)
    return set(plain.replace("::", ".").translate(_APART).split())


def named(lines: Sequence[str]) -> str:
    """Returns lines of C with an identifier in place of every mark: one that is no other word of them.

    The headers of what they use of the device library take the place of the line `INCLUDES`.
    """
    pieces = "\n".join(lines).split(_EDGE)
    around: dict[str, set[tuple[str, str]]] = {}
    for k in range(1, len(pieces) - 1, 2):
        before, behind = _BEFORE.search(pieces[k - 1][-_LONGEST:]), _BEHIND.match(pieces[k + 1])
        assert before is not None
        assert behind is not None
        around.setdefault(pieces[k], set()).add((before[0], behind[0]))
    words = _words(lines)
    taken = RESERVED | macros() | {word.partition(".")[0] for word in words} if around else set()
    chosen: dict[str, str] = {}
    for mark in sorted(around, key=lambda mark: int(mark.rpartition(_BETWEEN)[2])):
        stem, suffix, _ = mark.split(_BETWEEN)
        for name in _candidates(stem, suffix):
            every = {f"{before}{name}{behind}" for before, behind in around[mark]}
            if not every & taken:
                break
        taken |= every
        chosen[mark] = name
    pieces[1::2] = [chosen.get(piece, piece) for piece in pieces[1::2]]
    includes = "\n".join(f'#include "{header}"' for header in headers(words))
    return "".join(pieces).replace(INCLUDES, includes, 1) + "\n"


def comment(text: str, limit: int = 110) -> str:
    """Returns one ``//`` comment line: printable ASCII, no line continuation, shortened to fit."""
    safe = "".join(c if " " <= c <= "~" else "?" for c in text).replace("\\", "/")
    return f"// {safe if len(safe) <= limit else safe[: limit - 3] + '...'}"


class Writer:
    """Collects lines of C with indentation."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.depth = 0

    def line(self, text: str = "") -> None:
        self.lines.append("    " * self.depth + text if text else "")

    def open(self, text: str) -> None:
        """Writes a line that ends in ``{`` and indents what follows."""
        self.line(f"{text} {{" if text else "{")
        self.depth += 1

    @contextmanager
    def block(self, text: str, end: str = "}", *, when: bool = True) -> Iterator[None]:
        """Writes a block around what is written inside of the ``with`` statement; none unless ``when``."""
        if when:
            self.open(text)
        yield
        if when:
            self.close(end)

    @contextmanager
    def unrolled(self, *loops: str, when: bool = True) -> Iterator[None]:
        """Writes nested loops, which the compiler unrolls, around what is written inside of the ``with`` statement."""
        for loop in loops if when else ():
            self.line("#pragma unroll")
            self.open(loop)
        yield
        for _ in loops if when else ():
            self.close()

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Closes, at the end of the ``with`` statement, the blocks opened inside of it."""
        depth = self.depth
        yield
        while self.depth > depth:
            self.close()

    def each(self, counter: str, count: int, itype: str = "int", *, unroll: bool = True) -> str:
        """Opens a loop, which the `scope` around it closes; returns its counter.

        There is no loop if it would run once: its counter is "0".
        """
        if count == 1:
            return "0"
        self.line("#pragma unroll" if unroll else "#pragma unroll 1")
        self.open(f"for ({itype} {counter} = 0; {counter} < {count}; ++{counter})")
        return counter

    def leave(self, *conditions: str, how: str = "continue") -> None:
        """Writes what leaves a loop (or the kernel) where one of some C conditions holds; empty ones never do."""
        if any(conditions):
            self.line(f"if ({' || '.join(c for c in conditions if c)}) {how};")

    def inside(self, *conditions: str) -> str:
        """Returns the C condition that all of some hold, the constant ``inside`` if they are several; empty ones do."""
        kept = [c for c in conditions if c]
        if len(kept) > 1:
            self.line(f"const bool inside = {' && '.join(kept)};")
        return "inside" if len(kept) > 1 else "".join(kept)

    def unrolled_line(self, loop: str) -> None:
        """Writes an unrolled loop with its only statement on the same line."""
        self.line("#pragma unroll")
        self.line(loop)

    def close(self, text: str = "}") -> None:
        self.depth -= 1
        self.line(text)

    def otherwise(self, text: str = "else") -> None:
        """Closes a block and opens the next one of the same statement."""
        self.close(f"}} {text} {{")
        self.depth += 1

    def text(self) -> str:
        """Returns the lines, with names in place of marks (`Names`)."""
        return named(self.lines)
