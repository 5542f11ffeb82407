"""Names of users' tensors in kernels: whatever they are called, nothing else in the kernel has the name."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import pytest
from graphs import check_all, quick

import fusegraph as fg
from codegen.naming import Names, Writer, comment
from fusegraph.plan import plan


def _scan(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("scan")
    g.output(g.cumsum(g.tensor(n[0], (5, 300)) * g.tensor(n[1], (300,))), name=n[2])
    return g


def _rows(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("rows", io_dtype="float16")
    x, w, b = g.tensor(n[0], (7, 200)), g.tensor(n[1], (200,)), g.tensor(n[2], (200,))
    g.output(g.relu(g.layernorm(x, w, b)), name=n[3])
    return g


def _product(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("product", io_dtype="bfloat16")
    a, b, c = g.tensor(n[0], (40, 64)), g.tensor(n[1], (64, 24)), g.tensor(n[2], (24,))
    g.output(g.relu(a @ b + c), name=n[3])
    return g


def _attention(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("attention", io_dtype="float16")
    q, k, v = (g.tensor(name, (1, 2, 20, 16)) for name in n[:3])
    g.output(g.sdpa(q, k, v, use_causal_mask=True), name=n[3])
    return g


def _pool(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("pool")
    g.output(g.max_pool(g.tensor(n[0], (2, 3, 20, 20)), 3, 2, 1) + g.tensor(n[1], (1, 3, 1, 1)), name=n[2])
    return g


def _sort(n: Sequence[str]) -> fg.Graph:
    g = fg.Graph("sort")
    g.output(g.sort(g.tensor(n[0], (6, 50)) + g.tensor(n[1], (50,))), name=n[2])
    return g


@pytest.mark.slow
@pytest.mark.parametrize("build", [_scan, _rows, _pool, *quick(_sort, _product, _attention)])
def test_tensors_may_have_the_names_of_the_kernels_own_variables(build: Callable[[Sequence[str]], fg.Graph]) -> None:
    (kernel, *_) = plan(build("pqrs")).kernels
    code = re.sub(r"//[^\n]*|#[^\n]*", "", kernel.source.code)
    words = [w for w in dict.fromkeys(re.findall(r"[A-Za-z_]\w*", code)) if w.strip("_") == w and "__" not in w]
    assert len(words) > 30
    check_all([build([*words, "x1", "x2", "x3"][at : at + 4]) for at in range(0, len(words), 4)])


def test_names_are_chosen_when_the_kernel_is_written() -> None:
    names, w = Names(), Writer()
    x, vector, again = names.unique("row"), names.unique("row", "_v"), names.unique("row")
    assert x.isidentifier(), "whoever asks takes it for one"
    w.line(f"const int row = threadIdx.x, {x}_at = row;")
    w.line(comment("a user's ʘrowǀǀ0ʘ"))
    w.line(f"// {x} lies here")
    w.line(f"{vector} = at_{x}[row] + shared.row_2 + {again}; // row_3")
    assert names.chosen(w.lines) == (
        "const int row = threadIdx.x, row_2_at = row;\n"
        "// a user's ?row??0?\n"
        "// row_2 lies here\n"
        "row_v = at_row_2[row] + shared.row_2 + row_3; // row_3\n"
    )


def test_a_name_made_of_another_resembles_it() -> None:
    names, w = Names(), Writer()
    w.line(f"{(x := names.unique('my tensor'))} = {names.unique(x, '_map')};")
    w.line(f"{names.unique('aʘb')} = {names.unique(f'{x} parts')};")
    assert names.chosen(w.lines) == "my_tensor = my_tensor_map;\na_b = my_tensor_2;\n"
