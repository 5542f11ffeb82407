"""What two reports differ in: kernels, bytes and times."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fusegraph.report.explain import size_text, wrapped

Facts = Mapping[str, Any]


def differences(old: Facts, new: Facts, before: str, after: str) -> dict[str, Any]:
    """Returns how two reports differ as plain data: a title, and tables with ``title``, ``text``, ``heads``, ``rows``.

    Graphs are compared by name, kernels by the items that they compute: a kernel of the same items has changed if its
    code has.
    """
    tables = [_settings(old, new)]
    graphs = [{graph["name"]: graph for graph in facts["graphs"]} for facts in (old, new)]
    for name in dict.fromkeys([*graphs[0], *graphs[1]]):
        pair = [found.get(name) for found in graphs]
        if pair[0] is None or pair[1] is None:
            text = f"Only {after if pair[0] is None else before} has it."
            tables.append({"title": f"Graph {name}", "text": text, "heads": [], "rows": []})
        else:
            tables += [_sums(name, pair[0], pair[1]), _kernels(name, old, new, pair[0], pair[1])]
            tables.append(_decisions(name, pair[0], pair[1]))
    return {"title": f"From {before} to {after}", "tables": tables}


def _settings(old: Facts, new: Facts) -> dict[str, Any]:
    rows = [
        [what, *pair]
        for what, pair in {
            "fusegraph": [old["version"], new["version"]],
            "target": [old["target"]["name"], new["target"]["name"]],
            **{key: [old["options"].get(key), value] for key, value in new["options"].items()},
            "left to torch": [len(old["left"]), len(new["left"])],
        }.items()
        if pair[0] != pair[1]
    ]
    text = "" if rows else "Both were made with the same version and options, for the same target."
    return {"title": "Settings", "text": text, "heads": ["", "before", "after"], "rows": rows}


def _time(kernel: Facts) -> float:
    us = kernel["measured_us"]
    return float(kernel["estimated_us"] if us is None else us)


def _sums(name: str, old: Facts, new: Facts) -> dict[str, Any]:
    """Returns a graph's totals, before and after."""
    figures: list[tuple[str, Callable[[Facts], float], Callable[[Any], str]]] = [
        ("kernels", lambda g: len(g["kernels"]), str),
        ("bytes moved", lambda g: int(g["bytes_moved"]), size_text),
        ("time", lambda g: sum(map(_time, g["kernels"])), _us),
        ("floor", lambda g: sum(float(k["floor_us"]) for k in g["kernels"]), _us),
        ("workspace", lambda g: int(g["memory"]["workspace_bytes"]), size_text),
    ]
    rows = [[what, *map(show, (of(old), of(new))), _change(of(old), of(new))] for what, of, show in figures]
    return {"title": f"Graph {name}", "text": "", "heads": ["", "before", "after", "change"], "rows": rows}


def _us(time: float) -> str:
    return f"{time:.1f} us"


def _change(a: float, b: float) -> str:
    return "same" if a == b else f"{100 * (b / a - 1):+.1f} %" if a else "new"


def _kernels(name: str, old: Facts, new: Facts, a: Facts, b: Facts) -> dict[str, Any]:
    """Returns the kernels that differ, those first whose times differ the most."""
    before, after = _by_items(a), _by_items(b)
    rows: list[tuple[float, list[Any]]] = []
    for items in dict.fromkeys([*before, *after]):
        olds, news = before.get(items, []), after.get(items, [])
        for only in (*olds[len(news) :], *news[len(olds) :]):
            fresh = len(news) > len(olds)
            times = [None, f"{_time(only):.2f}"] if fresh else [f"{_time(only):.2f}", None]
            cells = [_number(only), _label(items), "new" if fresh else "gone", *times, only["schedule"]]
            rows.append((_time(only), cells))
        for x, y in zip(olds, news):
            if what := _changed(old["sources"][x["source"]], new["sources"][y["source"]], x, y):
                schedule = y["schedule"] if x["schedule"] == y["schedule"] else f"{x['schedule']} -> {y['schedule']}"
                cells = [_number(y), _label(items), what, f"{_time(x):.2f}", f"{_time(y):.2f}", schedule]
                rows.append((abs(_time(y) - _time(x)), cells))
    rows.sort(key=lambda row: -row[0])
    same = len(b["kernels"]) - sum(row[2] != "gone" for _, row in rows)
    return {
        "title": f"Kernels of {name}",
        "text": f"{same} of {len(b['kernels'])} kernels are the same. The largest differences in time come first.",
        "heads": ["kernel", "computes", "", "us before", "us after", "schedule"],
        "rows": [row for _, row in rows],
    }


def _by_items(graph: Facts) -> dict[tuple[str, ...], list[Facts]]:
    """Returns a graph's kernels by what they compute, as it is called in the model."""
    found: dict[tuple[str, ...], list[Facts]] = defaultdict(list)
    for kernel in graph["kernels"]:
        items = (graph["items"][row] for row in kernel["rows"])
        found[tuple(f"{item['scope'] or item['name']} {item['op']}" for item in items)].append(kernel)
    return found


def _changed(x: Facts, y: Facts, a: Facts, b: Facts) -> str:
    """Returns what differs in two kernels of the same items; "" if nothing does."""
    found = []
    if x["code"].replace(x["name"], "") != y["code"].replace(y["name"], ""):
        found.append("other schedule" if a["schedule"] != b["schedule"] else "other code")
    found += ["other bytes"] if a["bytes"] != b["bytes"] else []
    slower = _time(b) / max(_time(a), 1e-9)
    if not 0.98 < slower < 1.02:
        found.append("slower" if slower > 1 else "faster")
    return ", ".join(found)


def _number(kernel: Facts) -> str:
    return f"{kernel['number']} {kernel['family']}"


def _label(items: Sequence[str]) -> str:
    return "; ".join(items[:4]) + (f"; {len(items) - 4} more" if len(items) > 4 else "")


def _decisions(name: str, old: Facts, new: Facts) -> dict[str, Any]:
    """Returns the pairs that are fused in one report and not in the other, with the reasons."""
    verdicts = [
        {(d["producer"], d["consumer"]): (d["fused"], d["reason"]) for d in graph["decisions"]} for graph in (old, new)
    ]
    rows = [
        [f"{pair[0]} -> {pair[1]}", "fused" if now[0] else "not fused any more", now[1]]
        for pair, now in verdicts[1].items()
        if pair in verdicts[0] and verdicts[0][pair][0] != now[0]
    ]
    counts = [Counter(fused for fused, _ in found.values()) for found in verdicts]
    text = f"{counts[0][True]} pairs were fused before, {counts[1][True]} are after."
    return {"title": f"Decisions on {name}", "text": text, "heads": ["pair", "now", "reason"], "rows": rows}


def differences_text(found: Facts, width: int = 80) -> str:
    """Formats the result of `differences` as text."""
    lines = [str(found["title"])]
    for table in found["tables"]:
        lines += ["", table["title"]]
        lines += wrapped(table["text"], width, "  ") if table["text"] else []
        for row in table["rows"]:
            cells = ["-" if cell is None else str(cell) for cell in row]
            pairs = [f"{head} {cell}".strip() for head, cell in zip(table["heads"], cells)]
            lines += wrapped("; ".join(filter(None, pairs)), width, "  ", "      ")
    return "\n".join(lines) + "\n"
