"""A report as a picture: requests a second and time to first token, by trace and server.

    python -m e2e.bench.report.plot out/bench/RUN.json        # writes RUN.svg beside it

matplotlib is loaded only here, and only when a picture is made.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from e2e.bench.report.report import Report, loads
from e2e.bench.report.result import Result

PANELS: list[tuple[str, Callable[[Result], float]]] = [
    ("requests a second (more is better)", lambda r: r.requests_per_second),
    ("first token, p50 in ms (less is better)", lambda r: r.ttft_ms.get("p50", 0.0)),
    ("CPU seconds a request (less is better)", lambda r: r.total_cpu_seconds / r.num_requests),
]


def draw(report: Report, path: Path) -> None:
    """Writes an SVG or a PNG, as the path's suffix says. Bars are medians, whiskers all rounds."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "foveal"  # the same report gives the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        len(PANELS), 1, figsize=(max(6, 1.6 * len(report.traces) + 2), 3 * len(PANELS))
    )
    for axis, (title, value) in zip(axes, PANELS, strict=True):
        _bars(axis, report, value)
        axis.set_title(title, fontsize=10, loc="left")
    axes[0].legend(fontsize=8, ncols=3)
    model = Path(str(report.options.get("model", ""))).name
    figure.suptitle(f"{model}, {report.options.get('dtype', '')}, {report.date}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot.close(figure)


def _bars(axis: Any, report: Report, value: Callable[[Result], float]) -> None:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("--to", type=Path, help="default: an SVG beside the report")
    arguments = parser.parse_args()
    path = arguments.to or arguments.report.with_suffix(".svg")
    draw(loads(arguments.report.read_bytes()), path)
    print(path)


if __name__ == "__main__":
    main()
