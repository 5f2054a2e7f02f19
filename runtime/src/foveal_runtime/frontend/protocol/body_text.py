"""Media in a request's body that are read where they stand, and the buffers such bodies come into.

A megapixel's data URL is most of its request. As a text of its own it would be copied once more,
into memory that the kernel maps and clears for it, page by page, before anything is known of it:
more than half of what a repeated image costs. `http.asgi.json_bodies` leaves it in the body, and
whoever identifies or decodes the image (`media.hashing`) reads it from there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # media workers read data URLs, too, and have no use for it
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

BUFFER_BYTES = 1 << 20
_MAX_FREE = 2
"""Buffers that wait for another body; their memory stays mapped."""
_free: list[bytearray] = []


class Body:
    """The bytes of a body. Its buffer serves another one when nobody holds this any more.

    Attributes:
        buffer: of which the first `size` bytes are the body's, once it is complete.
    """

    __slots__ = ("buffer", "size")

    def __init__(self) -> None:
        self.buffer = _free.pop() if _free else bytearray(BUFFER_BYTES)
        self.size = 0

    def add(self, piece: bytes) -> bool:
        """False, and nothing added, when there is no room for it."""
        end = self.size + len(piece)
        if end > BUFFER_BYTES:
            return False
        self.buffer[self.size : end] = piece
        self.size = end
        return True

    def content(self) -> bytes:
        return bytes(memoryview(self.buffer)[: self.size])

    def __del__(self) -> None:
        if len(_free) < _MAX_FREE:
            try:
                self.buffer.append(self.buffer.pop())  # fails while anything looks into it
            except BufferError:
                return
            _free.append(self.buffer)


class BodyText:
    """A text of a body that has only printable ASCII and no escapes: its bytes are the text.

    Behaves as `str` does in what those who read data URLs ask for; slices are `str`.
    """

    __slots__ = ("_begin", "_body", "_size")

    def __init__(self, body: Body, begin: int, end: int) -> None:
        self._body = body
        self._begin = begin
        self._size = end - begin

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, at: slice) -> str:
        return str(self.bytes_of(at), "ascii")

    def __str__(self) -> str:
        return self[:]

    def bytes_of(self, at: slice) -> memoryview:
        """To be read at once: whoever keeps it keeps the buffer from other bodies."""
        start, stop, step = at.indices(self._size)
        assert step == 1
        return memoryview(self._body.buffer)[self._begin + start : self._begin + max(start, stop)]

    def find(self, text: str) -> int:
        end = self._begin + self._size
        at = self._body.buffer.find(text.encode(), self._begin, end)
        return at - self._begin if at >= 0 else -1

    def count(self, text: str) -> int:
        return self._body.buffer.count(text.encode(), self._begin, self._begin + self._size)

    def startswith(self, text: str) -> bool:
        return self[: len(text)] == text

    def behind(self, start: int) -> BodyText:
        """The text from there on, where it stands."""
        begin = self._begin + min(start, self._size)
        return BodyText(self._body, begin, self._begin + self._size)


MediaText = str | BodyText


class MaybeInBody:
    """Marks a field that takes a BodyText beside a text; clients can only send texts."""

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_wrap_validator_function(
            lambda value, check: value if isinstance(value, BodyText) else check(value),
            handler.generate_schema(str),
        )
