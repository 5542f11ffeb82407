"""Identifiers and comments: text from users becomes C only through here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from functools import cache, lru_cache
from string import ascii_letters, digits

from codegen.buffers import every
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
#: What is on both sides of a name not chosen yet: a letter, so that it is an identifier, and none that users write.
_EDGE = "ʘ"
#: The line in whose place the device library's headers are included: a comment that no user can write.
INCLUDES = "//…"
_COMMENT, _UNPRINTABLE = re.compile("//.*"), re.compile("[^ -~]")
#: Members of structs: names that only mean something within a struct.
_MEMBER = re.compile(r" \S+;")
#: Characters that are neither in a word nor between a variable and its member become spaces, and ``::`` two dots.
_APART = str.maketrans({c: " " for c in map(chr, range(128)) if not (c.isalnum() or c in "_.:")} | {":": "."})
#: Characters of identifiers.
_PART = f"{ascii_letters}{digits}_"


@lru_cache(1 << 12)
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

    The names are marks until the kernel is written: `chosen` replaces them by identifiers that nothing else in the
    kernel has, so writers need not know each other's.
    """

    def __init__(self) -> None:
        #: stems and suffixes of names by their marks, in the order in which they were asked for
        self._marks: dict[str, tuple[str, str]] = {}

    def unique(self, text: str, suffix: str = "") -> str:
        """Returns the mark of an identifier that will resemble the text, ending in ``suffix``."""
        made = self._marks.get(text.split(_EDGE)[1]) if _EDGE in text else None
        stem = "".join(made) if made else identifier(text)
        mark = f"{len(self._marks)}{stem}{suffix}"
        self._marks[mark] = stem, suffix
        return f"{_EDGE}{mark}{_EDGE}"

    def chosen(self, lines: Sequence[str]) -> str:
        """Returns lines of C with an identifier in place of every mark: one that is no other word of them.

        The headers of what they use of the device library take the place of the line `INCLUDES`.
        """
        pieces = "\n".join(lines).split(_EDGE)
        around, words = _around(pieces), set[str]().union(*map(_words, lines))
        dotted = [word for word in words if "." in word]
        taken = words.union([word.partition(".")[0] for word in dotted])
        kept, names = _kept(), {}
        for mark, (stem, suffix) in self._marks.items():
            if mark in around:
                for name in _candidates(stem, suffix):
                    every = [before + name + behind for before, behind in around[mark]]
                    if taken.isdisjoint(every) and kept.isdisjoint(every):
                        break
                taken.update(every)
                names[mark] = name
        pieces[1::2] = [names[mark] for mark in pieces[1::2]]
        includes = "\n".join(f'#include "{header}"' for header in headers(words, dotted))
        return "".join(pieces).replace(INCLUDES, includes, 1) + "\n"


@cache
def _kept() -> frozenset[str]:
    """Returns the words that no variable of a kernel may have as its name."""
    return RESERVED | macros()


@lru_cache(1 << 13)
def _words(line: str) -> frozenset[str]:
    """Returns the words of a line of C, with what they are members of; those of a namespace are ``namespace..name``.

    A struct is one line.  Most lines of a kernel are also in others.
    """
    plain = _COMMENT.sub("", "".join(line.split(_EDGE)[::2]))
    if "struct " in plain:
        plain = _MEMBER.sub("", plain)
    return frozenset(plain.translate(_APART).split())


def _around(pieces: Sequence[str]) -> dict[str, set[tuple[str, str]]]:
    """Returns the marks, every second piece of a text, with what stands around them in the same identifier."""
    around: dict[str, set[tuple[str, str]]] = {mark: set() for mark in pieces[1::2]}
    for before, mark, behind in zip(pieces[::2], pieces[1::2], pieces[2::2]):
        if before[-1:] in _PART or behind[:1] in _PART:
            around[mark].add((before[len(before.rstrip(_PART)) :], behind[: len(behind) - len(behind.lstrip(_PART))]))
        else:
            around[mark].add(("", ""))
    return around


def comment(text: str, limit: int = 110) -> str:
    """Returns one ``//`` comment line: printable ASCII, no line continuation, shortened to fit."""
    plain = text if text.isascii() and text.isprintable() else _UNPRINTABLE.sub("?", text)
    safe = plain.replace("\\", "/")
    return f"// {safe if len(safe) <= limit else safe[: limit - 3] + '...'}"


class Scope:
    """Closes, at the end of a ``with`` statement, the blocks opened since a depth; ``then`` is called behind them."""

    def __init__(self, w: Writer, depth: int, end: str = "}", then: Callable[[], None] | None = None) -> None:
        self._w, self._depth, self._end, self._then = w, depth, end, then

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        while self._w.depth > self._depth:
            self._w.close(self._end)
        if self._then:
            self._then()


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

    def scope(self, then: Callable[[], None] | None = None) -> Scope:
        """Closes, at the end of the ``with`` statement, the blocks opened inside of it; then calls ``then``."""
        return Scope(self, self.depth, then=then)

    def block(self, text: str, end: str = "}", *, when: bool = True, then: Callable[[], None] | None = None) -> Scope:
        """Writes a block around what is written inside of the ``with`` statement; none unless ``when``."""
        scope = Scope(self, self.depth, end, then)
        if when:
            self.open(text)
        return scope

    def unrolled(self, *loops: str, when: bool = True) -> Scope:
        """Writes nested loops, which the compiler unrolls, around what is written inside of the ``with`` statement."""
        scope = Scope(self, self.depth)
        for loop in loops if when else ():
            self.line("#pragma unroll")
            self.open(loop)
        return scope

    def guarded(self, *conditions: str) -> Scope:
        """Writes a block under all of some conditions, of which empty ones always hold; none if all do."""
        condition = every(*conditions)
        return self.block(f"if ({condition})", when=condition != "")

    def repeated(self, variable: str, count: int) -> Scope:
        """Writes an unrolled loop of so many passes; none for one."""
        return self.unrolled(f"for (int {variable} = 0; {variable} < {count}; ++{variable})", when=count > 1)

    def each_element(self, count: int, statement: str) -> None:
        """Writes a statement for all elements ``e`` of a vector."""
        self.unrolled_line(f"for (int e = 0; e < {count}; ++e) {statement}")

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
