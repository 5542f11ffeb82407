"""Fits the constants of cost models to measured schedules, and says how close the estimates are before and after.

fusegraph bench --suite schedules --json FILE    measures schedules on a GPU
python tools/fit_costs.py FILE                   fits the figures of its target that only measurements tell
python tools/fit_costs.py FILE --forms wgmma     fits the constants of a form's cost model (or "all"), which hold for
                                                 every target, instead
python tools/fit_costs.py FILE --forms all --choices
                                                 fits them so that the fastest schedules are chosen, however far off the
                                                 estimates are

Every second kernel is fitted to; the others tell whether the constants hold for what they were not fitted to.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from fusegraph.bench.results import columns
from fusegraph.bench.schedules.fit import (
    CONSTANTS,
    FIGURES,
    HEADS,
    Triple,
    Values,
    by_form,
    chosen,
    constants,
    fitted,
    triples,
)
from fusegraph.bench.schedules.run import read


def literal(before: Values, after: Values) -> list[str]:
    """Returns lines to paste: figures of the target, then constants by module; those that changed."""
    changed = {name: value for name, value in after.items() if value != before[name]}
    lines = [f"# {name} was {before[module, name]:g}" for module, name in changed if not module]
    figures = ", ".join(f"{name}={value:g}" for (module, name), value in changed.items() if not module)
    lines += [f"Target(..., {figures})"] if figures else []
    for module in dict.fromkeys(module for module, _ in changed if module):
        lines.append(f"# {module.replace('.', '/')}.py")
        lines += [f"{n} = {value:g}  # {before[m, n]:g}" for (m, n), value in changed.items() if m == module]
    return lines


def table(every: Sequence[Triple], target: object, before: Values, after: Values) -> list[str]:
    """Returns lines on how close the estimates are, before and after, of each form."""
    sides = [by_form(every, target, values) for values in (before, after)]
    return columns([[*HEADS, *HEADS[2:]], *([*old.cells, *new.cells[2:]] for old, new in zip(*sides))])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--forms", default="", help="names of forms, separated by commas; or all")
    parser.add_argument("--choices", action="store_true", help="fit what is chosen, not the times")
    given = parser.parse_args(arguments)
    target, rows = read(given.file)
    every = triples(rows)
    wanted = given.forms.split(",") if given.forms else []
    forms = [form for form in CONSTANTS if wanted == ["all"] or form.partition(" ")[2] in wanted]
    if wanted and not forms:
        parser.error(f"--forms: none of {', '.join(form.partition(' ')[2] for form in CONSTANTS)}")
    before = constants(target, forms, () if forms else FIGURES)
    used = [t for t in every if (t.form in forms if forms else t.form in CONSTANTS or t.form.startswith("rows"))]
    after = (chosen if given.choices else fitted)([t for t in used if t.kernel % 2 == 0], target, before)
    measured = sum(s["us"] is not None for _, schedules in rows for s in schedules)
    print(
        f"{len(every)} schedules of {len(rows)} kernels on {target.title}; {measured} were measured, others are no more"
    )
    print("before and after:\n")
    for name, some in (("fitted to", 0), ("held out", 1)):
        print(name)
        print("\n".join(table([t for t in used if t.kernel % 2 == some], target, before, after)) + "\n")
    print("\n".join(literal(before, after)) or "nothing changes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
