"""How commands plan graphs that they do not run."""

from __future__ import annotations

from fusegraph.engines.autotune import choosers
from fusegraph.engines.cuda import nvrtc_options
from fusegraph.engines.environment import check_environment
from fusegraph.engines.partitions import settling
from fusegraph.engines.plans import Planner, planner
from fusegraph.lowering.base import Options
from fusegraph.runtime.cache import default_cache
from fusegraph.runtime.targets import named, present


def planning(strict: bool, fusion: bool, target: str | None) -> tuple[Planner, Options]:
    """Returns what plans graphs for a target, by default the GPU, with what was measured on it, and its options."""
    check_environment()
    options = Options(strict=strict, target=present() if target is None else named(target))
    how = choosers(options.target, 0, None, default_cache(), nvrtc_options(options))
    planned = planner(fusion, how.first)
    if fusion and how.device_name is not None:
        planned = settling(planned, None, default_cache(), how.device_name)
    return planned, options
