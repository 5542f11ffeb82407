"""What is known of kernels once they are compiled: registers, spills and shared memory."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from codegen.spec import KernelSource
from fusegraph.engines.cuda import nvrtc_options
from fusegraph.errors import CompileError, ToolchainError
from fusegraph.plan import Plan
from fusegraph.runtime import nvrtc
from fusegraph.runtime.cache import default_cache

#: Told of each kernel as it is done: its name, and how many there are.
Told = Callable[[str, int], None]


def compiled_facts(plans: Sequence[Plan], told: Told = lambda name, count: None) -> Mapping[str, Mapping[str, Any]]:
    """Compiles the kernels of plans with NVRTC, for their targets; returns what is known of each, by its code.

    Kernels that have been compiled before come from the cache.  Where they cannot be compiled, a warning says so, and
    nothing is known of any.
    """
    wanted: dict[tuple[str, tuple[str, ...]], dict[str, KernelSource]] = defaultdict(dict)
    for plan in plans:
        options = plan.steps.options
        wanted[options.target.arch.name, nvrtc_options(options)] |= {k.source.code: k.source for k in plan.every_kernel}
    count, found = sum(map(len, wanted.values())), dict[str, Mapping[str, Any]]()
    try:
        for (arch, flags), sources in wanted.items():
            made = nvrtc.compile_kernels(
                [*sources.values()],
                arch,
                cache=default_cache(),
                options=flags,
                progress=lambda source, _: told(source.name, count),
            )
            found |= {code: _facts(source, kernel) for (code, source), kernel in zip(sources.items(), made)}
    except (CompileError, ToolchainError) as error:
        warnings.warn(f"the report has no registers of kernels: {error}", stacklevel=2)
        return {}
    return found


def _facts(source: KernelSource, kernel: nvrtc.CompiledKernel) -> dict[str, Any]:
    return {
        "registers": kernel.registers,
        "spill_bytes": kernel.spill_bytes,
        "shared_bytes": kernel.shared_bytes + source.dynamic_shared_bytes,
    }
