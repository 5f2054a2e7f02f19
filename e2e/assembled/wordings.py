"""The words around a clip of spoken digits, in training and in evaluation."""

from __future__ import annotations

from typing import Any

TRAINED = (
    ("Transcribe the input speech.", True),
    ("Transcribe the speech in this audio. Answer with the transcript alone.", False),
    ("Which digits do you hear?", True),
    ("What number is spoken?", False),
)
"""Words, and whether they come before the clip. The first two are those that the transcription API
sends to this family and to others."""
HELD_OUT = (("Which digits were said?", False), ("Write down the digits.", True))


def messages(wording: tuple[str, bool], part: dict[str, Any]) -> list[dict[str, Any]]:
    text, is_first = wording
    words = {"type": "text", "text": text}
    return [{"role": "user", "content": [words, part] if is_first else [part, words]}]
