"""The identity of a media part: fetched if need be, hashed, checked against its uuid.

Owned by input_processor. Knows nothing of processors or engines beyond what a uuid stands for.
Never decodes an image; a data: URL seen before is not even base64-decoded. The engines keep the
shared truth about uuids (`PreparedRequest.binds` goes up, announcements come down); the table here
answers between a bind and its announcement, and alone when no engine is connected.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from blake3 import blake3

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.placement import limits_of
from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.items.source import Buffer, GivenBytes, RawMedia
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.fetch import Fetcher
from foveal_runtime.frontend.media.hashing import frame
from foveal_runtime.frontend.protocol.body_text import MediaText
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import (
    FovealError,
    InvalidRequest,
    MediaConflict,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
)
from foveal_runtime.plan.media import MMHash


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
        check_same(self.lookup(alias), digest, uuid, path)

    def commit(self, alias: bytes, digest: bytes) -> None:
        """Binds (the caller has checked); the least recently used binding goes when full."""
        self._local[alias] = digest
        self._local.move_to_end(alias)
        while len(self._local) > self._max_bindings:
            self._local.popitem(last=False)

    def check_integrity(self) -> None:
        assert len(self._local) <= max(0, self._max_bindings)
        assert all(len(a) == 32 and len(d) == 32 for a, d in self._local.items())


def check_same(known: bytes | None, digest: bytes, uuid: str, path: str) -> None:
    """Raises MediaConflict when a uuid is known as other content."""
    if known is not None and known != digest:
        raise MediaConflict(
            f"{path or 'media'}: uuid {uuid!r} was bound to other content before; use a new "
            "uuid for new content",
            param=path or None,
        )


T = TypeVar("T")

_MAX_URL_HEAD = 4096
_THREAD_BYTES = 1 << 20
"""Hashing and base64 of larger media leave the event loop."""


class Named(NamedTuple):
    """A part whose identity is known. `key` is set for injected items, which have no digest; `raw`
    is None for uuid-only media."""

    digest: bytes
    raw: RawMedia | None
    alias: bytes | None
    key: MMHash | None = None


class DataUrlMedia:
    """Retained as the text it came as; decoded only when the value must be made. The first to read
    gets `file`, which was decoded to be hashed, unless it was forgotten before."""

    page = -1

    def __init__(self, url: MediaText, max_bytes: int, file: bytes | None = None) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._file = file

    def forget_file(self) -> None:
        """The item is known: whoever needs its value later decodes the text again."""
        self._file = None

    async def read(self) -> Buffer:
        file, self._file = self._file, None
        if file is not None:
            return file
        decode = functools.partial(hashing.decode_data_url, self._url, max_bytes=self._max_bytes)
        return await off_loop(len(self._url), decode)


class Identifier:
    """`recall_injected(name, options)` gives the key of an injected item of that name, if the
    request may use one and it is known."""

    def __init__(
        self,
        modalities: ModalitiesConfig,
        fetcher: Fetcher,
        aliases: Aliases,
        url_texts: hashing.UrlTextMap,
        stats: FrontendStats,
        recall_injected: Callable[[str, PrepareOptions], MMHash | None],
    ) -> None:
        self._modalities = modalities
        self._fetcher = fetcher
        self._aliases = aliases
        self._url_texts = url_texts
        self._stats = stats
        self._recall_injected = recall_injected

    async def identify(
        self, index: int, parts: Sequence[MediaPart], options: PrepareOptions
    ) -> Named:
        """Content digest and raw media of `parts[index]`. Errors name the part."""
        part = parts[index]
        try:
            alias = None
            if part.uuid is not None:
                kind = "embeds" if part.is_embeds else part.modality
                alias = self._aliases.key(part.uuid, options.salt, kind, part.path)
            beside = _content_beside(part, parts)
            if beside is not None and alias is not None and self._aliases.lookup(alias) is None:
                return await self.identify(beside, parts, options)
            if part.is_uuid_only:
                ordinal = sum(p.modality == part.modality for p in parts[:index])
                return self._recall(part, alias, ordinal, options)
            if part.page is not None:
                return Named(part.page.digest, part.page, None)
            digest, raw = await self.read(part, options)
            if alias is not None:
                self._aliases.check(alias, digest, part.uuid or "", part.path)
            return Named(digest, raw, alias)
        except FovealError as error:
            raise naming(part.path, error) from error

    def binds(
        self, parts: Sequence[MediaPart], named: Sequence[Named]
    ) -> list[tuple[bytes, bytes]]:
        """What the uuids of a request stand for, to be committed at once. Raises MediaConflict for
        one with two contents, be the other that of a request that was prepared meanwhile."""
        found: dict[bytes, bytes] = {}
        for part, name in zip(parts, named, strict=True):
            if name.alias is None:
                continue
            if name.raw is not None:
                self._aliases.check(name.alias, name.digest, part.uuid or "", part.path)
            known = found.setdefault(name.alias, name.digest)
            check_same(known, name.digest, part.uuid or "", part.path)
        return list(found.items())

    def _recall(
        self, part: MediaPart, alias: bytes | None, ordinal: int, options: PrepareOptions
    ) -> Named:
        """uuid-only media: what the uuid was bound to, or an injected item of that name."""
        if alias is None or part.uuid is None:
            raise InvalidRequest("a media part needs a url or a uuid")
        digest = self._aliases.lookup(alias)
        if digest is not None:
            return Named(digest, None, alias)
        key = self._recall_injected(part.uuid, options)
        if key is not None:
            return Named(b"", None, None, key)
        raise unknown_media(part.modality, f"{part.modality} {ordinal}", part.uuid)

    async def read(self, part: MediaPart, options: PrepareOptions) -> tuple[bytes, RawMedia]:
        """The digest of the part's file, and the file. Raises FovealError."""
        limit = limits_of(self._modalities, part.modality).max_bytes
        if part.data is not None:
            if len(part.data) > limit:
                raise MediaTooLarge(f"media has {len(part.data)} bytes, the limit is {limit}")
            return await self._digest(part.data), GivenBytes(part.data)
        url = part.url or ""
        if url[:5].lower() == "data:":
            url = url if url.startswith("data:") else "data:" + url[5:]
            hashing.check_text_size(url, limit + _MAX_URL_HEAD)
            return await self._read_data_url(url, limit, options.salt)
        assert isinstance(url, str), "only data: URLs are left in the body"
        with self._stats.stages.measure("fetch"):
            data = await self._fetcher.fetch(
                url, max_bytes=limit, charge=options.charge_media_bytes, salt=options.salt
            )
        return await self._digest(data), GivenBytes(data)

    async def _read_data_url(
        self, url: MediaText, limit: int, salt: bytes
    ) -> tuple[bytes, RawMedia]:
        begin = time.perf_counter()
        key = await off_loop(len(url), functools.partial(self._url_texts.key, url, salt))
        known, file = self._url_texts.lookup(key), None
        if known is not None and known[1] <= limit:
            self._stats.url_text_hits += 1
            digest = known[0]
        else:
            read = functools.partial(_digest_data_url, url, limit)
            digest, file = await off_loop(len(url), read)
            self._url_texts.commit(key, digest, len(file))
        self._stats.stages.observe("hash", time.perf_counter() - begin)
        return digest, DataUrlMedia(url, limit, file)

    async def _digest(self, data: Buffer) -> bytes:
        if len(data) == 0:
            raise MediaInvalid("media is empty")
        with self._stats.stages.measure("hash"):
            return await off_loop(len(data), functools.partial(hashing.content_digest, data))


def _content_beside(part: MediaPart, parts: Sequence[MediaPart]) -> int | None:
    """The part of the same request that has the content of one that is a uuid alone."""
    if not part.is_uuid_only or part.uuid is None:
        return None
    wanted = (part.uuid, part.modality, part.is_embeds)
    for index, other in enumerate(parts):
        is_whole = not other.is_uuid_only and other.page is None
        if is_whole and (other.uuid, other.modality, other.is_embeds) == wanted:
            return index
    return None


def _digest_data_url(url: MediaText, limit: int) -> tuple[bytes, bytes]:
    data = hashing.decode_data_url(url, max_bytes=limit)
    return hashing.content_digest(data), data


def unknown_media(modality: str, which: str, uuid: str | None) -> MediaUnknown:
    named = f" (uuid {uuid!r})" if uuid else ""
    return MediaUnknown(
        f"{which}{named} has neither url nor data and nobody holds it; send the {modality} again"
    )


def naming(path: str, error: FovealError) -> FovealError:
    """The same error, naming the part it is about unless it names a parameter already. What is
    fetched or processed once fails for all who wait for it, each with a part of its own."""
    named = path and error.param is None
    return error.about(path, f"{path}: {error.message}") if named else error


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Runs `work` here when it is short, in a thread when the loop would notice."""
    return work() if num_bytes < _THREAD_BYTES else await asyncio.to_thread(work)
