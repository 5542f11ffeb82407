"""README.md, docs and codegen/HOPPER.md are true: generated parts are current, commands and code run, CI does what it
tells people to do, links lead somewhere, mistakes are caught as told."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

import fusegraph as fg
from codegen import render, target
from codegen.contraction import wgmma_schedule as contraction_wgmma_schedule
from codegen.contraction.wgmma_layout import WgmmaSchedule
from fusegraph.cli import app
from fusegraph.engines.cpu import CpuExecutable, build_together
from fusegraph.errors import KernelError
from fusegraph.lowering.base import Options
from fusegraph.plan import plan
from fusegraph.report.check import check_executable

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = {path.name: path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))}
FRONT = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md", "codegen/HOPPER.md")
PAGES = [*(ROOT / name for name in FRONT), *(ROOT / "docs" / name for name in DOCS)]
HOPPER = (ROOT / "codegen" / "HOPPER.md").read_text()
CI = (ROOT / ".ci" / "run").read_text()
HOPPER_ARCH = target("sm_90a")
SOURCES = [file for package in ("fusegraph", "codegen") for file in (ROOT / package).rglob("*.py")]


def command(name: str) -> list[str]:
    """Returns the lines of one of the README's commands."""
    found = re.search(rf"<!-- command: {name} -->\n```sh\n(.*?)\n```", README, re.DOTALL)
    assert found is not None, name
    return found[1].splitlines()


@pytest.mark.slow
def test_generated_parts_are_current() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "readme.py"))
    pages = tool["pages"]()
    assert set(pages) == {ROOT / "README.md", ROOT / "codegen" / "HOPPER.md", *(ROOT / "docs" / name for name in DOCS)}
    shown: dict[Path, list[str]] = {}
    for path, text in pages.items():
        assert text == path.read_text(), "run python tools/readme.py"
        sections = shown[path] = re.findall(r"<!-- generated: ([\w-]+) -->", text)
        assert text.count("<!-- end -->") == len(sections)
        broken = re.sub(r"(<!-- generated: [\w-]+ -->\n).*?(?=<!-- end -->)", r"\1stale\n", text, flags=re.DOTALL)
        assert (broken != text) == bool(sections)
        assert tool["updated"](broken, tool["PAGES"][path](text)) == text
    hopper = shown.pop(ROOT / "codegen" / "HOPPER.md")
    assert sorted(hopper) == sorted(tool["PAGES"][ROOT / "codegen" / "HOPPER.md"](HOPPER))
    assert sorted(name for names in shown.values() for name in names) == sorted(tool["readme_makers"](""))
    assert tool["main"](["--check"]) == 0


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 200


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name if path.parent.name == "docs" else str(path.name))
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, heading = link.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.is_file(), link
        assert path in PAGES or path.suffix != ".md", f"{link} is no page"
        if heading:
            titles = re.findall(r"^#+ (.*)", path.read_text(), re.MULTILINE)
            assert heading in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles], link


def test_what_contributing_names_exists() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    paths = [
        name for name in re.findall(r"`([\w./-]+)`", text) if "/" in name and not re.search("NAME|FILE|FAMILY", name)
    ]
    assert len(paths) > 30
    for name in paths:
        assert (ROOT / name).exists(), name
    commits = re.findall(r"`([0-9a-f]{7})`", text)
    assert len(commits) >= 10
    known = subprocess.run(["git", "rev-parse", "--is-shallow-repository"], cwd=ROOT, capture_output=True, text=True)
    if known.stdout.strip() == "false":
        for commit in commits:
            assert subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT).returncode == 0, commit


def test_the_page_on_hopper_shows_the_whole_kernel() -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "hopper.py"))
    graph = tool["page_graph"](HOPPER)
    code = tool["hopper"](graph)
    cut = tool["parts"](code)
    assert "".join(cut.values()) == code
    shown = re.findall(r"<!-- generated: (\w+) -->", HOPPER)
    assert [name for name in shown if name in cut] == list(cut)
    (kernel,) = plan(graph).kernels
    assert tool["SCHEDULE"] in contraction_wgmma_schedule.schedules(kernel.group.lowered.spec, HOPPER_ARCH)
    with pytest.raises(ValueError, match="no line 'struct Shared'"):
        tool["parts"](code.replace("struct Shared", "struct Other"))


def damaged(before: str, after: str) -> CpuExecutable:
    """Returns a small product with a text of its kernel replaced.  Consumer 1 has no rows in the last row of tiles."""
    graph = fg.Graph("matmul_bias_gelu", io_dtype="bfloat16")
    x, w = graph.tensor("x", (264, 128)), graph.tensor("w", (128, 256))
    graph.output(graph.gelu(x @ w + graph.tensor("bias", (256,))), name="y")
    made = CpuExecutable(graph, Options(target=HOPPER_ARCH), lazy=True)
    assert made.plan is not None
    (kernel,) = made.plan.kernels
    spec = replace(kernel.group.lowered.spec, name=kernel.name)
    schedule = WgmmaSchedule(groups=2, tile_n=64, stages=4, split_k=1, raster_group=8, blocks=1)
    source = render(spec, schedule, HOPPER_ARCH)
    assert before in source.code
    source = replace(source, code=source.code.replace(before, after))
    made.plan = replace(made.plan, kernels=(replace(kernel, source=source),))
    made._plans[made._options.alignment] = made.plan
    return made


@pytest.mark.slow
def test_the_cpu_catches_the_mistakes_that_the_page_tells_of() -> None:
    sound, unfenced, uncounted, unannounced = made = [
        damaged("gelu", "gelu"),
        damaged("fence_async_shared();", ""),
        damaged("tma_commit();", "if (m0 + group * 64 < 264) tma_commit();"),
        damaged("barrier_expect(full, 24576);", "barrier_expect(full, 24560);"),
    ]
    build_together(made)
    assert check_executable(sound).ok
    page = re.sub(r"\d+", "N", " ".join(HOPPER.split()))
    with pytest.raises(KernelError) as raised:
        check_executable(unfenced)
    told = re.sub(r"\d+", "N", str(raised.value).partition("): ")[2])
    assert told.startswith("tma_store")
    assert told in page
    with pytest.raises(KernelError, match="16 bytes more than barrier_expect announced"):
        check_executable(unannounced)
    result = check_executable(uncounted)
    assert not result.ok
    message = "output 'y' depends on the order of threads: a barrier is missing"
    assert message in str(result)
    assert message in page


def test_ci_runs_the_readmes_test_command() -> None:
    steps = command("test")[-1].split(" && ")
    assert steps[0] == "python3 -m venv .venv"
    wanted = [re.sub(r"\.venv(/bin/\w+)?", r'"$folder/.venv\1"', step) for step in steps]
    written = [line for line in CI.splitlines() if line]
    places = [written.index(step) for step in wanted]
    assert places == sorted(places)
    assert places[-1] == len(written) - 1, "pytest's closing line comes last"


@pytest.mark.parametrize("name", ["main", "test", "needs"])
def test_commands_are_whole(name: str) -> None:
    lines = command(name)
    assert subprocess.run(["bash", "-n"], input="\n".join(lines), text=True).returncode == 0
    assert len(lines) == 1, "one line to copy"
    for word in " ".join(lines).split():
        if word.startswith("examples/"):
            assert (ROOT / word).is_file(), word


def test_ci_is_a_program_that_checks_what_it_should() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
    assert "set -euo pipefail" in CI
    assert '/python" tools/readme.py --check' in CI
    assert '/python" -m mkdocs build --strict --site-dir' in CI
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {re.split(r"[><=\[]", requirement)[0] for requirement in extras["test"]}
    names |= {re.split(r"[><=\[]", requirement)[0] for requirement in extras["docs"]}
    assert any("docs" in requirement for requirement in extras["test"])
    tools = {"ruff": "ruff", "mypy": "mypy", "mkdocs": "mkdocs-material", "pytest -n": "pytest-xdist"}
    for tool, package in tools.items():
        assert tool in CI
        assert package in names
    assert not {"cupy", "jax"} & names
    assert "torch==2.13.0" in extras["test"], "one release, not the newest with all that it brings"


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
@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "python.md",
        "gradients.md",
        "torch.md",
        "onnx.md",
        "training.md",
        "tutorial.md",
        "weights.md",
        "write-a-kernel.md",
    ],
)
def test_python_blocks_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"```python\n(.*?)```", {"README.md": README, **DOCS}[name], re.DOTALL)
    assert blocks
    monkeypatch.chdir(tmp_path)
    names = {"__name__": "readme"}
    for number, block in enumerate(blocks):
        # A block can be copied by itself, but where a page builds one kernel step by step.
        own = names if name == "write-a-kernel.md" else dict(names)
        exec(compile(block, f"{name}, Python block {number}", "exec"), own)
    assert not list(tmp_path.iterdir())


def test_python_blocks_are_known() -> None:
    run = {"python.md", "gradients.md", "torch.md", "onnx.md", "training.md", "tutorial.md"}
    run |= {"weights.md", "write-a-kernel.md"}
    assert {name for name, text in DOCS.items() if "```python\n" in text} == run


def test_paths_of_the_architecture_exist() -> None:
    tree = re.search(r"## Folders\n\n```\n(.*?)```", DOCS["architecture.md"], re.DOTALL)
    assert tree is not None
    lines = tree[1].splitlines()
    assert len(lines) <= 14
    folder = ROOT
    for line in lines:
        names = re.findall(r"\b[a-z_]+(?:/|\.py)", re.split(r"\s{3,}(?=[^\s.]+ )", line.strip())[0])
        assert names, line
        if not line.startswith(" "):
            folder = ROOT / names[0]
            names = ["."]
        for name in names:
            assert (folder / name).exists(), name
    packages = {p.name for p in (ROOT / "fusegraph").iterdir() if (p / "__init__.py").exists()}
    assert {p for p in packages if f"{p}/" not in tree[1]} == set()
    families = {p.name for p in (ROOT / "codegen").iterdir() if (p / "__init__.py").exists()}
    assert {p for p in families if f"{p}/" not in tree[1]} == set()


def test_the_reading_path_exists_and_is_short() -> None:
    path = re.findall(r"^\d+\. `([\w/.]+)`: ", DOCS["architecture.md"], re.MULTILINE)
    assert len(path) == 12
    assert sum(len((ROOT / name).read_text().splitlines()) for name in path) <= 5000


def test_environment_variables_are_all_there() -> None:
    named = set(re.findall(r"^\| `(FUSEGRAPH_\w+)`", DOCS["command-line.md"], re.MULTILINE))
    read = {
        variable for file in SOURCES for variable in re.findall(r"""["'](FUSEGRAPH_[A-Z_]+)["']""", file.read_text())
    }
    assert named == read


def test_commands_and_examples_are_all_there() -> None:
    for info in app.registered_commands:
        assert f"`{info.name}`" in DOCS["command-line.md"], info.name
    for file in (ROOT / "examples").glob("*.py"):
        assert f"| `{file.name}` |" in DOCS["tutorial.md"], file.name
