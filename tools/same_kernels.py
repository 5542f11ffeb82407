"""Compares the kernels of two commits, to check that a change leaves them as they are.

python tools/same_kernels.py BASE                 the commit BASE and the working tree
python tools/same_kernels.py BASE HEAD --arch sm_90a --only '^conv'

Every workload of the benchmarks, the torch models and the examples is planned and rendered at both, for sm_80, sm_90a
and sm_120.  Kernels are compared in the order in which they run: launch, source and headers; if these differ, also
the cubins, with the kernel renamed to one name.  "identical" means the same text, "renamed" another text but the same
cubin, "with less shared memory" the same cubin launched with fewer bytes of it, "changed" another cubin or launch.
Needs no GPU.  Exits with 1 if a kernel changed, is missing or is new.
"""

from __future__ import annotations

import argparse
import difflib
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ARCHS = ("sm_80", "sm_90a", "sm_120")
#: The type of an ELF section that has no content in the file.
NO_BITS = 8
#: A kernel as LISTING prints it: name, code, headers by name, and launch parameters.
Kernel = dict[str, Any]

#: Runs in each tree: prints a line of JSON for every workload and architecture.  Modules that moved are tried at both
#: places.
LISTING = r"""
import dataclasses, json, re, sys
from pathlib import Path
from fusegraph.loader import load_graphs
from fusegraph.lowering.base import Options
from fusegraph.plan import by_cost_model, plan
import codegen
from codegen import target
try:
    from fusegraph.bench.workloads import SUITES
except ImportError:
    from benchmarks.workloads import SUITES
try:
    from benchmarks import torch_models
except ImportError:
    from fusegraph.bench import torch_models

archs, only, share, shares = sys.argv[1].split(","), re.compile(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
device = Path(codegen.__file__).parent / "device"


def made_for(graph, machine):
    try:
        return plan(graph, Options(target=machine))
    except TypeError:
        return plan(graph, choose=by_cost_model(machine))


def graphs():
    for suite, make in SUITES.items():
        for workload in make():
            yield f"{suite}: {workload.name}", lambda w=workload: [w.graph()]
    for file in sorted(Path("examples").glob("*.py")):
        yield f"examples: {file.name}", lambda f=file: [getattr(x, "graph", x) for x in load_graphs(str(f))]
    for model in torch_models.MODELS:
        yield f"torch: {model.name}", lambda m=model: of_torch(m)


def of_torch(model):
    import torch
    from fusegraph.frontends.torch.exported import import_module
    from torch._subclasses import FakeTensorMode
    with FakeTensorMode(allow_non_fake_inputs=True):
        made, x = model.module(torch.bfloat16), model.input(torch.bfloat16)
    return import_module(made, x, name=model.name).graphs


def headers(code):
    found, pending = {}, re.findall(r'#include "(.*?)"', code)
    while pending:
        name = pending.pop()
        if name not in found and (device / name).exists():
            found[name] = (device / name).read_text()
            pending += re.findall(r'#include "(.*?)"', found[name])
    return found


for number, (name, make) in enumerate(graphs()):
    if number % shares != share or not only.search(name):
        continue
    try:
        made = [g for g in make() if g is not None]
    except Exception as error:
        print(json.dumps({"workload": name, "arch": "", "error": f"{type(error).__name__}: {error}"}), flush=True)
        continue
    for arch in archs:
        try:
            kernels = []
            for graph in made:
                for k in made_for(graph, target(arch)).kernels:
                    s = k.source
                    launch = {f.name: repr(getattr(s, f.name)) for f in dataclasses.fields(s)}
                    del launch["name"], launch["code"]
                    kernels.append({"name": s.name, "code": s.code, "headers": headers(s.code), "launch": launch})
            line = {"workload": name, "arch": arch, "kernels": kernels}
        except Exception as error:
            line = {"workload": name, "arch": arch, "error": f"{type(error).__name__}: {error}"}
        print(json.dumps(line), flush=True)
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit")
    parser.add_argument("head", nargs="?", help="another one; without it the tree as it is")
    parser.add_argument("--arch", action="append", choices=ARCHS, help="architectures (default: all)")
    parser.add_argument("--only", default="", metavar="REGEX", help="workloads whose names match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    archs = given.arch or list(ARCHS)
    with tempfile.TemporaryDirectory() as folder:
        trees = [_tree(commit, Path(folder) / which) for which, commit in (("base", given.base), ("head", given.head))]
        try:
            before, after = (_listed(tree, archs, given.only, given.jobs) for tree in trees)
        finally:
            for tree in trees:
                if tree != ROOT:
                    subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)
    return _compare(before, after, given.jobs)


def _tree(commit: str | None, folder: Path) -> Path:
    """Checks a commit out into a folder and returns it; without a commit, returns the working tree."""
    if commit is None:
        return ROOT
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, commit], cwd=ROOT, check=True)
    return folder


def _listed(tree: Path, archs: Sequence[str], only: str, jobs: int) -> dict[tuple[str, str], Any]:
    """Returns (workload, architecture) -> kernels of a tree, or the text of an error."""
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    running = [
        subprocess.Popen(
            [sys.executable, "-c", LISTING, ",".join(archs), only, str(n), str(jobs)],
            cwd=tree, env=environment, stdout=subprocess.PIPE, text=True,
        )
        for n in range(jobs)
    ]  # fmt: skip
    found: dict[tuple[str, str], Any] = {}
    with ThreadPoolExecutor(jobs) as pool:  # all are read at once, as a full pipe blocks its writer
        for output in pool.map(_output, running):
            for line in output.splitlines():
                one = json.loads(line)
                found[one["workload"], one["arch"]] = one["error"] if "error" in one else one["kernels"]
    return found


def _output(process: subprocess.Popen[str]) -> str:
    text, _ = process.communicate()
    if process.returncode:
        raise SystemExit(f"listing kernels ended with {process.returncode}")
    return text


def _compare(before: Mapping[tuple[str, str], Any], after: Mapping[tuple[str, str], Any], jobs: int) -> int:
    counts: Counter[str] = Counter()
    unequal: list[tuple[tuple[str, str], Kernel, Kernel]] = []
    for key in sorted(set(before) | set(after)):
        a, b = before.get(key), after.get(key)
        if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for x, y in zip(a, b):
                if x == y:
                    counts["identical"] += 1
                else:
                    unequal.append((key, x, y))
        elif a == b:
            counts["refused by both"] += 1
        else:
            counts["workloads with other kernels"] += 1
            print(f"{_called(key)}: {_told(a)} before, {_told(b)} now")
    with ProcessPoolExecutor(jobs) as pool:
        cubins = pool.map(_both, [(key[1], x, y) for key, x, y in unequal])
        for (key, x, y), same in zip(unequal, cubins):
            what = _compared(x, y) if same else "changed"
            counts[what] += 1
            if what == "changed":
                print(f"{_called(key)}: {x['name']} changed")
                print("\n".join(f"    {line}" for line in list(_difference(x, y))[:24]))
    print(", ".join(f"{n} {what}" for what, n in sorted(counts.items())) or "no kernels")
    return int(bool(counts["changed"] or counts["workloads with other kernels"]))


def _compared(x: Kernel, y: Kernel) -> str:
    """Returns what a kernel of the same cubin is called, by its launch."""
    if x["launch"] == y["launch"]:
        return "renamed"
    before, after = (int(one["launch"]["dynamic_shared_bytes"]) for one in (x, y))
    alike = {**x["launch"], "dynamic_shared_bytes": str(after)} == y["launch"]
    return "with less shared memory" if alike and after < before else "changed"


def _called(key: tuple[str, str]) -> str:
    return " ".join(part for part in key if part)


def _told(found: Any) -> str:
    if found is None:
        return "nothing"
    return f"kernels {', '.join(k['name'] for k in found)}" if isinstance(found, list) else str(found)


def _difference(x: Kernel, y: Kernel) -> Iterator[str]:
    """Yields the difference of launches and sources; if there is none, the names of headers that differ."""
    texts = [[*(f"{k}: {v}" for k, v in one["launch"].items()), *one["code"].splitlines()] for one in (x, y)]
    lines = [line for line in difflib.unified_diff(*texts, lineterm="", n=1) if not line.startswith(("---", "+++"))]
    yield from lines
    if not lines:
        yield f"headers: {', '.join(n for n in x['headers'] if x['headers'][n] != y['headers'].get(n))}"


def _both(given: tuple[str, Kernel, Kernel]) -> bool:
    """Tells whether two kernels have the same cubin."""
    arch, x, y = given
    return _cubin(arch, x) == _cubin(arch, y)


def _cubin(arch: str, kernel: Kernel) -> dict[str, str]:
    """Returns hashes of a kernel's machine code and constants by ELF section, with the kernel renamed to a fixed name.

    Symbols, and the addresses of unused variables of headers, are left out.
    """
    from cuda.bindings import nvrtc

    from fusegraph.runtime.nvrtc import BASE_OPTIONS

    code = re.sub(rf"\b{re.escape(kernel['name'])}\b", "kernel_of_both", kernel["code"])
    headers = kernel["headers"]
    names, texts = [n.encode() for n in headers], [t.encode() for t in headers.values()]
    _, program = nvrtc.nvrtcCreateProgram(code.encode(), b"kernel.cu", len(names), texts, names)
    options = [o.encode() for o in (*BASE_OPTIONS, f"--gpu-architecture={arch}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != 0:
        raise SystemExit(f"{kernel['name']} for {arch} does not compile")
    _, size = nvrtc.nvrtcGetCUBINSize(program)
    cubin = b" " * size
    nvrtc.nvrtcGetCUBIN(program, cubin)
    return {
        name: hashlib.sha256(content).hexdigest()
        for name, content in _sections(cubin)
        if name.startswith((".text.", ".nv.shared.", ".nv.constant")) and not name.startswith(".nv.constant4")
    }


def _sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yields (name, contents) of the sections of a 64-bit ELF file; the size of those without contents."""
    (start,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, named = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, start + n * size) for n in range(count)]
    for name, kind, _, _, offset, length in headers:
        begin = headers[named][4] + name
        content = str(length).encode() if kind == NO_BITS else elf[offset : offset + length]
        yield elf[begin : elf.index(b"\0", begin)].decode(), content


if __name__ == "__main__":
    sys.exit(main())
