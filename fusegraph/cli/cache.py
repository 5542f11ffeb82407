"""``fusegraph cache``: where compiled kernels and plans are kept, how much there is; removes them."""

from __future__ import annotations

from fusegraph.cli.console import print_json, say
from fusegraph.report.explain import count_text, size_text
from fusegraph.runtime.cache import default_cache


def look(action: str, *, as_json: bool) -> int:
    """Shows the cache ("show"), prints its bytes ("size"), or empties it ("clear"); returns 0.

    With ``as_json`` the object has ``folder`` (null without one), ``entries, bytes, limit_bytes``, and after "clear"
    the bytes ``freed``.
    """
    cache = default_cache()
    before = cache.size()
    if action == "clear":
        cache.clear()
    facts = {
        "folder": None if cache.folder is None else str(cache.folder),
        "entries": cache.count(),
        "bytes": cache.size(),
        "limit_bytes": cache.limit_bytes,
    }
    if as_json:
        print_json(facts | ({"freed": before - cache.size()} if action == "clear" else {}))
    elif action == "size":
        say(str(facts["bytes"]))
    elif action == "clear":
        say(f"{size_text(before - cache.size())} removed from {facts['folder'] or 'memory'}")
    else:
        used, most = size_text(cache.size()), size_text(cache.limit_bytes)
        say(f"{facts['folder'] or 'no folder'}: {count_text(cache.count(), 'file')}, {used} of at most {most}")
    return 0
