"""Axes and units: where ticks stand, and how a number is written. Pure. Used by chart.py, page.py.

Units are those of observability/panel.py.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from foveal_operator.observability.panel import Unit

NOTHING = "–"
_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_TIMES = ((86400.0, "d"), (3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_CLOCK_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600,
                43200, 86400, 172800, 604800)  # fmt: skip


class Axis(msgspec.Struct, frozen=True):
    """From `low` to `high`, with the values and texts of its ticks."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def share(self, value: float) -> float:
        """0 at the bottom, 1 at the top."""
        return (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0


def text_of(value: float, unit: Unit = "short") -> str:
    """A number with its unit, three figures of it: 1.21 MiB/s, 84 %, 12.5 ms."""
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else ("∞" if value > 0 else "−∞")
    sign, size = ("−" if value < 0 else ""), abs(value)
    if unit == "percentunit":
        return f"{sign}{_figures(100 * size)} %"
    if unit in ("bytes", "Bps"):
        return sign + _binary(size) + ("/s" if unit == "Bps" else "")
    if unit == "s":
        return sign + _duration(size)
    return sign + _decimal(size) + {"reqps": "/s", "ops": "/s", "celsius": " °C"}.get(unit, "")


def _figures(size: float) -> str:
    """Three figures, without zeros that say nothing."""
    if size == 0:
        return "0"
    if size >= 99.95:
        return f"{size:.0f}"
    places = 1 if size >= 9.995 else 2 if size >= 0.0995 else 3
    text = f"{size:.{places}f}".rstrip("0").rstrip(".")
    return text if text != "0" else "<0.001"


def _binary(size: float) -> str:
    power = 0
    while size >= 999.5 and power < len(_BINARY) - 1:
        size, power = size / 1024, power + 1
    return f"{_figures(size)} {_BINARY[power]}"


def _decimal(size: float) -> str:
    for factor, letter in _DECIMAL:
        if size >= 0.9995 * factor:
            return f"{_figures(size / factor)}{letter}"
    return _figures(size)


def _duration(size: float) -> str:
    if size == 0:
        return "0 s"
    for factor, letter in _TIMES:
        if size >= 0.9995 * factor:
            return f"{_figures(size / factor)} {letter}"
    return f"{_figures(size * 1e6)} µs"


def value_axis(values: Sequence[float], unit: Unit, top: float | None = None) -> Axis:
    """From zero (or below, where values are) to a round number above all of them."""
    finite = [value for value in values if math.isfinite(value)]
    high = max([top or 0.0, *finite]) if top is None else max(top, *finite, 0.0)
    low = min([0.0, *finite])
    if high <= low:
        high = low + 1.0
    step = _round_step((high - low) / 3.2, unit)
    first, last = math.floor(low / step), math.ceil(high / step - 1e-9)
    ticks = tuple((i * step, text_of(i * step, unit)) for i in range(first, last + 1))
    return Axis(first * step, last * step, ticks)


def _round_step(rough: float, unit: Unit) -> float:
    """The smallest of 1, 2, 2.5, 5 times a power of ten that is not below; of two for bytes, and of
    what clocks show for seconds."""
    if unit in ("bytes", "Bps") and rough >= 1:
        return float(2 ** math.ceil(math.log2(rough) - 1e-9))
    if unit == "s" and _CLOCK_STEPS[0] < rough <= _CLOCK_STEPS[-1]:
        return float(next(step for step in _CLOCK_STEPS if step >= rough))
    power = 10.0 ** math.floor(math.log10(rough))
    for factor in (1.0, 2.0, 2.5, 5.0, 10.0):
        if factor * power >= rough * (1 - 1e-9):
            return factor * power
    return 10.0 * power


def time_axis(times: Sequence[float]) -> Axis:
    """Clock times at round seconds, minutes or hours (UTC), four of them at most."""
    low, high = (times[0], times[-1]) if times else (0.0, 1.0)
    if high <= low:
        return Axis(low - 1, low + 1, ((low, _clock(low, 1)),))
    step = next((s for s in _CLOCK_STEPS if (high - low) / s <= 4), _CLOCK_STEPS[-1])
    first = math.ceil(low / step)
    ticks = [(i * step, _clock(i * step, step)) for i in range(first, math.floor(high / step) + 1)]
    return Axis(low, high, tuple(ticks))


def _clock(moment: float, step: float) -> str:
    shape = "%d %b" if step >= 86400 else "%H:%M" if step >= 60 else "%H:%M:%S"
    return time.strftime(shape, time.gmtime(moment))


def clock_text(moment: float) -> str:
    """With the day, in UTC."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(moment))
