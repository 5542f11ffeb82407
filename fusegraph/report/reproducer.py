"""A failing graph as a Python file that runs by itself, and the arrays that it fails on beside it."""

from __future__ import annotations

import io
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from fusegraph.engines import compile as compile_graph
from fusegraph.errors import FileError
from fusegraph.graph import Graph
from fusegraph.ops.base import Array
from fusegraph.report.artifacts import check_readable
from fusegraph.report.check import check_executable, run
from fusegraph.report.parts import builder_code, restored, saved_arrays

CODE, ARRAYS = "reproduce.py", "inputs.npz"

_FILE = '''"""{title}"""

import numpy as np  # noqa: F401

import fusegraph as fg
from fusegraph.report.reproducer import arrays_beside, replay

arrays = arrays_beside(__file__)
{code}

if __name__ == "__main__":
    raise SystemExit(replay(graph, arrays{options}))
'''


def reproducer_files(
    graph: Graph, inputs: Mapping[str, Array], title: str, options: Mapping[str, Any]
) -> dict[str, bytes]:
    """Returns the files, by name, that show a failure: the code, and the arrays of the graph's inputs.

    ``options`` are those of `fusegraph.compile`.  Raises NotSupportedError if the graph has nodes that passes made.
    """
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **saved_arrays(graph, inputs))  # type: ignore[arg-type] # names of tensors
    words = "".join(f", {key}={value!r}" for key, value in options.items())
    title = title.replace("\\", "/").replace('"""', "'''")
    code = _FILE.format(title=title, code=builder_code(graph), options=words)
    return {CODE: code.encode(), ARRAYS: buffer.getvalue()}


def arrays_beside(file: str) -> dict[str, Array]:
    """Returns the arrays in the folder of a reproducer, by the names of tensors."""
    return load_arrays(Path(file).parent / ARRAYS)


#: What NumPy raises for files that are no archives, are cut short or damaged.
_NO_ARRAYS = (
    OSError,
    ValueError,
    AttributeError,
    EOFError,
    SyntaxError,
    RuntimeError,
    MemoryError,
    BadZipFile,
    zlib.error,
)


def load_arrays(path: Path) -> dict[str, Array]:
    """Returns the arrays of an ``.npz`` file by name.  Raises FileError if it cannot be read."""
    check_readable(path)
    try:
        with np.load(path, allow_pickle=False) as found:
            return {name: found[name] for name in found.files}
    except _NO_ARRAYS as error:
        raise FileError(f"{path} cannot be read as an .npz file: {error}") from None


def replay(graph: Graph, arrays: Mapping[str, Array], **options: Any) -> int:
    """Runs a graph on saved arrays and prints how it compares with the reference; returns 1 if it fails, else 0.

    options: those of `fusegraph.compile`.
    """
    inputs = {t.name: restored(arrays, t) for t in graph.inputs}
    executable = compile_graph(graph, **options)
    outputs = run(executable, inputs)
    strict = bool(options.get("strict"))
    result = check_executable(executable, inputs, outputs=outputs, strict=strict)
    print(result)
    bad = 0
    for tensor in graph.outputs:
        if tensor.dtype.is_float:
            count = int((~np.isfinite(outputs[tensor.name].astype(np.float64))).sum())
            bad += count
            if count:
                print(f"{tensor.name}: {count} of {tensor.size} elements are not finite")
    return int(not result.ok or bad > 0)
