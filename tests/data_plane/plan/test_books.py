"""Books at their bounds take no more than the plan has for them."""

from __future__ import annotations

import gc
import multiprocessing
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from foveal_runtime.engine.events.log import EventBatch, StateStored
from foveal_runtime.engine.events.stream import EventStream
from foveal_runtime.engine.scheduler.request_table import MAX_EVICTED
from foveal_runtime.frontend.engines.quarantine import MAX_EXPLAINED, Quarantine
from foveal_runtime.frontend.engines.routing import Router
from foveal_runtime.frontend.grammars.compiler import Compiler
from foveal_runtime.frontend.http.access.admission import Gate
from foveal_runtime.frontend.items.documents import MAX_KNOWN_PAGES, Documents
from foveal_runtime.frontend.items.identify import Aliases
from foveal_runtime.frontend.media.hashing import UrlTextMap
from foveal_runtime.frontend.text.tokenizer import MAX_SPELLED, TextTokenizer
from foveal_runtime.mirror.admission import MAX_DEPARTED, RequestAdmission
from foveal_runtime.mirror.messages import Death, Refusals
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.refusals import MAX_REFUSALS, RefusalBook
from foveal_runtime.mirror.sender import Sender
from foveal_runtime.mirror.store import Bindings
from foveal_runtime.plan.budget.types import (
    ENGINE_BOOKS,
    ENGINE_SERVING_BYTES,
    FRONTEND_BOOKS,
    FRONTEND_SERVING_BYTES,
    MIRROR_UUIDS_BYTES,
)
from foveal_runtime.plan.config import Admission, FrontendConfig, ModalitiesConfig, ModelConfig
from foveal_runtime.telemetry.ages import EvictionAges
from foveal_runtime.telemetry.ghosts import GhostLists
from foveal_runtime.telemetry.metrics import Metrics
from foveal_runtime.wire import codec

LIMITS = ReceiverLimits(capacity_bytes=1 << 20)


def keys(count: int) -> Iterator[bytes]:
    """Distinct 32-byte keys, spread as hashes are."""
    return ((i * 0x9E3779B97F4A7C15 % (1 << 64)).to_bytes(8, "big") * 4 for i in range(1, count))


def uuids(count: int) -> Bindings:
    book = Bindings(LIMITS.max_bindings)
    for key in keys(count):
        book.bind(key, key[::-1])
        book.drain_changed()
    assert len(book.table) == ENGINE_BOOKS["uuids"][0]
    return book


def own_uuids(count: int) -> Aliases:
    config = FrontendConfig(model=ModelConfig(path="/m"))
    book = Aliases(config.max_bindings, 64)
    for key in keys(count):
        book.commit(key, key[::-1])
    assert len(book) == FRONTEND_BOOKS["uuids"][0]
    return book


def departed(count: int) -> RequestAdmission:
    book = Receiver(LIMITS).admission
    for key in keys(count):
        book.note_departed(key)
    assert len(book.departed) == MAX_DEPARTED == ENGINE_BOOKS["departed"][0]
    return book


def evicted(count: int) -> EvictionAges:
    book = EvictionAges(lambda: 0.0, remembered=MAX_EVICTED)
    for key in keys(count):
        book.evict(key)
    assert book.num_lately == ENGINE_BOOKS["evicted"][0]
    return book


def ghosts(count: int) -> GhostLists:
    book = GhostLists(1 << 40)
    for key in keys(count):
        book.query(key, 1)
    return book


def quarantine(count: int) -> RefusalBook:
    book = RefusalBook()
    shape = "4096 prompt tokens, 16 images, max_tokens 1024"
    entries = tuple((key[:16], 1.0 + i, f"{shape} {i}") for i, key in enumerate(keys(count)))
    for start in range(0, count, 64):
        book.join(Refusals(0.0, entries[start : start + 64]))
    assert len(book.entries) == MAX_REFUSALS == ENGINE_BOOKS["quarantine"][0]
    return book


def data_urls(count: int) -> UrlTextMap:
    book = UrlTextMap()
    for number, key in enumerate(keys(count)):
        book.commit(key, key[::-1], 1 << 20 | number)
    assert len(book) == FRONTEND_BOOKS["data_urls"][0]
    return book


def routes(count: int) -> Router:
    book = Router()
    for key in keys(count):
        book.commit("engine-0", [key])
    assert len(book) == FRONTEND_BOOKS["routes"][0]
    return book


def documents(count: int) -> Documents:
    """Of one page each: those take the most."""
    nobody = cast(Any, None)  # nothing is read or drawn
    book = Documents(ModalitiesConfig(), nobody, nobody, nobody, nobody)
    for key in keys(count):
        book._commit((key[:16], key), (key[::-1],))
    assert len(book) == MAX_KNOWN_PAGES == FRONTEND_BOOKS["documents"][0]
    return book


def tokens(count: int) -> TextTokenizer:
    backend = Tokenizer(models.BPE({f"token{i}": i for i in range(count)}, []))
    backend.decoder = decoders.ByteLevel()
    book = TextTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))
    for token_id in range(MAX_SPELLED):
        book.token_bytes(token_id)
    assert book.num_spelled == MAX_SPELLED == FRONTEND_BOOKS["tokens"][0]
    return book


def grammars(count: int) -> Compiler:
    book = Compiler(Metrics("frontend", model_name="m", process="frontend-0"))
    for number, key in enumerate(keys(count)):
        book._keep(key[:16], {"grammar": f"{number:04000}", "relaxed": []})
    assert 0.9 < book.known_bytes / 1024 / FRONTEND_BOOKS["grammars"][0] <= 1
    return book


def deaths(count: int) -> Quarantine:
    book = Quarantine()
    suspects = list(keys(128 * count + 1))
    for number in range(count):
        named = tuple(key[:16] for key in suspects[128 * number :][:128])
        book.on_death((f"engine-{number}", number), Death(number, 1.0, named, False))
    assert book.num_deaths == MAX_EXPLAINED == FRONTEND_BOOKS["deaths"][0]
    return book


def events(count: int) -> EventStream:
    """Kept for readers that ask again, and on its way to the thread that sends."""
    stream = EventStream("tcp://127.0.0.1:0")  # its thread never runs
    batch = EventBatch("engine-0", 1, 2.0, [StateStored(key) for key in keys(24)])
    payload = msgspec.msgpack.encode(batch)
    for number in range(count):
        stream.publish(batch)
        stream._keep(number.to_bytes(8, "big"), bytes(bytearray(payload)))
    assert stream.num_dropped
    assert len(stream._kept) < count
    return stream


def engines_uuids(count: int) -> Sender:
    """Those of one engine, as a frontend is told of them."""
    sender = Sender("f", frontend_boot=1)
    sender.bindings.update((key, key[::-1]) for key in keys(LIMITS.max_bindings + 1))
    assert count > len(sender.bindings) == ENGINE_BOOKS["uuids"][0]
    return sender


def measure_held(fill: Callable[..., object], *args: int) -> int:
    """Bytes of what `fill` returns. Python keeps freed tuples and numbers for later; a collection
    gives them back, so that none hides an entry and none counts as one."""
    gc.collect()
    tracemalloc.start()
    try:
        held = fill(*args)
        gc.collect()
        size, _ = tracemalloc.get_traced_memory()
        assert held is not None
    finally:
        tracemalloc.stop()
    return size


@pytest.fixture(scope="module")
def alone() -> Iterator[Callable[..., int]]:
    """`measure_held` in a process of its own: tracemalloc counts what every thread allocates, and
    threads of earlier tests may still run in this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield lambda fill, *args: pool.submit(measure_held, fill, *args).result()


def test_the_uuids_of_engines_are_in_the_mirrors_line(alone: Callable[..., int]) -> None:
    size = alone(engines_uuids, 1 << 20)
    assert MIRROR_UUIDS_BYTES / 2 < size <= MIRROR_UUIDS_BYTES, size


def prompt(count: int, num_sequences: int) -> object:
    """As it comes in a body, and in the messages of its sequences."""
    ids = msgspec.json.decode(msgspec.json.encode(list(range(70_000, 70_000 + count))))
    return ids, [codec.pack_tokens(ids) for _ in range(num_sequences)]


@pytest.mark.parametrize("num_sequences", [1, 8])
def test_prompts_in_flight_take_what_is_charged(
    alone: Callable[..., int], num_sequences: int
) -> None:
    """2,000,000 tokens of a process counted as tokens alone."""
    ticket = Gate(Admission()).enter()
    ticket.charge_tokens(20_000, num_sequences)
    size = alone(prompt, 20_000, num_sequences)
    assert ticket.media_bytes / 2 < size <= ticket.media_bytes, (size, ticket.media_bytes)


BOOKS = [
    (ENGINE_BOOKS, "uuids", uuids, 1),
    (ENGINE_BOOKS, "departed", departed, 1),
    (ENGINE_BOOKS, "evicted", evicted, 1),
    (ENGINE_BOOKS, "ghosts", ghosts, 3),
    (ENGINE_BOOKS, "events", events, 1),
    (ENGINE_BOOKS, "quarantine", quarantine, 1),
    (FRONTEND_BOOKS, "uuids", own_uuids, 1),
    (FRONTEND_BOOKS, "data_urls", data_urls, 1),
    (FRONTEND_BOOKS, "routes", routes, 1),
    (FRONTEND_BOOKS, "documents", documents, 1),
    (FRONTEND_BOOKS, "tokens", tokens, 1),
    (FRONTEND_BOOKS, "grammars", grammars, 1),
    (FRONTEND_BOOKS, "deaths", deaths, 1),
    (FRONTEND_BOOKS, "ghosts", ghosts, 1),
    (FRONTEND_BOOKS, "quarantine", quarantine, 1),
]


@pytest.mark.parametrize(("books", "name", "fill", "count"), BOOKS)
def test_a_full_book_takes_what_is_planned(
    alone: Callable[..., int],
    books: dict[str, tuple[int, int]],
    name: str,
    fill: Callable[[int], object],
    count: int,
) -> None:
    """Filled beyond its bound, and so at it."""
    entries, each = books[name]
    size = alone(fill, entries // count + min(entries, 2_000))
    planned = entries * each // count
    assert planned / 2 < size <= planned, (size, planned)


def test_every_book_is_filled_and_their_sum_is_in_the_plan() -> None:
    for books, serving in (
        (ENGINE_BOOKS, ENGINE_SERVING_BYTES), (FRONTEND_BOOKS, FRONTEND_SERVING_BYTES)
    ):  # fmt: skip
        assert {name for of, name, *_ in BOOKS if of is books} == books.keys()
        total = sum(entries * each for entries, each in books.values())
        assert 0.5 * serving < total <= 0.8 * serving, "the rest is for sockets and threads"
