"""What the cuda engine packs and launches, against the double of the driver."""

from __future__ import annotations

from typing import Any

from driver_double import CAPTURING, library, log, run_double

import fusegraph as fg
from fusegraph.engines import packing
from fusegraph.runtime.arrays import DeviceArray


def layer() -> Any:
    """Returns a graph whose parameter is reduced, and so packed."""
    graph = fg.Graph("layer")
    x, w = graph.tensor("x", (64, 16)), graph.tensor("w", (16, 16), parameter=True)
    graph.output(x * graph.reduction(w, mode="add", axes=0, keepdims=False), name="y")
    return graph


def launches(lib: Any) -> list[str]:
    """Returns the streams of the kernels launched since the log was emptied; then empties it."""
    found = [line.split()[4] for line in log(lib) if line.startswith("launch ")]
    lib.double_clear()
    return found


def double_packed_once() -> None:
    lib = library()
    executable = layer().compile("cuda")
    x, w, other, y = (DeviceArray.empty(s, "float32") for s in ((64, 16), (16, 16), (16, 16), (64, 16)))
    launches(lib)
    executable(x, w, out=y, stream=5)
    assert launches(lib) == ["0x5", "0x5"]
    for _ in range(2):
        executable(x, w, out=y, stream=6)
        assert launches(lib) == ["0x6"]
    executable(x, other, out=y)
    assert len(launches(lib)) == 2
    executable.repack()
    executable(x, w, out=y)
    assert len(launches(lib)) == 2
    executable(x, w, out=y)
    assert len(launches(lib)) == 1


def double_recorded() -> None:
    """What is packed while a stream is captured becomes part of the recording, which has copies of its own for that."""
    lib = library()
    executable = layer().compile("cuda")
    x, w, y = (DeviceArray.empty(s, "float32") for s in ((64, 16), (16, 16), (64, 16)))
    launches(lib)
    for _ in range(2):
        executable(x, w, out=y, stream=CAPTURING)
        assert len(launches(lib)) == 2
    executable(x, w, out=y)
    launches(lib)
    executable(x, w, out=y, stream=CAPTURING)
    assert len(launches(lib)) == 1
    held = executable.packed_bytes
    assert held == 3 * 64
    del w
    assert executable.packed_bytes == held  # the recording reads it


def double_given_up() -> None:
    """What has been recorded can be replayed after packing has been given up."""
    lib = library()
    executable = layer().compile("cuda")
    x, w, y = (DeviceArray.empty(s, "float32") for s in ((64, 16), (16, 16), (64, 16)))
    executable(x, w, out=y)
    executable(x, w, out=y, stream=CAPTURING)
    lib.double_clear()
    executable._built[16].packing._changes = packing.MOST_CHANGES
    executable.repack()
    executable(x, w, out=y)
    executable(x, w, out=y)
    done = [line.split()[0] for line in log(lib)]
    assert done.count("launch") == 4
    assert not {"free", "unload"} & {*done}


def double_freed() -> None:
    lib = library()
    executable = layer().compile("cuda")
    x, y = (DeviceArray.empty((64, 16), "float32") for _ in range(2))
    live = lib.double_live()
    for _ in range(3):
        w = DeviceArray.empty((16, 16), "float32")
        executable(x, w, out=y)
        assert executable.packed_bytes == 64
        del w
        assert executable.packed_bytes == 0
        assert lib.double_live() == live


DOUBLES = [name for name in dict(globals()) if name.startswith("double_")]


def test_with_the_double() -> None:
    run_double("test_packing_launches", *DOUBLES)
