"""The watch engine (kopf and nothing else of it) and the keeper that starts it anew."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from types import SimpleNamespace
from typing import Any

import kopf
from aiohttp import web
from aiohttp.test_utils import TestServer
from yarl import URL

from foveal_operator.common.logs import KopfsLines
from foveal_operator.kube.cluster import Credentials
from foveal_operator.kube.kinds import BY_NAME, KINDS, POD, SECRET, WATCHED, Kind
from foveal_operator.kube.kopf_watch import EndlessBackoff, WatchEngine
from foveal_operator.kube.watches import WatchKeeper
from tests.support.fake_clock import FakeTime


# --- the engine ----------------------------------------------------------------------------------
async def credentials() -> Credentials:
    return Credentials(server="http://127.0.0.1:9", token="t")


def engine(*namespaces: str, login: Any = credentials, monotonic: Any = None) -> WatchEngine:
    return WatchEngine(
        WATCHED, namespaces, login=login, sink=lambda *_: None,
        loop=asyncio.get_running_loop(), identity="me", monotonic=monotonic or time.monotonic,
    )  # fmt: skip


async def test_kopf_gets_event_handlers_and_nothing_else() -> None:
    """Any other kind of handler writes annotations or finalizers on users' objects."""
    registry = engine().registry()
    assert registry._changing.get_all_handlers() == []
    assert registry._spawning.get_all_handlers() == []
    assert registry._indexing.get_all_handlers() == []
    assert len(registry._watching.get_all_handlers()) == len(WATCHED)


async def test_kopf_is_silent_standalone_and_patient() -> None:
    settings = engine("a").settings()
    assert settings.posting.enabled is False
    assert settings.peering.standalone is True
    assert settings.scanning.disabled is True
    assert settings.process.ultimate_exiting_timeout is None, "it would kill the whole process"
    found = iter(settings.networking.error_backoffs)  # type: ignore[arg-type]
    waits = [next(found) for _ in range(1000)]
    assert max(waits) == 15.0
    assert list(zip(range(3), EndlessBackoff(), strict=False)) == [(0, 1.0), (1, 2.0), (2, 4.0)]


async def test_login_hands_over_a_token_that_expires() -> None:
    found = await engine()._on_login()
    assert isinstance(found, kopf.AiohttpSession)
    async with found.aiohttp_session as session:
        assert session.headers["Authorization"] == "Bearer t"
    assert found.expiration is not None


def test_secrets_are_never_watched_read_or_pruned() -> None:
    assert not SECRET.watched
    assert not SECRET.pruned
    assert BY_NAME["PersistentVolumeClaim"].pruned is False
    assert [kind.name for kind in KINDS if kind.plural == "secrets"] == ["Secret"]


async def test_a_kind_is_silent_until_its_watch_is_answered_and_after_a_while() -> None:
    now = 0.0
    one = engine("a", "b", monotonic=lambda: now)

    async def answer(path: str, status: int = 200, watch: str = "true") -> None:
        url = URL(f"https://host/prefix{path}").with_query(watch=watch)
        response = SimpleNamespace(status=status)
        await one._on_answer(None, None, SimpleNamespace(url=url, response=response))

    await answer(POD.path("a"))
    await answer(POD.path("b"), status=403)
    await answer(POD.path("b"), watch="")
    assert "pods" in one.lookup_silent(), "one namespace of two"
    await answer(POD.path("b"))
    assert set(one.lookup_silent()) == {kind.plural for kind in WATCHED if kind is not POD}
    now = 241.0
    assert "pods" in one.lookup_silent()


async def test_an_engine_that_fails_ends_its_thread() -> None:
    """kopf waits for the stop flag in a thread of its own, and asyncio.run waits for that thread:
    after one refused discovery call the engine looked alive for ever, and watched nothing."""

    async def refuse(request: web.Request) -> web.Response:
        if request.path == "/api":  # kopf would leave the second of two failures unread
            return web.json_response({"versions": []})
        return web.json_response({"kind": "Status", "code": 415}, status=415)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", refuse)
    async with TestServer(app) as server:

        async def login() -> Credentials:
            return Credentials(server=str(server.make_url("")).rstrip("/"), token="t")

        one = engine(login=login)
        one.start()
        assert await asyncio.to_thread(ended, one)
        assert one.failure


def ended(one: WatchEngine) -> bool:
    one.join(60.0)
    return not one.is_alive


# --- its keeper ----------------------------------------------------------------------------------
class StubEngine:
    """Alive and complete, until the test says otherwise."""

    def __init__(self) -> None:
        self.is_alive = True
        self.failure = ""
        self.silent: tuple[str, ...] = ()
        self.is_stopped = False

    def start(self) -> None: ...

    def stop(self) -> None:
        self.is_stopped = True

    def lookup_silent(self) -> tuple[str, ...]:
        return self.silent

    def was_refused(self) -> bool:
        return False


def keeper() -> tuple[WatchKeeper, list[StubEngine], FakeTime]:
    made: list[StubEngine] = []
    clock = FakeTime()

    def make(kinds: tuple[Kind, ...], namespaces: tuple[str, ...]) -> StubEngine:
        made.append(StubEngine())
        return made[-1]

    return WatchKeeper(make, clock.clock), made, clock


def test_dead_watches_are_replaced_at_a_bounded_rate() -> None:
    watches, made, clock = keeper()
    assert watches.lookup_failure()
    watches.start(WATCHED, ())
    assert watches.lookup_failure() == ""
    starts = []
    for _ in range(1800):
        made[-1].is_alive = False
        assert watches.lookup_failure() == "the watches have ended"
        if watches.restart_if_due():
            starts.append(clock.now)
        clock.now += 2.0
    gaps = [later - earlier for earlier, later in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert gaps[0] <= 4.0
    assert gaps[-1] == 300.0
    assert all(one.is_stopped for one in made[:-1])
    made[-1].is_alive = True
    assert not watches.restart_if_due()
    made[-1].is_alive = False
    assert watches.restart_if_due(), "once all was well, help comes fast again"


def test_deaf_watches_are_named_and_replaced_after_a_minute() -> None:
    watches, made, clock = keeper()
    watches.start(WATCHED, ())
    made[-1].silent = ("pods", "jobs")
    assert watches.lookup_failure() == "no watch of pods, jobs"
    assert not watches.restart_if_due(), "they may still be starting"
    clock.now += 61.0
    assert watches.restart_if_due()
    assert made[0].is_stopped
    assert watches.lookup_failure() == ""


# --- its log -------------------------------------------------------------------------------------
def told(*lines: tuple[str, float], error: Exception | None = None) -> list[str]:
    """What the operator's log has of lines that kopf says at these times."""
    found, only = [], KopfsLines()
    for text, at in lines:
        info = (type(error), error, None) if error else None
        record = logging.LogRecord("kopf.x", logging.ERROR, "x.py", 1, text, (), info)
        record.created = at
        if only.filter(record):
            assert record.exc_info is None
            found.append(record.getMessage())
    return found


def test_what_kopf_says_is_one_plain_line_a_minute() -> None:
    """A deleted namespace was a line of 1,500 characters for each kind at each attempt."""
    url = "https://10.0.0.1/api/v1/namespaces/a/pods"
    retry = (
        f"Request attempt #1 failed; will retry: GET {url}?watch=true -> APIForbiddenError('pods "
        "is forbidden', {'kind': 'Status', 'code': 403}, status=403)"
    )
    line = f"asking again for {url}: pods is forbidden (told once a minute)"
    assert told((retry, 0.0), (retry, 1.0), (retry, 59.0), (retry, 61.0)) == [line, line]
    refused = f"Request attempt #1 failed; will retry: GET {url} -> OSError(111, 'refused')"
    assert told((refused, 0.0)) == [
        f"asking again for {url}: OSError(111, 'refused') (told once a minute)"
    ]
    assert told(("Watcher for pods has failed: gone", 0.0), error=OSError("gone")) == []
    fault = "Handler 'pods' failed with an exception and will ignore it: KeyError('x')"
    assert told((fault, 0.0), error=KeyError("x")) == [fault]
    assert told(("Ignoring an unsupported event type", 0.0)) == [
        "Ignoring an unsupported event type"
    ]
