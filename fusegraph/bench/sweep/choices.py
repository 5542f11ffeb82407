"""Both sides of the choices of a slow case, estimated and measured."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fusegraph.engines.cuda import nvrtc_options
from fusegraph.engines.partitions import DeviceClock, PartitionTuner
from fusegraph.engines.plans import planner
from fusegraph.plan import Plan
from fusegraph.report.explain import describe_choice
from fusegraph.runtime.cache import default_cache

#: The seconds in which the choices of a graph are timed.
LIMIT_S = 20.0


def timed(plans: Iterable[Plan]) -> list[dict[str, Any]]:
    """Returns the choices of plans of which both sides could be timed, as `describe_choice`."""
    found = []
    for plan in plans:
        options, how = plan.steps.options, planner(True, None)
        clock = DeviceClock(options.target, default_cache(), nvrtc_options(options))
        settled = PartitionTuner(how, clock, limit_s=LIMIT_S).tune(plan.graph, options)
        made = how(plan.graph, replace(options, settled=settled)) if settled else plan
        found += [describe_choice(choice, options.target) for choice in made.choices if choice.us]
    return found
