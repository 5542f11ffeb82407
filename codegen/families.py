"""The registry: every kernel family.  To add one, add a folder or a file, and a line here."""

from __future__ import annotations

from typing import Any

from codegen import (
    attention,
    contraction,
    direct_convolution,
    filter_gradient,
    pointwise,
    pool,
    rows,
    scan,
    scatter,
    sort,
    winograd,
)
from codegen.attention import backward
from codegen.family import Family, Form, Schedule
from codegen.rows import members
from codegen.spec import KernelSpec

FAMILIES: tuple[Family[Any], ...] = (
    pointwise.FAMILY,
    members.FAMILY,
    pool.FAMILY,
    rows.FAMILY,
    scan.FAMILY,
    sort.FAMILY,
    scatter.FAMILY,
    direct_convolution.FAMILY,
    filter_gradient.FAMILY,
    winograd.FAMILY,
    contraction.FAMILY,
    attention.FAMILY,
    backward.FAMILY,
)

_FAMILIES = {family.spec: family for family in FAMILIES}
FORMS = {form.schedule: form for family in FAMILIES for form in family.forms}


def family_of(spec: KernelSpec) -> Family[Any]:
    """Returns the family whose kernels compute a specification."""
    return _FAMILIES[type(spec)]


def form_of(schedule: Schedule) -> Form[Any, Any]:
    """Returns the form of kernels that a schedule belongs to."""
    return FORMS[type(schedule)]
