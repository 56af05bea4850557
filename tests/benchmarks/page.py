"""``docs/benchmarks.md`` from the results: ``python tests/benchmarks/page.py``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.harness import ROOT, Figures, table

__all__ = ["PAGE", "RESULTS", "page", "write_page"]

RESULTS = Path(__file__).resolve().parent / "results"
PAGE = ROOT / "docs" / "benchmarks.md"

_HEAD = """# Benchmarks

This page is written by `make bench`. Each table was measured in one run on one machine, each
variant in fresh processes that take turns. Compare ratios within a table: other machines have
other seconds.

| column | |
|---|---|
| returned, touched | until the call returned; until a byte of each page was read too |
| CPU | of all threads of the process but the one that samples memory, until the last end |
| anonymous, resident | peak memory above the start; resident has mapped files' pages too |
| by read calls, from storage | what read calls gave (none for mapped files); what was not cached |
| read step, plan step | the steps of a load by its own report |
| / ... | the row's figure over the named row's; / floor: over the least that reading takes |

Under a table stand the claims about it: the limit, what was measured, and whether it is met.
"""


def page(results: list[Figures]) -> str:
    """The page's text."""
    parts = [_HEAD]
    for size, title in (("full", "At full size"), ("small", "At CI's size")):
        found = [result for result in results if result["size"] == size]
        if not found:
            continue
        parts.append(f"## {title}\n")
        if size == "small":
            parts.append("The claims are about full sizes: they are left out here.\n")
        for result in found:
            shown = result if size == "full" else {**result, "claims": []}
            parts.append(table(shown))
            about = ", ".join(f"{key} {value}" for key, value in result["machine"].items())
            parts.append(f"<small>{about}</small>\n")
    return "\n".join(parts)


def write_page() -> None:
    """Write it anew from everything under results/."""
    results = []
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text())
        found.setdefault("size", path.stem.rpartition("-")[2])
        results.append(found)
    PAGE.write_text(page(results))


if __name__ == "__main__":
    write_page()
