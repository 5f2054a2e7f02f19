"""Table of a tenant's uuids: each is bound to a content digest when it is first seen.

Used by input_processor. The engines keep the shared truth (`PreparedRequest.binds` goes up,
announcements come down); this table answers between a bind and its announcement, and alone when no
engine is connected. A uuid never names other content than it did first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from blake3 import blake3

from foveal_runtime.frontend.media.hashing import frame
from foveal_runtime.plan.errors import InvalidRequest, MediaConflict


class Aliases:
    """Bounded LRU of alias → content digest (both 32 bytes).

    `announced` asks the engine sessions' mirrors; their answer wins over the local table.
    """

    def __init__(
        self,
        max_bindings: int,
        max_uuid_length: int,
        announced: Callable[[bytes], bytes | None] = lambda alias: None,
    ) -> None:
        self._max_bindings = max_bindings
        self._max_uuid_length = max_uuid_length
        self._announced = announced
        self._local: OrderedDict[bytes, bytes] = OrderedDict()

    def __len__(self) -> int:
        return len(self._local)

    def key(self, uuid: str, salt: bytes, kind: str, path: str = "") -> bytes:
        """The alias of a uuid under a request's salt, for media of a kind: a modality, or "embeds".

        Raises InvalidRequest: empty, too long or not printable.
        """
        if not uuid or len(uuid) > self._max_uuid_length:
            raise InvalidRequest(
                f"{path or 'media'}: uuid has {len(uuid)} characters, allowed are 1 to "
                f"{self._max_uuid_length}",
                param=path or None,
            )
        if not uuid.isprintable():
            raise InvalidRequest(
                f"{path or 'media'}: uuid holds control characters", param=path or None
            )
        return blake3(frame(["foveal.alias", salt or None, kind, uuid])).digest()

    def lookup(self, alias: bytes) -> bytes | None:
        """The content digest bound to the alias, if any; changes nothing."""
        return self._announced(alias) or self._local.get(alias)

    def check(self, alias: bytes, digest: bytes, uuid: str, path: str) -> None:
        """Raises MediaConflict when the alias stands for other content."""
        known = self.lookup(alias)
        if known is not None and known != digest:
            raise MediaConflict(
                f"{path or 'media'}: uuid {uuid!r} was bound to other content before; use a new "
                "uuid for new content",
                param=path or None,
            )

    def commit(self, alias: bytes, digest: bytes) -> None:
        """Binds (the caller has checked); the least recently used binding goes when full."""
        self._local[alias] = digest
        self._local.move_to_end(alias)
        while len(self._local) > self._max_bindings:
            self._local.popitem(last=False)

    def check_integrity(self) -> None:
        assert len(self._local) <= max(0, self._max_bindings)
        assert all(len(a) == 32 and len(d) == 32 for a, d in self._local.items())
