"""README.md is true: generated parts are current, commands and code run, CI does what it tells people to do."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from fusegraph.cli import app

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()
SOURCES = [file for package in ("fusegraph", "codegen") for file in (ROOT / package).rglob("*.py")]


def command(name: str) -> list[str]:
    """The lines of one of the README's commands."""
    found = re.search(rf"<!-- command: {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
    assert found is not None, name
    return found[1].splitlines()


def test_generated_parts_are_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "readme.py"))
    assert tool["updated"](README) == README, "run python tools/readme.py"
    assert tool["main"](["--check"]) == 0
    assert README.count("<!-- generated:") == README.count("<!-- end -->") == 5
    assert "__global__" in README
    assert tool["updated"](README.replace("sigmoid", "sigmoidal")) != README.replace("sigmoid", "sigmoidal")


def test_ci_runs_the_readmes_test_command() -> None:
    steps = command("test")[-1].split(" && ")
    assert steps[0] == "python3 -m venv .venv"
    wanted = [re.sub(r"\.venv(/bin/\w+)?", r'"$folder/.venv\1"', step) for step in steps]
    written = [line for line in CI.splitlines() if line]
    places = [written.index(step) for step in wanted]
    assert places == sorted(places)
    assert places[-1] == len(written) - 1, "pytest's closing line comes last"


@pytest.mark.parametrize("name", ["main", "test"])
def test_commands_are_whole(name: str) -> None:
    lines = command(name)
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True).returncode == 0
    assert lines[0] == command("main")[0]
    for word in " ".join(lines).split():
        if word.startswith("examples/"):
            assert (ROOT / word).is_file(), word


def test_ci_is_a_program_that_checks_what_it_should() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
    assert "set -euo pipefail" in CI
    assert '/python" tools/readme.py --check' in CI
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[><=\[]", requirement)[0] for requirement in extras["test"]}
    for tool, package in (("ruff", "ruff"), ("mypy", "mypy"), ("pytest -n", "pytest-xdist")):
        assert tool in CI
        assert package in names
    assert not {"torch", "cupy", "jax"} & names


def test_what_ci_says_where_something_is_missing(tmp_path: Path) -> None:
    """With a PATH that has everything but a compiler, and then not even a Python with venv."""
    for tool in ("bash", "dirname", "env"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    python = tmp_path / "python3"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    environment = {"PATH": str(tmp_path), "HOME": os.environ.get("HOME", "/")}
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "apt install g++" in done.stderr
    python.write_text("#!/bin/sh\necho Python 3.9.2\nexit 1\n")
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs Python 3.11 or newer with venv, found Python 3.9.2" in done.stderr


@pytest.mark.slow
def test_python_blocks_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert len(blocks) >= 3
    monkeypatch.chdir(tmp_path)
    for number, block in enumerate(blocks):
        exec(compile(block, f"README.md, Python block {number}", "exec"), {"__name__": "readme"})
    assert not list(tmp_path.iterdir())


def test_paths_of_the_architecture_exist() -> None:
    tree = re.search(r"## Architecture\n\n```\n(.*?)```", README, re.DOTALL)
    assert tree is not None
    lines = tree[1].splitlines()
    assert len(lines) <= 12
    folder = ROOT
    for line in lines:
        names = re.findall(r"\b[a-z]+(?:/|\.py)", re.split(r"\s{3,}(?=[^\s.]+ )", line.strip())[0])
        assert names, line
        if not line.startswith(" "):
            folder = ROOT / names[0]
            names = ["."]
        for name in names:
            assert (folder / name).exists(), name
    packages = {p.name for p in (ROOT / "fusegraph").iterdir() if (p / "__init__.py").exists()}
    assert {p for p in packages if f"{p}/" not in tree[1]} == set()


def test_environment_variables_are_all_there() -> None:
    named = set(re.findall(r"^\| `(FUSEGRAPH_\w+)`", README, re.MULTILINE))
    read = {
        variable for file in SOURCES for variable in re.findall(r"""["'](FUSEGRAPH_[A-Z_]+)["']""", file.read_text())
    }
    assert named == read


def test_commands_and_examples_are_all_there() -> None:
    for info in app.registered_commands:
        assert f"`{info.name}`" in README, info.name
    for file in (ROOT / "examples").glob("*.py"):
        assert f"| `{file.name}` |" in README, file.name
