"""What tests write media files to."""

from __future__ import annotations


class Pipe:
    """A place that can be written to, and not gone back in: nothing at the start is put right."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, piece: bytes) -> int:
        self.data += piece
        return len(piece)
