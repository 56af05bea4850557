"""What columns are called in tables: words, and a unit behind them."""

from __future__ import annotations

__all__ = ["heading"]

_HEADINGS = {
    "returned_s": "returned, s",
    "touched_s": "touched, s",
    "cpu_s": "CPU, s",
    "child_cpu_s": "CPU, s",
    "read_s": "read step, s",
    "plan_s": "plan step, s",
    "seconds": "all types, s",
    "us_per_tensor": "µs a tensor",
    "cpu_us_per_tensor": "CPU µs a tensor",
    "anon_mib": "anonymous, MiB",
    "rss_mib": "resident, MiB",
    "minor_faults": "page faults",
    "gib": "weights, GiB",
    "file_gib": "file, GiB",
    "read_gib": "by read calls, GiB",
    "disk_gib": "from storage, GiB",
    "fetched_gib": "fetched, GiB",
    "rank_returned_s": "returned, s",
    "rank_touched_s": "touched, s",
    "rank_cpu_s": "CPU, s",
    "rank_anon_mib": "anonymous, MiB",
    "rank_gib": "weights, GiB",
    "read_gib_all": "by read calls, all, GiB",
    "disk_gib_all": "from storage, all, GiB",
    "ok": "plan ok",
}


def heading(column: str) -> str:
    """A column's name for people; one without words stays as it is."""
    return _HEADINGS.get(column, column)
