"""Pictures and questions of the bundled model (examples/tiny-vlm), for the model that sees."""

from __future__ import annotations

import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples/tiny-vlm"))

from evaluate import to_request
from questions import Asker, Sample, as_typed, is_right
from scenes import Picture, draw_digit, draw_scene

__all__ = [
    "Asker", "Picture", "Sample", "as_typed", "draw_digit", "draw_scene", "held_out", "is_right",
    "to_request",
]  # fmt: skip

LEARNT = ("digit",)
"""Families of questions that the model learnt: see the README's figures."""


def held_out(family: str, seed: str, num: int) -> list[Sample]:
    """Questions about scenes and scans that training never sees."""
    asker = Asker(random.Random(f"held out/{seed}/{family}"), held_out=True)
    return [asker.sample(family) for _ in range(num)]
