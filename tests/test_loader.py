"""Finding graphs in a Python file."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fusegraph.errors import FileError, ShapeError
from fusegraph.loader import load_graphs

HEAD = "import fusegraph as fg\n"
MAKE = """
def made(name, size=4):
    graph = fg.Graph(name)
    graph.output(graph.exp(graph.tensor("a", (size,))), name="y")
    return graph
"""


def names(file: str) -> list[str]:
    return [graph.name for graph in load_graphs(file)]


def error(file: str) -> str:
    with pytest.raises(FileError) as caught:
        load_graphs(file)
    return str(caught.value)


# --- what is found


def test_graphs_and_functions_in_order(write):
    file = write(
        HEAD
        + MAKE
        + """
first = made("first")
def second() -> fg.Graph: return made("second")
def third(size: int = 3, *args, key=None, **more) -> "fg.Graph": return made("third", size)
_fourth = made("fourth")
def unannotated(): raise RuntimeError("must not be called")
def needs(size: int) -> fg.Graph: raise RuntimeError("must not be called")
def _private() -> fg.Graph: raise RuntimeError("must not be called")
def several() -> list[fg.Graph]: raise RuntimeError("must not be called")
class Net:
    def build(self) -> fg.Graph: raise RuntimeError("must not be called")
"""
    )
    assert names(file) == ["first", "second", "third", "fourth"]


def test_functions_without_annotation_that_return_what_they_make(write):
    file = write(
        HEAD
        + """
from fusegraph import Graph
def body(g):
    x = g.tensor("x", (2,))
    g.output(g.relu(x), name="y")
def first():
    g = fg.Graph("first")
    body(g)
    return g
def second(size=2):
    if size:
        graph = Graph("second"); body(graph)
        return graph
def other():
    def inner():
        g = Graph("inner")
        return g
    raise RuntimeError("must not be called")
def number():
    g = Graph("number")
    return len("must not be called")
def elsewhere() -> int:
    g = Graph("elsewhere")
    return g
def needs(size):
    g = Graph("needs")
    return g
"""
    )
    assert names(file) == ["first", "second"]


def test_annotations_as_text(write):
    file = write(
        "from __future__ import annotations\nfrom typing import TYPE_CHECKING\n"
        + HEAD
        + "if TYPE_CHECKING:\n    from fusegraph import Graph\n"
        + MAKE
        + """
def a() -> fg.Graph: return made("a")
def b() -> Graph: return made("b")
def c() -> Subgraph: raise RuntimeError("must not be called")
"""
    )
    assert names(file) == ["a", "b"]


def test_decorated_functions(write):
    file = write(
        "import functools\n" + HEAD + MAKE + "@functools.cache\ndef a() -> fg.Graph: return made('a')\n" + "b = a()\n"
    )
    assert names(file) == ["a"]


def test_each_graph_once(write):
    file = write(
        HEAD
        + MAKE
        + """
def build() -> fg.Graph: return made("net")
graph = build()
alias = graph
larger = made("net", 5)
"""
    )
    graphs = load_graphs(file)
    assert [(g.name, g.inputs[0].shape) for g in graphs] == [("net", (4,)), ("net", (5,))]


def test_constants_tell_graphs_apart(write):
    file = write(
        HEAD
        + """
def scaled(factor):
    graph = fg.Graph("net")
    graph.output(graph.tensor("a", (4,)) * factor, name="y")
    return graph
one, two, three = scaled(2.0), scaled(3.0), scaled(2.0)
"""
    )
    assert len(load_graphs(file)) == 2


def test_functions_of_other_files_are_not_called(write):
    write(HEAD + MAKE + "def elsewhere() -> fg.Graph: return made('elsewhere')\n", "parts_of_it.py")
    file = write(HEAD + "from parts_of_it import *\nfrom parts_of_it import elsewhere, made\ngraph = made('here')\n")
    before = list(sys.path)
    assert names(file) == ["here"]
    assert sys.path == before


def test_select_by_name(write):
    file = write(
        HEAD
        + MAKE
        + "a = made('first')\nb = made('second')\ndef _c(): return made('third')\ndef d(n): pass\ne = 5\nf = dict\n"
    )
    assert names(f"{file}:b") == ["second"]
    assert names(f"{file}:_c") == ["third"]
    assert "no name 'nothing'; graphs in it: a, b" in error(f"{file}:nothing")
    assert "'n' has no default" in error(f"{file}:d")
    assert "'e' of" in error(f"{file}:e")
    assert "has type int" in error(f"{file}:e")
    assert "has type type" in error(f"{file}:f")


def test_a_file_name_with_a_colon(write):
    file = write(HEAD + MAKE + "a, b = made('a'), made('b')\n", "x:b")
    assert names(file) == ["a", "b"]
    assert names(f"{file}:b") == ["b"]


def test_runs_like_a_script(write, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["prog", "--flag"])
    file = write(
        HEAD
        + MAKE
        + """
import sys, pathlib, dataclasses, pickle
assert sys.argv == ["prog", "--flag"]
assert sys.path[0] == str(pathlib.Path(__file__).parent)
@dataclasses.dataclass
class Size:
    value: "int"
assert pickle.loads(pickle.dumps(Size(3))) == Size(3)
assert __name__ != "__main__"
graph = made(pathlib.Path(__file__).name)
if __name__ == "__main__":
    raise RuntimeError("not for import")
"""
    )
    assert names(file) == ["graphs.py"]


def test_prints_go_to_stderr(write, capfd):
    file = write(
        HEAD
        + MAKE
        + "import os, sys\nprint('one', flush=True)\nos.write(1, b'two\\n')\nos.system('echo three')\n"
        + "def g() -> fg.Graph:\n    print('four')\n    return made('g')\n"
    )
    print("before")
    load_graphs(file)
    print("after", flush=True)
    out, err = capfd.readouterr()
    assert out.split() == ["before", "after"]
    assert sorted(err.split()) == ["four", "one", "three", "two"]


# --- what is refused


def test_no_file(tmp_path):
    assert f"{tmp_path}/none.py does not exist" in error(f"{tmp_path}/none.py")
    assert f"{tmp_path} is a folder" in error(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in error(f"{tmp_path}/pipe")


def test_unreadable(write, monkeypatch):
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    file = write("")
    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert error(file) == f"{file} cannot be read: Permission denied"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"\x7fELF\0\0\0\1", "it holds NUL bytes"),
        (b"a = 1\nb = = 2\n", "graphs.py:2: SyntaxError: invalid syntax\n    b = = 2"),
        (b"if True:\na = 1\n", "graphs.py:2: IndentationError: expected an indented block"),
        (b"a = '\xff\xfe'\n", "graphs.py"),
        (b"(" * 5000, "graphs.py"),
        (b"# coding: no-such-encoding\n", "no-such-encoding"),
        (b"\x89PNG\r\n\x1a\n", "graphs.py"),
        (b"Dear reader, this is a letter.\n", "graphs.py:1: SyntaxError"),
    ],
)
def test_no_python(write, text, expected):
    assert expected in error(write(text))


def test_traceback_is_the_users(write):
    write("def fail(value):\n    return {}[value]\n", "helper_that_fails.py")
    file = write(
        HEAD + "import json\nfrom helper_that_fails import fail\n"
        "def go():\n    json.loads('[1]', object_hook=None)\n    return fail('here')\ngo()\n"
    )
    message = error(file)
    assert f"{file} raised KeyError" in message
    assert message.endswith("KeyError: 'here'")
    assert "line 6, in go" in message
    assert "helper_that_fails.py" in message
    assert "loader.py" not in message


def test_traceback_leaves_libraries_out(write):
    message = error(write("import json\nvalue = json.loads('{')\n"))
    assert "line 2, in <module>" in message
    assert "JSONDecodeError" in message
    assert "decoder.py" not in message


def test_a_deep_recursion_is_shortened(write):
    message = error(write("def f(n):\n    return f(n + 1)\nf(0)\n"))
    assert "RecursionError" in message
    assert len(message.splitlines()) < 40


def test_graph_errors_keep_their_type_and_get_a_place(write):
    file = write(
        HEAD
        + "g = fg.Graph('net')\na, b = g.tensor('a', (3, 4)), g.tensor('b', (5,))\n\n"
        + "g.output(g.add(a, b, name='total'))\n"
    )
    with pytest.raises(ShapeError) as caught:
        load_graphs(file)
    assert str(caught.value).startswith(f"{file}:5: ")
    assert "'total'" in str(caught.value)


def test_exits_and_interrupts(write):
    assert "exits while it is imported (status 3)" in error(write("raise SystemExit(3)"))
    with pytest.raises(KeyboardInterrupt):
        load_graphs(write("raise KeyboardInterrupt"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class Stop(BaseException): pass\nraise Stop('all of it')\n", "raised Stop"),
        ("import asyncio\nraise asyncio.CancelledError\n", "raised CancelledError"),
        ("raise GeneratorExit\n", "raised GeneratorExit"),
        ("class Loud(Exception):\n    def __str__(self): raise ValueError\nraise Loud\n", "raised Loud"),
        ("class Two(fg.FusegraphError):\n    def __init__(self, a, b): super().__init__(a + b)\nraise Two('x', 'y')\n",
         "graphs.py:4: xy"),
        ("class Exit(SystemExit):\n    def __init__(self): self.code = self\n    def __repr__(self): 1/0\nraise Exit\n",
         "exits while it is imported"),
        ("import sys\nsys.path = None\nraise KeyError('late')\n", "raised KeyError"),
    ],
)  # fmt: skip
def test_whatever_a_file_raises(write, text, expected, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert expected in error(write(HEAD + text))


def test_syntax_error_in_a_module_beside_it(write):
    write("def (:\n", "broken_module_beside.py")
    message = error(write("import broken_module_beside\n"))
    assert "broken_module_beside.py:1: SyntaxError" in message


def test_function_that_returns_no_graph(write):
    message = error(write(HEAD + "def g() -> fg.Graph: return 5\n"))
    assert "function 'g' of" in message
    assert "returned int" in message


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("", "annotated '-> Graph'"),
        ("def g(n, m) -> fg.Graph: pass\n", "function 'g' needs a default for 'n', 'm'"),
        ("def _g() -> fg.Graph: pass\n", "select it with FILE:_g"),
    ],
)
def test_no_graph(write, text, hint):
    message = error(write(HEAD + text))
    assert "holds no graph: looked for" in message
    assert hint in message
