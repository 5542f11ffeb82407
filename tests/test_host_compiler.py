"""Finding a compiler, building once, and telling what went wrong."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import re
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from codegen.spec import KernelSource
from fusegraph.errors import CompileError, KernelError, ToolchainError
from fusegraph.runtime import host_compiler
from fusegraph.runtime.cache import DiskCache
from fusegraph.runtime.host_compiler import _optimization, build, find_compiler, host_threads


def add(step: str = "1") -> KernelSource:
    code = f'// add\n#include "types.cuh"\nextern "C" __global__ void add(int* y) {{\n  y[threadIdx.x] += {step};\n}}\n'
    return KernelSource("add", code, (1, 1, 1), (8, 1, 1))


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def cache(shared_folder: Path) -> DiskCache:
    return DiskCache(shared_folder)


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FUSEGRAPH_CXX", raising=False)
    monkeypatch.delenv("CXX", raising=False)


def fake_compiler(folder: Path, name: str, version: str = "fake 1.0") -> Path:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{version}'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


# ---- finding


def test_variables_come_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = fake_compiler(tmp_path, "first"), fake_compiler(tmp_path, "second")
    monkeypatch.setenv("FUSEGRAPH_CXX", f"{first} --some-flag")
    monkeypatch.setenv("CXX", str(second))
    assert find_compiler().command == (str(first), "--some-flag")
    monkeypatch.delenv("FUSEGRAPH_CXX")
    assert find_compiler().command == (str(second),)
    monkeypatch.delenv("CXX")
    for name in ("c++", "clang++", "g++"):  # each goes before the ones before
        fake_compiler(tmp_path, name)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert Path(find_compiler().command[0]).name == name


@pytest.mark.usefixtures("no_variables")
def test_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: DiskCache) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolchainError, match=r"looked for g\+\+, clang\+\+, c\+\+ .*apt install g\+\+"):
        build([add()], cache=cache)


@pytest.mark.parametrize("value", ["/nowhere/g++", "'unclosed"])
def test_variable_that_names_nothing(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FUSEGRAPH_CXX", value)
    with pytest.raises(ToolchainError, match="FUSEGRAPH_CXX"):
        find_compiler()


def test_compiler_that_does_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = fake_compiler(tmp_path, "broken")
    broken.write_text("#!/bin/sh\necho no licence >&2\nexit 3\n")
    monkeypatch.setenv("FUSEGRAPH_CXX", str(broken))
    with pytest.raises(ToolchainError, match="no licence"):
        find_compiler()


def test_a_new_compiler_at_the_same_path_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = fake_compiler(tmp_path, "changing")
    monkeypatch.setenv("FUSEGRAPH_CXX", str(path))
    before = find_compiler()
    fake_compiler(tmp_path, "changing", "fake 2.0 of another size")
    assert find_compiler() != before


@pytest.mark.parametrize("value", ["0", "-1", "many", "1.5", "²"])
def test_number_of_host_threads_is_checked(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", value)
    with pytest.raises(ToolchainError, match="FUSEGRAPH_CPU_THREADS"):
        host_threads()


def test_number_of_host_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUSEGRAPH_CPU_THREADS", "5")
    assert host_threads() == 5
    monkeypatch.delenv("FUSEGRAPH_CPU_THREADS")
    assert host_threads() == os.cpu_count()


# ---- building


def test_second_build_comes_from_the_disk(
    shared_folder: Path, monkeypatch: pytest.MonkeyPatch, cache: DiskCache
) -> None:
    assert not build([add("41")], cache=cache).cached
    monkeypatch.setattr(host_compiler, "_compile", _must_not_compile)
    module = build([add("41")], cache=DiskCache(shared_folder))
    assert module.cached
    y = np.zeros(8, np.int32)
    module.launch("add", [y.ctypes.data])
    assert (y == 41).all()
    with pytest.raises(AssertionError, match="compiles"):
        build([add("42")], cache=cache)


def _must_not_compile(*_: Any) -> bytes:
    raise AssertionError("compiles")


def test_key_changes_with_headers_flags_and_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Keys:
        seen: list[str] = []  # noqa: RUF012

        def get_or_build(self, key: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
            self.seen.append(key)
            raise LookupError

    def key() -> str:
        with pytest.raises(LookupError):
            build([add()], cache=Keys())
        return Keys.seen[-1]

    keys = [key(), key()]
    assert keys[0] == keys[1]
    header = tmp_path / "types.cuh"
    header.write_text("// another")
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "headers", lambda: [header])
        keys.append(key())
    with monkeypatch.context() as patch:
        patch.setattr(host_compiler, "_KERNEL_FLAGS", ("-O0",))
        keys.append(key())
    monkeypatch.setenv("FUSEGRAPH_CXX", str(fake_compiler(tmp_path, "other")))
    keys.append(key())
    assert len(set(keys)) == 4


def test_compile_error_keeps_source_and_log(cache: DiskCache) -> None:
    with pytest.raises(CompileError) as caught:
        build([add("undeclared_name")], cache=cache)
    text = str(caught.value)
    assert "kernels add" in text
    assert "add.cu:4" in text  # the line of the kernel's own code
    assert "undeclared_name" in text
    match = re.search(r"kept in (\S+)", text)
    assert match is not None
    folder = Path(match[1])
    assert "undeclared_name" in (folder / "unit.cpp").read_text()
    assert "add.cu:4" in (folder / "log.txt").read_text()
    shutil.rmtree(folder)


def test_errors_name_a_few_of_many_kernels(cache: DiskCache) -> None:
    kernels = [
        replace(add(), name=f"k{n}", code=add("undeclared_name").code.replace("add(", f"k{n}(")) for n in range(9)
    ]
    with pytest.raises(CompileError, match=r"of kernels k0, k1, k2, k3, k4, k5 and 3 more \(exit status") as caught:
        build(kernels, cache=cache)
    match = re.search(r"kept in (\S+)", str(caught.value))
    assert match is not None
    shutil.rmtree(match[1])
    module = build([replace(k, code=k.code.replace("undeclared_name", "1")) for k in kernels], cache=cache)
    with pytest.raises(KernelError, match=r"the module has k0, k1, k2, k3, k4, k5 and 3 more$"):
        module.launch("add", [0])


def test_damaged_library_is_a_toolchain_error(cache: DiskCache) -> None:
    class Damaged:
        def get_or_build(self, key: str, build: Callable[[], bytes]) -> tuple[bytes, bool]:
            return (b"not a library", True)

    build([add()], cache=cache)  # the runtime is loaded: the kernels' library is the damaged one
    with pytest.raises(ToolchainError, match="library of add cannot be loaded"):
        build([add()], cache=Damaged())


def test_no_temporary_files_are_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: DiskCache) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    module = build([add("77")], cache=cache)
    assert not module.cached
    assert list(tmp_path.iterdir()) == []


def test_a_temporary_folder_that_takes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: DiskCache
) -> None:
    """Not a defect, nor an error of stdout, which the command line takes any other failure of writing for."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "removed"))
    with pytest.raises(ToolchainError, match="No such file or directory; name another one in TMPDIR"):
        build([add("78")], cache=cache)
    monkeypatch.undo()
    build([add("77")], cache=cache)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "removed"))
    with pytest.raises(ToolchainError, match="name another one in TMPDIR"):
        build([add("77")], cache=cache)  # from the cache, to be loaded

    def full(*_: Any, **__: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(ToolchainError, match="No space left on device; name another one in TMPDIR"):
        build([add("79")], cache=cache)


def test_module_is_unloaded_when_forgotten(cache: DiskCache) -> None:
    def loaded() -> int:
        return len(
            {line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line}
        )

    build([add()], cache=cache)
    gc.collect()
    before = loaded()
    modules = [build([add()], cache=cache) for _ in range(5)]
    assert loaded() == before + 5
    y = np.zeros(8, np.int32)
    for module in modules:
        module.launch("add", [y.ctypes.data])
    assert (y == 5).all()
    del module, modules
    gc.collect()
    assert loaded() == before


# ---- launch arguments


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ([], {}, "takes 1 arguments; 0 were given"),
        ([1.5], {}, "argument 0 is a float"),
        ([ctypes.c_int(1)], {}, "argument 0 has 4 bytes, the parameter 8"),
        ([1 << 64], {}, "argument 0 is 18446744073709551616"),
        ([0], {"block": (1025, 1, 1)}, "block"),
        ([0], {"block": (1, 1, 65)}, "block"),
        ([0], {"block": (0, 1, 1)}, "block"),
        ([0], {"grid": (1, 65536, 1)}, "grid"),
        ([0], {"grid": (-1, 1, 1)}, "grid"),
        ([0], {"shared_bytes": 227 * 1024 + 1}, "dynamic shared memory"),
        ([0], {"order": "random"}, "order"),
    ],
)
def test_launch_refuses(cache: DiskCache, args: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(KernelError, match=message):
        build([add()], cache=cache).launch(0, args, **options)


def test_launch_refuses_unknown_kernels(cache: DiskCache) -> None:
    module = build([add()], cache=cache)
    with pytest.raises(KernelError, match="0 kernels are called 'sub'; the module has add"):
        module.launch("sub", [0])
    for index in (1, -1):
        with pytest.raises(KernelError, match="of a module of 1"):
            module.launch(index, [0])


def test_empty_grid_launches_nothing(cache: DiskCache) -> None:
    build([add()], cache=cache).launch(0, [0], grid=(0, 1, 1))


def test_only_kernels_of_many_threads_are_optimised() -> None:
    few, some, many = (replace(add(), grid=(blocks, 1, 1)) for blocks in (1, 16384, 65536))
    assert [_optimization([k]) for k in (few, some, many)] == ["-O0", "-Og", "-O2"]
    assert _optimization([replace(few, grid=(4096, 1, 1), uses_barriers=True)]) == "-O2"
    assert _optimization([some] * 40 + [many]) == "-Og", "compiling the others well would take longer"
