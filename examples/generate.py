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
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from reprlib import repr as brief
from typing import Any

import numpy as np
from checkpoints import GROUP, HEAT, SIZE, WEIGHTS, Arrays, Config, Kind, Model, loaded, rates_of
from safetensors import SafetensorError

import fusegraph as fg

PROMPT = 512  # tokens that are read at a time, at most
SEED = Kind("an integer of 64 bits", lambda x: type(x) is int and -(2**63) <= x < 2**63)
SHARE = Kind("a number above 0, and 1 at most", lambda x: type(x) is float and 0 < x <= 1)


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
