"""Checkpoints of language models, read for generate.py: what they say of their model, and its tensors as NumPy arrays.

A folder has config.json and model.safetensors, or parts of that with an index, of Llama, Mistral, Qwen2, Qwen3, Gemma
or GPT-2, as transformers writes them.  Or it has the checkpoint of train_gpt.py.

Whatever is not as it should be ends the program with a line that names the file, what it says and what would be right.
"""

import ast
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import pi
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
RATE = Kind("a number above 0", lambda x: type(x) in (int, float) and 0 < x < 1e38)
HEAT = Kind("a number that is not negative", lambda x: type(x) in (int, float) and 0 <= x < 1e38)
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
