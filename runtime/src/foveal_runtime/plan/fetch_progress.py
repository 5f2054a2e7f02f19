"""Progress series of a download, which the pod of a fetch Job serves and the operator reads.

The one contract between main/download.py, which serves them, and the operator's probes, which read
them. They are no part of metrics.py's registry: no Prometheus is meant to scrape a pod that lives
for minutes. No I/O here.
"""

from __future__ import annotations

FETCHED_BYTES = "foveal_fetch_bytes"
FETCH_TOTAL_BYTES = "foveal_fetch_total_bytes"


def exposition(fetched_bytes: int, total_bytes: int) -> str:
    """Both series in Prometheus' text format; `total_bytes` 0 = not known."""
    return (
        f"# TYPE {FETCHED_BYTES} gauge\n{FETCHED_BYTES} {fetched_bytes}\n"
        f"# TYPE {FETCH_TOTAL_BYTES} gauge\n{FETCH_TOTAL_BYTES} {total_bytes}\n"
    )


def percent(fetched_bytes: int, total_bytes: int) -> int | None:
    """0 to 99 while it lasts; None while nobody knows how much there is to fetch."""
    if total_bytes <= 0:
        return None
    return min(99, max(0, 100 * fetched_bytes // total_bytes))
