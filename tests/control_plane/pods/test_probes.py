"""Probes: bounded, patient with nobody; figures add up, also from the runtime's own series."""

from __future__ import annotations

import asyncio

import pytest
from aiohttp import ClientSession, web

from foveal_operator.pods.metrics import Figures, History, PodReports, read_figures
from foveal_operator.pods.probes import aiohttp_fetch, metrics_url
from tests.support.fake_pods import FakePods, engine_text, frontend_text, pod


async def test_figures_add_up() -> None:
    pods = FakePods(e0=engine_text(), e1=engine_text(0, peak=9), f0=frontend_text(2, 1))
    engines = [pod("e-0", ip="e0"), pod("e-1", ip="e1")]
    found = await pods.prober.observe_pods(engines, [pod("f-0", ip="f0")])
    assert found.sessions == {"e-0": 2, "e-1": 0}
    assert found.load == {"e-0": 7, "e-1": 7}
    assert (found.sessions_up, found.sessions_wanted) == (3, 4)
    assert found.silent == ()
    assert found.measured == {"kv": 7}
    assert found.peaks == {"e-0": 5, "e-1": 9}


async def test_ready_frontends_that_do_not_answer_are_named() -> None:
    pods = FakePods(f0=frontend_text(1), f1=frontend_text(1))
    del pods.texts["f1"]
    frontends = [pod("f-0", ip="f0"), pod("f-1", ip="f1"), pod("f-2", ip="f2", ready=False)]
    assert (await pods.prober.observe_pods([pod("e-0", ip="e0")], frontends)).silent == ("f-1",)


async def test_engines_of_another_group_are_no_missing_sessions() -> None:
    pods = FakePods(f0=frontend_text(1))
    engines = [pod("e-0", ip="e0"), pod("e-1", ip="e1", group="other")]
    found = await pods.prober.observe_pods(engines, [pod("f-0", ip="f0")])
    assert (found.sessions_up, found.sessions_wanted) == (1, 1)


async def test_a_silent_pod_is_unknown_and_forgotten_after_a_while() -> None:
    pods = FakePods(e0=engine_text())
    found = await pods.prober.observe_pods([pod("e-0", ip="e0"), pod("e-1", ip="e1")], [])
    assert found.sessions == {"e-0": 2}
    assert (found.sessions_up, found.sessions_wanted) == (-1, -1)
    del pods.texts["e0"]
    pods.now = 20.0
    found = await pods.prober.observe_pods([pod("e-0", ip="e0")], [])
    assert found.sessions == {"e-0": 2}
    pods.now = 61.0
    found = await pods.prober.observe_pods([pod("e-0", ip="e0")], [])
    assert found == PodReports()


async def test_no_pod_is_asked_more_often_than_the_interval() -> None:
    pods = FakePods(e0=engine_text())
    engines = [pod("e-0", ip="e0", ready=False), pod("e-1", ip="absent", ready=False)]
    for now in (0.0, 5.0, 14.9, 15.0, 29.0):
        pods.now = now
        await pods.prober.observe_pods(engines, [])
    assert sorted(pods.asked) == ["absent", "absent", "e0", "e0"]


async def test_a_pod_that_has_just_become_ready_is_asked_more_often() -> None:
    """Ready waits for its sessions: it came up to 15 s later than it could."""
    pods = FakePods(f0=frontend_text(1))
    for now in (0.0, 5.0, 7.9, 8.0, 34.0, 36.0, 49.0):
        pods.now = now
        frontend = pod("f-0", ip="f0", ready=now >= 5.0)
        asked = len(pods.asked)
        await pods.prober.observe_pods([], [frontend])
        assert (len(pods.asked) > asked) == (now in (0.0, 5.0, 8.0, 34.0, 49.0)), now


async def test_few_are_asked_at_a_time() -> None:
    pods = FakePods()
    await pods.prober.observe_pods([pod(f"e-{i}", ip=f"e{i}") for i in range(20)], [])
    assert pods.most_in_flight == 2
    assert len(pods.asked) == 20


async def test_pods_that_do_not_run_are_not_asked() -> None:
    starting, v6 = pod("e-0"), pod("e-1", ip="fd00::1")
    del starting["status"]["podIP"]
    assert metrics_url(starting) is None
    assert metrics_url(v6) == "http://[fd00::1]:80/metrics"
    pods = FakePods()
    await pods.prober.observe_pods([starting], [])
    assert pods.asked == []


async def test_stale_hints_are_a_rate_over_the_last_minutes() -> None:
    pods = FakePods()
    engines, frontends = [pod("e-0", ip="e0")], [pod("f-0", ip="f0")]
    for now, queries, stale in ((0, 10, 10), (100, 110, 12), (200, 10_010, 62)):
        pods.now = float(now)
        pods.texts = {"e0": engine_text(stale=stale), "f0": frontend_text(1, queries=queries)}
        found = await pods.prober.observe_pods(engines, frontends)
    assert found.stale_rate == pytest.approx(52 / 10_000)


def test_a_few_queries_make_no_rate() -> None:
    history = History()
    history.add(0.0, Figures())
    history.add(15.0, Figures(num_queries=10, num_stale=1))
    assert history.growth == (10, 1)
    history.add(30.0, Figures(num_queries=3))
    assert history.growth == (0, 0)
    for now in range(100):
        history.add(1000.0 + now * 15, Figures(num_queries=3 + now))
    assert history.growth[0] == 40


@pytest.mark.parametrize(
    "text", ["foveal_mirror_sessions{ 7", "foveal_mirror_sessions NaN", "foveal_mirror_sessions -1"]
)
async def test_nonsense_is_silence(text: str) -> None:
    pods = FakePods(e0=text)
    with pytest.raises(ValueError, match=r"."):
        read_figures(text)
    assert await pods.prober.observe_pods([pod("e-0", ip="e0")], []) == PodReports()


async def test_forgetting_leaves_the_others() -> None:
    pods = FakePods(e0=engine_text(), e1=engine_text())
    engines = [pod("e-0", ip="e0"), pod("e-1", ip="e1")]
    await pods.prober.observe_pods(engines, [])
    pods.prober.forget(["uid-e-1"])
    await pods.prober.observe_pods(engines, [])
    assert sorted(pods.asked) == ["e0", "e0", "e1"]


async def test_real_http_answers_and_hangs() -> None:
    """200, 503, a redirect, too much, and nothing at all; each a value or a plain error."""
    never = asyncio.Event()

    async def answer(request: web.Request) -> web.Response:
        kind = request.path.strip("/")
        if kind == "hang":
            await never.wait()
        if kind == "redirect":
            raise web.HTTPFound("/ok")
        body = "x" * (5 << 20) if kind == "long" else "foveal_mirror_sessions 2\n"
        return web.Response(text=body, status=503 if kind == "bad" else 200)

    app = web.Application()
    app.router.add_get("/{kind}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    base = runner.addresses[0]
    async with ClientSession() as session:
        fetch = aiohttp_fetch(session)
        url = f"http://{base[0]}:{base[1]}"
        assert read_figures(await fetch(f"{url}/ok", 30.0)).sessions == 2
        for kind in ("bad", "redirect", "long"):
            with pytest.raises(ValueError, match="status"):
                await fetch(f"{url}/{kind}", 30.0)
        with pytest.raises(TimeoutError):
            await fetch(f"{url}/hang", 0.05)
        with pytest.raises(OSError, match=r"."):
            await fetch("http://127.0.0.1:1/ok", 5.0)
    never.set()
    await runner.cleanup()
