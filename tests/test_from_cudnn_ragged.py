"""`from_cudnn`: ragged tensors of attention, sequence after sequence, wherever their offsets say."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from attention_oracle import attention, gradients  # noqa: E402
from test_from_cudnn import DATA, cudnn, pygraph  # noqa: E402

from fusegraph.errors import LayoutError, NotSupportedError  # noqa: E402
from fusegraph.frontends.cudnn import from_cudnn  # noqa: E402
from fusegraph.frontends.cudnn.rows import rows_of  # noqa: E402

NAN = float("nan")
LENGTHS = [(3, 5), (0, 2), (1, 0), (7, 9)]


class Ragged:
    """A tensor (B, H, S, D) of which each batch lies in a flat memory of its own length.

    gap     tokens that are left out after each sequence.
    wide    how many tensors of this shape lie beside each other, of which this is ``place``.
    """

    def __init__(
        self, x: Any, lengths: list[int], gap: int = 0, wide: int = 1, place: int = 0, tail: int = 2, memory: Any = None
    ) -> None:
        self.shape = tuple(x.shape)
        _, heads, tokens, depth = self.shape
        self.strides = (tokens * wide * heads * depth, depth, wide * heads * depth, 1)
        begins = np.concatenate([[0], np.cumsum([n + gap for n in lengths])])
        self.offsets = torch.tensor(begins * self.strides[2]).reshape(-1, 1, 1, 1)
        size = (int(begins[-1]) + tail) * self.strides[2]
        self.memory = torch.full((size,), NAN, dtype=x.dtype) if memory is None else memory
        self.lengths, self.array = lengths, self.memory[place * heads * depth :]
        for b, n in enumerate(lengths):
            self._of(b, n).copy_(x[b, :, :n])

    def _of(self, b: int, n: int) -> Any:
        size = (self.shape[1], n, self.shape[3])
        return torch.as_strided(self.array[int(self.offsets[b]) :], size, self.strides[1:]) if n else torch.empty(size)

    def padded(self) -> Any:
        """Returns the ragged tensor padded with zeros."""
        found = torch.zeros(self.shape, dtype=self.memory.dtype)
        for b, n in enumerate(self.lengths):
            found[b, :, :n] = self._of(b, n)
        return found

    def untouched(self) -> bool:
        """Tells whether all elements outside sequences are still NaN; overwrites the sequences with NaN."""
        for b, n in enumerate(self.lengths):
            self._of(b, n).fill_(NAN)
        return bool(torch.isnan(self.memory.float()).all())

    def tensor(self, g: Any, arrays: dict[Any, Any], name: str, made: Any = None, kind: Any = None) -> Any:
        """Returns the ragged tensor of a graph; its offsets and array are added to ``given``."""
        if made is None:
            how = {} if kind is None else {"data_type": kind}
            made = g.tensor(list(self.shape), list(self.strides), name=name, **how)
        else:
            made.set_output(True).set_dim(list(self.shape)).set_stride(list(self.strides))
            if kind is not None:
                made.set_data_type(kind)
        offset = g.tensor([len(self.lengths) + 1, 1, 1, 1], name=f"{name} begins", data_type=DATA.INT64)
        made.set_ragged_offset(offset)
        arrays |= {made: self.array, offset: self.offsets}
        return made


def of_lengths(g: Any, arrays: dict[Any, Any], lengths: list[tuple[int, int]]) -> dict[str, Any]:
    how: dict[str, Any] = {"use_padding_mask": True}
    for n, key in enumerate(("seq_len_q", "seq_len_kv")):
        how[key] = g.tensor([len(lengths), 1, 1, 1], name=key, data_type=DATA.INT32)
        arrays[how[key]] = torch.tensor([pair[n] for pair in lengths], dtype=torch.int32).reshape(-1, 1, 1, 1)
    return how


def normal(*shape: int, seed: int = 0) -> Any:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu")
    return made.half().to(torch.get_default_device())


def run(engine: str, lengths: list[tuple[int, int]], heads: tuple[int, int] = (4, 2), padded: bool = True, **gaps: Any):
    """Runs forward and backward of ragged tensors of different layouts, and compares them with the oracle."""
    (h, h_k), batch, depth = heads, len(lengths), 8
    rows, keys = (max(1, *(pair[n] for pair in lengths)) for n in range(2))
    q_n, k_n = ([pair[n] for pair in lengths] for n in range(2))
    sizes = (h, rows, depth), (h_k, keys, depth), (h_k, keys, 16)
    q, k, v = (normal(batch, *size, seed=n) for n, size in enumerate(sizes))
    loss = normal(batch, h, rows, 16, seed=3)
    how = {"attn_scale": 0.25, "diagonal_band_right_bound": 0, "generate_stats": True}
    how["diagonal_alignment"] = cudnn.diagonal_alignment.BOTTOM_RIGHT
    meaning = {"scale": 0.25, "right": 0, "bottom": True, "lengths": lengths}

    g, arrays = pygraph(DATA.HALF), dict[Any, Any]()
    lying = {"q": Ragged(q, q_n, **gaps.get("q", {})), "k": Ragged(k, k_n, **gaps.get("k", {}))}
    lying |= {"v": Ragged(v, k_n, **gaps.get("v", {}))}
    operands = {name: x.tensor(g, arrays, name) for name, x in lying.items()}
    told = of_lengths(g, arrays, lengths) if padded else {}
    o, stats = g.sdpa(**operands, **told, **how)
    out = Ragged(torch.full_like(loss, NAN), q_n, **gaps.get("o", {}))
    sums = Ragged(torch.full((batch, h, rows, 1), NAN), q_n)
    out.tensor(g, arrays, "o", o)
    sums.tensor(g, arrays, "stats", stats, DATA.FLOAT)
    graph = from_cudnn(g)
    graph.build(engine=engine)
    graph.execute(arrays)
    wanted = attention(q, k, v, **meaning)
    found, logs = out.padded(), sums.padded()
    torch.testing.assert_close(found.double(), wanted[0], atol=2e-3, rtol=2e-3)
    for b, n in enumerate(q_n):
        torch.testing.assert_close(logs[b, :, :n].double(), wanted[1][b, :, :n], atol=1e-4, rtol=1e-4)
    kept = out.memory.clone(), sums.memory.clone()
    assert out.untouched()
    assert sums.untouched()
    out.memory.copy_(kept[0])
    sums.memory.copy_(kept[1])

    g, arrays = pygraph(DATA.HALF), dict[Any, Any]()
    operands = {name: x.tensor(g, arrays, name) for name, x in lying.items()}
    operands |= {"o": out.tensor(g, arrays, "o"), "stats": sums.tensor(g, arrays, "stats", kind=DATA.FLOAT)}
    operands["dO"] = Ragged(loss, q_n).tensor(g, arrays, "dO")
    told = of_lengths(g, arrays, lengths) if padded else {}
    how.pop("generate_stats")
    made = g.sdpa_backward(**operands, **told, **how, max_total_seq_len_q=64, max_total_seq_len_kv=64)
    results = {}
    for name, t, x, n in zip(("dQ", "dK", "dV"), made, (q, k, v), (q_n, k_n, k_n)):
        results[name] = Ragged(torch.full_like(x, NAN), n, **gaps.get(name, {}))
        results[name].tensor(g, arrays, name, t)
    graph = from_cudnn(g)
    graph.build(engine=engine)
    graph.execute(arrays)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    for x, expected in zip(results.values(), gradients(loss, leaves, *leaves, **meaning)):
        torch.testing.assert_close(x.padded().double(), expected, atol=4e-3, rtol=4e-3)
    return results


GAPS: dict[str, dict[str, Any]] = {
    "one after the other": {},
    "with gaps, each another one": {"q": {"gap": 1}, "k": {"gap": 3}, "v": {"gap": 2, "tail": 5}, "o": {"gap": 4}},
    "beside others": {"q": {"wide": 3, "place": 1}, "k": {"wide": 2}, "v": {"wide": 2, "place": 1}, "dQ": {"wide": 2}},
    "no more memory than is needed": {n: {"tail": 0} for n in ("q", "k", "v", "o", "dQ", "dK", "dV")},
}


@pytest.mark.parametrize("name", GAPS)
def test_ragged(name):
    for x in run("reference", LENGTHS, **GAPS[name]).values():
        assert x.untouched()


@pytest.mark.parametrize("heads", [(1, 1), (2, 2), (4, 1)])
def test_heads(heads):
    run("reference", [(2, 3), (4, 1)], heads)
    run("reference", [(1, 1)], heads)  # one token
    run("reference", [(0, 0), (0, 3)], heads)  # no query at all


@pytest.mark.slow
def test_on_kernels():
    for x in run("cpu", LENGTHS, **GAPS["with gaps, each another one"]).values():
        assert x.untouched()


def test_lengths_are_those_between_offsets_where_no_others_are_told():
    run("reference", LENGTHS, padded=False)


def test_results_between_each_others_rows():
    """dQ, dK and dV of one memory: each leaves alone what is not its own."""
    lengths = [(3, 3), (5, 5)]
    shape = (2, 2, 5, 8)
    memory = torch.full(((8 + 1) * 3 * 16,), NAN, dtype=torch.float16)
    q, k, v, loss = (normal(*shape, seed=n) for n in range(4))
    out, stats, *_ = attention(q, k, v, lengths=lengths)
    g, arrays = pygraph(DATA.HALF), dict[Any, Any]()
    operands = {n: Ragged(x, [3, 5]).tensor(g, arrays, n) for n, x in zip("qkv", (q, k, v))}
    operands |= {n: Ragged(x, [3, 5]).tensor(g, arrays, n) for n, x in (("o", out.half()), ("dO", loss))}
    operands["stats"] = Ragged(stats.float(), [3, 5]).tensor(g, arrays, "stats", kind=DATA.FLOAT)
    found = g.sdpa_backward(**operands, **of_lengths(g, arrays, lengths))
    results = []
    for n, (name, t) in enumerate(zip(("dQ", "dK", "dV"), found)):
        results.append(Ragged(torch.full(shape, NAN), [3, 5], wide=3, place=n, memory=memory))
        results[-1].tensor(g, arrays, name, t)
    graph = from_cudnn(g)
    graph.build(engine="reference")
    graph.execute(arrays)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    for x, wanted in zip(results, gradients(loss, leaves, *leaves, lengths=lengths)):
        torch.testing.assert_close(x.padded().double(), wanted, atol=8e-3, rtol=8e-3)
    assert bool(torch.isnan(memory[8 * 48 :]).all())


def test_arrays_of_other_sizes_and_numbers():
    """As much memory as is given counts, in any shape; another size is read and compiled again, once."""
    g, arrays = pygraph(DATA.HALF), dict[Any, Any]()
    x = normal(2, 1, 4, 8)
    lying = Ragged(x, [4, 2])
    q = lying.tensor(g, arrays, "q")
    q.set_ragged_offset_multiplier(8)
    begins = q.ragged_offset
    o = g.sdpa(q=q, k=q, v=q, **of_lengths(g, arrays, [(4, 4), (2, 2)]))[0].set_output(True)
    graph, wanted = from_cudnn(g), attention(x, x, x, lengths=[(4, 4), (2, 2)])[0]
    graph.build(engine="reference")
    assert [(t.name, t.shape) for t in graph.ragged] == [("q", (8, 8))]
    for gap in (0, 0, 20):
        lying = Ragged(x, [4, 2], gap=gap)
        arrays |= {q: lying.array.reshape(-1, 1, 8), begins: lying.offsets // 8, o: torch.empty(2, 1, 4, 8).half()}
        graph.execute(arrays)
        torch.testing.assert_close(arrays[o].double(), wanted, atol=2e-3, rtol=2e-3)
    assert len(graph._sized) == 1 + (len(Ragged(x, [4, 2]).array) != 64)


def test_what_cannot_be_ragged():
    g = pygraph(DATA.HALF)
    x = g.tensor([2, 1, 4, 8], ragged_offset=g.tensor([3, 1, 1, 1], data_type=DATA.INT32), name="x")
    g.relu(x).set_output(True)
    with pytest.raises(NotSupportedError, match=r"'x' .*ragged_offset"):
        from_cudnn(g)
    with pytest.raises(LayoutError, match="one after the other"):
        rows_of((2, 1, 4, 8), (32, 32, 4, 1), None)
    g = pygraph(DATA.HALF)
    x = g.tensor([2, 1, 4, 8], ragged_offset=g.tensor([2, 1, 1, 1], data_type=DATA.INT32, name="at"), name="x")
    g.sdpa(q=x, k=x, v=x)[0].set_output(True)
    with pytest.raises(LayoutError, match="offsets of 'x' are 3 numbers, got"):
        from_cudnn(g)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GAPS)
def test_on_a_gpu(name):
    with torch.device("cuda"):
        run("cuda", LENGTHS, **GAPS[name])
