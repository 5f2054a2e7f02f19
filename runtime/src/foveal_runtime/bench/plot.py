"""A plot of a report: requests a second and time to first token, by trace and server.

matplotlib is loaded only here, and only when a plot is made; the extra `bench` installs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from foveal_runtime.bench.report import Report
from foveal_runtime.bench.result import RunResult
from foveal_runtime.plan.errors import StartupError

PANELS: list[tuple[str, Callable[[RunResult], float]]] = [
    ("requests a second (more is better)", lambda r: r.requests_per_second),
    ("first token, p50 in ms (less is better)", lambda r: r.ttft_ms.get("p50", 0.0)),
    ("CPU seconds a request (less is better)", lambda r: r.total_cpu_seconds / r.num_requests),
]


FORMATS = (".png", ".svg")


def check(path: Path) -> None:
    """Raises StartupError when no plot could be written there: before anything is measured."""
    if path.suffix not in FORMATS:
        raise StartupError(f"--plot {path}: end its name with .png or .svg")
    if find_spec("matplotlib") is None:
        raise StartupError("--plot needs matplotlib: pip install 'foveal-runtime[bench]'")


def draw(report: Report, path: Path) -> None:
    """Writes an SVG or a PNG, as the path's suffix says. Bars are medians, whiskers all rounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "foveal"  # the same report gives the same file
    from matplotlib import pyplot

    panels = PANELS if any(result.cpu_seconds for result in report.results) else PANELS[:-1]
    figure, axes = pyplot.subplots(
        len(panels), 1, figsize=(max(6, 1.6 * len(report.traces) + 2), 3 * len(panels))
    )
    for axis, (title, value) in zip(axes, panels, strict=True):
        _bars(axis, report, value)
        axis.set_title(title, fontsize=10, loc="left")
    axes[0].legend(fontsize=8, ncols=3)
    model = Path(str(report.options.get("model") or report.servers[0].model)).name
    parts = (model, str(report.options.get("dtype", "")), report.date)
    title = ", ".join(part for part in parts if part)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _bars(axis: Any, report: Report, value: Callable[[RunResult], float]) -> None:
    traces, names = report.traces, report.names
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        middles, below, above = [], [], []
        for trace in traces:
            values = [value(result) for result in report.of(trace, name)] or [0.0]
            middle = statistics.median(values)
            middles.append(middle)
            below.append(middle - min(values))
            above.append(max(values) - middle)
        places = [i - 0.4 + width * (index + 0.5) for i in range(len(traces))]
        axis.bar(places, middles, width, yerr=[below, above], capsize=2, label=name)
    axis.set_xticks(range(len(traces)), traces)
    axis.grid(axis="y", alpha=0.3)
