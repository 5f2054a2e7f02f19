"""From tokens and media parts to a request that can be routed: identity first, work only if needed.

Implements `seams.InputProcessor`; one per HTTP process. A part is fetched (or not: data URLs are
known by their text), hashed, and looked up in the processor cache and in every engine's mirror.
Only when nobody knows it does a media worker wake. Never decodes a picture itself.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from foveal_runtime.frontend.aliases import Aliases
from foveal_runtime.frontend.flights import SingleFlight
from foveal_runtime.frontend.item_source import Buffer, GivenBytes, ItemSource, RawMedia
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.fetch import Fetcher
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import MediaWorkers
from foveal_runtime.frontend.prepared import PreparedItem, PreparedRequest
from foveal_runtime.frontend.processor_cache import ProcessorCache
from foveal_runtime.frontend.seams import MediaPart, PrepareOptions
from foveal_runtime.frontend.stats import FrontendStats
from foveal_runtime.plan.config import FrontendConfig, ModalityLimits
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    FovealError,
    InvalidRequest,
    MediaInvalid,
    MediaTooLarge,
    MediaUnknown,
    Unsupported,
)
from foveal_runtime.plan.media import MODALITIES, ItemMeta, MMHash, Modality
from foveal_runtime.wire.item import meta_of, read_header

log = logging.getLogger(__name__)
T = TypeVar("T")

_THREAD_BYTES = 1 << 20
"""Hashing and base64 of larger media leave the event loop."""


class Knowledge(Protocol):
    """What the engine sessions know; `engine_client.EngineClient` implements it."""

    def lookup_item(self, mm_hash: MMHash) -> tuple[int, ItemMeta] | None:
        """(size in bytes, meta) of a value that some engine announced."""
        ...

    def lookup_alias(self, alias: bytes) -> bytes | None: ...

    def max_model_len(self) -> int: ...


class NoEngines:
    """Nothing is known: for tests, and before the first session."""

    def lookup_item(self, mm_hash: MMHash) -> tuple[int, ItemMeta] | None:
        return None

    def lookup_alias(self, alias: bytes) -> bytes | None:
        return None

    def max_model_len(self) -> int:
        return 0


class _Named(NamedTuple):
    """A part whose identity is known. `key` is set for injected items, which have no digest."""

    digest: bytes
    raw: RawMedia | None
    alias: bytes | None
    key: MMHash | None = None


class _DataUrl:
    """Retained as the text it came as; decoded only when the value must be made."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url = url
        self._max_bytes = max_bytes

    async def read(self) -> Buffer:
        decode = functools.partial(hashing.decode_data_url, self._url, max_bytes=self._max_bytes)
        return await _off_loop(len(self._url), decode)


class InputProcessor:
    """See the module.

    `workers` must have been started; `info` is what they said. `knowledge` is the engine client.
    """

    def __init__(
        self,
        config: FrontendConfig,
        workers: MediaWorkers,
        info: ProcessorInfo,
        *,
        knowledge: Knowledge | None = None,
        fetcher: Fetcher | None = None,
        stats: FrontendStats | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self.workers = workers
        self.knowledge: Knowledge = knowledge or NoEngines()
        self.stats = stats or FrontendStats()
        self.fetcher = fetcher or Fetcher(config.media_sources)
        self.cache = ProcessorCache(config.processor_bytes)
        self.url_texts = hashing.UrlTextMap(config.max_bindings)
        self.aliases = Aliases(
            config.max_bindings, config.max_uuid_length, lambda a: self.knowledge.lookup_alias(a)
        )
        self.processing: SingleFlight[MMHash, Buffer] = SingleFlight()
        for placeholder in info.placeholders:
            if not placeholder.method:
                name = MODALITIES[placeholder.modality]
                self.stats.splice_refused[name] = placeholder.reason
                log.warning("%s input is refused for this model: %s", name, placeholder.reason)

    def is_warm(self) -> bool:
        """A worker runs the processor on a first item before it reports ready."""
        return self.workers.num_ready > 0

    async def close(self) -> None:
        await self.workers.close()
        await self.fetcher.close()

    async def prepare(
        self, token_ids: list[int], parts: Sequence[MediaPart], options: PrepareOptions
    ) -> PreparedRequest:
        """See `seams.InputProcessor`."""
        self._check_counts(parts)
        token_ids = self._complete(token_ids, parts)
        slots = self._match(token_ids, parts)
        item_options = _canonical(options.mm_processor_kwargs)
        items: list[PreparedItem] = []
        try:
            named = await _together([self._identify(i, parts, options) for i in range(len(parts))])
            index_of, which, binds = {}, [], []
            for part, name in zip(parts, named, strict=True):
                key = name.key or hashing.mm_hash(
                    name.digest, modality=MODALITIES.index(part.modality),
                    identity=self.info.identity, options=item_options[0], salt=options.tenant,
                )  # fmt: skip
                if key not in index_of:
                    index_of[key] = len(items)
                    items.append(self._item(key, part, name, item_options[1]))
                which.append(index_of[key])
                if name.alias is not None:
                    binds.append((name.alias, name.digest))
            paths = [parts[which.index(i)].path for i in range(len(items))]
            await _together([self._learn(item, p) for item, p in zip(items, paths, strict=True)])
            request = PreparedRequest(
                request_id=options.request_id,
                token_ids=token_ids,
                items=items,
                placements=[(at, which[part]) for at, part in slots],
                sampling=options.sampling,
                binds=binds,
                priority=options.priority,
                cache_salt=_cache_salt(options),
                read_prefix_cache=options.read_prefix_cache,
                echo_prompt=options.echo_prompt,
            )
            self._fit(request)
        except BaseException as error:
            for item in items:
                item.source.release()
            if isinstance(error, FovealError):
                self.stats.count_media_error(error.code)
            raise
        for alias, digest in binds:
            self.aliases.commit(alias, digest)
        return request

    # ---- prompt ---------------------------------------------------------------------------------
    def _check_counts(self, parts: Sequence[MediaPart]) -> None:
        for modality in MODALITIES:
            mine = [part for part in parts if part.modality == modality]
            limit = self._limits(modality).max_per_prompt
            if not mine:
                continue
            if limit == 0:
                raise Unsupported(f"{modality} input is switched off here", param=mine[0].path)
            if self.info.placeholder_token_id(modality) is None:
                raise Unsupported(f"this model takes no {modality} input", param=mine[0].path)
            if len(mine) > limit:
                raise InvalidRequest(
                    f"the request has {len(mine)} {modality} parts, the limit is {limit}",
                    param=mine[limit].path,
                )

    def _complete(self, token_ids: list[int], parts: Sequence[MediaPart]) -> list[int]:
        """Prefix models: all placeholders first, in the order of the parts; then BOS, the text
        without placeholders and BOS, a newline."""
        if self.info.prompt_rule != "prefix" or not parts:
            return token_ids
        marks = [self.info.placeholder_token_id(part.modality) for part in parts]
        drop = {*marks, *self.info.prefix_ids}
        text = [token for token in token_ids if token not in drop]
        if self.info.suffix_ids and tuple(text[-len(self.info.suffix_ids) :]) == (
            self.info.suffix_ids
        ):
            text = text[: -len(self.info.suffix_ids)]
        placeholders = [mark for mark in marks if mark is not None]
        return [*placeholders, *self.info.prefix_ids, *text, *self.info.suffix_ids]

    def _match(self, token_ids: list[int], parts: Sequence[MediaPart]) -> list[tuple[int, int]]:
        """(index into token_ids, index into parts) of each placeholder, in prompt order."""
        modality_of: dict[int, Modality] = {}
        for modality in MODALITIES:
            token = self.info.placeholder_token_id(modality)
            if token is not None:
                modality_of[token] = modality
        waiting = {m: [i for i, p in enumerate(parts) if p.modality == m] for m in MODALITIES}
        counts = {m: len(indices) for m, indices in waiting.items()}
        slots = []
        for at, token in enumerate(token_ids):
            found = modality_of.get(token)
            if found is None:
                continue
            if not waiting[found]:
                raise InvalidRequest(
                    f"the prompt has more {found} placeholders than {found} parts "
                    f"({counts[found]}); the text of a message must not contain them"
                )
            slots.append((at, waiting[found].pop(0)))
        for modality, left in waiting.items():
            if left:
                raise InvalidRequest(
                    f"the prompt has {counts[modality] - len(left)} {modality} placeholders for "
                    f"{counts[modality]} {modality} parts; the chat template dropped some",
                    param=parts[left[0]].path,
                )
        return slots

    def _fit(self, request: PreparedRequest) -> None:
        limit = self.knowledge.max_model_len()
        metas = [item.meta for item in request.items]
        if limit <= 0 or any(meta is None for meta in metas):
            return
        media = sum(meta.num_tokens - 1 for _, i in request.placements if (meta := metas[i]))
        length = len(request.token_ids) + media
        if length >= limit:
            raise ContextLengthExceeded(
                f"the prompt has {length} tokens with its media expanded ({media} more than its "
                f"text), the model's context is {limit}"
            )
        if length + request.sampling.max_tokens > limit:
            request.sampling = msgspec.structs.replace(request.sampling, max_tokens=limit - length)

    def _limits(self, modality: str) -> ModalityLimits:
        limits: ModalityLimits = getattr(self.config.modalities, modality)
        return limits

    # ---- identity -------------------------------------------------------------------------------
    async def _identify(
        self, index: int, parts: Sequence[MediaPart], options: PrepareOptions
    ) -> _Named:
        """Content digest and raw media of one part. Errors name the part."""
        part = parts[index]
        try:
            alias = None
            if part.uuid is not None:
                alias = self.aliases.key(part.uuid, options.tenant, part.modality, part.path)
            if part.is_uuid_only:
                ordinal = sum(p.modality == part.modality for p in parts[:index])
                return self._recall(part, alias, ordinal, options)
            digest, raw = await self._read(part, options)
            if alias is not None:
                self.aliases.check(alias, digest, part.uuid or "", part.path)
            return _Named(digest, raw, alias)
        except FovealError as error:
            raise _at(part.path, error) from error

    def _recall(
        self, part: MediaPart, alias: bytes | None, ordinal: int, options: PrepareOptions
    ) -> _Named:
        """uuid-only media: what the uuid was bound to, or an injected item of that name."""
        if alias is None:
            raise InvalidRequest("a media part needs a url or a uuid")
        digest = self.aliases.lookup(alias)
        if digest is not None:
            return _Named(digest, None, alias)
        injected = hashing.injected_hash(
            part.uuid or "", namespace=self.config.injection.namespace,
            identity=self.info.identity, salt=options.tenant,
        )  # fmt: skip
        if self.config.injection.enabled and self._is_known(injected):
            return _Named(b"", None, None, injected)
        raise _unknown(part.modality, ordinal, part.uuid)

    async def _read(self, part: MediaPart, options: PrepareOptions) -> tuple[bytes, RawMedia]:
        limit = self._limits(part.modality).max_bytes
        if part.data is not None:
            if len(part.data) > limit:
                raise MediaTooLarge(f"media has {len(part.data)} bytes, the limit is {limit}")
            return await self._digest(part.data), GivenBytes(part.data)
        url = part.url or ""
        if url[:5].lower() == "data:":
            return await self._read_data_url("data:" + url[5:], limit), _DataUrl(url, limit)
        with self.stats.stages.measure("fetch"):
            data = await self.fetcher.fetch(url, max_bytes=limit, charge=options.charge_media_bytes)
        return await self._digest(data), GivenBytes(data)

    async def _read_data_url(self, url: str, limit: int) -> bytes:
        begin = time.perf_counter()
        key = await _off_loop(len(url), functools.partial(self.url_texts.key, url))
        known = self.url_texts.lookup(key)
        if known is not None and known[1] <= limit:
            self.stats.url_text_hits += 1
            digest = known[0]
        else:

            def read() -> tuple[bytes, int]:
                data = hashing.decode_data_url(url, max_bytes=limit)
                return hashing.content_digest(data), len(data)

            digest, num_bytes = await _off_loop(len(url), read)
            self.url_texts.commit(key, digest, num_bytes)
        self.stats.stages.observe("hash", time.perf_counter() - begin)
        return digest

    async def _digest(self, data: Buffer) -> bytes:
        if len(data) == 0:
            raise MediaInvalid("media is empty")
        with self.stats.stages.measure("hash"):
            return await _off_loop(len(data), functools.partial(hashing.content_digest, data))

    # ---- items ----------------------------------------------------------------------------------
    def _item(self, key: MMHash, part: MediaPart, name: _Named, options: bytes) -> PreparedItem:
        modality = MODALITIES.index(part.modality)
        source = ItemSource(
            key, self.cache, self.stats, name.raw,
            lambda raw: self._make(key, modality, options, raw),
        )  # fmt: skip
        return PreparedItem(key, modality, source)

    def _is_known(self, key: MMHash) -> bool:
        return self.cache.is_cached(key) or self.knowledge.lookup_item(key) is not None

    async def _learn(self, item: PreparedItem, path: str) -> None:
        """Size and meta: from the processor cache, from an engine's announcement, or by work."""
        source = item.source
        assert isinstance(source, ItemSource)
        cached = self.cache.get(item.mm_hash)
        if cached is not None:
            source.hold(cached)
            _describe(item, cached)
            return
        item.is_held_only = not source.can_make
        announced = self.knowledge.lookup_item(item.mm_hash)
        if announced is not None:
            item.size_bytes, item.meta = announced
            return
        if item.is_held_only:
            raise _unknown(MODALITIES[item.modality], None, None, path)
        item.was_processed = True
        try:
            value = await source.value()
        except FovealError as error:
            raise _at(path, error) from error
        source.retain(value)
        _describe(item, value)

    async def _make(self, key: MMHash, modality: int, options: bytes, raw: RawMedia) -> Buffer:
        """The processor, once for all who want this key now."""

        async def work() -> Buffer:
            data = await raw.read()
            done = await self.workers.process(modality, options, data)
            self.stats.stages.observe("decode", done.decode_seconds)
            self.stats.stages.observe("process", done.process_seconds)
            self.stats.processed_items[modality] += 1
            self.cache.commit(key, done.value)
            return done.value

        return await self.processing.run(key, work)


def _describe(item: PreparedItem, value: Buffer) -> None:
    item.size_bytes = len(value)
    item.meta = meta_of(read_header(value))


def _unknown(modality: str, ordinal: int | None, uuid: str | None, path: str = "") -> MediaUnknown:
    which = f"{modality} {ordinal}" if ordinal is not None else f"{modality} at {path}"
    named = f" (uuid {uuid!r})" if uuid else ""
    return MediaUnknown(
        f"{which}{named} has neither url nor data and nobody holds it; send the media once more",
        param=path or None,
    )


def _at(path: str, error: FovealError) -> FovealError:
    """The same error, naming the part it is about."""
    if path and error.param is None:
        error.param = path
        if path not in error.message:
            error.message = f"{path}: {error.message}"
            error.args = (error.message,)
    return error


def _canonical(options: Mapping[str, object]) -> tuple[Mapping[str, object], bytes]:
    """Options for the key, and as sorted JSON for the worker. Raises InvalidRequest."""
    try:
        return options, json.dumps(options, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"mm_processor_kwargs is not plain JSON: {error}", param="mm_processor_kwargs"
        ) from error


def _cache_salt(options: PrepareOptions) -> bytes:
    if not options.cache_salt and not options.tenant:
        return b""
    return hashing.short_digest(options.tenant, options.cache_salt.encode())


async def _off_loop(num_bytes: int, work: Callable[[], T]) -> T:
    """Runs `work` here when it is short, in a thread when the loop would notice."""
    return work() if num_bytes < _THREAD_BYTES else await asyncio.to_thread(work)


async def _together(work: Sequence[Awaitable[T]]) -> list[T]:
    """All results; the first error in order of the list, after the others were cancelled."""
    tasks: list[asyncio.Task[Any]] = [asyncio.ensure_future(w) for w in work]
    try:
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            if not task.done():
                task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
    errors = [t.exception() for t in tasks if not t.cancelled() and t.exception()]
    if errors and errors[0] is not None:
        raise errors[0]
    return [task.result() for task in tasks]
