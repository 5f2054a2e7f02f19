"""From tokens and media parts to a request that can be routed: identity first, work only if needed.

Implements `interfaces.InputProcessor`; one per HTTP process. A part is identified (`identify`), its
key looked up in the processor cache and in every engine's mirror; only when none has it does a
media worker start. Never decodes an image itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.documents import Documents
from foveal_runtime.frontend.items.embeds import embeds_item
from foveal_runtime.frontend.items.identify import (
    Aliases,
    DataUrlMedia,
    Identifier,
    Named,
    naming,
    off_loop,
    unknown_media,
)
from foveal_runtime.frontend.items.injection import Injector
from foveal_runtime.frontend.items.interfaces import Knowledge
from foveal_runtime.frontend.items.placement import (
    check_counts,
    complete_prompt,
    match_placeholders,
)
from foveal_runtime.frontend.items.prepared import (
    ItemCost,
    MediaPart,
    PreparedItem,
    PreparedRequest,
    PrepareOptions,
)
from foveal_runtime.frontend.items.processor_cache import ProcessorCache
from foveal_runtime.frontend.items.source import Buffer, ItemSource, Page, RawMedia
from foveal_runtime.frontend.media import hashing
from foveal_runtime.frontend.media.fetch import Fetcher
from foveal_runtime.frontend.media.options import by_modality
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import Workers
from foveal_runtime.frontend.protocol.bounds import check_prompt_logprobs
from foveal_runtime.plan.config import FrontendConfig
from foveal_runtime.plan.errors import (
    ContextLengthExceeded,
    FovealError,
    InvalidRequest,
    Unsupported,
)
from foveal_runtime.plan.media import MODALITIES, MMHash
from foveal_runtime.wire.item import meta_of, read_header

log = logging.getLogger(__name__)
T = TypeVar("T")


class MediaInput:
    """Prepares the media of requests.

    `workers` must have been started; `info` is what they said. `knowledge` is the engine client.
    """

    def __init__(
        self,
        config: FrontendConfig,
        workers: Workers,
        info: ProcessorInfo,
        *,
        knowledge: Knowledge,
        stats: FrontendStats | None = None,
    ) -> None:
        self.config = config
        self.info = info
        self.workers = workers
        self.knowledge = knowledge
        self.stats = stats or FrontendStats()
        self.fetcher = Fetcher(config.media_sources)
        self.cache = ProcessorCache(config.processor_bytes)
        self.url_texts = hashing.UrlTextMap()
        self.aliases = Aliases(
            config.max_bindings, config.max_uuid_length, self.knowledge.lookup_alias
        )
        self.processing: SingleFlight[MMHash, Buffer] = SingleFlight()
        self._reading_embeds = asyncio.Semaphore(1)  # a file is copied twice; no plan counts many
        self.injector = Injector(
            config.injection, info, self.cache, self.stats, self.knowledge,
        )  # fmt: skip
        self._identifier = Identifier(
            config.modalities, self.fetcher, self.aliases, self.url_texts, self.stats,
            self._recall_injected,
        )  # fmt: skip
        self.documents = Documents(config.modalities, info, self._identifier, workers, self.stats)
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

    async def pages(
        self, documents: Sequence[MediaPart], options: PrepareOptions
    ) -> list[Sequence[Page]]:
        """See `interfaces.InputProcessor`."""
        return await self.documents.pages(documents, options)

    async def prepare(
        self, token_ids: list[int], parts: Sequence[MediaPart], options: PrepareOptions
    ) -> PreparedRequest:
        """See `interfaces.InputProcessor`."""
        items: list[PreparedItem] = []
        try:
            self._check_embeds(parts)
            check_counts(self.info, self.config.modalities, parts)
            token_ids = complete_prompt(self.info, token_ids, parts)
            slots = match_placeholders(self.info, token_ids, parts)
            present = {MODALITIES.index(part.modality) for part in parts}
            own = by_modality(options.mm_processor_kwargs, present, self.info.options)
            own_options = {modality: (one, _canonical(one)) for modality, one in own.items()}
            named = await together(
                [self._identifier.identify(i, parts, options) for i in range(len(parts))]
            )
            which = self._distinct(parts, named, options, own_options, items)
            paths = [parts[which.index(i)].path for i in range(len(items))]
            await together([self._learn(item, p) for item, p in zip(items, paths, strict=True)])
            for name in named:
                if isinstance(name.raw, DataUrlMedia):
                    name.raw.forget_file()
            request = PreparedRequest(
                request_id=options.request_id,
                token_ids=token_ids,
                items=items,
                placements=[(at, which[part]) for at, part in slots],
                sampling=options.sampling,
                binds=self._identifier.binds(parts, named),
                priority=options.priority,
                cache_salt=options.salt,
                read_prefix_cache=options.read_prefix_cache,
                echo_prompt=options.echo_prompt,
                lora=options.lora,
            )
            self._fit(request)
        except BaseException as error:
            for item in items:
                item.source.release()
            if isinstance(error, FovealError):
                self.stats.media_errors[error.code] += 1
            raise
        for alias, digest in request.binds:
            self.aliases.commit(alias, digest)
        return request

    def inject_into_mm_cache(
        self, mm_hashes: Mapping[str, Sequence[str]], mm_kwargs: Mapping[str, Sequence[Any]]
    ) -> None:
        """Items that were processed elsewhere: see `injection.Injector.inject`. Never raises."""
        self.injector.inject(mm_hashes, mm_kwargs)

    def reset_cache(self) -> None:
        """Forgets every processed item; what requests hold they keep."""
        self.cache.reset()

    # ---- items ----------------------------------------------------------------------------------
    def _distinct(
        self,
        parts: Sequence[MediaPart],
        named: Sequence[Named],
        options: PrepareOptions,
        own_options: Mapping[int, tuple[Mapping[str, Any], bytes]],
        items: list[PreparedItem],
    ) -> list[int]:
        """Fills `items` with the distinct ones; returns each part's index into them. `own_options`
        are those of each modality, also as JSON."""
        index_of: dict[MMHash, int] = {}
        which = []
        for part, name in zip(parts, named, strict=True):
            modality = MODALITIES.index(part.modality)
            own, raw_options = own_options[modality]
            key = name.key or self._key(part, modality, name, options, own)
            if key not in index_of:
                index_of[key] = len(items)
                item = self._item(key, modality, name, raw_options, options.client, part.is_embeds)
                items.append(item)
            which.append(index_of[key])
        return which

    def _key(
        self,
        part: MediaPart,
        modality: int,
        name: Named,
        options: PrepareOptions,
        own_options: Mapping[str, Any],
    ) -> MMHash:
        identity = self.info.identity
        if part.is_embeds:
            return hashing.embeds_hash(name.digest, identity=identity, salt=options.salt)
        return hashing.mm_hash(
            name.digest,
            modality=modality,
            identity=identity,
            options=own_options,
            salt=options.salt,
        )

    def _item(
        self,
        key: MMHash,
        modality: int,
        name: Named,
        options: bytes,
        client: str,
        is_embeds: bool,
    ) -> PreparedItem:
        cost = ItemCost()

        def make(raw: RawMedia) -> Coroutine[Any, Any, Buffer]:
            if is_embeds:
                return self._take_embeds(key, raw)
            return self._make(key, modality, options, raw, cost, client)

        source = ItemSource(key, self.cache, self.stats, name.raw, make)
        return PreparedItem(key, modality, source, cost=cost)

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
        try:
            if item.is_held_only:
                name = MODALITIES[item.modality]
                raise unknown_media(name, name, None)
            value = await source.value()
        except FovealError as error:
            raise naming(path, error) from error
        source.retain(value)
        _describe(item, value)

    async def _make(
        self,
        key: MMHash,
        modality: int,
        options: bytes,
        raw: RawMedia,
        cost: ItemCost,
        client: str,
    ) -> Buffer:
        """The processor, once for all who want this key now: it costs the one who came first."""

        async def work() -> Buffer:
            cost.was_processed = True
            data = await raw.read()
            begin = time.perf_counter()
            done = await self.workers.process(modality, options, data, client, raw.page)
            self._check_value(done.value)
            worked = done.decode_seconds + done.process_seconds
            self.stats.stages.observe("queue", max(0.0, time.perf_counter() - begin - worked))
            self.stats.stages.observe("decode", done.decode_seconds)
            self.stats.stages.observe("process", done.process_seconds)
            self.stats.processed_items[modality] += 1
            self.cache.commit(key, done.value)
            return done.value

        return await self.processing.run(key, work)

    async def _take_embeds(self, key: MMHash, raw: RawMedia) -> Buffer:
        """The item of encoder outputs that a client sent; no processor has any part in it."""

        async def work() -> Buffer:
            async with self._reading_embeds:
                data = await raw.read()
                value = await off_loop(len(data), lambda: embeds_item(data, self.info))
            self._check_value(value)
            self.cache.commit(key, value)
            return value

        return await self.processing.run(key, work)

    def _check_embeds(self, parts: Sequence[MediaPart]) -> None:
        path = next((part.path for part in parts if part.is_embeds), None)
        if path is not None and not self.config.media_embeds:
            raise Unsupported(
                f"{path}: images as embeddings are switched off here (--enable-mm-embeds, "
                "frontend.mediaEmbeds): send the image",
                param=path,
            )

    def _check_value(self, value: Buffer) -> None:
        """A value that no request can use takes no place in a cache."""
        limit = self.knowledge.max_model_len()
        num_tokens = meta_of(read_header(value)).num_tokens
        if 0 < limit <= num_tokens:
            raise ContextLengthExceeded(
                f"the prompt is too long: the item takes {num_tokens} tokens, this model's maximum "
                f"context length is {limit} tokens"
            )

    def _recall_injected(self, name: str, options: PrepareOptions) -> MMHash | None:
        key = self.injector.recall(name, options.tenant, is_salted=bool(options.salt))
        known = self.cache.is_cached(key) or self.knowledge.lookup_item(key) is not None
        return key if known else None

    def _fit(self, request: PreparedRequest) -> None:
        """Checks the expanded length; cuts max_tokens to what is left."""
        limit = self.knowledge.max_model_len()
        metas = [item.meta for item in request.items]
        if limit <= 0 or any(meta is None for meta in metas):
            return
        media = sum(meta.num_tokens - 1 for _, i in request.placements if (meta := metas[i]))
        length = len(request.token_ids) + media
        sampling = request.sampling
        if length + sampling.least_outputs > limit:
            raise ContextLengthExceeded(
                f"the prompt is too long: it has {length} tokens with its media expanded ({media} "
                f"more than its text), this model's maximum context length is {limit} tokens"
            )
        check_prompt_logprobs(length, sampling.prompt_logprobs)
        if sampling.least_outputs and length + sampling.max_tokens > limit:
            request.sampling = msgspec.structs.replace(sampling, max_tokens=limit - length)


def _describe(item: PreparedItem, value: Buffer) -> None:
    item.size_bytes = len(value)
    item.meta = meta_of(read_header(value))


def _canonical(options: Mapping[str, object]) -> bytes:
    """Options as sorted JSON for the worker. Raises InvalidRequest."""
    try:
        return json.dumps(options, sort_keys=True, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(
            f"mm_processor_kwargs is not plain JSON: {error}", param="mm_processor_kwargs"
        ) from error


async def together(work: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """All results; the first error in order of the list, after the others were cancelled."""
    if len(work) < 2:
        return [await one for one in work]
    tasks = [asyncio.create_task(one) for one in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    finally:
        for task in tasks:
            task.cancel()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
    for end in ends:
        if isinstance(end, BaseException) and not isinstance(end, asyncio.CancelledError):
            raise end
    return [task.result() for task in tasks]
