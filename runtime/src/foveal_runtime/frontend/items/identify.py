"""The identity of a media part: fetched if need be, hashed, checked against its uuid.

Owned by input_processor. Knows nothing of processors or engines beyond what a uuid stands for.
Never decodes an image; a data: URL seen before is not even base64-decoded.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.aliases import Aliases
from foveal_runtime.frontend.items.placement import limits_of
from foveal_runtime.frontend.items.seams import MediaPart, PrepareOptions
from foveal_runtime.frontend.items.source import Buffer, GivenBytes, RawMedia
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.fetch import Fetcher
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import (
    FovealError,
    InvalidRequest,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
)
from foveal_runtime.plan.media import MMHash

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
    """Retained as the text it came as; decoded only when the value must be made."""

    page = -1

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url = url
        self._max_bytes = max_bytes

    async def read(self) -> Buffer:
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
            return await self._read_data_url(url, limit, options.salt), DataUrlMedia(url, limit)
        with self._stats.stages.measure("fetch"):
            data = await self._fetcher.fetch(
                url, max_bytes=limit, charge=options.charge_media_bytes, salt=options.salt
            )
        return await self._digest(data), GivenBytes(data)

    async def _read_data_url(self, url: str, limit: int, salt: bytes) -> bytes:
        begin = time.perf_counter()
        key = await off_loop(len(url), functools.partial(self._url_texts.key, url, salt))
        known = self._url_texts.lookup(key)
        if known is not None and known[1] <= limit:
            self._stats.url_text_hits += 1
            digest = known[0]
        else:
            read = functools.partial(_digest_data_url, url, limit)
            digest, num_bytes = await off_loop(len(url), read)
            self._url_texts.commit(key, digest, num_bytes)
        self._stats.stages.observe("hash", time.perf_counter() - begin)
        return digest

    async def _digest(self, data: Buffer) -> bytes:
        if len(data) == 0:
            raise MediaInvalid("media is empty")
        with self._stats.stages.measure("hash"):
            return await off_loop(len(data), functools.partial(hashing.content_digest, data))


def _digest_data_url(url: str, limit: int) -> tuple[bytes, int]:
    data = hashing.decode_data_url(url, max_bytes=limit)
    return hashing.content_digest(data), len(data)


def unknown_media(modality: str, which: str, uuid: str | None) -> MediaUnknown:
    named = f" (uuid {uuid!r})" if uuid else ""
    return MediaUnknown(
        f"{which}{named} has neither url nor data and nobody holds it; send the {modality} again"
    )


def naming(path: str, error: FovealError) -> FovealError:
    """The same error, naming the part it is about unless it names a parameter already."""
    if path and error.param is None:
        error.param = path
        error.message = f"{path}: {error.message}"
        error.args = (error.message,)
    return error


async def off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Runs `work` here when it is short, in a thread when the loop would notice."""
    return work() if num_bytes < _THREAD_BYTES else await asyncio.to_thread(work)
