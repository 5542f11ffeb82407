"""What the suite of decoding measures: a step at a position, or a prompt, through torch.compile."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fusegraph.bench.decode.sizes import SIZES, WEIGHTS
from fusegraph.bench.torch_engines import OURS, on_engine
from fusegraph.bench.zoo.models import LLAMA
from fusegraph.bench.zoo.run import Subject, Task
from fusegraph.errors import FusegraphError

#: What is asked for unless it is said: modes on a GPU, and on an engine that emulates it; batches there, and here.
MODES, SMALL_MODES = ("at511", "at8191", "prefill2048"), ("at31", "prefill16")
BATCHES, SMALL_BATCHES = (1, 8, 16), (1,)
_MODELS, _SMALL_MODELS = (f"{LLAMA}:1b", f"{LLAMA}:8b"), (f"{LLAMA}:small",)
_STEP, _PROMPT = re.compile(r"at(\d{1,6})(?:of(\d{1,6}))?"), re.compile(r"prefill(\d{1,6})")
#: The peer; a name of `fusegraph.bench.torch_engines.ENGINES`.
PEER = "inductor"


@dataclass(frozen=True)
class Mode:
    """The positions of the tokens of a call, and the tokens that the caches have room for."""

    positions: range
    length: int

    @property
    def is_step(self) -> bool:
        """Whether a call reads a single token."""
        return len(self.positions) == 1


def mode_of(name: str) -> Mode:
    """Returns a mode: "at511" is a step that fills the caches up, "at511of2048" one with 512 of 2048 tokens there when
    it is done, "prefill64" a prompt.

    Raises FusegraphError for other names.
    """
    if (found := _STEP.fullmatch(name)) and int(found[1]) < (length := int(found[2] or int(found[1]) + 1)):
        return Mode(range(int(found[1]), int(found[1]) + 1), length)
    if (found := _PROMPT.fullmatch(name)) and int(found[1]):
        return Mode(range(int(found[1])), int(found[1]))
    raise FusegraphError(
        f"--modes: {name!r} is no position (at511, at511of2048) and no length of a prompt (prefill2048)"
    )


class Decoding(Subject):
    """A call of a decoder with caches; each call does the same again.

    bytes  that a step has to read; None for prompts.
    flops  operations of a prompt's products; None for steps.
    notes  on what was chosen for an engine.
    """

    def __init__(self, task: Task) -> None:
        import torch

        from fusegraph.bench.decode.models import Decoder

        mode = mode_of(task.mode)
        size, at = SIZES[task.model.partition(":")[2]], mode.positions
        with torch.device(task.device):
            self.model = Decoder(size, task.dtype, task.batch, mode.length)
            tokens = torch.randint(0, size.vocabulary, (task.batch, len(at)))
            self.inputs = [tokens, torch.arange(at.start, at.stop)]
        self.task, self.size, self.mode = task, size, mode
        self.bytes = self.model.bytes_read(at.start) if mode.is_step else None
        self.flops = None if mode.is_step else size.operations(task.batch, len(at))
        self.notes = list[str]()

    def step(self, engine: str) -> Callable[[], list[Any]]:
        from fusegraph.bench.decode.models import attention

        function, attend = on_engine(engine, self.model, forget=False), attention
        if engine == PEER and self.mode.is_step and self.task.device == "cuda":
            attend = self._faster()
            self.notes.append(f"{engine}: attention by {attend.__name__}")
        return lambda: [function(*self.inputs, attend)]

    def _faster(self) -> Any:
        """Returns the way to attend that eager torch is faster with: which one depends on the length and the batch."""
        import torch

        from fusegraph.bench.decode.models import attention, products
        from fusegraph.bench.torch_timing import replay_us

        keys, values = self.model.layers[0].keys, self.model.layers[0].values
        q = torch.randn(*keys.shape[:2], self.size.heads // self.size.shared, keys.shape[3]).to(keys)
        mask = self.model.places <= self.inputs[1][:, None]
        times = {way: replay_us(lambda way=way: way(q, keys, values, mask)) for way in (attention, products)}  # type: ignore[misc]
        return min(times, key=times.__getitem__)


def engines_of(peers: bool) -> tuple[str, ...]:
    """Returns the engines that are timed."""
    return (PEER, OURS) if peers else (OURS,)


def device_bytes(task: Task) -> int:
    """Returns about how many bytes of a device's memory the process of a task takes."""
    return SIZES[task.model.partition(":")[2]].device_bytes(task.dtype, task.batch, mode_of(task.mode).length)


def tasks(
    wanted: Callable[[str], Any], weights: Sequence[str], batches: Sequence[int], modes: Sequence[str], device: str
) -> list[Task]:
    """Returns the tasks of models whose names are wanted, all models before the next batch, and all batches before the
    next mode; prompts are of the first batch.

    Raises FusegraphError for modes and weights that there are not.
    """
    if wrong := [name for name in weights if name not in WEIGHTS]:
        raise FusegraphError(f"--dtypes: {wrong[0]!r} is none of {', '.join(WEIGHTS)}")
    return [
        Task(model, dtype, batch, mode, device)
        for mode in modes
        for batch in (batches if mode_of(mode).is_step else batches[:1])
        for model in (_MODELS if device == "cuda" else _SMALL_MODELS)
        if wanted(model)
        for dtype in weights
    ]
