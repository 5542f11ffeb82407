"""A small GPT learns to write plays, byte by byte: built, trained and sampled with fusegraph and NumPy alone.

    python examples/train_gpt.py                           tiny: about a minute on a CPU
    python examples/train_gpt.py --size small              11 million parameters, for a GPU
    python examples/train_gpt.py --size small --resume     goes on from the last checkpoint, as if it had not stopped
    python examples/train_gpt.py --resume --steps 200      trains a model further: the learning rate goes up again
    fusegraph explain examples/train_gpt.py                what a step becomes

A training step is one graph: it draws a batch of the text, computes the loss and its gradients, and updates the
weights.  All that changes from step to step is state, which the graph keeps in its inputs: nothing is copied to or from
a GPU but the losses, now and then, and every step is the same call, which is recorded once and replayed.

Writes checkpoint.safetensors, loss.png and sample.txt to --folder; Ctrl-C, too, leaves a checkpoint.  The sizes gpt2
and gpt2-xl have GPT-2's layers and vocabulary, of which bytes are the first 256: they are for measuring.

Needs safetensors and matplotlib:  pip install safetensors matplotlib
"""

import argparse
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import pi
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

import fusegraph as fg
from fusegraph import optimizers

TEXT = Path(__file__).with_name("shakespeare.txt")
HELD_OUT = 1 / 20  # of the text, at its end: not trained on
PROMPT, SEED = "\n\n", 1
#: Operations a second on 16-bit matrices that data sheets give, by fusegraph's names of GPUs.
PEAKS = {"a100": 312e12, "l40s": 362e12, "rtx4090": 165e12, "h100": 989e12, "h200": 989e12, "rtx5090": 209e12}


@dataclass(frozen=True)
class Size:
    """A model, and how it is trained; a batch has ``batch`` rows of ``context`` bytes."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    steps: int
    rate: float
    vocabulary: int = 256
    dtype: str = "bfloat16"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the weights by name; those with one dimension are scales of norms."""
        n, found = self.width, {"embedding": (self.vocabulary, self.width), "norm": (self.width,)}
        block = {"norm1": (n,), "qkv": (n, 3 * n), "out": (n, n), "norm2": (n,), "up": (n, 4 * n), "down": (4 * n, n)}
        return found | {f"{layer}.{name}": shape for layer in range(self.layers) for name, shape in block.items()}

    def parameters(self) -> int:
        return sum(int(np.prod(shape)) for shape in self.shapes().values())

    def operations(self) -> int:
        """Returns the operations that a token takes: 6 for each weight, and those of attention (as PaLM counts)."""
        return 6 * self.parameters() + 12 * self.layers * self.width * self.context


SIZES = {
    "tiny": Size(2, 64, 2, 64, batch=4, steps=120, rate=3e-3, dtype="float32"),
    "small": Size(6, 384, 6, 256, batch=64, steps=2000, rate=1e-3),
    "gpt2": Size(12, 768, 12, 1024, batch=16, steps=2000, rate=6e-4, vocabulary=50257),
    "gpt2-xl": Size(48, 1600, 25, 1024, batch=8, steps=2000, rate=2e-4, vocabulary=50257),
}

# ---- the model


def declared(graph: fg.Graph, size: Size) -> dict[str, fg.Tensor]:
    """Returns the weights as inputs of a graph."""
    return {name: graph.tensor(name, shape, size.dtype) for name, shape in size.shapes().items()}


def features(graph: fg.Graph, size: Size, w: dict[str, fg.Tensor], tokens: fg.Tensor) -> fg.Tensor:
    """Returns for each token (rows, length) of a text a vector (rows, length, width) that tells what follows."""
    rows, length = tokens.shape
    depth = size.width // size.heads
    rates = np.tile(10000.0 ** -np.linspace(0, 1, depth // 2, endpoint=False), 2)
    angles = graph.constant(np.outer(np.arange(length), rates).astype(np.float32).reshape(length, 1, 1, depth))
    x = graph.gather(w["embedding"], tokens)
    for layer in range(size.layers):
        qkv = graph.rmsnorm(x, w[f"{layer}.norm1"]) @ w[f"{layer}.qkv"]
        parts = qkv.reshape(rows, length, 3, size.heads, depth).transpose(2, 0, 3, 1, 4)
        q, k, v = graph.rope(parts[0], angles), graph.rope(parts[1], angles), parts[2]
        mixed = graph.sdpa(q, k, v, attn_scale=depth**-0.5, use_causal_mask=True)
        x = x + mixed.transpose(0, 2, 1, 3).reshape(rows, length, size.width) @ w[f"{layer}.out"]
        hidden = graph.gelu(graph.rmsnorm(x, w[f"{layer}.norm2"]) @ w[f"{layer}.up"])
        x = x + hidden @ w[f"{layer}.down"]
    return graph.rmsnorm(x, w["norm"])


def loss_of(graph: fg.Graph, size: Size, w: dict[str, fg.Tensor], windows: fg.Tensor) -> fg.Tensor:
    """Returns the mean cross entropy of all bytes but the first in windows (rows, context + 1) of a text."""
    loss, _ = graph.linear_cross_entropy(features(graph, size, w, windows[:, :-1]), w["embedding"], windows[:, 1:])
    return loss


def training_step(size: Size, length: int) -> tuple[fg.Graph, list[optimizers.State]]:
    """Returns the graph of a step on a text of so many bytes, and what the optimisers keep.

    Further inputs are the weights, how many steps were done, and the losses of all of them.
    """
    graph = fg.Graph("training_step", io_dtype=size.dtype)
    text = graph.tensor("text", (length,), "uint8")
    done, losses = graph.tensor("done", (), "int64"), graph.tensor("losses", (size.steps,), "float32")
    w = declared(graph, size)

    begin = graph.rng_uniform(graph.constant(np.zeros((size.batch, 1), np.float32)), SEED, done)
    begin = graph.cast(begin * (length - size.context), "int64")
    windows = graph.cast(graph.gather(text, begin + graph.arange(size.context + 1)), "int32")
    loss = loss_of(graph, size, w, windows)

    gradients = graph.gradients(loss, list(w.values()))
    gradients, _ = optimizers.clip_by_global_norm(graph, gradients, 1.0)
    share = graph.cast(done, "float32") / size.steps
    rate = size.rate * graph.min(share * 20 + 1 / size.steps, 0.55 + 0.45 * graph.cos(share * pi))  # warm-up, cosine
    states = []
    for rank, decay in ((2, 0.1), (1, 0.0)):  # matrices decay, the scales of norms do not
        group, theirs = zip(*((x, g) for x, g in zip(w.values(), gradients) if x.rank == rank))
        states.append(optimizers.adamw(graph, group, theirs, rate, betas=(0.9, 0.95), weight_decay=decay, masters=True))
    graph.assign(losses[done], loss)
    graph.assign(done, done + 1)
    return graph, states


def evaluation(size: Size) -> fg.Graph:
    """Returns the graph of the loss on given windows of a text."""
    graph = fg.Graph("evaluation", io_dtype=size.dtype)
    windows = graph.tensor("windows", (size.batch, size.context + 1), "int32")
    graph.output(loss_of(graph, size, declared(graph, size), windows), name="loss")
    return graph


def next_byte(size: Size) -> fg.Graph:
    """Returns the graph of the probabilities of what follows the token at ``last``, sharpened by a low temperature."""
    graph = fg.Graph("next_byte", io_dtype=size.dtype)
    tokens, last = graph.tensor("tokens", (1, size.context), "int32"), graph.tensor("last", (), "int64")
    temperature = graph.tensor("temperature", (), "float32")
    w = declared(graph, size)
    logits = graph.matmul(features(graph, size, w, tokens)[:, last], w["embedding"].T, dtype="float32")
    graph.output(graph.softmax(logits / temperature), name="probabilities")
    return graph


graph, _ = training_step(SIZES["tiny"], 1 << 20)  # for `fusegraph run` and `explain`

# ---- training


def initial(size: Size) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the weights to begin with; those whose products are added to the residual are smaller in deep models."""
    rng = np.random.default_rng(SEED)
    for name, shape in size.shapes().items():
        deviation = 0.02 / (2 * size.layers) ** 0.5 if name.endswith((".out", ".down")) else 0.02
        yield name, np.ones(shape) if len(shape) == 1 else deviation * rng.standard_normal(shape, np.float32)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Opens a checkpoint.  Exits if there is none, or one that cannot be read."""
    if not path.exists():
        sys.exit(f"there is no {path} to go on from; leave out --resume")
    try:
        with safe_open(path, "numpy") as file:
            yield file
    except (SafetensorError, OSError) as error:
        sys.exit(f"{path} cannot be read ({error}); leave out --resume to begin again")


def steps_of(file: Any) -> int:
    """Returns how many steps the run of a checkpoint was to have."""
    return file.get_slice("losses").get_shape()[0]


class Training:
    """A model being trained on a text: the executable of a step, and all arrays, on the executable's device."""

    def __init__(self, size: Size, text: bytes, engine: str | None = None) -> None:
        self.size, data = size, np.frombuffer(text, np.uint8)
        kept = round(len(data) * (1 - HELD_OUT))
        self.held_out = data[kept:]
        graph, states = training_step(size, kept)
        self.run = graph.compile(engine)
        self.on_gpu = self.run.engine == "cuda"
        weights = {t.name: t.dtype.numpy for t in graph.inputs if t.name in size.shapes()}
        arrays = {name: array.astype(weights[name]) for name, array in initial(size)}
        for state in states:
            arrays |= state.arrays(arrays)
        arrays |= {"done": np.zeros((), np.int64), "losses": np.full(size.steps, np.nan, np.float32)}
        self.text = self.placed(data[:kept])
        self.state = {name: self.placed(array) for name, array in arrays.items()}

    def placed(self, array: np.ndarray) -> Any:
        """Returns an array where the executable wants it, for it to write to."""
        return fg.to_device(np.asarray(array)) if self.on_gpu else np.array(array)

    @property
    def weights(self) -> dict[str, Any]:
        return {name: self.state[name] for name in self.size.shapes()}

    @property
    def done(self) -> int:
        return int(fg.to_numpy(self.state["done"]))

    @property
    def losses(self) -> np.ndarray:
        """The losses of the steps that were done."""
        return fg.to_numpy(self.state["losses"])[: self.done]

    def step(self) -> None:
        """Starts a step; on a GPU it does not wait for it."""
        self.run(text=self.text, **self.state)

    def save(self, path: Path) -> None:
        """Writes a checkpoint; whoever stops the program leaves the one before, or this one, never half of one."""
        temporary = path.with_suffix(".tmp")
        arrays = {name: np.array(fg.to_numpy(array)) for name, array in self.state.items()}
        save_file(arrays, temporary, metadata={"size": repr(self.size)})
        os.replace(temporary, path)

    def load(self, path: Path) -> None:
        """Reads a checkpoint, which may be of a run of fewer or more steps.  Exits if it is not of this model."""
        steps = self.size.steps
        with opened(path) as file:
            before, found = steps_of(file), (file.metadata() or {}).get("size")
            if found != repr(replace(self.size, steps=before)):
                sys.exit(f"{path} is of {found}, not {self.size}")
            arrays = {name: file.get_tensor(name) for name in self.state}
        done = int(arrays["done"])
        if done > steps:
            sys.exit(f"{path} has {done} steps already: give --steps {done} or more")
        if before != steps:
            print(f"{path} is of {before} steps: from step {done + 1} on the learning rate is that of {steps} steps")
            arrays["losses"] = np.append(arrays["losses"][:done], np.full(steps - done, np.nan, np.float32))
        self.state = {name: self.placed(array) for name, array in arrays.items()}

    def held_out_loss(self) -> float:
        """Returns the loss on text that was not trained on."""
        rows, length = self.size.batch, self.size.context + 1
        begin = np.random.default_rng(SEED).integers(0, len(self.held_out) - length + 1, (rows, 1))
        windows = self.held_out[begin + np.arange(length)].astype(np.int32)
        run = evaluation(self.size).compile(self.run.engine)
        return float(fg.to_numpy(run(windows=self.placed(windows), **self.weights)))

    def sample(self, length: int, temperature: float = 0.8) -> str:
        """Returns text that the model continues a prompt with: each byte is drawn from what it tells."""
        run, rng, weights = next_byte(self.size).compile(self.run.engine), np.random.default_rng(SEED), self.weights
        heat, found = self.placed(np.float32(temperature)), list(PROMPT.encode())
        for _ in range(length):
            seen = found[-self.size.context :]
            tokens = np.zeros((1, self.size.context), np.int32)
            tokens[0, : len(seen)] = seen
            last = np.array(len(seen) - 1)
            row = fg.to_numpy(run(tokens=self.placed(tokens), last=self.placed(last), temperature=heat, **weights))[0]
            found.append(int(rng.choice(len(row), p=row / row.sum(dtype=np.float64))))
        return bytes(found).decode(errors="replace").strip()


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Has the first Ctrl-C noted in a list, as half a step is none to save; the second one does what it always does."""
    noted: list[int] = []

    def note(number: int, _: Any) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def train(training: Training, checkpoint: Path, until: int | None = None) -> None:
    """Trains to the last step, or ``until`` one, and writes a checkpoint at every quarter of the way and at the end.

    Ctrl-C ends it behind a step: it writes a checkpoint, and exits.
    """
    size, first = training.size, training.done
    end, often = size.steps if until is None else until, 10 if training.on_gpu else 1
    peak = PEAKS.get(training.run.target.name) if training.on_gpu and size.dtype == "bfloat16" else None
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
    with interrupts() as noted, Progress(*columns) as bar:
        task = bar.add_task("", total=end, completed=first, told="")
        began, since = time.perf_counter(), first
        for number in range(first + 1, end + 1):
            training.step()
            if number % often == 0 or number == end:
                loss = training.losses[-1]  # waits for the step
                now = time.perf_counter()
                rate = size.batch * size.context * (number - since) / (now - began)
                began, since = now, number
                used = f"  MFU {rate * size.operations() / peak:.0%}" if peak else ""
                bar.update(task, completed=number, told=f"loss {loss:.3f}  {rate:,.0f} tokens/s{used}")
            if number % max(1, size.steps // 4) == 0 or number == end or noted:
                training.save(checkpoint)
                bar.console.print(f"step {number}  loss {training.losses[-1]:.3f}  saved {checkpoint}")
                began = time.perf_counter()
            if noted:
                sys.exit(f"stopped; --resume goes on from step {number} of {end}")


def plot(losses: np.ndarray, path: Path) -> None:
    """Draws the losses, and their means over the steps around."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss (nats a byte)", title="Training loss")
    axes.plot(np.arange(1, len(losses) + 1), losses, alpha=0.3, linewidth=0.8)
    width = max(1, len(losses) // 50)
    smooth = np.convolve(losses, np.ones(width) / width, "valid")
    axes.plot(np.arange(len(smooth)) + (width + 1) / 2, smooth)
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description="Trains a small GPT on plays of Shakespeare.")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, help="how many in all; default: the size's, or the checkpoint's")
    parser.add_argument("--engine", choices=("cuda", "cpu"), help="default: cuda if there is a GPU")
    parser.add_argument("--folder", type=Path, help="where to write; default: fusegraph_out/train_gpt/SIZE")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's checkpoint")
    told = parser.parse_args(argv)
    if told.steps is not None and told.steps < 1:
        parser.error(f"--steps is at least 1, got {told.steps}")
    folder = told.folder or Path("fusegraph_out/train_gpt") / told.size
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint, size = folder / "checkpoint.safetensors", SIZES[told.size]
    if told.steps is not None:
        size = replace(size, steps=told.steps)
    elif told.resume:
        with opened(checkpoint) as file:
            size = replace(size, steps=steps_of(file))

    began = time.perf_counter()
    training = Training(size, TEXT.read_bytes(), told.engine)
    kernels = len(training.run.plan.kernels)
    print(f"{size.parameters():,} parameters, {kernels} kernels a step, ready in {time.perf_counter() - began:.1f} s")
    if told.resume:
        training.load(checkpoint)
    if training.done == size.steps:
        print(f"all {size.steps} steps are done; a larger --steps goes on")
    train(training, checkpoint)
    plot(training.losses, folder / "loss.png")
    print(f"loss on text that was not trained on: {training.held_out_loss():.3f}\n")
    sample = training.sample(120 if told.size == "tiny" else 600)
    (folder / "sample.txt").write_text(sample + "\n")
    print(f"{sample}\n\nloss.png, sample.txt and {checkpoint.name} are in {folder}")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit("stopped")
