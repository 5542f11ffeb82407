"""Identifiers and comments: text from users becomes C only through here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

#: Words a generated name must not be: C++ and CUDA keywords, and names the kernels and device headers use themselves.
RESERVED = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t char8_t
    class co_await co_return co_yield compl concept const const_cast consteval constexpr constinit continue
    decltype default delete do double dynamic_cast else enum explicit export extern false float for friend
    goto if inline int long mutable namespace new noexcept not not_eq nullptr operator or or_eq private
    protected public register reinterpret_cast requires return short signed sizeof static static_assert
    static_cast struct switch template this thread_local throw true try typedef typeid typename union
    unsigned using virtual void volatile wchar_t while xor xor_eq float16 bfloat16 float8_e4m3 float8_e5m2
    int8 uint8 int16 uint16 int32 uint32 int64 uint64 Vector convert round_to infinity quiet_nan math load store
    float8_e4m3fnuz float8_e5m2fnuz saturating overflowing reinterpret widen Format Limit APPROXIMATE_MATH
    load_shared store_shared threadIdx blockIdx blockDim
    gridDim warpSize dim3 main abs acos acosh asin asinh atan atanh ceil cos cosh exp exp2 expm1 erf floor fmod log
    log1p log2 max min pow rint round sin sinh sqrt rsqrt tan tanh trunc isnan isinf
    signbit half load_evict_last NULL INFINITY NAN M N K signed_ size lane warp
    asinf sinf cosf tanf expf logf y0 y1 yn j0 j1 jn gamma index remainder div clock time signal read write
    close open printf assert linux unix near far
    barrier_init barrier_fence_init barrier_arrive barrier_expect barrier_wait barrier_arrive_cluster tma_load
    tma_load_im2col tma_load_multicast tma_load_im2col_multicast tma_store tma_store_add tma_prefetch tma_commit
    tma_wait tma_wait_read bulk_load bulk_store fence_async_shared registers_increase registers_decrease
    named_barrier_sync named_barrier_arrive grid_dependency_wait grid_dependency_launch cluster_rank cluster_sync
    cluster_arrive cluster_wait cluster_map shared_address copy_async copy_async_cached copy_async_evict_last
    copy_async_commit copy_async_wait copy_async_arrive mma tf32 to_tf32 load_matrices load_matrices_transposed
    store_matrices block_from_the_end
    store_matrices_transposed wgmma wgmma_fence wgmma_commit wgmma_wait wgmma_hold matrix_descriptor swizzle tile_at
    fragment_at fragment_at_across load_fragment load_fragment_across load_columns load_column_pairs put_fragment
    Fragment Pair PairOf load_results carry_row fetch_row winograd FragmentWords store_fragments
    store_fragments_turned store_row prefetch Barrier TensorMap Ring Tile
    """.split()  # noqa: SIM905 - a list of a hundred quoted words is no easier to read
)


def identifier(text: str) -> str:
    """A C identifier that resembles a text: ASCII letters, digits and single underscores, not reserved, at most 48
    long.
    """
    name = re.sub(r"_+", "_", re.sub(r"[^0-9A-Za-z]+", "_", text)).strip("_")[:48].rstrip("_")
    if not name:
        name = "t"
    if name[0].isdigit():
        name = f"t{name}"
    # Macros of the headers for the CPU begin with the project's name.
    return f"{name}_" if name in RESERVED or name.startswith("FUSEGRAPH_") else name


class Names:
    """Gives every text a C identifier of its own within one scope."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = set(taken)
        self._next: dict[tuple[str, str], int] = {}

    def unique(self, text: str, suffix: str = "") -> str:
        """An unused identifier resembling the text, ending in ``suffix``."""
        stem = identifier(text)
        name = stem + suffix if not stem.endswith("_") else stem[:-1] + suffix if suffix else stem
        count = self._next.get((stem, suffix), 2)
        while name in self._taken or name in RESERVED:
            name = f"{stem.rstrip('_')}_{count}{suffix}"
            count += 1
        self._next[stem, suffix] = count
        self._taken.add(name)
        return name


def comment(text: str, limit: int = 110) -> str:
    """One ``//`` comment line: printable ASCII, no line continuation, shortened to fit."""
    safe = "".join(c if " " <= c <= "~" else "?" for c in text).replace("\\", "/")
    return f"// {safe if len(safe) <= limit else safe[: limit - 3] + '...'}"


class Writer:
    """Lines of C with indentation."""

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
        """Opens a block and closes it behind what is written inside of the ``with`` statement, if ``when``."""
        if when:
            self.open(text)
        yield
        if when:
            self.close(end)

    @contextmanager
    def unrolled(self, *loops: str, when: bool = True) -> Iterator[None]:
        """The same for loops, one in the other, that the compiler unrolls."""
        for loop in loops if when else ():
            self.line("#pragma unroll")
            self.open(loop)
        yield
        for _ in loops if when else ():
            self.close()

    def unrolled_line(self, loop: str) -> None:
        """Writes a loop that is unrolled and has its only statement behind it."""
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
        return "\n".join(self.lines) + "\n"
