"""The example that generates text: checkpoints of several layouts, against NumPy in float64 without any cache."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("safetensors")

from safetensors.numpy import save_file

from codegen.attention.spec import AttentionSpec
from fusegraph.plan import plan

FOLDER = Path(__file__).parent.parent / "examples"
WORDS, WIDTH, HEADS, SHARED, DEPTH, HIDDEN = 97, 64, 4, 2, 16, 128
Array = np.ndarray[Any, Any]
LIKE_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": HIDDEN, "num_attention_heads": HEADS, "num_key_value_heads": SHARED,
    "vocab_size": WORDS, "num_hidden_layers": 1, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {
        "rope_theta": 5e5, "eos_token_id": [96, 95],
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 32},
    },
    "mistral": {"sliding_window": 5}, "qwen2": {}, "qwen3": {"head_dim": 32},
    "gemma": {"head_dim": 32, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
    "gpt2": {"n_embd": WIDTH, "n_head": HEADS, "n_layer": 1, "n_positions": 64, "vocab_size": WORDS},
}  # fmt: skip


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("generate")


# ---- checkpoints, and what they compute


def checkpoint(folder: Path, kind: str, dtype: Any = np.float32, **more: Any) -> dict[str, Array]:
    """Writes a random checkpoint as transformers does, with ``more`` in its configuration; returns its tensors."""
    folder.mkdir(exist_ok=True)
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {}
    if kind == "gpt2":
        config = CONFIGS[kind]
        shapes |= {"wte.weight": (WORDS, WIDTH), "wpe.weight": (64, WIDTH)}
        sizes = {"attn.c_attn": (WIDTH, 3 * WIDTH), "attn.c_proj": (WIDTH, WIDTH), "mlp.c_fc": (WIDTH, 4 * WIDTH)}
        for name, shape in {**sizes, "mlp.c_proj": (4 * WIDTH, WIDTH)}.items():
            shapes |= {f"h.0.{name}.weight": shape, f"h.0.{name}.bias": shape[1:]}
        shapes |= {f"{n}.{end}": (WIDTH,) for n in ("h.0.ln_1", "h.0.ln_2", "ln_f") for end in ("weight", "bias")}
        shapes = {f"transformer.{name}": shape for name, shape in shapes.items()}
        if more.get("tie_word_embeddings") is False:
            shapes["lm_head.weight"] = (WORDS, WIDTH)
    else:
        config = {**LIKE_LLAMA, **CONFIGS[kind]}
        depth, layer = config.get("head_dim", DEPTH), "model.layers.0."
        for name, heads in (("q", HEADS), ("k", SHARED), ("v", SHARED)):
            shapes[f"{layer}self_attn.{name}_proj.weight"] = (heads * depth, WIDTH)
            if kind == "qwen2":
                shapes[f"{layer}self_attn.{name}_proj.bias"] = (heads * depth,)
        shapes[f"{layer}self_attn.o_proj.weight"] = (WIDTH, HEADS * depth)
        shapes |= {f"{layer}mlp.{n}_proj.weight": (HIDDEN, WIDTH) for n in ("gate", "up")}
        shapes[f"{layer}mlp.down_proj.weight"] = (WIDTH, HIDDEN)
        if kind == "qwen3":
            shapes |= {f"{layer}self_attn.{n}_norm.weight": (depth,) for n in "qk"}
        norms = (f"{layer}input_layernorm", f"{layer}post_attention_layernorm", "model.norm")
        shapes |= {f"{n}.weight": (WIDTH,) for n in norms} | {"model.embed_tokens.weight": (WORDS, WIDTH)}
        if kind != "gemma":
            shapes["lm_head.weight"] = (WORDS, WIDTH)
    (folder / "config.json").write_text(json.dumps({"model_type": kind, **config, **more}))
    made = {name: (rng.normal(size=shape) * 0.2 + ("norm" in name)).astype(dtype) for name, shape in shapes.items()}
    if kind == "llama":  # in two parts
        parts = {"a.safetensors": sorted(made)[::2], "b.safetensors": sorted(made)[1::2]}
        for file, names in parts.items():
            save_file({name: made[name] for name in names}, folder / file)
        told = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(told))
    else:
        save_file(made, folder / "model.safetensors")
    return made


def rms(x: Array, weight: Array, shift: float = 0.0) -> Array:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * (weight + shift)


def layer_norm(x: Array, weight: Array, bias: Array) -> Array:
    x = x - x.mean(-1, keepdims=True)
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def tanh_gelu(x: Array) -> Array:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def turned(x: Array, rates: Array) -> Array:
    """Turns pairs of x (length, heads, depth), as complex numbers, by their positions times the rates."""
    pairs = x[..., : len(rates)] + 1j * x[..., len(rates) :]
    pairs = pairs * np.exp(1j * np.arange(len(x))[:, None, None] * rates)
    return np.concatenate([pairs.real, pairs.imag], -1)


def attended(q: Array, k: Array, v: Array, window: int) -> Array:
    """Attends from each position to the last ``window`` ones; all are (length, heads, depth)."""
    found = np.zeros_like(q)
    for at in range(len(q)):
        for head in range(q.shape[1]):
            shared = head * k.shape[1] // q.shape[1]
            first = max(0, at + 1 - window)
            score = k[first : at + 1, shared] @ q[at, head] / np.sqrt(q.shape[-1])
            p = np.exp(score - score.max())
            found[at, head] = p / p.sum() @ v[first : at + 1, shared]
    return found.reshape(len(q), -1)


def logits_of(kind: str, made: dict[str, Array], tokens: list[int], scale: float = DEPTH**-0.5) -> Array:
    """Returns the logits (length, words) of all tokens of a text; ``scale`` is that of GPT-2's attention."""
    w = {n.removeprefix("transformer.").removeprefix("model."): x.astype(np.float64) for n, x in made.items()}
    length = len(tokens)
    if kind == "gpt2":
        x = w["wte.weight"][tokens] + w["wpe.weight"][:length]

        def norm(x: Array, name: str) -> Array:
            return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"])

        def linear(x: Array, name: str) -> Array:
            return x @ w[f"h.0.{name}.weight"] + w[f"h.0.{name}.bias"]

        q, k, v = linear(norm(x, "h.0.ln_1"), "attn.c_attn").reshape(length, 3, HEADS, -1).transpose(1, 0, 2, 3)
        q = q * scale * np.sqrt(q.shape[-1])
        x = x + linear(attended(q, k, v, length), "attn.c_proj")
        x = x + linear(tanh_gelu(linear(norm(x, "h.0.ln_2"), "mlp.c_fc")), "mlp.c_proj")
        return norm(x, "ln_f") @ w.get("lm_head.weight", w["wte.weight"]).T
    config, shift = CONFIGS[kind], float(kind == "gemma")
    depth = config.get("head_dim", DEPTH)
    rates = config.get("rope_theta", 1e4) ** (-np.arange(depth // 2) * 2 / depth)
    if kind == "llama":  # slower by 8 where a turn takes over 32 positions, as before where it takes less than 8
        wave = 2 * np.pi / rates
        smooth = (32 / wave - 1) / 3
        between = (1 - smooth) * rates / 8 + smooth * rates
        rates = np.where(wave > 32, rates / 8, np.where(wave < 8, rates, between))
    x = w["embed_tokens.weight"][tokens] * (np.sqrt(WIDTH) if kind == "gemma" else 1)
    layer = "layers.0."
    h = rms(x, w[f"{layer}input_layernorm.weight"], shift)
    q, k, v = (
        (h @ w[f"{layer}self_attn.{n}_proj.weight"].T + w.get(f"{layer}self_attn.{n}_proj.bias", 0)).reshape(
            length, -1, depth
        )
        for n in "qkv"
    )
    if kind == "qwen3":
        q, k = (rms(y, w[f"{layer}self_attn.{n}_norm.weight"]) for n, y in (("q", q), ("k", k)))
    mixed = attended(turned(q, rates), turned(k, rates), v, config.get("sliding_window", length))
    x = x + mixed @ w[f"{layer}self_attn.o_proj.weight"].T
    h = rms(x, w[f"{layer}post_attention_layernorm.weight"], shift)
    gate, up = (h @ w[f"{layer}mlp.{n}_proj.weight"].T for n in ("gate", "up"))
    gate = tanh_gelu(gate) if kind == "gemma" else gate / (1 + np.exp(-gate))
    x = x + (gate * up) @ w[f"{layer}mlp.down_proj.weight"].T
    return rms(x, w["norm.weight"], shift) @ w.get("lm_head.weight", w["embed_tokens.weight"]).T


def greedy(kind: str, made: dict[str, Array], given: list[int], length: int) -> tuple[list[int], Array]:
    """Returns the likeliest continuation, and the logits before each of its tokens."""
    text, found = list(given), []
    while len(text) < length:
        found.append(logits_of(kind, made, text)[-1])
        text.append(int(found[-1].argmax()))
    return text, np.array(found)


# ---- the example


def told(example: ModuleType, made: Any, *, by_prompt: bool) -> tuple[Array, list[Array]]:
    """Returns the texts of a generation, and the logits of its steps, which its programs were told to return."""
    found = []
    if by_prompt:
        while made.read < made.given:
            found = [made.prefill(**made.weights, **made.state)]
            made.read = min(made.read + example.chunk_of(made.given), made.given)
    while made.read + 1 < made.length:
        found.append(made.decode(**made.weights, **made.state))
        made.read += 1
    return made.text(), found


@pytest.fixture
def with_logits(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, whose programs return their logits."""
    init = example.Program.__init__

    def outspoken(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.graph.output(self.logits, name="logits")

    monkeypatch.setattr(example.Program, "__init__", outspoken)
    return example


KINDS = ["llama", *(pytest.param(kind, marks=pytest.mark.slow) for kind in CONFIGS if kind != "llama")]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_tokens(kind: str, with_logits: ModuleType, tmp_path: Path) -> None:
    """A prompt of several pieces, then token by token; the likeliest tokens are NumPy's, and logits are as exact as
    float32 is.  Without the program for prompts it is the same.
    """
    made, given = checkpoint(tmp_path, kind), [3, 14, 15, 92, 65, 35, 8, 9, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 2]
    text, logits = greedy(kind, made, given, 27)
    model, weights = with_logits.loaded(tmp_path, "fp32")
    for by_prompt in (True, False):
        run = with_logits.Generation(model, weights, given, 2, 27, "cpu", temperature=0)
        texts, found = told(with_logits, run, by_prompt=by_prompt)
        assert texts.tolist() == [text, text]
        np.testing.assert_allclose(np.stack(found[-len(logits) :])[:, 0], logits, rtol=2e-4, atol=2e-4)


@pytest.mark.slow
def test_gpt2_without_scale_and_with_a_head(with_logits: ModuleType, tmp_path: Path) -> None:
    """What the configuration says is done: attention need not be scaled, nor the head be the embedding."""
    told_ = {"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "tie_word_embeddings": False}
    made = checkpoint(tmp_path, "gpt2", **told_)
    model, weights = with_logits.loaded(tmp_path, "fp32")
    assert [model.scale(layer) for layer in (0, 1, 3)] == [1, 1 / 2, 1 / 4]
    assert with_logits.Model(1, 1, 1, 16, 9, falling=True).scale(1) == 1 / 8
    run = with_logits.Generation(model, weights, [3, 14, 15], 1, 6, "cpu", temperature=0)
    texts, found = told(with_logits, run, by_prompt=True)
    expected = logits_of("gpt2", made, texts[0].tolist(), scale=1.0)[2:5]
    np.testing.assert_allclose(np.stack(found)[:, 0], expected, rtol=2e-4, atol=2e-4)


def by_hand(x: Array, how: str) -> Array:
    """Returns what a matrix (out, in) is after it has been quantised, as text books say."""
    x = x.astype(np.float64)
    if how == "int4":
        groups = x.reshape(len(x), -1, 64)
        step = (np.abs(groups).max(-1, keepdims=True) / 7).astype(ml_dtypes.bfloat16).astype(np.float64)
        return (np.round(groups / step).clip(-8, 7) * step).reshape(x.shape)
    if how == "int8":
        step = np.abs(x).max(1, keepdims=True) / 127
        return np.round(x / step) * step
    step = np.abs(x).max(1, keepdims=True) / 448
    return (x / step).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * step


@pytest.mark.slow
@pytest.mark.parametrize("how", ["int8", "int4", "fp8", "bf16"])
def test_quantised_weights(how: str, with_logits: ModuleType, tmp_path: Path) -> None:
    """Logits are those of the quantised matrices, as far as bfloat16 goes; the embedding is not quantised."""
    made, given = checkpoint(tmp_path, "mistral", ml_dtypes.bfloat16), [3, 14, 15, 92, 65]
    model, weights = with_logits.loaded(tmp_path, how)
    assert weights["embedding"].dtype == ml_dtypes.bfloat16
    if how != "bf16":
        made = {name: by_hand(x, how) if "proj" in name or "head" in name else x for name, x in made.items()}
        size = {"int8": 1, "fp8": 1, "int4": 0.5}[how]
        assert weights["0.up"].nbytes == 2 * HIDDEN * WIDTH * size
    run = with_logits.Generation(model, weights, given, 1, 8, "cpu", temperature=0)
    texts, found = told(with_logits, run, by_prompt=True)
    expected = logits_of("mistral", made, texts[0].tolist())[4:7]
    assert np.abs(np.stack(found)[:, 0] - expected).max() < 0.03 * np.abs(expected).max()


def test_a_step_copies_no_cache_and_reads_what_is_filled(example: ModuleType) -> None:
    made = plan(example.graph)
    cache = min(t.nbytes for t in example.graph.inputs if t.name.endswith((".keys", ".values")))
    assert len(example.graph.updates) == 6  # the caches of two layers, the text and the position
    assert not any(t.nbytes >= cache for k in made.kernels for t in k.group.writes)
    attention = [spec for k in made.kernels if isinstance(spec := k.group.lowered.spec, AttentionSpec)]
    assert len(attention) == 2
    assert all(spec.bounds and all(bound.loads for bound in spec.bounds) for spec in attention)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"top_k": 20, "top_p": 0.5}], ids=str)
def test_tokens_are_drawn_in_the_graph(how: dict[str, Any], example: ModuleType, tmp_path: Path) -> None:
    """The same ones for a seed, others for another; all of the likeliest three, and no others, or of those that have
    a share of the probability together.
    """
    made, given = checkpoint(tmp_path, "qwen2"), [5, 6, 7]
    model, weights = example.loaded(tmp_path, "fp32")
    texts = []
    for seed in (1, 1, 2):
        run = example.Generation(model, weights, given, 4, 9, "cpu", seed, temperature=1.5, **how)
        texts.append(list(example.generate(run, 4))[-1])
        assert texts[-1].shape == (4, 9)
    assert (texts[0] == texts[1]).all()
    assert (texts[0] != texts[2]).any()
    ranks = set()
    for row in texts[0].tolist():
        logits = logits_of("qwen2", made, row)
        for at in range(2, 8):
            likelier = logits[at] > logits[at][row[at + 1]]
            p = np.exp((logits[at] - logits[at].max()) / 1.5)
            assert p[likelier].sum() < how.get("top_p", 1) * np.sort(p)[-how["top_k"] :].sum()
            ranks.add(int(likelier.sum()))
    assert ranks == {0, 1, 2} if how == {"top_k": 3} else len(ranks) > 1


def test_a_text_ends(example: ModuleType) -> None:
    class Made:
        model, given = example.Model(1, 1, 1, 2, 9, end=(4, 8)), 2

    assert example.upto(np.array([4, 1, 2, 8, 4, 3]), Made) == [4, 1, 2]
    assert example.upto(np.array([4, 1, 2, 3]), Made) == [4, 1, 2, 3]


@pytest.mark.slow
def test_the_model_that_was_trained(example: ModuleType, tmp_path: Path, capsys: Any) -> None:
    pytest.importorskip("matplotlib")
    gpt = importlib.import_module("train_gpt")
    training = gpt.Training(gpt.Size(2, 32, 2, 32, batch=2, steps=4, rate=1e-2, dtype="float32"), b"ab" * 4000, "cpu")
    training.step()
    training.save(tmp_path / "checkpoint.safetensors")
    model, weights = example.loaded(tmp_path, "fp32")
    assert (model.layers, model.heads, model.context) == (2, 2, 32)
    run = example.Generation(model, weights, list(b"abcab"), 1, 12, "cpu", temperature=0)
    text = list(example.generate(run, 1))[-1][0]
    again = gpt.next_byte(training.size).compile("cpu")
    for at in range(5, 12):
        tokens = np.zeros((1, 32), np.int32)
        tokens[0, :at] = text[:at]
        heat, last = np.ones((), np.float32), np.array(at - 1)
        assert again(tokens=tokens, last=last, temperature=heat, **training.weights)[0].argmax() == text[at]
    example.main([str(tmp_path), "--prompt", "abcab", "--length", "12", "--engine", "cpu", "--weights", "fp32"])
    said = capsys.readouterr().out
    assert bytes(text.tolist()).decode(errors="replace").rstrip("\ufffd") in said
    assert "kernels a step" in said
    assert "tokens/s" in said


def refused(example: ModuleType, folder: Path, words: str, *more: str) -> None:
    with pytest.raises(SystemExit, match=words):
        example.main([str(folder), *more])


def test_what_is_wrong_is_said(example: ModuleType, tmp_path: Path, capsys: Any) -> None:
    refused(example, tmp_path, "neither a config.json nor a checkpoint.safetensors")
    for text, words in (
        ('{"model_type": "mamba"}', "model_type is 'mamba'; it should be one of llama"), ("{", "is no JSON"),
        ("[]", "holds .*; it should hold an object"), ("{}", "has no model_type; it should be one of llama"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(text)
        refused(example, tmp_path, words)
    checkpoint(tmp_path, "qwen2")
    refused(example, tmp_path, "--prompt is numbers of tokens, not 'Once upon a time'")
    refused(example, tmp_path, "the prompt has 3 tokens, the text 2;", "--prompt", "1 2 3", "--length", "2")
    for token in ("97", "-1", str(10**12)):
        refused(example, tmp_path, f"does not have: .{token}.; it has those from 0 to 96", f"--prompt={token}")
    wrong = ("--batch=0", "--length=0", "--length=x", "--top-k=0", "--top-p=0", "--top-p=1.1", f"--seed={2**63}")
    for argument in (*wrong, "--temperature=-1", "--temperature=nan", "--temperature=inf"):
        refused(example, tmp_path, "2", argument)
        assert "should be a" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="rows of 'up' have 66 elements"):
        importlib.import_module("checkpoints").quantized("up", np.ones((2, 66), np.float32), example.fg.int4)


LLAMAS: list[tuple[dict[str, Any], str]] = [
    ({"num_hidden_layers": 0}, "num_hidden_layers is 0; it should be an integer above 0"),
    ({"num_hidden_layers": 1.0}, "num_hidden_layers is 1.0; it should be"),
    ({"num_hidden_layers": 2}, r"has no tensor layers\.1\.input_layernorm\.weight"),
    ({"hidden_size": None}, "hidden_size is None; it should be"),
    ({"num_attention_heads": 3}, "hidden_size is 64; it should be a multiple of num_attention_heads, which is 3"),
    ({"num_key_value_heads": 3}, "num_attention_heads should be a multiple"),
    ({"num_key_value_heads": 4}, r"k_proj\.weight is \[32, 64\]; .* it should be \[64, 64\]"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; it should be a number"),
    ({"rope_theta": 0}, "rope_theta is 0; it should be a number above 0"),
    ({"rope_theta": None}, "rope_theta is None"),
    ({"rope_scaling": {"type": "yarn"}}, "type is 'yarn'; it should be one of default"),
    ({"rope_scaling": {"type": "linear"}}, "has no factor"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5; it should be 1"),
    ({"hidden_act": []}, "hidden_act is .*; it should be one of silu"),
    ({"eos_token_id": "x"}, "eos_token_id is 'x'"),
    ({"vocab_size": 98}, r"embed_tokens\.weight is \[97, 64\]; .* it should be \[98, 64\]"),
    ({"layer_types": ["sliding_attention"]}, "layer_types is .*; it should be a list of 'full_attention'"),
    ({"quantization_config": {"bits": 4}}, "quantization_config is .*; it should be absent"),
]


@pytest.mark.parametrize(("more", "words"), LLAMAS, ids=str)
def test_a_configuration_is_checked(more: dict[str, Any], words: str, example: ModuleType, tmp_path: Path) -> None:
    checkpoint(tmp_path, "qwen2", **more)
    refused(example, tmp_path, words)


def test_tensors_are_checked(example: ModuleType, tmp_path: Path) -> None:
    """Each is there, of floats and of its shape, and there are no others; files are whole, and in the folder."""
    made, file = checkpoint(tmp_path, "qwen2"), tmp_path / "model.safetensors"
    head, layer = "lm_head.weight", "model.layers.0."
    bias, down = f"{layer}self_attn.k_proj.bias", f"{layer}mlp.down_proj.weight"
    changes: list[tuple[str, Any, str]] = [
        (down, None, r"has no tensor layers\.0\.mlp\.down_proj\.weight"),
        (head, None, "has no tensor lm_head.weight, and tie_word_embeddings is not true"),
        (bias, None, r"has no tensor layers\.0\.self_attn\.k_proj\.bias"),
        (head, made[head][:50], r"lm_head\.weight is \[50, 64\]; .* it should be \[97, 64\]"),
        (down, made[down][..., None], r"down_proj\.weight is \[64, 128, 1\]"),
        (down, made[down].astype(ml_dtypes.float8_e4m3fn), "is of F8_E4M3; it should be of F64"),
        (down, made[down].astype(np.int8), "is of I8"),
        (f"{layer}mlp.down_proj.bias", made[bias], "does not have: .*down_proj.bias"),
    ]
    for name, x, words in changes:
        save_file({n: y for n, y in {**made, name: x}.items() if y is not None}, file)
        refused(example, tmp_path, words)
    save_file(made, file)
    file.write_bytes(file.read_bytes()[:1000])
    refused(example, tmp_path, "model.safetensors is no file of safetensors")
    index = tmp_path / "model.safetensors.index.json"
    for told_, words in (
        ({}, "has no weight_map"), ([], "holds"), ({"weight_map": ["a"]}, "weight_map is"),
        ({"weight_map": {"a": "../model.safetensors"}}, "an object of names of files"),
        ({"weight_map": {"a": "none.safetensors"}}, "none.safetensors is no file of safetensors"),
    ):  # fmt: skip
        index.write_text(json.dumps(told_))
        refused(example, tmp_path, words)
    index.unlink()
    file.unlink()
    refused(example, tmp_path, "has no model.safetensors")
    checkpoint(tmp_path, "gpt2", n_positions=128)
    refused(example, tmp_path, r"wpe\.weight is \[64, 64\]; .* it should be \[128, 64\]")


def test_the_limit_of_memory(example: ModuleType) -> None:
    """Weights once, and the keys and values of the tokens that were read, at the rate of the machine."""

    class Target:
        memory_rate = 2.0e6

    run = example.Generation.__new__(example.Generation)
    run.model, run.length, run.weight_bytes, run.token_bytes = example.Model(1, 1, 1, 2, 9), 100, 10**9, 10**6
    run.decode = type("Executable", (), {"target": Target})
    assert [run.step_bytes(n) for n in (0, 99)] == [10**9 + 10**6, 10**9 + 10**8]
    assert run.shortest(0, 2) == pytest.approx(2.003e9 / 2e12)
