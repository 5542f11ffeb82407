"""What callers of the ONNX frontend may give by mistake: each function takes it, or raises an error of fusegraph's."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from onnx import helper
from onnx_models import one, perceptron, save

import fusegraph as fg
from fusegraph.errors import ArgumentError, FusegraphError, ModelError
from fusegraph.onnx import Backend


class Strange:
    """An object of a type that nothing accepts."""


SCALARS: tuple[Any, ...] = (
    None, True, 0, 1, -1, 2**80, 1.5, float("nan"), float("inf"), 1j, "", "x", "\0", "a" * 5000, b"", b"x", np.int64(2),
    np.float32(2), np.array("x"), Path("/"), Path("/dev/null"), "/proc/self/mem", object, Strange(), onnx.ModelProto(),
)  # fmt: skip
SEVERAL: tuple[Any, ...] = (
    [], [1], (), (None,), {}, set(), {1, 2}, range(3), iter([1]), [("x", 1)], np.zeros(3), np.array([None]),
    np.zeros((2, 8), np.float32), [[1], [2, 3]], [None, 8], [2**70, 8], [1.5, 8], [True, 8], [2, 8], "28",
)  # fmt: skip
NAMED: tuple[Any, ...] = tuple({key: x} for key in ("x", "batch", "y") for x in (*SCALARS, *SEVERAL))
HOSTILE: tuple[Any, ...] = (*SCALARS, *SEVERAL, *NAMED, {1: 2}, {None: None}, {b"x": 1})

PROTO = perceptron()
X = np.zeros((2, 8), np.float32)
NODE = helper.make_node("Relu", ["x"], ["y"])
SIZES = {"batch": 2}


def on(**more: Any) -> Any:
    return {"engine": "reference", **more}


CALLS: dict[str, Callable[[Any], Any]] = {
    "path": lambda v: fg.onnx.load(v),
    "shapes": lambda v: fg.onnx.from_proto(PROTO, v),
    "shapes of no input": lambda v: fg.onnx.from_proto(one("Relu", None), {"a": v}),
    "values": lambda v: fg.onnx.from_proto(PROTO, SIZES, v),
    "compute_dtype": lambda v: fg.onnx.from_proto(PROTO, SIZES, compute_dtype=v),
    "model": lambda v: fg.onnx.from_proto(v, SIZES),
    "folder": lambda v: fg.onnx.from_proto(PROTO, SIZES, folder=v),
    "where": lambda v: fg.onnx.from_proto(PROTO, SIZES, where=v),
    "name": lambda v: fg.onnx.from_proto(PROTO, SIZES, name=v),
    "prepare": lambda v: Backend.prepare(v, **on()),
    "device": lambda v: Backend.prepare(PROTO, v, **on()),
    "inputs": lambda v: Backend.prepare(PROTO, **on()).run(v),
    "an input": lambda v: Backend.prepare(PROTO, **on()).run([v]),
    "inputs of a model": lambda v: Backend.prepare(PROTO, **on()).model(v),
    "run_model": lambda v: Backend.run_model(v, [X], **on()),
    "run_node": lambda v: Backend.run_node(v, [X], **on()),
    "inputs of a node": lambda v: Backend.run_node(NODE, v, **on()),
    "an input of a node": lambda v: Backend.run_node(NODE, [v], **on()),
    "opset_version": lambda v: Backend.run_node(NODE, [X], **on(opset_version=v)),
    "is_compatible": lambda v: Backend.is_compatible(v),
    "supports_device": lambda v: Backend.supports_device(v),
}


@pytest.mark.parametrize("what", CALLS)
def test_arguments_are_taken_or_refused(what: str) -> None:
    for given in HOSTILE:
        try:
            CALLS[what](given)
        except FusegraphError:
            continue
        except Exception as error:
            raise AssertionError(f"{what}: {given!r}") from error


@pytest.mark.parametrize("shapes", [[1], {"x": "28"}, {"batch": 2.0}, {"batch": True}, {"batch": -1}, {"x": [2.5, 8]}])
def test_sizes_are_integers(shapes: Any, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="shapes"):
        fg.onnx.load(save(PROTO, tmp_path), shapes=shapes)


def test_sizes_of_numpy(tmp_path: Path) -> None:
    path = save(PROTO, tmp_path)
    for shapes in ({"batch": np.int64(3)}, {"x": np.array([3, 8])}, {"batch": np.array(3)}, {"x": (np.int32(3), 8)}):
        assert fg.onnx.load(path, shapes).inputs["x"].shape == (3, 8)
    assert fg.onnx.load(os.fsencode(path), SIZES).inputs["x"].shape == (2, 8)


def test_files_that_are_none(tmp_path: Path) -> None:
    """Reading a pipe would wait for ever."""
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    with pytest.raises(ModelError, match="no file"):
        fg.onnx.load(pipe)
