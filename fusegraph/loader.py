"""The graphs of a file, for the command line: of a Python file, or the one of an ONNX model.

What is found in a Python file, in the order of its definition:

- every `Graph` that is bound to a module-level name when the file has run, and every ``pygraph`` of cudnn-frontend,
  which is read by `fusegraph.from_cudnn`;
- the result of every module-level function that is defined in the file itself, is public (its name starts without an
  underscore), can be called without arguments, and returns a graph: it has the return annotation ``-> Graph``, or
  none at all and a ``return`` of what it made with ``Graph(...)``;
- likewise programs of ``torch.export`` (annotation ``-> ExportedProgram``): a graph for each of their pieces between
  operators that torch has to compute, if there are any, which are named on stderr.

A graph found twice is listed once: the same object under two names, or a function whose graph equals one found before
(``graph = build()``).  ``FILE:name`` selects one name; it may then be private, a function needs no annotation, and
what it names or the function returns may be an ``nn.Module`` with a tuple of example inputs.

The file runs as ``python FILE`` would run it, its folder first on ``sys.path``, but ``__name__`` is not ``"__main__"``.
What it prints goes to stderr, as stdout is the command's own.

``model.onnx`` holds one graph; ``model.onnx:batch=8,x=1x3x224x224`` gives sizes of dimensions and shapes of inputs that
the model leaves open.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import itertools
import os
import re
import stat
import sys
import sysconfig
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import Any

import codegen
import fusegraph
from codegen.sizes import limits
from fusegraph.dims import Dim
from fusegraph.engines.sized import sources_of
from fusegraph.errors import FileError, FusegraphError, ShapeError, shown
from fusegraph.frontends.cudnn import from_cudnn, is_pygraph
from fusegraph.frontends.torch.files import graphs_of, is_model, is_program
from fusegraph.graph import Graph
from fusegraph.sized_graphs import graph_at, varies

_LOOKED_FOR = (
    "looked for module-level names bound to a fusegraph.Graph, and for public functions without required parameters "
    "annotated '-> Graph' or returning a Graph that they make"
)
_WANTED = (
    "wanted is a fusegraph.Graph, a cudnn.pygraph, a program of torch.export, or a torch.nn.Module with a tuple of "
    "example inputs"
)
#: Packages that files may well need -> the extra of ours that brings them.
_EXTRAS = {"cudnn": "cudnn", "onnx": "onnx", "torch": "torch"} | dict.fromkeys(
    ("PIL", "skimage", "matplotlib", "safetensors"), "examples"
)
_numbers = itertools.count()


def onnx_file(file: str) -> str | None:
    """Returns the file of an ONNX model that is given with or without sizes; None for other files."""
    model = _ONNX.fullmatch(file)
    return model[1] if model is not None else None


def load_graphs(file: str, dims: Sequence[str] | None = None, *, known: bool = False) -> list[Graph]:
    """Returns the graphs, one or more, of ``FILE``, ``FILE:name``, ``MODEL.onnx`` or ``MODEL.onnx:dimension=size,...``.

    dims    sizes of dimensions that vary: ``batch=8`` one, ``batch=1..64`` a range, ``batch=8..64:8`` multiples.
    known   raises FileError for graphs whose sizes still vary.

    Raises FileError if the file is missing, a folder or not Python, if it raises or exits, or if it holds no graph (or
    none of that name).  A FusegraphError raised while a graph is built keeps its type; file and line are put in front.
    For ONNX models, raises what `fusegraph.onnx.load` raises, and FileError for malformed sizes.
    """
    model = _ONNX.fullmatch(file)
    if model is not None:
        from fusegraph.frontends.onnx import load

        return _checked([load(model[1], {**_shapes(model[2] or ""), **_dims(dims)}).graph], known)
    path, name = _split(file)
    code = _compiled(path)
    module = ModuleType(f"fusegraph_file_{next(_numbers)}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickle look a class's module up
    with _stdout_to_stderr(), _first_on_path(path.parent), _blamed_on(path):
        exec(code, vars(module))
        candidates = _candidates(module) if name is None else [_selected(path, module, name)]
        graphs = [graph for label, value in candidates for graph in _graphs_of(path, label, value)]
    found: dict[Any, Graph] = {}
    for graph in graphs:
        found.setdefault(_fingerprint(graph), graph)
    if not found and candidates:
        labels = ", ".join(label for label, _ in candidates)
        raise FileError(f"{path}: torch has to compute all of {labels}; there is nothing to compile")
    if not found:
        raise FileError(f"{path} holds no graph: {_LOOKED_FOR}{_near_misses(module)}")
    given, graphs = _dims(dims), list(found.values())
    named = {name for graph in graphs for name in sources_of(graph)}
    for name in given:
        if name not in named:
            raise FileError(f"no graph of {path} has a Dim {name!r}; there are: {', '.join(sorted(named)) or 'none'}")
    return _checked([_with_dims(graph, given) for graph in graphs], known)


# --- sizes that vary


def _dims(texts: Sequence[str] | None) -> dict[str, int]:
    """Parses sizes of dimensions: one, or a range as a Dim.  Raises FileError."""
    found: dict[str, int] = {}
    for text in texts or ():
        name, _, sizes = text.rpartition("=")
        one = re.fullmatch(r"(\d{1,18})(?:\.\.(\d{1,18})(?::(\d{1,18}))?)?", sizes)
        if not name or one is None:
            raise FileError(
                f"--dim {text!r} is no size: give batch=8, a range batch=1..64, or its multiples of 8, batch=8..64:8"
            )
        if name in found:
            raise FileError(f"--dim gives {name!r} twice")
        low, high, unit = one.groups()
        try:
            clean = re.sub(r"\W+", "_", name, flags=re.ASCII)
            found[name] = int(low) if high is None else Dim(clean, int(low), int(high), int(unit or 1))
        except ShapeError as error:
            raise FileError(f"--dim {text!r}: {error}") from None
    return found


def _with_dims(graph: Graph, given: Mapping[str, int]) -> Graph:
    """Returns a graph with other sizes for some of its Dims.  Raises FileError for sizes that they do not allow."""
    sources = sources_of(graph)
    if sources.keys().isdisjoint(given):
        return graph
    sizes: dict[str, int] = {}
    for name, (unit, (low, high), own) in sources.items():
        size = given.get(name, own)
        least, most = limits(size)
        if name in given and (size % unit != 0 or not low * unit <= least <= most <= high * unit):
            multiple = f"a multiple of {unit} " if unit > 1 else ""
            raise FileError(f"--dim {name}: graph {graph.name!r} takes {multiple}from {low * unit} to {high * unit}")
        sizes[name] = size // unit if name in given else own
    return graph_at(graph, sizes)[0]


def _checked(graphs: list[Graph], known: bool) -> list[Graph]:
    for graph in graphs if known else ():
        if varies(graph):
            names = " ".join(f"--dim {name}=8" for name in sources_of(graph))
            raise FileError(f"graph {graph.name!r} has sizes that vary, which this command needs to know: give {names}")
    return graphs


# --- reading

#: A model, and the sizes behind a colon.
_ONNX = re.compile(r"(.*\.onnx)(?::([^/]*=[^/]*))?", re.IGNORECASE | re.DOTALL)


def _shapes(text: str) -> dict[str, int | list[int]]:
    """Parses sizes and shapes such as ``batch=8,x=1x3x224x224``.  Raises FileError."""
    found: dict[str, int | list[int]] = {}
    for part in text.split(",") if text else ():
        name, _, sizes = part.rpartition("=")
        if not name or not re.fullmatch(r"\d{1,18}(x\d{1,18})*", sizes):
            raise FileError(f"{part!r} is no size: give batch=8 for a dimension, x=1x3x224x224 for an input")
        numbers = [int(n) for n in sizes.split("x")]
        found[name] = numbers[0] if len(numbers) == 1 else numbers
    return found


def _split(file: str) -> tuple[Path, str | None]:
    """Returns the absolute path and the name of ``FILE`` or ``FILE:name``; a file that exists is taken as it is."""
    text, colon, name = file.rpartition(":")
    if not os.path.lexists(file) and colon and name.isidentifier():
        return _absolute(text), name
    return _absolute(file), None


def _absolute(text: str) -> Path:
    try:
        return Path(os.path.abspath(text))
    except FileNotFoundError:
        raise FileError(f"{text!r} is in no folder: the working folder has been removed") from None


def _compiled(path: Path) -> CodeType:
    try:
        kind = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise FileError(f"{path} does not exist; give a Python file that builds graphs") from None
    except OSError as error:
        raise FileError(f"{str(path)[:500]} cannot be read: {error.strerror or error}") from None
    if not stat.S_ISREG(kind):
        raise FileError(f"{path} is {'a folder' if stat.S_ISDIR(kind) else 'no regular file'}; give a Python file")
    try:
        source = path.read_bytes()
    except OSError as error:
        raise FileError(f"{path} cannot be read: {error.strerror or error}") from None
    if b"\0" in source:
        raise FileError(f"{path} is not Python source: it holds NUL bytes, as binary files do")
    try:
        return compile(source, str(path), "exec", dont_inherit=True)
    except SyntaxError as error:
        raise FileError(_syntax_error(error)) from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise FileError(f"{path} cannot be parsed as Python: {error or type(error).__name__}") from None


def _syntax_error(error: SyntaxError) -> str:
    lines = traceback.format_exception_only(error)
    place = f"{error.filename}:{error.lineno}" if error.lineno else str(error.filename)
    excerpt = "".join(line for line in lines[:-1] if not line.lstrip().startswith("File ")).rstrip()
    return f"{place}: {type(error).__name__}: {error.msg}" + (f"\n{excerpt}" if excerpt else "")


# --- running


@contextlib.contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Sends what is printed to stderr, also by C libraries and child processes."""
    kept = None
    with contextlib.suppress(OSError):  # a closed stdout needs no diversion
        sys.stdout.flush()
        kept = os.dup(1)
        os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)


@contextlib.contextmanager
def _first_on_path(folder: Path) -> Iterator[None]:
    entry = str(folder)
    sys.path.insert(0, entry)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError, AttributeError, TypeError):  # the file may have changed what is there
            sys.path.remove(entry)


@contextlib.contextmanager
def _blamed_on(path: Path) -> Iterator[None]:
    """Turns what the user's code raises into a FileError with the user's part of the traceback."""
    try:
        yield
    except FileError:
        raise
    except FusegraphError as error:
        frames = _own_frames(error.__traceback__, path)
        place = f"{frames[-1].filename}:{frames[-1].lineno}: " if frames else ""
        # The constructor of a user's own class may take anything.
        kind = type(error) if type(error).__module__ == FusegraphError.__module__ else FileError
        raise kind(f"{place}{error}") from None
    except KeyboardInterrupt:
        raise
    except SystemExit as error:
        raise FileError(
            f"{path} exits while it is imported (status {shown(error.code)}); "
            "put what is not for import under: if __name__ == '__main__'"
        ) from None
    except SyntaxError as error:  # of a module that the file imports, or of compile() in it
        raise FileError(f"{path} cannot be imported: {_syntax_error(error)}") from None
    except BaseException as error:  # a file may raise anything
        frames = _own_frames(error.__traceback__, path)
        trace = "".join(traceback.format_list(frames)).rstrip()
        what = "".join(traceback.format_exception_only(error)).rstrip()
        if isinstance(error, ModuleNotFoundError) and error.name in _EXTRAS:
            what += f"; install it with: pip install 'fusegraph[{_EXTRAS[error.name]}]'"
        lines = [f"{path} raised {type(error).__name__}", trace, what]
        raise FileError("\n".join(line for line in lines if line)) from None


def _own_frames(trace: TracebackType | None, path: Path) -> list[traceback.FrameSummary]:
    """Returns the frames in the user's file and in modules beside it, without fusegraph's, Python's and packages'."""
    ours = [Path(str(package.__file__)).parent for package in (fusegraph, codegen)]
    installed = [Path(sysconfig.get_path(key)) for key in ("stdlib", "purelib", "platlib")]

    def own(filename: str) -> bool:
        if filename == str(path):
            return True
        file = Path(filename)
        return file.is_relative_to(path.parent) and not any(file.is_relative_to(f) for f in (*ours, *installed))

    frames = [frame for frame in traceback.extract_tb(trace) if own(frame.filename)]
    return frames if len(frames) <= 12 else [*frames[:4], *frames[-8:]]


# --- choosing


def _candidates(module: ModuleType) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in list(vars(module).items())
        if _is_made(value) or (not name.startswith("_") and _returns_graph(value, module) and not _required(value))
    ]


def _selected(path: Path, module: ModuleType, name: str) -> tuple[str, Any]:
    if name not in vars(module):
        known = ", ".join(label for label, _ in _candidates(module)) or "none"
        raise FileError(f"{path} has no name {name!r}; graphs in it: {known}")
    value = vars(module)[name]
    if not _is_made(value) and not is_model(value) and not _is_function(value):
        raise FileError(
            f"{name!r} of {path} has type {type(value).__name__}; {_WANTED}, or a function that returns one"
        )
    if required := _required(value):
        raise FileError(
            f"function {name!r} of {path} cannot be called without arguments: {required[0]!r} has no default"
        )
    return name, value


def _graphs_of(path: Path, name: str, value: Any) -> list[Graph]:
    result = value if _is_made(value) or is_model(value) else value()
    if is_pygraph(result):
        return [from_cudnn(result)]
    if is_program(result) or is_model(result):
        return graphs_of(name, result)
    if not isinstance(result, Graph):
        raise FileError(f"function {name!r} of {path} returned {type(result).__name__}; {_WANTED}")
    return [result]


def _is_made(value: Any) -> bool:
    """Returns true if a value is a graph already, ours or another library's."""
    return isinstance(value, Graph) or is_pygraph(value) or is_program(value)


def _is_function(value: Any) -> bool:
    return inspect.isfunction(inspect.unwrap(value)) if callable(value) else False


def _returns_graph(value: Any, module: ModuleType) -> bool:
    """Tells whether a value is a function of the module that returns a Graph, by its annotation or else its text."""
    if not _is_function(value) or getattr(value, "__module__", None) != module.__name__:
        return False
    annotations = getattr(inspect.unwrap(value), "__annotations__", {})
    if "return" not in annotations:
        return _returns_what_it_makes(inspect.unwrap(value), module)
    annotation = annotations["return"]
    if not isinstance(annotation, str):
        return annotation is Graph or getattr(annotation, "__name__", "") == "ExportedProgram"
    try:
        return eval(annotation, vars(module)) is Graph or annotation.endswith("ExportedProgram")
    except Exception:  # a name that exists for type checkers only
        return annotation.rpartition(".")[2] in ("Graph", "ExportedProgram")


def _returns_what_it_makes(function: Any, module: ModuleType) -> bool:
    """Returns true if a function's text returns ``Graph(...)``, or a name that it binds to that.  Nothing is called."""
    tree = ast.parse(Path(str(module.__file__)).read_bytes())
    line, name = function.__code__.co_firstlineno, function.__name__
    named = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == name)
    node = next((n for n in named if line == min([n.lineno, *(d.lineno for d in n.decorator_list)])), None)
    if node is None:
        return False

    def makes(value: ast.expr | None) -> bool:
        if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name | ast.Attribute):
            return False
        try:
            return eval(ast.unparse(value.func), vars(module)) is Graph
        except Exception:  # a local name
            return False

    inner = [part for statement in node.body for part in _own_statements(statement)]
    made = {
        t.id
        for part in inner
        if isinstance(part, ast.Assign) and makes(part.value)
        for t in part.targets
        if isinstance(t, ast.Name)
    }
    returned = [part.value for part in inner if isinstance(part, ast.Return)]
    return any(makes(v) or (isinstance(v, ast.Name) and v.id in made) for v in returned)


def _own_statements(node: ast.AST) -> Iterator[ast.AST]:
    """Yields a statement and those in it, but not what belongs to functions and classes defined there."""
    yield node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
        for child in ast.iter_child_nodes(node):
            yield from _own_statements(child)


def _required(value: Any) -> list[str]:
    """Returns the names of a function's parameters without a default; none for a graph."""
    if not _is_function(value):
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in inspect.signature(value).parameters.values()
        if p.default is inspect.Parameter.empty and p.kind not in optional
    ]


def _near_misses(module: ModuleType) -> str:
    """Returns what to change if a function of the file would nearly do, as the end of a message; "" if none does."""
    for name, value in vars(module).items():
        if _returns_graph(value, module):
            if required := _required(value):
                return f"; function {name!r} needs a default for {', '.join(map(repr, required))}"
            return f"; function {name!r} is private: rename it, or select it with FILE:{name}"
    return ""


def _fingerprint(graph: Graph) -> tuple[Any, ...]:
    """Returns a key that two graphs share only if they are the same, down to the bytes of their constants."""
    tensors = tuple(
        (t.name, t.shape, t.strides, t.dtype.name, None if t.value is None else t.value.tobytes())
        for t in graph.tensors.values()
    )
    nodes = tuple(
        (n.op.name, tuple(t.name for t in n.inputs), repr(sorted(n.attributes.items())), n.name) for n in graph.nodes
    )
    ends = tuple(t.name for t in graph.inputs), tuple(t.name for t in graph.outputs)
    return graph.name, graph.io_dtype.name, graph.compute_dtype.name, tensors, nodes, ends
