"""What the GPU benches share: timing on the device, its limits, and a JSON file with the facts.

Limits are measured in the same run: bytes a second of copying on the device, and operations a
second of one large bfloat16 product of random numbers. On a CPU everything runs, too, so that the
scripts are tested; the figures mean nothing there.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def parser(doc: str) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    made.add_argument("--tiny", action="store_true", help="small shapes: does the script work?")
    made.add_argument("--out", type=Path, help="JSON file; written after each case")
    return made


def median_seconds(work: Callable[[], object], device: str, repeats: int = 15) -> float:
    """Of `repeats` runs after two, each timed on the device."""
    times = []
    for turn in range(repeats + 2):
        if device == "cuda":
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            seconds = begin.elapsed_time(end) / 1000
        else:
            start = time.perf_counter()
            work()
            seconds = time.perf_counter() - start
        if turn >= 2:
            times.append(seconds)
    return sorted(times)[len(times) // 2]


def copy_rate(device: str, tiny: bool) -> float:
    """Bytes a second, read and written ones counted."""
    source = torch.empty((1 << 20) if tiny else (2 << 30), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / median_seconds(lambda: target.copy_(source), device)


def product_rate(device: str, tiny: bool) -> float:
    """Operations a second."""
    side = 64 if tiny else 8192
    a, b = (torch.randn(side, side, device=device).bfloat16() for _ in range(2))
    return 2 * side**3 / median_seconds(lambda: a @ b, device)


def facts(device: str) -> dict[str, str]:
    names = ("torch", "triton", "transformers")
    found = {name: importlib.metadata.version(name) for name in names}
    found["date"] = datetime.date.today().isoformat()
    found["python"] = platform.python_version()
    found["device"] = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    if device == "cuda":
        found["cuda"] = str(torch.version.cuda)
    return found


class Results:
    """Rows of figures: printed as they come, kept in a file."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._out: Path | None = options.out
        self._found: dict[str, Any] = {"facts": facts(options.device), "limits": {}, "rows": []}
        print(self._found["facts"], flush=True)

    def limit(self, name: str, value: float) -> float:
        self._found["limits"][name] = value
        print(f"limit {name}: {value:.4g}", flush=True)
        return value

    def row(self, **figures: object) -> None:
        self._found["rows"].append(figures)
        shown = (f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in figures.items())
        print("  ".join(shown), flush=True)
        if self._out is not None:
            self._out.write_text(json.dumps(self._found, indent=1))
