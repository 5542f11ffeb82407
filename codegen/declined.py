"""The exception by which a form, a family, a pass or a front end declines something, with the reason."""

from __future__ import annotations


class Declined(Exception):
    """Raised when something is not taken; the text is the reason, which users read in reports.

    Forms decline specs, families decline groups of nodes, passes decline what looks like their pattern but is not,
    front ends decline operators.  The caller catches it and tries what comes next.
    """
