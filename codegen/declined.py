"""The one way to say no: what a form, a family, a pass or a front door does not take, and why."""

from __future__ import annotations


class Declined(Exception):
    """Something is not taken; the text is the reason, which users read in reports.

    Forms decline specs, families decline groups of nodes, passes decline what looks like a pattern and is none, front
    doors decline operators.  Who asks catches it, and tries what comes next.
    """
