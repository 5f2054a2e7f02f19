"""The pictures of docs/concepts/scale.md, as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from e2e.bench.simulation.fleet import Hour
from e2e.bench.simulation.limits import Break

NAMES = {"ipc": "value cache", "encoder": "encoder cache", "prefix": "prefix cache"}
_STYLE: Any = {"svg.hashsalt": "foveal", "font.size": 9, "axes.spines.top": False,
          "axes.spines.right": False}  # fmt: skip


def _save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    text = path.read_text()
    path.write_text("\n".join(line.rstrip() for line in text.splitlines()) + "\n")


def draw_day(hours: Sequence[Hour], path: Path) -> None:
    """Hits, bytes, messages and waiting through the day."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 6), layout="constrained")
        axes = figure.subplots(2, 2, sharex=True)
        x = [hour.hour for hour in hours]
        for cache, name in NAMES.items():
            axes[0, 0].plot(x, [100 * hour.hits[cache] for hour in hours], label=name)
        axes[0, 0].set(title="Hits", ylabel="%", ylim=(0, 100))
        axes[0, 1].plot(x, [h.value_bytes_per_second / 1e6 for h in hours], label="values")
        axes[0, 1].plot(x, [h.control_bytes_per_second / 1e6 for h in hours], label="control")
        axes[0, 1].set(title="On the wire, whole fleet", ylabel="MB/s")
        axes[1, 0].plot(x, [h.engine_messages_per_second for h in hours], label="each engine sends")
        axes[1, 0].plot(x, [h.frontend_messages_per_second for h in hours],
                        label="each frontend receives")  # fmt: skip
        axes[1, 0].set(title="Messages down", ylabel="a second", xlabel="hour")
        axes[1, 1].plot(x, [1e3 * h.ttft_p50 for h in hours], label="TTFT p50")
        axes[1, 1].plot(x, [1e3 * h.ttft_p99 for h in hours], label="TTFT p99")
        axes[1, 1].set(title="First token", ylabel="ms", xlabel="hour",
                       xticks=range(0, 25, 4))  # fmt: skip
        for one in axes.flat:
            one.set_ylim(bottom=0)
            one.grid(alpha=0.3)
            one.legend(frameon=False)
        _save(figure, path)


def draw_limits(breaks: Sequence[Break], sizes: dict[str, int], path: Path) -> None:
    """Where each part breaks; the fleet's own size as a line. `sizes`: by what is counted."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 0.9 + 0.45 * len(breaks)), layout="constrained")
        axes = figure.subplots()
        colours = dict(zip(sizes, ("tab:blue", "tab:orange"), strict=True))
        rows = list(reversed(breaks))
        axes.barh([one.what for one in rows], [one.size for one in rows],
                  color=[colours[one.counted] for one in rows])  # fmt: skip
        for row, one in enumerate(rows):
            axes.text(one.size * 1.1, row, f"{one.size:,.0f} {one.counted}", va="center")
        for name, size in sizes.items():
            axes.axvline(size, color=colours[name], linestyle=":", label=f"{size:,} {name}")
        axes.set(xscale="log", xlim=(1, 30 * max(one.size for one in breaks)))
        axes.legend(frameon=False, loc="upper right")
        _save(figure, path)
