"""Spoken digits by espeak-ng: which voices training hears, and which it never does.

`Speaker` calls the library of a published package (GPL-3.0, a tool of tests and training; nothing
of it is distributed here). Clips are 16 kHz, mono, float32 in [-1, 1].
"""

from __future__ import annotations

import base64
import ctypes
import io
import random
import wave
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import soxr

from e2e.assembled import parts

RATE = 16_000
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MOST_DIGITS = 4
_ACCENTS = ("en-us", "en", "en-gb-scotland", "en-gb-x-gbclan", "en-029")
_TIMBRES = ("", "+m1", "+m2", "+m3", "+m5", "+m6", "+f1", "+f2", "+f3")
TRAINED = tuple(accent + timbre for accent in _ACCENTS for timbre in _TIMBRES)
HELD_OUT = tuple(
    accent + timbre
    for accent in ("en-us", "en", "en-gb-x-rp", "en-gb-x-gbcwmd")
    for timbre in ("+m4", "+m7", "+f4", "+f5")
)
"""Other timbres, and two accents that training does not have."""
_SYNCHRONOUS = 2
_RATE, _PITCH = 1, 3
_UTF8, _CHARACTERS = 1, 1


class Clip(NamedTuple):
    """What is said, by which voice, and how it sounds: (samples,) float32, as a WAV file of 16 bits
    has it."""

    digits: str
    voice: str
    samples: np.ndarray

    def wav(self) -> bytes:
        file = io.BytesIO()
        with wave.open(file, "wb") as writer:
            writer.setnchannels(1)
            writer.setsampwidth(2)
            writer.setframerate(RATE)
            writer.writeframes((self.samples * 32768).astype("<i2").tobytes())
        return file.getvalue()

    def part(self) -> dict[str, Any]:
        """The clip as a part of a chat message."""
        data = base64.b64encode(self.wav()).decode()
        return {"type": "input_audio", "input_audio": {"data": data, "format": "wav"}}


def draw(rng: random.Random, voices: tuple[str, ...]) -> Clip:
    """One to four digits by one of the voices, at a speed and pitch of chance."""
    digits = "".join(rng.choices("0123456789", k=rng.randint(1, MOST_DIGITS)))
    voice = rng.choice(voices)
    pause = rng.choice((" ", ", "))
    words = pause.join(WORDS[int(digit)] for digit in digits)
    samples = speaker().say(words, voice, rng.randint(130, 210), rng.randint(25, 75))
    loud = np.round(samples * rng.uniform(0.4, 1.0) * 32767) / 32768
    return Clip(digits, voice, loud.astype(np.float32))


@cache
def speaker() -> Speaker:
    """The one of this process: the library has global state."""
    return Speaker()


class Speaker:
    """espeak-ng's library. Raises packages.Unavailable where it cannot be had."""

    def __init__(self) -> None:
        folder = parts.espeak()
        [path] = sorted(folder.glob("libespeak-ng.*"))[:1]
        self._library = ctypes.CDLL(str(path))
        data = str(folder / "espeak-ng-data").encode()
        self._rate = self._library.espeak_Initialize(_SYNCHRONOUS, 0, data, 0)
        if self._rate <= 0:
            raise RuntimeError(f"espeak-ng finds no data in {folder}")
        self._heard: list[np.ndarray] = []
        kind = ctypes.CFUNCTYPE(
            ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p
        )
        self._callback = kind(self._hear)  # the library keeps no reference of its own
        self._library.espeak_SetSynthCallback(self._callback)

    def _hear(self, samples: Any, count: int, _events: object) -> int:
        if samples and count > 0:
            self._heard.append(np.ctypeslib.as_array(samples, (count,)).copy())
        return 0

    def say(self, words: str, voice: str, words_a_minute: int, pitch: int) -> np.ndarray:
        """The samples of English words; `pitch`: 0 to 100."""
        library = self._library
        if library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"espeak-ng has no voice {voice}")
        library.espeak_SetParameter(_RATE, words_a_minute, 0)
        library.espeak_SetParameter(_PITCH, pitch, 0)
        self._heard.clear()
        text = words.encode()
        library.espeak_Synth(
            ctypes.c_char_p(text), ctypes.c_size_t(len(text) + 1), 0, _CHARACTERS, 0, _UTF8,
            None, None,
        )  # fmt: skip
        library.espeak_Synchronize()
        samples = np.concatenate(self._heard).astype(np.float32) / 32768
        return np.asarray(soxr.resample(samples, self._rate, RATE), np.float32)
