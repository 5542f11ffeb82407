"""Filter gradients of convolutions with few channels and filters a group, depthwise ones above all."""

from __future__ import annotations

from codegen.family import Family, Form
from codegen.filter_gradient import schedule
from codegen.filter_gradient.renderer import render
from codegen.filter_gradient.schedule import FilterGradientSchedule
from codegen.filter_gradient.spec import FilterGradientSpec

FAMILY = Family(
    "filter_gradient",
    FilterGradientSpec,
    (Form("patches", FilterGradientSchedule, schedule.schedules, render, cost=schedule.cost),),
)
