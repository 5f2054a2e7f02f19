"""JSON bytes of answers: one encoder for the whole HTTP side."""

from __future__ import annotations

from typing import Any

import msgspec

_encoder = msgspec.json.Encoder()


def encode_json(value: Any) -> bytes:
    """Compact JSON. Numbers that JSON lacks (inf, nan) come out as null."""
    return _encoder.encode(value)


def sse(value: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + _encoder.encode(value) + b"\n\n"


SSE_DONE = b"data: [DONE]\n\n"
