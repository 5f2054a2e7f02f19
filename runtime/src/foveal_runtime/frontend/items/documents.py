"""Documents of a request as pages, each known by what it shows: none is drawn twice to find out.

Owned by input_processor, called before the prompt is rendered, because a document takes as many
placeholders as it has pages. Media workers draw; only the digests of the pages are kept here. A
page that another document had is the same item.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from foveal_runtime.frontend.common.single_flight import SingleFlight
from foveal_runtime.frontend.common.stats import FrontendStats
from foveal_runtime.frontend.items.identify import Identifier, naming
from foveal_runtime.frontend.items.placement import check_counts
from foveal_runtime.frontend.items.prepared import MediaPart, PrepareOptions
from foveal_runtime.frontend.items.source import Page, RawMedia, ReadOnce
from foveal_runtime.frontend.media.protocol import ProcessorInfo
from foveal_runtime.frontend.media.workers import Workers
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import FovealError, InvalidRequest

_DIGEST_BYTES = 32
MAX_KNOWN_PAGES = 1 << 13
"""Digests of pages that are remembered."""

Digests = tuple[bytes, ...]


class Documents:
    """Documents and their pages, decoded once.

    Bounded by pages; the least recently used document goes first.
    """

    def __init__(
        self,
        modalities: ModalitiesConfig,
        info: ProcessorInfo,
        identifier: Identifier,
        workers: Workers,
        stats: FrontendStats,
    ) -> None:
        self._modalities = modalities
        self._info = info
        self._identifier = identifier
        self._workers = workers
        self._stats = stats
        self._known: OrderedDict[tuple[bytes, bytes], Digests] = OrderedDict()
        self._num_pages = 0
        self._drawing: SingleFlight[tuple[bytes, bytes], Digests] = SingleFlight()

    async def pages(
        self, documents: Sequence[MediaPart], options: PrepareOptions
    ) -> list[Sequence[Page]]:
        """See `interfaces.InputProcessor`. One document after the other, so that a request with too
        many pages is refused before all are drawn."""
        check_counts(self._info, self._modalities, documents)
        limit = self._modalities.image.max_per_prompt
        found: list[Sequence[Page]] = []
        for document in documents:
            try:
                digest, file = await self._identifier.read(document, options)
                raw = ReadOnce(file)
                digests = await self._digests((options.salt, digest), raw, options.client)
            except FovealError as error:
                self._stats.media_errors[error.code] += 1
                raise naming(document.path, error) from error
            found.append([Page(one, raw, number) for number, one in enumerate(digests)])
            num_pages = sum(map(len, found))
            if num_pages > limit:
                raise InvalidRequest(
                    f"the documents have {num_pages} pages up to {document.path}, the limit is "
                    f"{limit} images in a request",
                    param=document.path,
                )
        return found

    async def _digests(self, key: tuple[bytes, bytes], raw: RawMedia, client: str) -> Digests:
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            return known

        async def work() -> Digests:
            done = await self._workers.page_digests(await raw.read(), client)
            self._stats.stages.observe("decode", done.decode_seconds)
            size = _DIGEST_BYTES
            drawn = bytes(done.value)
            digests = tuple(drawn[i : i + size] for i in range(0, len(drawn), size))
            self._commit(key, digests)
            return digests

        return await self._drawing.run(key, work)

    def _commit(self, key: tuple[bytes, bytes], digests: Digests) -> None:
        self._num_pages += len(digests) - len(self._known.pop(key, ()))
        self._known[key] = digests
        while self._num_pages > MAX_KNOWN_PAGES:
            self._num_pages -= len(self._known.popitem(last=False)[1])

    def __len__(self) -> int:
        """Pages that are known."""
        return self._num_pages

    def check_integrity(self) -> None:
        assert self._num_pages == sum(map(len, self._known.values())) <= MAX_KNOWN_PAGES
