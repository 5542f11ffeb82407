"""torch programs that change their inputs: these become assignments, in one piece, without copies."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from graphs import quick

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

import fusegraph.torch  # noqa: E402
from codegen.attention.spec import AttentionSpec  # noqa: E402
from fusegraph.engines.kernels import KernelExecutable  # noqa: E402
from fusegraph.frontends.torch.exported import import_module  # noqa: E402
from fusegraph.frontends.torch.foreach import rules  # noqa: E402


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelExecutable[Any]]]:
    """The executables that are made meanwhile."""
    every: list[KernelExecutable[Any]] = []
    init = KernelExecutable.__init__

    def recorded(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        every.append(self)

    monkeypatch.setattr(KernelExecutable, "__init__", recorded)
    torch._dynamo.reset()
    yield every
    torch._dynamo.reset()


def families(executable: KernelExecutable[Any]) -> list[str]:
    assert executable.plan is not None
    return [k.group.family for k in executable.plan.kernels]


def updated(executable: KernelExecutable[Any]) -> int:
    return len(executable.graph.updates)


def same(function: Callable[..., Any], *inputs: Any, calls: int = 1, **tolerance: float) -> None:
    """Checks that a compiled function returns the same and does the same to its inputs."""
    ours, theirs = copy.deepcopy(inputs), copy.deepcopy(inputs)
    compiled = torch.compile(function, backend="fusegraph")
    for _ in range(calls):
        torch.testing.assert_close(compiled(*ours), function(*theirs), **tolerance)
    torch.testing.assert_close(ours, theirs, **tolerance)


CACHE, ROW = (2, 3, 16, 8), (2, 3, 1, 8)
WRITES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "index_put": lambda cache, at, x: cache.__setitem__((slice(None), slice(None), at), x),
    "index_copy": lambda cache, at, x: cache.index_copy_(2, at, x),
    "slice": lambda cache, at, x: cache.__setitem__((slice(None), slice(None), slice(5, 6)), x),
    "select": lambda cache, at, x: cache.__setitem__((1, slice(None), slice(5, 6)), x[0]),
    "scatter": lambda cache, at, x: cache.scatter_(2, at.view(1, 1, 1, 1).expand(x.shape), x),
    "positions": lambda cache, at, x: cache.__setitem__(
        (torch.arange(2), slice(None), at + torch.arange(2)), x[:, :, 0]
    ),
    "rows": lambda cache, at, x: cache.view(6, 16, 8).__setitem__((at - 3, at + 1), x[0, :1, 0]),
    "copy": lambda cache, at, x: cache.narrow(2, 4, 1).copy_(x),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", WRITES)
def test_caches_are_written_where_they_lie(how: str, made: list[KernelExecutable[Any]]) -> None:
    def step(cache: Any, at: Any, x: Any, w: Any) -> Any:
        WRITES[how](cache, at, torch.tanh(x @ w))
        return F.scaled_dot_product_attention(x, cache, cache)

    with torch.no_grad():
        same(step, torch.randn(CACHE), torch.tensor([7]), torch.randn(ROW), torch.randn(8, 8))
    (executable,) = made
    assert updated(executable) == 1
    plan = executable.plan
    assert plan is not None
    cache = next(iter(plan.simplified.updates.values()))
    assert not any(t.nbytes >= cache.nbytes for k in plan.kernels for t in k.group.writes)


def random_program(seed: int) -> Callable[..., Any]:
    """A program that writes into two inputs, through views or not, and reads them between."""
    draw = random.Random(seed)
    views = (lambda x: x, lambda x: x[1:3], lambda x: x.t()[2], lambda x: x[:, ::2], lambda x: x.view(-1)[3:15])
    writes = (
        lambda x, v, at: x.copy_(v),
        lambda x, v, at: x.add_(v).mul_(0.5),
        lambda x, v, at: x.index_add_(0, at, v.tanh().expand_as(x)[:2]),
        lambda x, v, at: x.index_copy_(0, at, v.expand_as(x)[:2]),
        lambda x, v, at: x.masked_fill_(x > v, 1.0),
        lambda x, v, at: x.__setitem__(at, v.expand_as(x)[0] * 2),
        lambda x, v, at: x.copy_(x.flip(0)),
    )
    steps = [(draw.randrange(2), draw.choice(views), draw.choice(writes)) for _ in range(draw.randint(1, 4))]
    reads = [draw.random() < 0.5 for _ in steps]

    def program(x: Any, y: Any, at: Any) -> Any:
        found = []
        for (which, view, write), read in zip(steps, reads, strict=True):
            target, other = view((x, y)[which]), (y, x)[which]
            write(target, other.amax(), at)
            if read:
                found.append(target.sum(0) + other[0, 0])
        return found, x * 2

    return program


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(n, marks=pytest.mark.slow) for n in range(3, 20))])
def test_random_programs(seed: int, made: list[KernelExecutable[Any]]) -> None:
    with torch.no_grad():
        same(random_program(seed), torch.randn(4, 6), torch.randn(4, 6), torch.tensor([1, 0]), calls=2)


def test_prompts_at_several_positions(made: list[KernelExecutable[Any]]) -> None:
    def step(cache: Any, at: Any, x: Any) -> Any:
        cache[:, :, at] = x * 2
        return cache.sum(2)

    with torch.no_grad():
        same(step, torch.randn(CACHE), torch.tensor([3, -1, 9]), torch.randn(2, 3, 3, 8))
    (executable,) = made
    assert updated(executable) == 1


def test_two_writes_and_reads_between(made: list[KernelExecutable[Any]]) -> None:
    def step(cache: Any, at: Any, x: Any) -> Any:
        before = cache.sum(2)
        cache[:, :, at] = x
        between = cache.amax(2)
        cache[:, :, at + 1] = x * 2 + between[:, :, None]
        return before, between, cache.mean(2)

    with torch.no_grad():
        same(step, torch.randn(CACHE), torch.tensor([3]), torch.randn(ROW))
    (executable,) = made
    assert updated(executable) == 1


def test_running_statistics(made: list[KernelExecutable[Any]]) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()).train()
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="fusegraph")
    for _ in range(2):
        x = torch.randn(2, 3, 9, 9)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), theirs(x), rtol=1e-4, atol=1e-4)
    for a, b in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(a, b)
    assert updated(made[0]) == 3  # mean, variance and the number of batches
    assert len(made) == 1


def test_optimizers(made: list[KernelExecutable[Any]]) -> None:
    def adamw(weight: Any, gradient: Any, first: Any, second: Any, step: Any) -> None:
        step += 1
        weight.mul_(1 - 1e-2 * 1e-3)
        first.lerp_(gradient, 0.1)
        second.mul_(0.999).addcmul_(gradient, gradient, value=1e-3)
        size = 1e-3 / (1 - 0.9**step)
        weight.addcdiv_(first, second.sqrt() / (1 - 0.999**step).sqrt() + 1e-8, value=-1.0 * 1e-3)
        weight.sub_(gradient * size * 0)

    with torch.no_grad():
        same(adamw, *(torch.randn(33, 65) for _ in range(3)), torch.rand(33, 65), torch.tensor(1.0), calls=2)
    (executable,) = made
    assert updated(executable) == 4
    assert set(families(executable)) == {"pointwise"}
    assert executable.plan is not None
    assert executable.plan.memory.size <= 1024  # nothing of the weights' size
    assert len(families(executable)) <= 2


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01, foreach=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True, foreach=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", quick("AdamW", "SGD", "RMSprop"))
def test_torchs_optimizers(which: str, made: list[KernelExecutable[Any]]) -> None:
    """A kernel writes a weight and what is kept for it, where they lie."""
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 5))
    theirs = copy.deepcopy(ours)
    for model, compiled in ((ours, True), (theirs, False)):
        optimizer = OPTIMIZERS[which](model.parameters())
        step = torch.compile(lambda opt=optimizer: opt.step(), backend="fusegraph") if compiled else optimizer.step
        x = torch.ones(8, 40).cumsum(0)
        for _ in range(3):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert not [left for report in fusegraph.torch.report(clear=True) for left in report.left]
    last = made[-1]
    assert updated(last) == {"SGD": 2, "AdamW": 4, "RMSprop": 5}[which] * 4
    assert last.plan is not None
    assert last.plan.memory.size == 0
    assert sum("param_groups_0_params_" in t.base.name for k in last.plan.kernels for t in k.group.writes) == 4


@pytest.mark.slow
@pytest.mark.parametrize("order", [2.0, float("inf")])
def test_norm_of_all_gradients(order: float, made: list[KernelExecutable[Any]]) -> None:
    """The norms of all gradients are one launch, that of their norms another, and what scales them is one."""
    torch.manual_seed(0)
    weights = [torch.zeros(n, 7 + n, dtype=torch.float64, requires_grad=True) for n in range(3, 9)]
    grads = [torch.randn_like(w) for w in weights]
    norms = []
    for clip in (torch.compile(nn.utils.clip_grad_norm_, backend="fusegraph"), nn.utils.clip_grad_norm_):
        for w, g in zip(weights, grads, strict=True):
            w.grad = g.clone()
        norms.append((clip(weights, 0.5, order), *(w.grad for w in weights)))
    torch.testing.assert_close(*norms)
    assert families(made[-1]) == ["members", "rows", "members"]


def test_operators_of_lists() -> None:
    for operator, rule in rules().items():
        kinds = [str(a.type) for a in operator._schema.arguments if not a.has_default_value() or a.name == "value"]
        several, numbers = [[torch.rand(n, n) + 0.5 for n in (3, 2)] for _ in kinds], [0.5, 2.0]
        args = [
            {"List[Tensor]": x, "List[number]": numbers, "Tensor": torch.tensor(1.5)}.get(kind, 0.75)
            for kind, x in zip(kinds, several)
        ]
        torch.testing.assert_close(list(rule(*args)), list(operator(*args)), equal_nan=True, msg=str(operator))


class Attention(nn.Module):
    """A step of attention over a static cache, as decoders are written for torch.compile."""

    def __init__(self, width: int = 32, heads: int = 4, kv: int = 2, length: int = 32) -> None:
        super().__init__()
        self.d = width // heads
        self.q, self.k, self.v = (nn.Linear(width, n * self.d, bias=False) for n in (heads, kv, kv))
        self.register_buffer("keys", torch.zeros(1, kv, length, self.d))
        self.register_buffer("values", torch.zeros(1, kv, length, self.d))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: Any, position: Any) -> Any:
        b, s, w = x.shape
        q, k, v = (f(x).view(b, s, -1, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        self.keys[:, :, position] = torch.cat((-k[..., self.d // 2 :], k[..., : self.d // 2]), -1)
        self.values[:, :, position] = v
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.mask[position], enable_gqa=True)
        return y.transpose(1, 2).reshape(b, s, w)


@pytest.mark.parametrize("positions", [1, 4])
def test_decoder_steps(positions: int, made: list[KernelExecutable[Any]]) -> None:
    torch.manual_seed(0)
    ours = Attention().eval()
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="fusegraph")
    with torch.no_grad():
        for start in (0, positions):
            x, at = torch.randn(1, positions, 32), torch.arange(start, start + positions)
            torch.testing.assert_close(compiled(x, at), theirs(x, at))
    torch.testing.assert_close(ours.keys, theirs.keys)
    torch.testing.assert_close(ours.values, theirs.values)
    (executable,) = made
    plan = executable.plan
    assert plan is not None
    assert updated(executable) == 2
    if positions == 1:  # one product makes queries, keys and values; what is stored is a part of its result
        assert families(executable).count("contraction") == 1
        writers = {t.base.name: k.group.family for k in plan.kernels for t in k.group.writes}
        assert (writers["values"], writers["keys"]) == ("pointwise", "pointwise")
    assert not any(t.nbytes >= ours.keys.nbytes for k in plan.kernels for t in k.group.writes)


def repeated(x: Any, times: int) -> Any:
    """Repeats heads of keys, as decoders do that leave nothing to the operator of attention."""
    b, heads, length, d = x.shape
    return x[:, :, None].expand(b, heads, times, length, d).reshape(b, heads * times, length, d)


def attended(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
    return torch.softmax(scores + mask, -1, dtype=torch.float32) @ v


@pytest.mark.parametrize("attend", [attended, F.scaled_dot_product_attention])
@pytest.mark.parametrize("rows", quick(1, 3))
def test_caches_are_not_repeated_for_heads(attend: Any, rows: int, made: list[KernelExecutable[Any]]) -> None:
    def step(x: Any, w: Any, keys: Any, values: Any, at: Any, mask: Any) -> Any:
        q, k, v = ((x @ part).unflatten(-1, (-1, 8)).transpose(1, 2) for part in w.split((48, 16, 16), -1))
        keys.index_copy_(2, at, k.tanh())
        values.index_copy_(2, at, v)
        return attend(q, repeated(keys, 3), repeated(values, 3), mask).transpose(1, 2).relu()

    with torch.no_grad():
        caches = torch.randn(2, 2, 20, 8), torch.randn(2, 2, 20, 8)
        at, mask = torch.arange(4, 4 + rows), torch.randn(2, 1, rows, 20)
        same(step, torch.randn(2, rows, 24), torch.randn(24, 80), *caches, at, mask)
    (executable,) = made
    plan = executable.plan
    assert plan is not None
    assert families(executable).count("attention") == 1
    assert not any(t.nbytes >= caches[0].nbytes for k in plan.kernels for t in k.group.writes)
    if rows == 1:  # the product of the values stores into the cache
        assert [k.group.family for k in plan.kernels for t in k.group.writes if t.base.name == "values"] == [
            "contraction"
        ]


SIZES: dict[str, Any] = {
    **{"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 64},
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "GPT2": ("GPT2LMHeadModel", {"vocab_size": 97, "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 64}),
    "Mistral": ("MistralForCausalLM", SIZES),
    "Gemma": ("GemmaForCausalLM", {**SIZES, "head_dim": 64}),
    "Gemma2": ("Gemma2ForCausalLM", {**SIZES, "head_dim": 64}),
    "Phi": ("PhiForCausalLM", {**SIZES, "num_key_value_heads": 4}),
}
#: Those that keep the last tokens only, and count them in Python.
SLIDING = "Mistral", "Gemma2"


@pytest.mark.parametrize("name", ["GPT2", *(pytest.param(x, marks=pytest.mark.slow) for x in DECODERS if x != "GPT2")])
def test_decoders_of_transformers(name: str, made: list[KernelExecutable[Any]]) -> None:
    try:
        import transformers
        from transformers import StaticCache
    except ImportError as error:
        pytest.skip(f"no transformers: {error}")
    torch.manual_seed(0)
    kind, sizes = DECODERS[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, kind)(config).eval()
    compiled = torch.compile(model, backend="fusegraph", fullgraph=True)
    caches = []

    def decoded(step: Any) -> Any:
        caches.append(cache := StaticCache(config=config, max_cache_len=32))
        how, logits = {"past_key_values": cache, "use_cache": True}, []
        with torch.no_grad():
            out = model(torch.arange(10).reshape(2, 5), cache_position=torch.arange(5), **how)
            for position in range(5, 9):
                token = out.logits[:, -1:].argmax(-1)
                out = step(input_ids=token, cache_position=torch.tensor([position]), **how)
                logits.append(out.logits.clone())
        return logits, [x for layer in cache.layers for x in (layer.keys, layer.values)]

    fusegraph.torch.report(clear=True)
    torch.testing.assert_close(decoded(compiled), decoded(model), rtol=1e-4, atol=1e-5)
    functions = fusegraph.torch.report(clear=True)
    assert len(functions) == (2 if name in SLIDING else 1)  # a number in Python is known to change when it has
    for function in functions:
        (piece,) = function.pieces
        assert not function.left
        plan = piece.planned()
        assert plan is not None
        assert len(plan.graph.updates) == 6  # keys, values and the length of each layer
        keys = caches[0].layers[0].keys
        assert not any(t.nbytes >= keys.nbytes for k in plan.kernels for t in k.group.writes)
        attention = [spec for k in plan.kernels if isinstance(spec := k.group.lowered.spec, AttentionSpec)]
        assert len(attention) == 2
        if name not in SLIDING:  # how many keys there are is data
            assert all(bound.loads for spec in attention for bound in spec.bounds)
            assert all(spec.bounds for spec in attention)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Gemma"])
def test_prompts_of_decoders(name: str) -> None:
    """A prompt and the steps after it, both compiled, with a cache that was there before, in bfloat16."""
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    kind, sizes = DECODERS[name]
    config = getattr(transformers, f"{name}Config")(**sizes)
    model = getattr(transformers, kind)(config).eval().bfloat16()
    heads = getattr(config, "num_key_value_heads", config.num_attention_heads)
    depth = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def decoded(step: Any) -> tuple[Any, Any]:
        cache = transformers.StaticCache(config=config, max_cache_len=23)
        cache.early_initialization(2, heads, depth, torch.bfloat16, torch.device("cpu"))
        tokens = torch.arange(10).reshape(2, 5), *(torch.full((2, 1), n) for n in range(3))
        with torch.no_grad():
            logits = [step(input_ids=x, past_key_values=cache, use_cache=True).logits.clone() for x in tokens]
        return logits, [x for layer in cache.layers for x in (layer.keys, layer.values)]

    fusegraph.torch.report(clear=True)
    found = decoded(torch.compile(model, backend="fusegraph", fullgraph=True))
    functions = fusegraph.torch.report(clear=True)
    torch.testing.assert_close(found, decoded(model), rtol=2e-2, atol=2e-2)
    assert [len(function.pieces) for function in functions] == [1, 1]
    for plan in (function.pieces[0].planned() for function in functions):
        assert plan is not None
        assert len(plan.graph.updates) == 6


@pytest.mark.slow
def test_transformers_generate() -> None:
    transformers = pytest.importorskip("transformers")
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).eval()
    how = {"max_new_tokens": 8, "do_sample": False, "cache_implementation": "static", "eos_token_id": None}
    prompt = torch.arange(10).reshape(2, 5)
    expected = model.generate(prompt, pad_token_id=0, **how)
    model.forward = torch.compile(model.forward, backend="fusegraph", fullgraph=True)
    fusegraph.torch.report(clear=True)
    assert torch.equal(model.generate(prompt, pad_token_id=0, **how), expected)
    assert [len(function.pieces) for function in fusegraph.torch.report(clear=True)] == [1, 1]


def test_numbers_that_count(made: list[KernelExecutable[Any]]) -> None:
    """A number that the program changes is data: what is compiled when it has changed once serves all its values."""

    class State:
        count = 3

    def step(x: Any, at: Any, state: State) -> Any:
        state.count += 1
        return x * state.count + (at < state.count), at - max(state.count - 6, 0)

    compiled, state = torch.compile(step, backend="fusegraph", fullgraph=True), State()
    for value in (4, 5, 2**40, 7, -9):
        x, at = torch.randn(3, 8), torch.arange(8)
        state.count = value
        found = compiled(x, at, state)
        state.count = value
        torch.testing.assert_close(found, step(x, at, state))
    assert state.count == -8
    assert len(made) == 2


def test_exported_programs_assign_what_they_change() -> None:
    (graph,) = import_module(Attention().eval(), torch.randn(1, 1, 32), torch.tensor([3])).graphs
    assert [t.name for t in graph.updates.values()] == ["keys", "values"]
    assert len(graph.results) == 1


def test_what_is_read_later_is_left_to_torch(made: list[KernelExecutable[Any]]) -> None:
    def step(cache: Any, x: Any) -> Any:
        old = torch.histc(cache, 4)  # torch computes it of what was there
        cache.add_(x)
        return old, cache * 2

    with torch.no_grad():
        same(step, torch.rand(64), torch.rand(64))


def test_training(made: list[KernelExecutable[Any]]) -> None:
    torch.manual_seed(0)
    ours = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    theirs = copy.deepcopy(ours)
    compiled = torch.compile(ours, backend="fusegraph")
    for _ in range(2):
        x = torch.randn(32, 8)
        compiled(x).square().mean().backward()
        theirs(x).square().mean().backward()
    for a, b in zip((*ours.parameters(), *ours.buffers()), (*theirs.parameters(), *theirs.buffers()), strict=True):
        torch.testing.assert_close(a, b)
        if a.grad is not None:
            torch.testing.assert_close(a.grad, b.grad)


def test_parts_of_inputs_change_places() -> None:
    def swapped(x: Any, y: Any) -> Any:
        x[:2], y[:2] = y[2:4].clone(), x[2:4].clone()
        return x.sum()

    def turned(x: Any, y: Any) -> Any:
        old = x[2:5].clone()
        y[:3], x[1:4] = x[:3] + y[:3], y[2:5] * 2
        y[3:6], x[3:6] = old, x[:3].clone()
        return x.sum() + y.sum()

    for function in (swapped, turned):
        same(function, torch.randn(7, 5), torch.randn(7, 5), calls=2)
