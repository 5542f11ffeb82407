"""Text from a language model: a checkpoint in transformers' layout, run with fusegraph and NumPy alone.

    python examples/generate.py FOLDER --prompt "Once upon a time"
    python examples/generate.py FOLDER --weights int4 --batch 8 --temperature 0.8 --top-p 0.95 --seed 7
    python examples/generate.py fusegraph_out/train_gpt/tiny --prompt "HAMLET" --length 64

FOLDER has config.json and model.safetensors, or parts of that with an index, of Llama, Mistral, Qwen2, Qwen3, Gemma or
GPT-2.  Or it has the checkpoint of train_gpt.py, whose tokens are bytes.

There are two programs of one graph: one reads many tokens of the prompt, the other a token.  What changes from step to
step is state, which the graph keeps in its inputs: the text, how much of it has been read, and the caches of keys and
values.  So a step is the same call each time, which a GPU records once and replays, and no cache is ever copied.  The
position is data: attention reads the part of the caches that is filled.  The next token is drawn in the graph.

Needs safetensors; with tokenizers it reads and writes text, else numbers of tokens:  pip install safetensors tokenizers
"""

import argparse
import ast
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from math import pi, prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

import fusegraph as fg

#: What matrices are kept as: the dtype of their elements, and of everything else.
WEIGHTS = {
    "bf16": (fg.bfloat16, fg.bfloat16), "fp32": (fg.float32, fg.float32), "int8": (fg.int8, fg.bfloat16),
    "fp8": (fg.float8_e4m3, fg.bfloat16), "int4": (fg.int4, fg.bfloat16),
}  # fmt: skip
GROUP = 64  # neighbours in a row that share a scale, in int4
PROMPT = 512  # tokens that are read at a time, at most
ACTIVATIONS = {"silu": "swish", "gelu": "gelu", "gelu_new": "gelu_approx_tanh", "gelu_pytorch_tanh": "gelu_approx_tanh"}
FLOATS = ("F64", "F32", "F16", "BF16")
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A decoder in terms that all of them share; biases and further norms are where a checkpoint has them.

    rates       of rotary embeddings: radians a position, for each pair of elements; none: positions are weights.
    window      how many tokens attention looks back; None: all.
    multiplier  of the embedding.
    shift       of the scales of norms.
    scaled      whether attention divides scores by the square root of a head's elements.
    falling     whether it divides them by the number of the layer, from 1, as well.
    end         tokens after which nothing follows.
    """

    layers: int
    heads: int
    shared: int  # heads of keys and values
    depth: int  # of a head
    context: int  # tokens that the model was trained for
    epsilon: float = 1e-5
    activation: str = "gelu"
    gated: bool = False
    rates: tuple[float, ...] = ()
    window: int | None = None
    multiplier: float = 1.0
    shift: float = 0.0
    scaled: bool = True
    falling: bool = False
    end: tuple[int, ...] = ()

    def scale(self, layer: int) -> float:
        """Returns what attention multiplies scores by."""
        return (self.depth**-0.5 if self.scaled else 1.0) / (layer + 1 if self.falling else 1)


# ---- what a checkpoint says of its model


class Kind(NamedTuple):
    """What a value should be: in words, and as a test."""

    words: str
    holds: Callable[[Any], bool]


def one_of(names: Iterable[str]) -> Kind:
    return Kind(f"one of {', '.join(names)}", lambda x: isinstance(x, str) and x in names)


SIZE = Kind("an integer above 0", lambda x: type(x) is int and 0 < x < 2**31)
SEED = Kind("an integer of 64 bits", lambda x: type(x) is int and -(2**63) <= x < 2**63)
RATE = Kind("a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e38)
HEAT = Kind("a number that is not negative", lambda x: type(x) in (int, float) and 0 <= x < 1e38)
SHARE = Kind("a number above 0, and 1 at most", lambda x: type(x) is float and 0 < x <= 1)
FLAG = Kind("true or false", lambda x: type(x) is bool)
OBJECT = Kind("an object", lambda x: isinstance(x, dict))
FILES = Kind("an object of names of files", lambda x: OBJECT.holds(x) and all(is_name(n) for n in x.values()))
TOKENS = Kind("a token, or a list of them", lambda x: all(type(n) is int for n in (x if isinstance(x, list) else [x])))
UNQUANTISED = Kind("absent: tensors are floats here, and --weights quantises them", lambda x: False)
ALIKE = Kind("false: layers that look back differently far are not supported", lambda x: x is False)
WHOLE = Kind("1: rotary embeddings of a part of a head are not supported", lambda x: x == 1)
ALONE = Kind("false: there is nothing else to attend to", lambda x: x is False)


def is_name(x: Any) -> bool:
    return isinstance(x, str) and x == Path(x).name


@dataclass(frozen=True)
class Config:
    """What a file says, whose keys are checked when they are asked for."""

    file: Path = Path()
    told: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> "Config":
        """Reads a file of JSON.  Exits if it is none, or no object."""
        try:
            told = json.loads(file.read_text())
        except (OSError, ValueError, RecursionError) as error:
            sys.exit(f"{file} is no JSON: {error}")
        if not OBJECT.holds(told):
            sys.exit(f"{file} holds {brief(told)}; it should hold an object")
        return cls(file, told)

    def __call__(self, key: str, kind: Kind, usual: Any = ...) -> Any:
        """Returns the value of a key, or the usual one; null is none where None is usual.

        Exits if it is missing, or of another kind.
        """
        value = self.told.get(key, usual)
        if value is ...:
            sys.exit(f"{self.file} has no {key}; it should be {kind.words}")
        if not (value is None and usual is None) and not kind.holds(value):
            sys.exit(f"{self.file}: {key} is {brief(value)}; it should be {kind.words}")
        return value

    def share(self, key: str, by: str) -> int:
        """Returns the quotient of two sizes.  Exits if it is not whole."""
        whole, parts = self(key, SIZE), self(by, SIZE)
        if whole % parts:
            sys.exit(f"{self.file}: {key} is {whole}; it should be a multiple of {by}, which is {parts}")
        return int(whole // parts)


#: Our names -> those of a checkpoint, whose matrices are joined.  Stars are numbers of layers.
LLAMA = {
    "embedding": ("embed_tokens",), "norm": ("norm",), "head": ("lm_head",), "*.norm1": ("layers.*.input_layernorm",),
    "*.qkv": tuple(f"layers.*.self_attn.{x}_proj" for x in "qkv"), "*.q_norm": ("layers.*.self_attn.q_norm",),
    "*.k_norm": ("layers.*.self_attn.k_norm",), "*.out": ("layers.*.self_attn.o_proj",),
    "*.norm2": ("layers.*.post_attention_layernorm",), "*.up": ("layers.*.mlp.gate_proj", "layers.*.mlp.up_proj"),
    "*.down": ("layers.*.mlp.down_proj",),
}  # fmt: skip
GPT2 = {
    "embedding": ("wte",), "positions": ("wpe",), "norm": ("ln_f",), "head": ("lm_head",), "*.norm1": ("h.*.ln_1",),
    "*.qkv": ("h.*.attn.c_attn",), "*.out": ("h.*.attn.c_proj",), "*.norm2": ("h.*.ln_2",),
    "*.up": ("h.*.mlp.c_fc",), "*.down": ("h.*.mlp.c_proj",),
}  # fmt: skip
MATRICES = ("qkv", "out", "up", "down")
OURS = {n: (n,) for n in ("embedding", "norm", *(f"*.{n}" for n in ("norm1", "norm2", *MATRICES)))}
LIKE_LLAMA = ("llama", "mistral", "qwen2", "qwen3", "gemma")


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores a model.

    names   ours -> theirs.
    inner   elements of a token between the two matrices of a perceptron; ``width`` are those elsewhere.
    words   how many tokens there are.
    biased  our names of what has biases.
    ending  of the names of what is no bias.
    turned  whether matrices are (in, out).
    """

    names: Mapping[str, Sequence[str]]
    width: int
    inner: int
    words: int
    biased: Sequence[str] = ()
    ending: str = ".weight"
    turned: bool = False

    def shapes(self, model: Model) -> dict[str, list[tuple[int, ...]]]:
        """Returns the shapes, as (out, in), of what is joined to a tensor, by our name without its layer."""
        n, q, kv, inner = self.width, model.heads * model.depth, model.shared * model.depth, self.inner
        return {
            "embedding": [(self.words, n)], "head": [(self.words, n)], "positions": [(model.context, n)],
            "norm": [(n,)], "norm1": [(n,)], "norm2": [(n,)], "q_norm": [(model.depth,)], "k_norm": [(model.depth,)],
            "qkv": [(q, n), (kv, n), (kv, n)], "out": [(n, q)],
            "up": [(inner, n)] * (1 + model.gated), "down": [(n, inner)],
        }  # fmt: skip


def described(folder: Path) -> tuple[Model, Layout]:
    """Returns the model in a folder and how it is stored.  Exits if there is none, or one that is not supported."""
    if (file := folder / "config.json").is_file():
        config = Config.read(file)
        kind = config("model_type", one_of((*LIKE_LLAMA, "gpt2")))
        model, layout = gpt2(config) if kind == "gpt2" else llama(config, kind)
        config("quantization_config", UNQUANTISED, None)
        same = "sliding_attention" if model.window else "full_attention"
        same_for_all = Kind(f"a list of {same!r} alone", lambda x: isinstance(x, list) and all(n == same for n in x))
        config("layer_types", same_for_all, None)
        tied = config("tie_word_embeddings", FLAG, kind in ("gpt2", "gemma"))
        left_out = ("head",) * tied + ("*.q_norm", "*.k_norm") * (kind != "qwen3")
        end = config("eos_token_id", TOKENS, None)
        end = tuple(end) if isinstance(end, list) else () if end is None else (end,)
        names = {name: parts for name, parts in layout.names.items() if name not in left_out}
        return replace(model, end=end), replace(layout, names=names)
    if (file := folder / "checkpoint.safetensors").is_file():  # of train_gpt.py
        try:
            size = ast.parse((opened(file).metadata() or {}).get("size", "Size()"), mode="eval").body
            config = Config(file, {k.arg: ast.literal_eval(k.value) for k in getattr(size, "keywords", ())})
        except (SyntaxError, ValueError) as error:
            sys.exit(f"{file} does not say what train_gpt.py does of its size: {error}")
        width, heads, depth = config("width", SIZE), config("heads", SIZE), config.share("width", "heads")
        model = Model(
            config("layers", SIZE), heads, heads, depth, config("context", SIZE), rates=rates_of(Config(), depth)
        )
        return model, Layout(OURS, width, 4 * width, config("vocabulary", SIZE, 256), ending="", turned=True)
    sys.exit(f"{folder} has neither a config.json nor a checkpoint.safetensors")


def gpt2(config: Config) -> tuple[Model, Layout]:
    """Returns the model of a configuration of GPT-2."""
    layers, heads, width = (config(f"n_{key}", SIZE) for key in ("layer", "head", "embd"))
    depth = config.share("n_embd", "n_head")
    config("add_cross_attention", ALONE, False)
    model = Model(
        layers, heads, heads, depth, config("n_positions", SIZE, 1024), config("layer_norm_epsilon", HEAT, 1e-5),
        activation(config, "activation_function", "gelu_new"),
        scaled=config("scale_attn_weights", FLAG, True), falling=config("scale_attn_by_inverse_layer_idx", FLAG, False),
    )  # fmt: skip
    biased = ("norm", *(f"*.{n}" for n in ("norm1", "norm2", *MATRICES)))
    inner = config("n_inner", SIZE, None) or 4 * width
    return model, Layout(GPT2, width, inner, config("vocab_size", SIZE), biased, turned=True)


def llama(config: Config, kind: str) -> tuple[Model, Layout]:
    """Returns the model of a configuration of Llama or of one of its relatives."""
    heads, width, gemma = config("num_attention_heads", SIZE), config("hidden_size", SIZE), kind == "gemma"
    shared = config("num_key_value_heads", SIZE, None) or heads
    depth = config("head_dim", SIZE, None) or config.share("hidden_size", "num_attention_heads")
    if heads % shared or depth % 2:
        sys.exit(
            f"{config.file}: heads of {depth} elements, {heads} that share {shared} of keys and values; elements are "
            "turned in pairs, and num_attention_heads should be a multiple of num_key_value_heads"
        )
    config("use_sliding_window", ALIKE, None)
    usual = {key: config.told[key] for key in ("rope_theta", "partial_rotary_factor") if key in config.told}
    scaling = config("rope_scaling", OBJECT, None) or config("rope_parameters", OBJECT, None) or {}
    model = Model(
        config("num_hidden_layers", SIZE), heads, shared, depth, config("max_position_embeddings", SIZE, 2048),
        config("rms_norm_eps", HEAT, 1e-6),
        activation(config, *(("hidden_activation", "gelu_pytorch_tanh") if gemma else ("hidden_act", "silu"))),
        gated=True, rates=rates_of(Config(config.file, {**usual, **scaling}), depth),
        window=config("sliding_window", SIZE, None) if kind == "mistral" else None,
        multiplier=width**0.5 if gemma else 1.0, shift=float(gemma),
    )  # fmt: skip
    biased = {"qwen2": ("*.qkv",), "mistral": ()}.get(kind)
    if biased is None:
        biased = ("*.qkv", "*.out") * config("attention_bias", FLAG, False)
    if kind == "llama":
        biased += ("*.up", "*.down") * config("mlp_bias", FLAG, False)
    inner, words = config("intermediate_size", SIZE), config("vocab_size", SIZE)
    return model, Layout(LLAMA, width, inner, words, biased)


def activation(config: Config, key: str, usual: str) -> str:
    """Returns our name of an activation."""
    return ACTIVATIONS[config(key, one_of(ACTIVATIONS), None) or usual]


def rates_of(rope: Config, depth: int) -> tuple[float, ...]:
    """Returns the rates of rotary embeddings; Llama 3.1 has slower ones where a turn takes longer than its context."""
    rates = np.float64(rope("rope_theta", RATE, 1e4)) ** (-np.arange(0, depth, 2) / depth)
    rope("partial_rotary_factor", WHOLE, 1)
    types = one_of(("default", "linear", "llama3"))
    kind = rope("rope_type", types, None) or rope("type", types, None)
    if kind == "linear":
        rates = rates / rope("factor", RATE)
    elif kind == "llama3":
        low = rope("low_freq_factor", RATE)
        high = rope(
            "high_freq_factor", Kind(f"a number above low_freq_factor, {low}", lambda x: RATE.holds(x) and x > low)
        )
        turns = rope("original_max_position_embeddings", SIZE) * rates / (2 * pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        rates = rates * (share + (1 - share) / rope("factor", RATE))
    return tuple(rates.tolist())


# ---- its tensors


def opened(file: Path) -> Any:
    """Returns a file of tensors.  Exits if it is none, or a part of one."""
    try:
        return safe_open(file, "numpy")
    except (OSError, SafetensorError) as error:
        sys.exit(f"{file} is no file of safetensors: {error}")


def stored(folder: Path) -> dict[str, tuple[Path, Any, str]]:
    """Returns where each tensor of a checkpoint is, by name without the prefix of the whole model."""
    if (index := folder / "model.safetensors.index.json").is_file():
        files = sorted(set(Config.read(index)("weight_map", FILES).values()))
    else:
        files = [name for name in ("model.safetensors", "checkpoint.safetensors") if (folder / name).is_file()][:1]
    if not files:
        sys.exit(f"{folder} has no model.safetensors")
    found: dict[str, tuple[Path, Any, str]] = {}
    for file in (folder / name for name in files):
        tensors = opened(file)
        for key in tensors.keys():  # noqa: SIM118 - the file is no dictionary
            name = key.removeprefix("transformer.").removeprefix("model.")
            if name in found:
                sys.exit(f"{file} has a tensor {key}, which is there already: {found[name][2]} of {found[name][0]}")
            found[name] = file, tensors, key
    return found


def read(folder: Path, there: dict[str, tuple[Path, Any, str]], name: str, shape: tuple[int, ...]) -> Any:
    """Returns a tensor, and takes it out of those that are there.  Exits unless it is one of floats, of this shape."""
    if name not in there:
        untied = ", and tie_word_embeddings is not true" if name.startswith("lm_head.") else ""
        sys.exit(f"{folder} has no tensor {name}{untied}")
    file, tensors, key = there.pop(name)
    part = tensors.get_slice(key)
    if (kind := part.get_dtype()) not in FLOATS:
        sys.exit(f"{file}: tensor {key} is of {kind}; it should be of {', '.join(FLOATS)}")
    if (seen := tuple(part.get_shape())) != shape:
        sys.exit(f"{file}: tensor {key} is {list(seen)}; as the model is described it should be {list(shape)}")
    return tensors.get_tensor(key)


def loaded(folder: Path, weights: str) -> tuple[Model, Arrays]:
    """Returns the model in a folder and its weights, those of layers as "0.qkv" and so on, matrices as (out, in).

    Biases are called "0.qkv.bias", scales of what is quantised "0.qkv.scale".  Exits if a tensor is missing, or not as
    the model is described, or if there is one too many.
    """
    model, layout = described(folder)
    there, found, shapes = stored(folder), Arrays(), layout.shapes(model)
    for pattern, parts in layout.names.items():
        wanted = shapes[pattern.removeprefix("*.")]
        if len(parts) == 1:  # it is joined already
            wanted = [(sum(rows for rows, *_ in wanted), *wanted[0][1:])]
        for layer in range(model.layers if "*" in pattern else 1):
            name, theirs = pattern.replace("*", str(layer)), [part.replace("*", str(layer)) for part in parts]
            turned = layout.turned and name.endswith(MATRICES)
            arrays = [read(folder, there, n + layout.ending, s[::-1] if turned else s) for n, s in zip(theirs, wanted)]
            arrays = [x.T for x in arrays] if turned else arrays
            found |= kept(name, np.ascontiguousarray(np.concatenate(arrays), np.float32), model, weights)
            if pattern in layout.biased:
                arrays = [read(folder, there, f"{n}.bias", s[:1]) for n, s in zip(theirs, wanted)]
                found |= kept(f"{name}.bias", np.concatenate(arrays).astype(np.float32), model, weights)
    more = [n for n in there if n.endswith((".weight", ".bias")) and not n.endswith(".attn.bias")]  # which is a mask
    more = [n for n in more if n != "lm_head.weight"]  # it is the embedding
    if more:
        sys.exit(f"{folder} has tensors that the model, as it is described, does not have: {brief(more)}")
    kind, other = WEIGHTS[weights]
    if "head" not in found and kind != other:  # then it is the embedding, whose rows are looked up as well
        found |= quantized("head", found["embedding"].astype(np.float32), kind)
    return model, found


def kept(name: str, x: Any, model: Model, weights: str) -> Arrays:
    """Returns a tensor as it is kept: matrices of products in ``weights``; what is looked up, and biases, wider."""
    kind, other = WEIGHTS[weights]
    if "norm" in name:
        return {name: x if name.endswith(".bias") else x + np.float32(model.shift)}
    if kind != other and name.endswith((*MATRICES, "head")):
        return quantized(name, x, kind)
    return {name: x.astype(other.numpy)}


def quantized(name: str, x: Any, kind: Any) -> Arrays:
    """Returns a matrix in a smaller dtype, and what it is to be multiplied with: a scale for each row, or group of it.

    Two elements of int4 are a byte.  Exits if its rows are not whole groups.
    """
    if kind == fg.int4 and x.shape[1] % GROUP:
        sys.exit(f"int4 has groups of {GROUP}, and rows of {name!r} have {x.shape[1]} elements; take int8")
    rows = x.reshape(len(x), -1, GROUP if kind == fg.int4 else x.shape[1])
    most = {fg.int8: 127.0, fg.int4: 7.0}.get(kind) or float(kind.max)
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(most)
    scale = np.where(scale == 0, np.float32(1), scale)
    if kind != fg.int4:
        q = (rows / scale)[:, 0]
        return {name: (np.rint(q) if kind == fg.int8 else q).astype(kind.numpy), f"{name}.scale": scale[:, 0, 0]}
    scale = scale.astype(fg.bfloat16.numpy)
    q = np.clip(np.rint(rows / scale.astype(np.float32)), -8, 7).astype(np.int8).view(np.uint8).reshape(-1) & 15
    return {name: q[::2] | q[1::2] << 4, f"{name}.scale": scale[:, :, 0]}


# ---- the programs


class Program:
    """The graph that reads so many tokens of texts at a time, and draws the token that follows the last one.

    Its inputs are the weights and the state: ``text`` (rows, length), of which ``given`` tokens are there from the
    beginning and ``position`` have been read, the ``seed`` of what is drawn, and "0.keys", "0.values" and so on.
    ``logits`` (rows, vocabulary) are those of the last token.
    """

    def __init__(self, model: Model, weights: Arrays, rows: int, length: int, tokens: int, **sampling: Any) -> None:
        self.model, kind = model, fg.float32 if weights["embedding"].dtype == np.float32 else fg.bfloat16
        self.graph = graph = fg.Graph("decode" if tokens == 1 else "prefill", io_dtype=kind)
        self.w = {name: self.declared(name, weights) for name in weights if not name.endswith(".scale")}
        self.scales = {name: self.declared(name, weights) for name in weights if name.endswith(".scale")}
        text = graph.tensor("text", (rows, length), "int32")
        position, given, seed = (graph.tensor(n, (), "int64") for n in ("position", "given", "seed"))
        self.position = position

        at = position + graph.arange(tokens)
        end = position + 1 if tokens == 1 else graph.min(position + tokens, graph.max(given, position + 1))
        x = graph.gather(self.w["embedding"], graph.gather(text, at, axis=1))
        if model.multiplier != 1:
            x = x * model.multiplier
        if "positions" in self.w:
            x = x + graph.gather(self.w["positions"], at)
        places = graph.arange(length)
        met = places <= at.reshape(tokens, 1)
        if model.window is not None and model.window < length:
            met = met & (places > at.reshape(tokens, 1) - model.window)
        angles = None
        if model.rates:
            rates = graph.constant(np.tile(np.asarray(model.rates, np.float32), 2))
            angles = graph.cast(at, "float32").reshape(tokens, 1, 1, 1) * rates
        for layer in range(model.layers):
            x = x + self.attention(layer, self.norm(x, f"{layer}.norm1"), at, met, angles)
            x = x + self.perceptron(layer, self.norm(x, f"{layer}.norm2"))
        last = x[:, 0] if tokens == 1 else x[:, end - 1 - position]
        head = "head" if "head" in self.w else "embedding"
        self.logits = self.linear(self.norm(last, "norm"), head, "float32")
        token = graph.sample(self.logits, seed=seed, offset=end, dtype="int32", **sampling)
        # What is given stays: a position behind the end of the text is left out.
        graph.assign(text[:, graph.where(end >= given, end, length)], token)
        graph.assign(position, end)

    def declared(self, name: str, weights: Arrays) -> fg.Tensor:
        """Returns a weight as an input of the graph.

        Those that are quantised are no parameters, of which the graph might keep copies in a wider dtype.
        """
        x, scale = weights[name], weights.get(f"{name}.scale")
        if scale is not None and scale.ndim == 2:
            return self.graph.tensor(name, (len(scale), scale.shape[1] * GROUP), "int4")
        return self.graph.tensor(name, x.shape, x.dtype, parameter=scale is None)

    def norm(self, x: fg.Tensor, name: str) -> fg.Tensor:
        """Returns layer norm, if there is a bias, or RMS norm along the last dimension."""
        scale, bias, epsilon = self.w[name], self.w.get(f"{name}.bias"), self.model.epsilon
        if bias is not None:
            return self.graph.layernorm(x, scale, bias, epsilon=epsilon)
        return self.graph.rmsnorm(x, scale, epsilon=epsilon)

    def linear(self, x: fg.Tensor, name: str, dtype: str | None = None) -> fg.Tensor:
        """Returns the product of x with a matrix (out, in), and its bias added."""
        graph, w, scale, bias = self.graph, self.w[name], self.scales.get(f"{name}.scale"), self.w.get(f"{name}.bias")
        if scale is not None:
            w = graph.cast(w, x.dtype)
            if scale.rank == 2:
                w = (w.reshape(*scale.shape, GROUP) * scale[:, :, None]).reshape(w.shape)
        y = graph.matmul(x, w.T, dtype="float32" if scale is not None and scale.rank == 1 else dtype)
        if scale is not None and scale.rank == 1:
            y = graph.cast(y * scale, dtype or x.dtype)
        return y if bias is None else y + bias

    def attention(self, layer: int, x: fg.Tensor, at: fg.Tensor, met: fg.Tensor, angles: fg.Tensor | None) -> fg.Tensor:
        """Stores keys and values of tokens ``at`` positions in the caches, and attends to all that are ``met``."""
        graph, model, (rows, tokens, _) = self.graph, self.model, x.shape
        heads, shared, depth = model.heads, model.shared, model.depth
        length = met.shape[-1]
        parts = graph.split(self.linear(x, f"{layer}.qkv"), [heads * depth, shared * depth, shared * depth], axis=-1)
        q, k, v = (part.reshape(rows, tokens, -1, depth).transpose(0, 2, 1, 3) for part in parts)
        if f"{layer}.q_norm" in self.w:
            q, k = self.norm(q, f"{layer}.q_norm"), self.norm(k, f"{layer}.k_norm")
        if angles is not None:
            q, k = graph.rope(q, angles), graph.rope(k, angles)
        caches = []
        for name, new in (("keys", k), ("values", v)):
            cache = graph.tensor(f"{layer}.{name}", (rows, shared, length, depth))
            where, new = (self.position, new[:, :, 0]) if tokens == 1 else (at, new)
            caches.append(graph.assign(cache[:, :, where], new))
        mixed = graph.sdpa(q, *caches, mask=met, attn_scale=model.scale(layer))
        return self.linear(mixed.transpose(0, 2, 1, 3).reshape(rows, tokens, heads * depth), f"{layer}.out")

    def perceptron(self, layer: int, x: fg.Tensor) -> fg.Tensor:
        """Returns what a layer does to each token for itself."""
        hidden, activation = self.linear(x, f"{layer}.up"), getattr(self.graph, self.model.activation)
        if not self.model.gated:
            return self.linear(activation(hidden), f"{layer}.down")
        gate, up = self.graph.split(hidden, 2, axis=-1)
        return self.linear(activation(gate) * up, f"{layer}.down")


def example() -> fg.Graph:
    """Returns a step of decoding of a small model, for `fusegraph explain`."""
    model = Model(2, 4, 2, 64, 1024, activation="swish", gated=True, rates=rates_of(Config(), 64))
    shapes = {"qkv": (512, 256), "out": (256, 256), "up": (1024, 256), "down": (256, 512), "norm1": 256, "norm2": 256}
    weights = {f"{layer}.{name}": shape for layer in range(2) for name, shape in shapes.items()}
    weights |= {"embedding": (1000, 256), "norm": 256}
    kinds = {name: np.float32 if "norm" in name else fg.bfloat16.numpy for name in weights}
    arrays = {name: np.zeros(shape, kinds[name]) for name, shape in weights.items()}
    return Program(model, arrays, rows=1, length=1024, tokens=1, temperature=0).graph


graph = example()

# ---- generation


class Generation:
    """A model at work on texts that begin with the same tokens."""

    def __init__(
        self, model: Model, weights: Arrays, given: Sequence[int], rows: int, length: int,
        engine: str | None = None, seed: int = 0, **sampling: Any,
    ) -> None:  # fmt: skip
        self.model, self.given, self.length, self.read = model, len(given), length, 0
        programs = [Program(model, weights, rows, length, n, **sampling) for n in (1, chunk_of(len(given)))]
        self.decode, self.prefill = (p.graph.compile(engine) for p in programs)
        self.on_gpu = self.decode.engine == "cuda"
        text = np.zeros((rows, length), np.int32)
        text[:, : len(given)] = given
        state = {"text": text, "given": np.array(len(given)), "position": np.array(0), "seed": np.array(seed)}
        caches = [t for t in programs[0].graph.inputs if t.name.endswith((".keys", ".values"))]
        state |= {t.name: np.zeros(t.shape, t.dtype.numpy) for t in caches}
        self.weights = {name: self.placed(x) for name, x in weights.items()}
        self.state = {name: self.placed(x) for name, x in state.items()}
        #: Bytes of all weights that a step reads, and of a token's keys and values.
        looked_up = {"positions", *(("embedding",) if "head" in weights else ())}
        self.weight_bytes = sum(x.nbytes for name, x in weights.items() if name not in looked_up)
        self.token_bytes = sum(prod(t.shape) * t.dtype.itemsize for t in caches) // length

    def placed(self, x: Any) -> Any:
        """Returns an array where the executables want it, for them to write to."""
        return fg.to_device(x) if self.on_gpu else np.array(x)

    def prompt(self) -> None:
        """Reads what is given, and draws the first token."""
        while self.read < self.given:
            self.prefill(**self.weights, **self.state)
            self.read = min(self.read + chunk_of(self.given), self.given)

    def step(self) -> None:
        """Reads a token and draws the next one; on a GPU it does not wait for it."""
        self.decode(**self.weights, **self.state)
        self.read += 1

    def text(self) -> np.ndarray:
        """Returns all tokens (rows, tokens) by now; waits for them."""
        return fg.to_numpy(self.state["text"])[:, : max(self.read + 1, self.given)]

    def step_bytes(self, position: int) -> int:
        """Returns how many bytes a step at a position reads at least: weights, and the filled part of the caches."""
        return self.weight_bytes + self.token_bytes * min(position + 1, self.model.window or self.length)

    def shortest(self, first: int, end: int) -> float:
        """Returns the seconds that the steps at these positions take at the rate of the machine's memory."""
        return sum(self.step_bytes(n) for n in range(first, end)) / self.decode.target.memory_rate / 1e6


def chunk_of(given: int) -> int:
    """Returns how many tokens of a prompt are read at a time: few numbers, so that programs are found in the cache."""
    return next((n for n in (16, 64, 256) if given <= n), PROMPT)


def generate(made: Generation, often: int) -> Iterator[np.ndarray]:
    """Yields the texts (rows, tokens) after every so many steps, until they are full or have all ended."""
    made.prompt()
    yield made.text()
    while made.read + 1 < made.length:
        made.step()
        if made.read % often == 0 or made.read + 1 == made.length:
            text = made.text()
            yield text
            if made.model.end and np.isin(text[:, made.given :], made.model.end).any(1).all():
                return


# ---- text


def upto(text: np.ndarray, made: Generation) -> list[int]:
    """Returns the tokens of a text up to its end."""
    found = np.flatnonzero(np.isin(text[made.given :], made.model.end))
    return text[: made.given + found[0] if len(found) else None].tolist()


def reader(folder: Path) -> tuple[Callable[[str], list[int]], Callable[[Sequence[int]], str]]:
    """Returns what makes tokens of a text, and a text of tokens; without a tokenizer it is their numbers."""
    if not (folder / "config.json").is_file():
        return lambda text: list(text.encode()), lambda tokens: bytes(n & 255 for n in tokens).decode(errors="replace")
    if not (find_spec("tokenizers") and (folder / "tokenizer.json").is_file()):
        return lambda text: [int(word) for word in text.split()], lambda tokens: "".join(f"{n} " for n in tokens)
    from tokenizers import Tokenizer

    try:
        made = Tokenizer.from_file(str(folder / "tokenizer.json"))
    except Exception as error:  # of no narrower type
        sys.exit(f"{folder / 'tokenizer.json'} is no tokenizer: {error}")
    return lambda text: made.encode(text).ids, lambda tokens: made.decode(list(tokens), skip_special_tokens=True)


def as_kind(read: Callable[[str], Any], kind: Kind) -> Callable[[str], Any]:
    """Returns what makes a value of an argument, or says what it should be."""

    def made(text: str) -> Any:
        try:
            value = read(text)
        except ValueError:
            value = None
        if value is None or not kind.holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} should be {kind.words}")
        return value

    return made


def main(argv: list[str]) -> None:
    size, heat, share, seed = as_kind(int, SIZE), as_kind(float, HEAT), as_kind(float, SHARE), as_kind(int, SEED)
    parser = argparse.ArgumentParser(description="Continues a text with a language model.")
    parser.add_argument("folder", type=Path, help="of a checkpoint")
    parser.add_argument("--prompt", default="Once upon a time", help="what the text begins with")
    parser.add_argument("--weights", choices=WEIGHTS, default="bf16", help="what matrices are rounded to when loaded")
    parser.add_argument("--batch", type=size, default=1, help="how many texts are drawn")
    parser.add_argument("--length", type=size, help="tokens of a text, the prompt's among them; default: 512 at most")
    parser.add_argument("--temperature", type=heat, default=0.0, help="0: the likeliest token is taken")
    parser.add_argument("--top-k", type=size)
    parser.add_argument("--top-p", type=share)
    parser.add_argument("--seed", type=seed, default=0)
    parser.add_argument("--engine", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    try:
        write_text(parser.parse_args(argv))
    except (fg.FusegraphError, SafetensorError, OSError, MemoryError) as error:
        sys.exit(f"{type(error).__name__}: {error}")


def write_text(told: argparse.Namespace) -> None:
    """Does what the command line says.  Exits if the checkpoint or the prompt cannot be used."""
    began = time.perf_counter()
    model, weights = loaded(told.folder, told.weights)
    encode, decode = reader(told.folder)
    try:
        given, length = encode(told.prompt), min(512, model.context) if told.length is None else told.length
    except ValueError:
        sys.exit(f"there is no tokenizer: --prompt is numbers of tokens, not {told.prompt!r}")
    if not 0 < len(given) < length <= model.context:
        sys.exit(f"the prompt has {len(given)} tokens, the text {length}; the model was trained for {model.context}")
    words = len(weights["embedding"])
    if beyond := [n for n in given if not 0 <= n < words]:
        sys.exit(
            f"the prompt has tokens that the model does not have: {brief(beyond)}; it has those from 0 to {words - 1}"
        )
    sampling = {"temperature": told.temperature, "top_k": told.top_k, "top_p": told.top_p}
    made = Generation(model, weights, given, told.batch, length, told.engine, told.seed, **sampling)
    size, kernels, seconds = made.weight_bytes / 1e6, len(made.decode.plan.kernels), time.perf_counter() - began
    print(f"{size:,.1f} MB of weights, {kernels} kernels a step, ready in {seconds:.1f} s\n")

    shown, marks, texts = "", [(time.perf_counter(), 0)], np.zeros((0, 0), np.int32)
    for texts in generate(made, 8 if made.on_gpu else 1):
        marks.append((time.perf_counter(), made.read))
        whole = decode(upto(texts[0], made)).rstrip("\ufffd")  # the beginning of a character
        print(whole[len(shown) :], end="", flush=True)
        shown = whole
    for row in texts[1:]:
        print(f"\n\n{decode(upto(row, made))}", end="")
    print(f"\n\n{made.given} tokens of the prompt: {marks[1][0] - marks[0][0]:.3f} s, with what a first call takes")
    if len(marks) > 3:  # the first step is recorded, or loaded
        (since, first), (until, end) = marks[2], marks[-1]
        rate = (end - first) / (until - since)
        used = f", {made.shortest(first, end) / (until - since):.0%} of its memory's limit" if made.on_gpu else ""
        print(f"{told.batch * rate:,.1f} tokens/s, {made.step_bytes(end) / 1e6:,.1f} MB a step{used}")


if __name__ == "__main__":
    main(sys.argv[1:])
