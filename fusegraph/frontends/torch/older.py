"""What older releases of torch trace otherwise, so that graphs that they trace hold for all sizes, too."""

from __future__ import annotations

from typing import Any

from torch import _meta_registrations as registrations


def _floor_division(x: Any, y: Any) -> Any:
    return x // y


def round_down_without_guards() -> None:
    """Lets pooling's shape rule divide sizes without a guard on the remainder.

    Before torch 2.13 it asks whether the remainder is 0, to correct a quotient that is rounded down already.  Each
    remainder would be traced and compiled apart, and `mark_dynamic` refused.
    """
    if hasattr(registrations, "div_rtn"):
        registrations.div_rtn = _floor_division
