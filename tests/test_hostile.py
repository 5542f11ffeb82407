"""Hostile values for every argument of every public function: each is taken, and then means something, or refused with
an error of fusegraph's.
"""

from __future__ import annotations

import inspect
import io
import operator
import os
import socket
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import quick
from hostile_values import MORE, OTHER, VALUES, fault, use

import fusegraph as fg
from fusegraph import functional
from fusegraph.cli import command, main
from fusegraph.errors import ArgumentError, AttributeValueError, CompileError, OutOfMemoryError, ShapeError
from fusegraph.layout import MAX_RANK
from fusegraph.methods import METHODS
from fusegraph.ops import TABLE
from fusegraph.ops.attributes import KINDS
from fusegraph.ops.base import REQUIRED, Op
from fusegraph.report.check import check
from fusegraph.runtime import cache
from fusegraph.runtime.cache import DiskCache

IMAGE = (2, 4, 6, 6)
#: Shapes of the operands of ops that do not take images alone.
SHAPES: dict[str, list[tuple[int, ...]]] = {
    "conv_fprop": [IMAGE, (3, 4, 3, 3)],
    "conv_dgrad": [(2, 3, 4, 4), (3, 4, 3, 3)],
    "conv_wgrad": [IMAGE, (2, 3, 4, 4)],
    "matmul": [(4, 6), (6, 5)],
    "sdpa": [(2, 4, 6, 8)] * 3,
    "sdpa_backward": [(2, 4, 6, 8)] * 5 + [(2, 4, 6, 1)],
    "rope": [(2, 3, 8, 16), (8, 1, 1, 16)],
    "rope_backward": [(2, 3, 8, 16), (8, 1, 1, 16)],
}
NEEDED: dict[str, Any] = {
    "shape": IMAGE,
    "axis": 1,
    "padding": 1,
    "window": 2,
    "size": (6, 6),
    "negative_slope": 0.1,
    "groups": 2,
    "k": 2,
    "dtype": "float16",
}
Calls = Iterator[tuple[str, Callable[[Any], object]]]


def of_op(op: Op, key: str | int, *, planned: bool) -> Callable[[Any], object]:
    """Returns a function that calls an op with a value as one of its attributes or operands."""

    def call(value: Any) -> None:
        g = fg.Graph("g")
        shapes = SHAPES.get(op.name, [IMAGE] * (len(op.operands) - op.optional))
        integers = op.name.startswith(("bitwise", "shift"))
        operands: list[Any] = [
            g.tensor(f"t{n}", shape, "int32" if integers or name in ("index", *op.integers) else "float32")
            for n, (name, shape) in enumerate(zip(op.names(len(shapes)), shapes))
        ]
        attributes = {name: NEEDED[name] for name, default in op.attributes.items() if default is REQUIRED}
        if isinstance(key, str):
            attributes[key] = value
        else:
            operands += [None] * (key + 1 - len(operands))
            operands[key] = value
        use(g, getattr(g, op.name)(*operands, **attributes), planned=planned)

    return call


def of_table(planned: bool) -> Calls:
    for op in TABLE.values():
        for key in op.attributes:
            yield f"{op.name}: {key}", of_op(op, key, planned=planned)
        for n, name in enumerate(op.operands):
            yield f"{op.name}: operand {name}", of_op(op, n, planned=planned)


def of_methods(planned: bool) -> Calls:
    """Yields methods that are no ops, with a value as one of their arguments."""
    good: dict[str, Any] = {
        "parts": 2, "axes": (), "block": 2, "count": 3, "depth": 3, "size": 5, "dtype": "float32", "axis": 1,
        "equation": "abcd->a", "y": 1.0, "weights": None,
    }  # fmt: skip
    shapes = {"grid": (2, 3, 3, 2)}

    def argument(g: fg.Graph, method: str, name: str) -> Any:
        if name == "index" and method == "resample":
            return [0, 1]
        if name in good:
            return good[name]
        kind = {"index": "int32", "mask": "bool"}.get(name, "float32")
        return g.tensor(name, shapes.get(name, IMAGE), kind)

    def of(method: str, parameters: list[inspect.Parameter], chosen: str) -> Callable[[Any], object]:
        def call(value: Any) -> None:
            g = fg.Graph("g")
            args, named = [], {}
            for p in parameters:
                if p.name == chosen or p.default is p.empty:
                    given = value if p.name == chosen else argument(g, method, p.name)
                    if method == "einsum" and p.name != "name":
                        args.append(given)
                    else:
                        named[p.name] = given
            use(g, getattr(g, method)(*args, **named), planned=planned)

        return call

    for method, function in METHODS.items():
        if method not in TABLE:
            parameters = list(inspect.signature(function).parameters.values())[1:]
            yield from ((f"{method}: {p.name}", of(method, parameters, p.name)) for p in parameters)


def of_builder(planned: bool) -> Calls:
    """Yields the builder itself, and tensors."""

    def made() -> tuple[fg.Graph, fg.Tensor]:
        g = fg.Graph("g")
        return g, g.tensor("x", (2, 3, 4))

    def with_x(take: Callable[[fg.Graph, fg.Tensor, Any], Any]) -> Callable[[Any], object]:
        def call(value: Any) -> None:
            g, x = made()
            use(g, take(g, x, value), planned=planned)

        return call

    yield "Graph: name", fg.Graph
    yield "Graph: io_dtype", lambda v: fg.Graph("g", v)
    yield "Graph: compute_dtype", lambda v: fg.Graph("g", compute_dtype=v)
    for key in ("name", "shape", "dtype", "layout", "strides"):
        tensor: dict[str, Any] = {"name": "a", "shape": (2, 3)}
        yield f"tensor: {key}", with_x(lambda g, _, v, k=key, t=tensor: g.relu(g.tensor(**{**t, k: v})))
    for key in ("array", "name", "dtype"):
        yield f"constant: {key}", with_x(lambda g, _, v, k=key: g.relu(g.constant(**{"array": 1.0, k: v})))
    for key in ("tensor", "name", "dtype", "layout", "strides"):
        yield f"output: {key}", with_x(lambda g, x, v, k=key: g.output(**{"tensor": g.relu(x), k: v}))
    yield "rename: name", with_x(lambda g, x, v: g.rename(x, v))
    yield "rename: tensor", with_x(lambda g, x, v: g.rename(v, "new"))
    yield "name", with_x(lambda g, x, v: g.relu(x, name=v))
    yield "x[value]", with_x(lambda g, x, v: x[v])
    yield "x[value, 0]", with_x(lambda g, x, v: x[v, 0])
    yield "x[:value]", with_x(lambda g, x, v: x[:v])
    yield "x[::value]", with_x(lambda g, x, v: x[::v])
    for name in ("add", "sub", "mul", "truediv", "pow", "matmul", "gt", "le", "and_", "or_"):
        operate = getattr(operator, name)
        yield f"x {name} value", with_x(lambda g, x, v, f=operate: f(x, v))
        yield f"value {name} x", with_x(lambda g, x, v, f=operate: f(v, x))
    yield "x.reshape", with_x(lambda g, x, v: x.reshape(v))
    yield "x.reshape of three", with_x(lambda g, x, v: x.reshape(v, v, v))
    yield "x.transpose", with_x(lambda g, x, v: x.transpose(v))
    yield "x.transpose of three", with_x(lambda g, x, v: x.transpose(v, v, v))


def of_functions(_: bool) -> Calls:
    """Yields functions of the package, and executables."""
    g = fg.Graph("g")
    g.output(g.relu(g.tensor("x", (2, 3, 4))), name="y")
    executable, x = g.compile("reference"), np.ones((2, 3, 4), np.float32)
    for key in ("engine", "strict", "fusion", "target", "device", "workspace_limit", "cache", "jobs", "partition",
                "autotune"):  # fmt: skip
        yield f"compile: {key}", lambda v, k=key: fg.compile(g, **{"engine": "reference", k: v})
    yield "compile: target of cpu", lambda v: fg.compile(g, "cpu", target=v) if v is not None else None
    yield "compile: graph", lambda v: fg.compile(v, "reference")
    yield "check: graph", lambda v: check(v, "reference")
    yield "check: engine", lambda v: check(g, v) if v is not None else None
    yield "to_device", fg.to_device
    yield "to_numpy", fg.to_numpy
    yield "from_cudnn", fg.from_cudnn
    yield "DiskCache: folder", lambda v: None if isinstance(v, str | bytes) else DiskCache(v)
    yield "DiskCache: limit_bytes", lambda v: DiskCache(None, v)
    yield "call: input", executable
    yield "call: named", lambda v: executable(x=v)
    yield "call: one too many", lambda v: executable(x, v)
    yield "call: stream", lambda v: executable(x, stream=v)
    yield "call: out", lambda v: executable(x, out=v)
    yield "call: several out", lambda v: executable(x, out=[v])
    yield "call: named out", lambda v: executable(x, out={"y": v})
    arrays: Mapping[str, Any] = {
        "x": np.ones((1, 4, 6, 6), np.float32), "w": np.ones((3, 4, 3, 3), np.float32),
        "loss": np.ones((1, 3, 4, 4), np.float32), "a": np.ones((4, 4), np.float32), "b": np.ones((4, 4), np.float32),
        "window": 2, "size": (6, 6), "taps": (3, 3),
    }  # fmt: skip
    for name in ("conv2d", "conv_transpose2d", "matmul", "linear", "max_pool2d", "avg_pool2d", "conv2d_input",
                 "conv2d_weight"):  # fmt: skip
        function = getattr(functional, name)
        parameters = inspect.signature(function).parameters
        given = {k: arrays.get(k, arrays["x"]) for k, p in parameters.items() if p.default is p.empty}
        for key in parameters:
            yield f"{name}: {key}", lambda v, f=function, k=key, rest=given: f(**{**rest, k: v})


SWEEPS = [of_table, of_methods, of_builder, of_functions]


def faults(calls: Calls, values: Mapping[str, Callable[[], Any]], parts: int = 1) -> list[str]:
    """Returns the faults of all calls with all values.

    Calls with an argument of one name, if there are so many of them, are given one of so many ``parts`` of the values
    in turn.
    """
    found = []
    every, turn = list(calls), Counter[str]()
    count = Counter(what.partition(": ")[2] for what, _ in every)
    for what, call in every:
        argument = what.partition(": ")[2]
        step = parts if count[argument] >= parts else 1
        for name, make in [*values.items()][turn[argument] % step :: step]:
            seen = fault(call, make)
            if seen is not None:
                found.append(f"{what}, given {name}: {seen}")
        turn[argument] += 1
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: s.__name__)
def test_values(sweep: Callable[[bool], Calls]) -> None:
    assert faults(sweep(False), VALUES) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda s: s.__name__)
def test_more_values(sweep: Callable[[bool], Calls]) -> None:
    """Arguments that many ops have are judged by the same code: each op is given a third of the values."""
    assert faults(sweep(True), VALUES | MORE, parts=3 if sweep is of_table else 1) == []


def test_the_sweep_finds_faults() -> None:
    assert fault(lambda v: [1, 2][v], lambda: "x") is not None
    assert fault(lambda v: fg.Graph("g").relu(v), lambda: OTHER) is None
    assert len(list(of_table(False))) > 300


def test_every_attribute_has_a_kind() -> None:
    """`fusegraph.ops.attributes` says what it is: a new one belongs there."""
    assert {key for op in TABLE.values() for key in op.attributes} <= set(KINDS)


def test_what_means_nothing_is_refused() -> None:
    g = fg.Graph("g")
    x, q = g.tensor("x", (4, 6)), g.tensor("q", (1, 1, 4, 8))
    for call in (
        lambda: g.reduction(x, "var", correction=float("nan")),
        lambda: g.reduction(x, "var", correction=float("inf")),
        lambda: g.sdpa(q, q, q, diagonal_band_left_bound=0),
        lambda: g.split(x, float("nan")),  # type: ignore[arg-type]
        lambda: g.einsum(None, x),
        lambda: x[np.array([True, False, True, True])],
    ):
        with pytest.raises(AttributeValueError):
            call()
    with pytest.raises(ShapeError, match=f"at most {MAX_RANK} dimensions"):
        g.tensor("y", [1] * 1000)
    g.output(g.relu(g.tensor("z", [1] * MAX_RANK)))
    assert check(g, "cpu").ok
    with pytest.raises(CompileError, match="'sm_12345' is no target"):
        g.compile("cpu", target="sm_12345")
    with pytest.raises(ArgumentError, match="target is 5; it should be a text"):
        g.compile("cpu", target=5)


@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_more_memory_than_there_is(engine: str) -> None:
    g = fg.Graph("huge")
    x = g.tensor("x", (1,))
    g.output(g.exp(g.broadcast(x, (2**20, 2**20))), name="y")
    text = r"output 'y' of graph 'huge', float32 \[1048576, 1048576\], takes 4.0 TiB .* a process has at most .* here"
    with pytest.raises(OutOfMemoryError, match=text):
        g.compile(engine)(np.ones(1, np.float32))
    with pytest.raises(OutOfMemoryError):
        check(g, engine)


# ---- the command line and the environment


FILE = "import fusegraph as fg\ng = fg.Graph('g')\ng.output(g.relu(g.tensor('x', (2, 3))), name='y')\n"
TEXTS = [
    "", "x", "-1", "0", "nan", "9" * 30, "9" * 5000, "../x", "a\nb", "a" * 5000, "\udcff", "\N{SNOWMAN}", "/dev/null",
    "/dev/zero", "fifo", "sock", "folder", "loop", "[", "0x10", "1e400", "g.py:", "g.py:g", "g.py:x y", ":",
    "nothing.py", "empty.onnx", "fifo.onnx", "folder.onnx", "empty.onnx:a=1", "empty.onnx:a=", "sm_90a,", "sm_12345",
    ",,", "*", "--", "-", "/proc/self/mem", "~", "g.py/x",
]  # fmt: skip


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a graph file, an empty model, and paths that are not regular files."""
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("g.py").write_text(FILE)
    Path("empty.onnx").touch()
    for name in ("fifo", "fifo.onnx"):
        os.mkfifo(name)
    for name in ("folder", "folder.onnx"):
        Path(name).mkdir()
    Path("loop").symlink_to("loop")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("sock")
    return folder


def answered(arguments: list[str]) -> str | None:
    """Returns what is wrong with a command's exit: a status other than those of success, differences and errors."""
    out, err = io.StringIO(), io.StringIO()

    def run(_: Any) -> None:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(arguments)
        assert status in (0, 1, 2), status
        assert "Traceback" not in err.getvalue()

    seen = fault(run, lambda: None)
    return None if seen is None else f"{[a[:60] for a in arguments]}: {seen} {err.getvalue()[-300:]}"


def command_lines() -> Iterator[list[str]]:
    for name, each in command().commands.items():
        for parameter in each.params:
            if parameter.param_type_name == "argument":
                yield from ([name, text] for text in TEXTS)
            elif not parameter.is_flag and name != "doctor":
                first = [name, "--list"] if name == "bench" else [name, "g.py"]
                engine = ["--engine", "reference"] if name in ("run", "compile") and parameter.name != "engine" else []
                yield from ([*first, parameter.opts[0], text, *engine] for text in TEXTS)


@pytest.mark.slow
@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("ignore")
def test_command_lines() -> None:
    lines = list(command_lines())
    assert len(lines) > 500
    assert [seen for line in lines if (seen := answered(line)) is not None] == []
    assert Path("/dev/null").is_char_device()


@pytest.mark.usefixtures("place")
@pytest.mark.filterwarnings("ignore")
def test_files_of_the_command_line() -> None:
    assert [seen for text in TEXTS if (seen := answered(["explain", text])) is not None] == []


NONSENSE = ("maybe", "-1", "nan", "9" * 5000, "9" * 400 + ".5", "\N{SNOWMAN}", "\udcff", "a\nb", "true", "0x10", "5 XB")


@pytest.mark.parametrize("variable", ["AUTOTUNE", "CPU_THREADS", "CACHE_LIMIT"])
@pytest.mark.parametrize("engine", ["cpu", "reference"])
def test_nonsense_in_the_environment(variable: str, engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is an error of every engine, though another one would need it."""
    g = fg.Graph("g")
    g.output(g.relu(g.tensor("x", (2, 3))))
    for text in NONSENSE:
        monkeypatch.setenv(f"FUSEGRAPH_{variable}", text)
        with pytest.raises(fg.FusegraphError, match=f"FUSEGRAPH_{variable}"):
            g.compile(engine)


@pytest.mark.parametrize(
    "variable",
    quick(
        "FUSEGRAPH_CXX", "CXX", "PATH", "FUSEGRAPH_CACHE_DIR", "XDG_CACHE_HOME", "HOME", "TMPDIR", "FUSEGRAPH_AUTOTUNE"
    ),
)
@pytest.mark.filterwarnings("ignore")
def test_environment(variable: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if variable in ("XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv("FUSEGRAPH_CACHE_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", None)
    engine = "cpu" if variable in ("FUSEGRAPH_CXX", "CXX", "PATH") else "reference"
    for text in (
        *NONSENSE,
        "",
        "'",
        "fifo",
        "loop",
        "g.py",
        "/dev/null",
        "../x",
        "~nobody_here/x",
        " ",
        "false",
        "cat",
    ):
        monkeypatch.setenv(variable, text)
        cache.default_cache.cache_clear()
        assert answered(["run", "g.py", "--engine", engine]) is None, text
    cache.default_cache.cache_clear()
