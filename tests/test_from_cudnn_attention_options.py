"""`from_cudnn`: attention with any of its options together, against an oracle that goes head by head."""

from __future__ import annotations

import random
from math import inf, lcm
from typing import Any

import pytest

torch = pytest.importorskip("torch")
from attention_oracle import attention, gradients, slope  # noqa: E402
from test_from_cudnn import DATA, cudnn, pygraph  # noqa: E402

from fusegraph.frontends.cudnn import CudnnGraph, from_cudnn  # noqa: E402
from fusegraph.ops import attention as ops  # noqa: E402

HALF = {torch.float16: DATA.HALF, torch.bfloat16: DATA.BFLOAT16}
ALIGNMENTS = cudnn.diagonal_alignment
SCALE = 0.25


class Case:
    """Attention with some options, on random numbers."""

    def __init__(self, seed: int, **fixed: Any) -> None:
        rng, make = random.Random(seed), torch.Generator().manual_seed(seed)
        own: dict[str, Any] = {
            "dtype": rng.choice(list(HALF)),
            "heads": rng.choice([(1, 1), (2, 2), (4, 2), (1, 2), (2, 1), (2, 3)]),
            "batch": rng.choice([1, 3]),
            "rows": rng.choice([1, 7, 33]),
            "keys": rng.choice([1, 2, 19, 40]),
            "depth": rng.choice([(8, 8), (16, 8), (5, 24)]),
            "padded": rng.random() < 0.5,
            "paged": rng.choice([None, None, None, 1, 8]),
            "biased": rng.random() < 0.3,
            "alibi": rng.random() < 0.3,
            "blocks": rng.random() < 0.2,
            "sink": rng.random() < 0.4,
            "dropped": rng.choice([None, None, "drawn", "mask"]),
            "bottom": rng.random() < 0.5,
            "left": rng.choice([None, None, 1, 4]),
            "right": rng.choice([None, 0, 3]),
            "told": rng.random() < 0.4,
            **fixed,
        }
        self.__dict__ |= own
        self.h_k, self.h_v = own["heads"]
        self.h = lcm(*own["heads"]) * rng.choice([1, 2])
        batch, rows, keys, (depth, wide) = own["batch"], own["rows"], own["keys"], own["depth"]
        self.padded = own["padded"] or own["paged"] is not None

        def normal(*shape: int, dtype: Any = own["dtype"]) -> Any:
            return torch.randn(shape, generator=make).to(dtype)

        self.q, self.k, self.v = (
            normal(batch, self.h, rows, depth),
            normal(batch, self.h_k, keys, depth),
            normal(batch, self.h_v, keys, wide),
        )
        self.loss = normal(batch, self.h, rows, wide)
        self.lengths = None
        if self.padded:
            some = [(rng.choice([0, 1, rows, rng.randint(0, rows)]), rng.choice([0, 1, keys])) for _ in range(batch)]
            self.lengths = some
        self.bias = normal(1, self.h, rows, keys) if own["biased"] else None
        self.sink_token = normal(1, self.h, 1, 1, dtype=torch.float32) if own["sink"] else None
        self.bits = self.allowed = None
        if own["blocks"]:
            tall, bytes_ = -(-rows // 128), -(-keys // 1024)
            self.bits = torch.randint(0, 256, (batch, self.h, tall, bytes_), generator=make).to(torch.uint8)
            i, j = torch.arange(rows)[:, None] // 128, torch.arange(keys)[None, :] // 128
            self.allowed = (self.bits[:, :, i, j // 8] >> (j % 8)) & 1 == 1
        self.mask = (torch.rand(batch, self.h, rows, keys, generator=make) < 0.7).to(own["dtype"])

    def operands(self, g: Any, arrays: dict[Any, Any], paged: bool) -> dict[str, Any]:
        """Returns the keywords of sdpa and sdpa_backward, and fills ``arrays``."""

        def given(name: str, x: Any, kind: Any = None) -> Any:
            made = g.tensor(list(x.shape), list(x.stride()), name=name, **({} if kind is None else {"data_type": kind}))
            arrays[made] = x
            return made

        how: dict[str, Any] = {
            "attn_scale": SCALE,
            "use_alibi_mask": self.alibi,
            "diagonal_alignment": ALIGNMENTS.BOTTOM_RIGHT if self.bottom else ALIGNMENTS.TOP_LEFT,
            "diagonal_band_left_bound": self.left,
            "diagonal_band_right_bound": self.right,
            "q": given("q", self.q),
        }
        for name, x in (("k", self.k), ("v", self.v)):
            if not paged:
                how[name] = given(name, x)
                continue
            pages = -(-self.keys // self.paged)
            whole = torch.zeros(*x.shape[:2], pages * self.paged, x.shape[3], dtype=x.dtype)
            whole[:, :, : self.keys] = x
            order = torch.randperm(self.batch * pages, generator=torch.Generator().manual_seed(7))
            blocks = whole.reshape(*x.shape[:2], pages, self.paged, x.shape[3]).transpose(1, 2).flatten(0, 1)
            container = torch.empty_like(blocks)
            container[order] = blocks
            how[name] = given(name, container)
            table = order.reshape(self.batch, 1, pages, 1).int()
            how[f"paged_attention_{name}_table"] = given(f"table {name}", table, DATA.INT32)
            how["paged_attention_max_seq_len_kv"] = self.keys
        if self.lengths is not None:
            how["use_padding_mask"] = True
            for n, key in enumerate(("seq_len_q", "seq_len_kv")):
                x = torch.tensor([pair[n] for pair in self.lengths], dtype=torch.int32).reshape(-1, 1, 1, 1)
                how[key] = given(key, x, DATA.INT32)
        if self.bias is not None:
            how["bias"] = given("bias", self.bias)
        if self.sink_token is not None:
            how["sink_token"] = given("sink", self.sink_token, DATA.FLOAT)
        if self.dropped == "drawn":
            numbers = [given(n, torch.full((1, 1, 1, 1), 5), DATA.INT64) for n in ("seed", "offset")]
            how["dropout"] = (0.3, *numbers)
        elif self.dropped == "mask":
            scales = [given(n, torch.full((1, 1, 1, 1), x), DATA.FLOAT) for n, x in (("by", 1.25), ("inverse", 0.8))]
            how["dropout"] = (given("mask", self.mask), *scales)
        return how

    def meaning(self, dump: Any = None) -> dict[str, Any]:
        """Returns the keywords of the oracle."""
        weigh = dump / 0.7 if self.dropped == "drawn" else self.mask * 1.25 if self.dropped == "mask" else None
        return {
            "scale": SCALE,
            "lengths": self.lengths,
            "bias": self.bias,
            "alibi": self.alibi,
            "left": self.left,
            "right": self.right,
            "bottom": self.bottom,
            "allowed": self.allowed,
            "sink": self.sink_token,
            "weigh": weigh,
        }

    def forward(self, engine: str) -> CudnnGraph:
        """Runs the forward pass and compares all its outputs."""
        g, arrays = pygraph(HALF[self.dtype]), dict[Any, Any]()
        how = self.operands(g, arrays, self.paged is not None)
        if "dropout" in how and self.dropped == "mask":
            how["dropout"] = how["dropout"][:2]
        if self.bits is not None:
            how["block_mask"] = g.tensor(list(self.bits.shape), name="blocks", data_type=DATA.UINT8)
            arrays[how["block_mask"]] = self.bits
        each = {"score_max": (self.batch, self.h, self.rows, 1), "score_sum_exp": (self.batch, self.h, self.rows, 1)}
        shapes = {"rng_dump": (self.batch, self.h, self.rows, self.keys)} if self.dropped == "drawn" else {}
        outs = {}
        for name, shape in {**(each if self.told else {}), **shapes}.items():
            how[name] = g.tensor(list(shape), name=name, data_type=DATA.FLOAT).set_output(True)
            outs[name] = arrays[how[name]] = torch.full(shape, float("nan"))
        o, stats = g.sdpa(**how, generate_stats=True, unfuse_fma=True)
        o.set_output(True)
        stats.set_output(True).set_data_type(DATA.FLOAT)
        outs["o"] = arrays[o] = torch.full_like(self.loss, float("nan"))
        outs["stats"] = arrays[stats] = torch.full((self.batch, self.h, self.rows, 1), float("nan"))
        graph = from_cudnn(g)
        graph.build(engine=engine)
        graph.execute(arrays)
        self.o, self.stats, self.dump = outs["o"], outs["stats"], outs.get("rng_dump")
        found = attention(self.q, self.k, self.v, **self.meaning(self.dump))
        close = {"atol": 2e-3, "rtol": 2e-3} if self.dtype == torch.float16 else {"atol": 1.5e-2, "rtol": 1.5e-2}
        torch.testing.assert_close(self.o.double(), found[0], **close)
        for name, wanted in zip(("stats", "score_max", "score_sum_exp"), found[1:]):
            if name in outs:
                torch.testing.assert_close(outs[name].double(), wanted, atol=2e-4, rtol=2e-4)
        return graph

    def backward(self, engine: str) -> CudnnGraph:
        """Runs the gradients of the forward pass and compares them."""
        g, arrays = pygraph(HALF[self.dtype]), dict[Any, Any]()
        how = self.operands(g, arrays, paged=False)
        rest = {"o": self.o, "dO": self.loss, "stats": self.stats}
        for name, x in rest.items():
            how[name] = g.tensor(list(x.shape), name=name, **({"data_type": DATA.FLOAT} if name == "stats" else {}))
            arrays[how[name]] = x
        leaves = [x.clone().double().requires_grad_() for x in (self.q, self.k, self.v)]
        meaning = self.meaning(self.dump)
        outs: dict[str, Any] = {}
        for key, name, word in (("bias", "dBias", "bias"), ("sink_token", "dSink_token", "sink")):
            x = getattr(self, key)
            if x is not None:
                how[name] = g.tensor(list(x.shape), name=name, data_type=DATA.FLOAT).set_output(True)
                outs[name] = arrays[how[name]] = torch.full(x.shape, float("nan"))
                meaning[word] = x.clone().double().requires_grad_()
                leaves.append(meaning[word])
        found = g.sdpa_backward(**how, use_deterministic_algorithm=True)
        for name, t, like in zip(("dQ", "dK", "dV"), found, (self.q, self.k, self.v)):
            t.set_output(True)
            outs[name] = arrays[t] = torch.full_like(like, float("nan"))
        graph = from_cudnn(g)
        graph.build(engine=engine)
        graph.execute(arrays)
        wanted = gradients(self.loss, leaves, *leaves[:3], **meaning)
        names = ["dQ", "dK", "dV", *(n for n in ("dBias", "dSink_token") if n in outs)]
        unit = 2e-3 if self.dtype == torch.float16 else 1.6e-2
        for name, x in zip(names, wanted):
            most = float(x.abs().max()) if x.numel() else 0.0
            torch.testing.assert_close(
                outs[name].double(), x, rtol=2 * unit, atol=4 * unit * max(most, 1.0), msg=lambda m, n=name: f"{n}: {m}"
            )
        return graph


@pytest.mark.parametrize("seed", range(24))
def test_any_options_forward(seed):
    Case(seed).forward("reference")


@pytest.mark.parametrize("seed", range(100, 116))
def test_any_options_backward(seed):
    case = Case(seed, blocks=False, paged=None)
    case.forward("reference")
    case.backward("reference")


ON_KERNELS: dict[str, dict[str, Any]] = {
    "sink of padded rows": {"padded": True, "sink": True, "heads": (2, 2), "rows": 7, "told": False, "dropped": None},
    "alibi at the bottom": {"alibi": True, "bottom": True, "sink": True, "rows": 7, "keys": 19, "dropped": None},
    "told of each query": {"told": True, "padded": True, "sink": True, "heads": (2, 2)},
    "more heads of values": {"heads": (2, 3), "rows": 7},
    "blocks": {"blocks": True, "rows": 33, "keys": 40, "dropped": None},
    "mask": {"dropped": "mask", "rows": 7},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ON_KERNELS)
def test_on_kernels(name):
    plain = {"paged": None, "biased": False, "blocks": False, "left": None, "right": 0}
    case = Case(3, **{**plain, **ON_KERNELS[name]})
    case.forward("cpu")
    if name in ("sink of padded rows", "more heads of values", "mask"):
        case.backward("cpu")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200, 230))
def test_any_options_on_kernels(seed):
    case = Case(seed)
    case.forward("cpu")
    if case.paged is None and not case.blocks:
        case.backward("cpu")


def test_attention_stays_one_kernel_where_the_kernel_has_it_all():
    """A sink of padded rows costs its stats a kernel, and no scores are in memory."""
    case = Case(3, padded=True, sink=True, heads=(2, 2), told=False, dropped=None, blocks=False, paged=None)
    families = [k.group.family for k in case.forward("cpu").build().plan.kernels]
    assert families.count("attention") == 1
    assert "matmul" not in families


def test_what_dropout_draws_is_the_share_that_was_asked_for():
    case = Case(5, dropped="drawn", rows=33, keys=40, batch=3, padded=False, paged=None)
    case.forward("reference")
    assert set(case.dump.unique().tolist()) == {0.0, 1.0}
    assert abs(float(case.dump.mean()) - 0.7) < 4 * (0.21 / case.dump.numel()) ** 0.5


def test_slopes_of_alibi():
    for heads in (1, 2, 3, 5, 8, 12):
        assert ops.alibi_slopes(heads).tolist() == pytest.approx([slope(h, heads) for h in range(heads)])


def test_a_scale_that_comes_with_every_call():
    g = pygraph(DATA.HALF)
    x = torch.randn(1, 2, 5, 8).half()
    q = g.tensor([1, 2, 5, 8], name="q")
    scale = g.tensor([1, 1, 1, 1], data_type=DATA.FLOAT, is_pass_by_value=True, name="scale")
    o = g.sdpa(q=q, k=q, v=q, attn_scale=scale)[0].set_output(True)
    graph, out = from_cudnn(g), torch.empty_like(x)
    graph.build(engine="reference")
    for factor in (0.5, -1.0):
        graph.execute({q: x, scale: factor, o: out})
        torch.testing.assert_close(out.double(), attention(x, x, x, scale=factor)[0], atol=2e-3, rtol=2e-3)
    assert -inf < factor
