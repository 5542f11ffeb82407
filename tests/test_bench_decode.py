"""The suite of decoding: its tasks, what they compute, the share of the memory's rate; without a GPU, small ones."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from math import inf
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fusegraph.cli import main
from fusegraph.cli.suites import pattern
from fusegraph.errors import FusegraphError

pytest.importorskip("torch")

import torch
from torch.utils.flop_counter import FlopCounterMode

import fusegraph as fg
import fusegraph.torch
from fusegraph.bench.decode import run, steps
from fusegraph.bench.decode.models import MATRICES, Decoder, attention, products
from fusegraph.bench.decode.run import Decodings, measured, together
from fusegraph.bench.decode.sizes import GROUP, SIZES, WEIGHTS
from fusegraph.bench.decode.steps import Decoding, Mode, device_bytes, mode_of, tasks
from fusegraph.bench.torch_engines import OURS, difference
from fusegraph.bench.workers import Failure, each
from fusegraph.bench.zoo.figures import DECODING, sentences
from fusegraph.bench.zoo.run import Figures, Row, Task, row_from_data


def _tasks(only: str = "", device: str = "cuda") -> list[Task]:
    return tasks(pattern(only), list(WEIGHTS), steps.BATCHES, steps.MODES, device)


def test_tasks() -> None:
    """What matters most comes first: every model and dtype, then batches, then positions, then prompts."""
    found = _tasks()
    assert len(found) == len(set(found)) == 6 * (3 * 2 + 1)
    assert [task.name for task in found[:7]] == [
        *(f"llama:{size} {weights} b1 at511" for size in ("1b", "8b") for weights in ("bf16", "int8", "int4")),
        "llama:1b bf16 b8 at511",
    ]
    assert {(t.batch, t.mode) for t in found[-6:]} == {(1, "prefill2048")}
    assert {t.model for t in _tasks("8b")} == {"llama:8b"}
    with pytest.raises(FusegraphError, match="'fp8' is none of bf16, int8, int4"):
        tasks(pattern(""), ["bf16", "fp8"], [1], ["at1"], "cuda")


def test_modes() -> None:
    assert mode_of("at511") == Mode(range(511, 512), 512)
    assert mode_of("at511of2048") == Mode(range(511, 512), 2048)
    assert mode_of("at0") == Mode(range(1), 1)
    assert mode_of("prefill3") == Mode(range(3), 3)
    assert [mode_of(name).is_step for name in ("at0", "prefill1", "prefill2")] == [True, True, False]
    for wrong in ("at", "prefill0", "at-1", "train", "at1x", "at5of5"):
        with pytest.raises(FusegraphError, match=f"'{wrong}' is no position"):
            mode_of(wrong)


def test_so_many_at_a_time_as_memory_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    found = _tasks()
    monkeypatch.setattr("fusegraph.runtime.driver.properties", lambda _: SimpleNamespace(total_memory=141 << 30))
    assert 6 <= together(found, 12) <= 12
    assert together(found, 4) == 4
    assert sum(map(device_bytes, found[: together(found, 12)])) < 0.85 * (141 << 30)
    monkeypatch.setattr("fusegraph.runtime.driver.properties", lambda _: SimpleNamespace(total_memory=1 << 30))
    assert together(found, 12) == 1
    assert together(_tasks("", "cpu"), 12) == 1
    for task in found:  # each fits one of 80 GB
        assert device_bytes(task) < 75 << 30, task.name


def test_sizes_are_those_of_the_models() -> None:
    for name, parameters in (
        ("1b", 1.24e9 + 0.26e9),
        ("8b", 8.03e9),
    ):  # 1B has one matrix for the embedding and the head
        with torch.device("meta"):
            model = Decoder(SIZES[name], "bf16", 1, 2)
        size = SIZES[name]
        assert size.elements + size.vocabulary * size.width == sum(p.numel() for p in model.parameters() if p.ndim == 2)
        assert size.cache_bytes(1, 2) == sum(2 * layer.keys.nbytes for layer in model.layers)
        assert sum(p.numel() for p in model.parameters()) == pytest.approx(parameters, rel=0.01)


def test_operations_of_a_prompt() -> None:
    """Those that torch counts on a CPU, which leaves out attention; there each pair of tokens has two products."""
    size, n = SIZES["small"], 6
    model = Decoder(size, "bf16", 3, n)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(torch.zeros(3, n, dtype=torch.int64), torch.arange(n))
    pairs = sum(range(1, n + 1))
    assert size.operations(3, n) == counter.get_total_flops() + 3 * size.layers * size.heads * pairs * 4 * size.depth


def test_bytes_of_a_step() -> None:
    """Matrices and norms once, and what the caches are filled with, but of the embedding and of buffers nothing."""
    size, read = SIZES["small"], {}
    for weights in MATRICES:
        read[weights] = Decoder(size, weights, 3, 100).bytes_read(9) - Decoder(size, weights, 3, 100).bytes_read(8)
        assert read[weights] == 3 * size.layers * 2 * size.shared * size.depth * 2
    elements = size.layers * (2 * 128 * 128 + 2 * 64 * 128 + 3 * 256 * 128) + 320 * 128
    norms, cache = (2 * size.layers + 1) * 128 * 2, 10 * 3 * size.layers * 2 * size.shared * size.depth * 2
    rows = size.layers * (2 * 128 + 2 * 64 + 2 * 256 + 128) + 320
    expected = {"bf16": elements * 2, "int8": elements + rows * 2, "int4": elements // 2 + elements // GROUP * 2}
    for weights, bytes_of in expected.items():
        assert Decoder(size, weights, 3, 100).bytes_read(9) == bytes_of + norms + cache


def test_ways_to_attend_are_the_same() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 20, 8), torch.randn(2, 3, 20, 8)
    mask = torch.arange(20)[None] <= 7
    expected = attention(q.double(), k[:, :, :8].double(), v[:, :, :8].double(), None)
    for way in (attention, products):
        torch.testing.assert_close(way(q, k, v, mask).double(), expected, rtol=1e-5, atol=1e-5)


def test_a_step_follows_a_prompt() -> None:
    """Steps from token to token give the logits of a prompt of all of them."""
    torch.manual_seed(0)
    model = Decoder(SIZES["small"], "bf16", 2, 6).float()
    tokens = torch.randint(0, 320, (2, 6))
    with torch.no_grad():
        expected = [model(tokens[:, : n + 1], torch.arange(n + 1)) for n in range(6)]
        for way in (attention, products):
            for n in range(6):
                found = model(tokens[:, n : n + 1], torch.tensor([n]), way)
                torch.testing.assert_close(found, expected[n], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "mode"), [("bf16", "at31of47"), ("int8", "at46"), ("int4", "at31of47"), ("bf16", "prefill16")]
)
def test_a_call_is_one_piece(weights: str, mode: str) -> None:
    """It computes what eager torch does, again and again, and copies no cache."""
    torch._dynamo.reset()
    made = Decoding(Task("llama:small", weights, 2, mode, "cpu"))
    is_step = made.mode.is_step
    assert (made.bytes is not None) == is_step == (mode != "prefill16")
    fusegraph.torch.report(clear=True)
    with torch.no_grad():
        expected = made.step("eager")()
        step = made.step(OURS)
        assert all(difference(expected, step()) < 2e-2 for _ in range(2))
    (function,) = fusegraph.torch.report(clear=True)
    assert not function.left
    (piece,) = function.pieces
    plan = piece.planned()
    assert plan is not None
    assert len(plan.graph.updates) == 4
    if is_step:
        length = made.mode.length
        assert not any(length in t.shape and t.dtype == fg.bfloat16 for k in plan.kernels for t in k.group.writes)
    torch._dynamo.reset()


def test_shares_of_the_memorys_rate() -> None:
    times = {"inductor": 20.0, OURS: 10.0}
    engines = {engine: Figures(call_us=us + 5, replay_us=us, kernels=3) for engine, us in times.items()}
    row = Row("llama:8b", "int4", 1, engines, timed=True, mode="at511", bytes=24 * 10**6, memory=4.8e6)
    assert [row.share(engine) for engine in engines] == [0.25, 0.5]
    assert row.read_rate(OURS) == 2.4e6
    prompt = Row("llama:8b", "int8", 1, engines, mode="prefill64", flops=int(1.5e10), rate=2e9, notes=["so"])
    assert (prompt.share(OURS), prompt.mfu(OURS)) == (None, 0.5)
    heads, first, second = DECODING.lines([row, prompt])
    cells = dict(zip(heads, first, strict=False))
    assert [cells[head] for head in ("call", "TB/s", "of memory's rate", "MFU", "notes")] == [
        "llama:8b int4 b1 at511", "2.40", "50%", "-", "-",
    ]  # fmt: skip
    assert ("50%" in second, second[-1]) == (True, "so")
    said = sentences([row, prompt], DECODING)
    assert said[0] == (
        "int4 at511 by replay: geometric mean 2.00 over 1 models, 0 below 1, worst 2.00 (llama:8b int4 b1 at511)."
    )
    assert row_from_data(asdict(row)) == row


@pytest.mark.slow
def test_a_task_in_its_process(tmp_path: Path) -> None:
    task = Task("llama:small", "bf16", 1, "at15", "cpu", caches=str(tmp_path / "caches" / "decode"))
    ((_, found),) = each(partial(measured, True), [task], 1, 3600.0)
    assert isinstance(found, dict), found
    assert found["engines"].keys() == {"eager", OURS}
    figures = found["engines"][OURS]
    assert figures.why == {}
    assert figures.kernels
    assert figures.error < 2e-2
    assert (found["left"], found["expected"], found["bytes"] > 0) == ([], "eager", True)


def test_what_fails_is_told_of_one_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An engine that fails leaves the figures of the others, and the next tasks, as they are."""

    def step(_: Any, engine: str) -> Any:
        if engine == OURS:
            raise ValueError("no kernel")
        return lambda: [torch.ones(3)]

    monkeypatch.setattr(Decoding, "step", step)
    monkeypatch.setattr(run, "begin", lambda _: None)
    found = measured(False, Task("llama:small", "bf16", 1, "at1", "cpu", caches=str(tmp_path / "a" / "b")))
    assert found["engines"]["eager"].cold_s is not None
    assert found["engines"][OURS].why == {"compile": "ValueError: no kernel"}


def test_runs_go_on_and_what_lacked_memory_is_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file, seen = tmp_path / "decode.json", list[tuple[int, list[str]]]()
    answers: dict[str, Any] = {}

    def each(_: Any, jobs: list[Task], processes: int, *__: float) -> Any:
        seen.append((processes, [job.name for job in jobs]))
        assert {job.caches for job in jobs} <= {str(tmp_path / "caches" / "decode")}
        fine = {"engines": {engine: Figures(replay_us=1.0) for engine in ("eager", "inductor", OURS)}}
        return [(job, answers.pop(job.name, fine)) for job in jobs]

    monkeypatch.setattr(run, "each", each)
    monkeypatch.setattr(run, "together", lambda left, _: min(2, len(left)))
    wanted = tasks(pattern("1b"), ["bf16", "int8", "int4"], [1], ["at7"], "cuda")
    names = [task.name for task in wanted]
    answers[names[0]] = Failure("its process ended with status -9")
    answers[names[1]] = Failure("ValueError: wrong")
    made = Decodings(wanted, file, tmp_path / "caches")
    rows = list(made.measure(4, inf))
    assert seen == [(2, names[:2]), (1, names[:1]), (1, names[2:])]
    assert [row.name for row in rows] == [*names[:2], names[0], names[2]]
    assert made.rows[names[0]].figure(OURS, "replay_us") == 1.0
    assert made.rows[names[1]].figure(OURS, "why") == {"time": "ValueError: wrong"}
    assert list(Decodings(wanted, file, tmp_path / "caches").measure(4, inf)) == []
    for row in made.rows.values():  # as if the peer had been left out
        row.engines.pop("inductor")
    made.save(complete=True)
    assert list(Decodings(wanted, file, tmp_path / "caches", peers=False).measure(4, inf)) == []
    assert len(list(Decodings(wanted, file, tmp_path / "caches").measure(4, inf))) == 3


def test_command(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    command = ["bench", "--suite", "decode"]
    assert main([*command, "--list", "--dtypes", "int4,bf16", "--modes", "at7", "--batches", "2,3"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said == [f"llama:small {w} b{b} at7 cpu" for b in (2, 3) for w in ("int4", "bf16")]
    for more, words in (
        (["--dtypes", "fp32"], "'fp32' is none of bf16, int8, int4"),
        (["--modes", "train"], "'train' is no position"),
        (["--batches", "usual"], "'usual' is no positive number"),
        (["--peers", "cudnn"], "'cudnn' is none of compile, none"),
        (["--only", "70b"], "is found in no name"),
    ):
        assert main([*command, *more]) == 2
        assert words in capsys.readouterr().err


def test_nothing_measured(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fusegraph.runtime.driver.unavailable_reason", lambda: "no driver; use engine='cpu'")
    monkeypatch.setattr(Decodings, "measure", lambda *_: iter(()))
    assert main(["bench", "--suite", "decode", "--modes", "at7", "--minutes", "2"]) == 1
    assert "nothing was measured within 2 minutes" in capsys.readouterr().out
