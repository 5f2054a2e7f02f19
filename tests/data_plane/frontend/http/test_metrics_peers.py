"""/metrics of several processes: peers that are away, late or restarted, and sums that stay."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from foveal_runtime.frontend.http.monitoring.metrics import MetricsPage, counts_file
from foveal_runtime.frontend.http.monitoring.siblings import Siblings, socket_path
from foveal_runtime.plan.local import COUNTS_VARIABLE
from foveal_runtime.telemetry.exposition import OPENMETRICS, TEXT, PageFormat, parse
from foveal_runtime.telemetry.metrics import Metrics
from tests.support.metric_samples import total


async def test_page_shows_peers_and_survives_their_absence(start: Any) -> None:
    async with start(frontend_id="other") as other:
        await other.chat()
        peers = (f"{other.url}/metrics?own=1", "http://127.0.0.1:9/metrics")
        async with start(metrics_peers=peers) as harness:
            await harness.chat()
            text = (await harness.http.get("/metrics")).text
            own = (await harness.http.get("/metrics?own=1")).text
    assert total(text, "vllm:request_success_total", finished_reason="stop") == 2
    assert total(text, "foveal_ready", process="other") == 1
    assert total(text, "foveal_metrics_peers_unreachable", process="frontend-0") == 1
    assert total(own, "vllm:request_success_total", finished_reason="stop") == 1


async def test_sums_do_not_fall_while_a_peer_is_away(start: Any) -> None:
    """Of `foveal serve` with several frontends, one that starts again."""
    async with start() as harness:
        async with start(frontend_id="other") as other:
            await other.chat()
            page = MetricsPage(harness.app.service.metrics, (f"{other.url}/metrics?own=1",))
            both = (await page.text()).decode()
        alone = (await page.text()).decode()
    for text, ready in ((both, 1), (alone, 0)):
        assert total(text, "vllm:request_success_total", finished_reason="stop") == 1
        assert total(text, "vllm:request_prompt_tokens_count") == 1
        assert total(text, "foveal_ready", process="other") == ready
        assert total(text, "foveal_metrics_peers_unreachable") == 1 - ready


async def test_pages_are_written_beside_the_event_loop() -> None:
    """That takes most of their time, and no key is asked for."""
    threads = []

    def render(registry: Any) -> bytes:
        threads.append(threading.get_ident())
        return TEXT.render(registry)

    form = PageFormat(TEXT.content_type, render, TEXT.families)
    metrics = Metrics("frontend", model_name="m", process="p")
    for peers in ((), ("http://127.0.0.1:9/metrics",)):
        assert b"python_info" in await MetricsPage(metrics, peers).text(form)
    assert len(threads) == 2
    assert threading.get_ident() not in threads


async def test_pages_are_made_one_at_a_time(start: Any) -> None:
    """Each held the event loop up, for a tenth of a second with three processes: whoever asked ten
    times a second, without a key, stopped all streams."""
    async with start(frontend_id="other") as other, start() as harness:

        def asked() -> float:
            text = other.app.service.metrics.exposition().decode()
            return total(text, "http_requests_total", handler="/metrics")

        page = MetricsPage(harness.app.service.metrics, (f"{other.url}/metrics?own=1",))
        texts = await asyncio.gather(*(page.text() for _ in range(20)))
        assert len(set(texts)) == 1
        await harness.until(asked)
        assert asked() == 1
        await other.chat()
        later = (await page.text()).decode()
        assert total(later, "vllm:request_success_total", finished_reason="stop") == 1


def _process(folder: Path, number: int) -> Metrics:
    metrics = Metrics("frontend", model_name="m", process=f"frontend-0/{number}")
    metrics.keep(counts_file(socket_path(str(folder), number)))
    return metrics


@pytest.mark.parametrize("form", [TEXT, OPENMETRICS])
async def test_sums_do_not_fall_when_a_process_dies(tmp_path: Path, form: PageFormat) -> None:
    """Prometheus takes less for a restart, and counts all there is once more."""
    one, other = _process(tmp_path, 0), _process(tmp_path, 1)
    page = MetricsPage(one, (), Siblings([socket_path(str(tmp_path), 1)]).metrics_peers)

    async def seen() -> tuple[float, float, float, float]:
        families = {family.name: family for family in parse((await page.text(form)).decode(), form)}
        samples = {
            (sample.name, sample.labels.get("finished_reason") or sample.labels.get("le")): sample
            for name in ("vllm:request_success", "vllm:request_prompt_tokens")
            for sample in families[name].samples
        }
        return tuple(samples[key].value for key in (
            ("vllm:request_success_total", "stop"),
            ("vllm:request_prompt_tokens_bucket", "5.0"),
            ("vllm:request_prompt_tokens_count", None),
            ("vllm:request_prompt_tokens_sum", None),
        ))  # type: ignore[return-value]  # fmt: skip

    for metrics, size in ((one, 4), (other, 70)):
        metrics.inc("vllm:request_success", finished_reason="stop")
        metrics.observe("vllm:request_prompt_tokens", size)
    assert await seen() == (1, 1, 1, 4), "what a process has never shown is not known"
    unreachable = b"foveal_metrics_peers_unreachable{"
    assert unreachable in await page.text(form)
    assert unreachable not in one.exposition(form), "what a sibling shows of it an hour later"
    other.exposition()
    assert await seen() == (2, 1, 2, 74)
    again = _process(tmp_path, 1)
    again.set("vllm:mm_cache_queries", 3)
    again.inc("vllm:request_success", finished_reason="stop")
    assert await seen() == (2, 1, 2, 74)
    again.exposition()
    assert await seen() == (3, 1, 2, 74)
    assert not again.exposition().count(b"frontend-0/0")


async def test_sums_do_not_fall_when_the_parent_of_all_processes_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What they had counted lay beside their sockets, in a folder of the parent's."""
    monkeypatch.setenv(COUNTS_VARIABLE, str(tmp_path / "frontend-0.counts"))
    for folder, wanted in (("a", 1), ("b", 2)):
        (tmp_path / folder).mkdir()
        one, other = _process(tmp_path / folder, 0), _process(tmp_path / folder, 1)
        other.inc("vllm:request_success", finished_reason="stop")
        other.exposition()
        peers = Siblings([socket_path(str(tmp_path / folder), 1)]).metrics_peers
        text = (await MetricsPage(one, (), peers).text()).decode()
        assert total(text, "vllm:request_success_total", finished_reason="stop") == wanted


async def test_a_peer_that_stands_still_holds_one_page_up() -> None:
    """A process that was stopped held every page of its siblings up, for two seconds."""
    going = asyncio.Event()
    going.set()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        await going.wait()
        writer.write(b"HTTP/1.0 200 OK\r\ncontent-type: text/plain\r\n\r\npeer_is_here 1\n")
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    metrics = Metrics("frontend", model_name="m", process="p")
    page = MetricsPage(metrics, (f"http://127.0.0.1:{port}/metrics",))
    clock = asyncio.get_running_loop().time

    async def seen() -> tuple[bool, float]:
        began = clock()
        return b"peer_is_here" in await page.text(), clock() - began

    async with server:
        assert (await seen())[0]
        going.clear()
        found, seconds = await seen()
        assert not found
        assert seconds >= 2
        for _ in range(4):
            found, seconds = await seen()
            assert not found
            assert seconds < 1.5
        going.set()
        await asyncio.sleep(0.5)
        assert (await seen())[0]


def test_what_does_not_fit_is_not_counted_on_from(tmp_path: Path) -> None:
    file = tmp_path / "1.counts"
    for text in (b"", b"{", b'{"vllm:mm_cache_hits":[[[["m","",""],9.0]],[]],"no":[[],[]]}',
                 b'{"vllm:request_prompt_tokens":[[],[[["m",""],[1,2],3.0]]]}'):  # fmt: skip
        file.write_bytes(text)
        metrics = Metrics("frontend", model_name="m", process="p")
        metrics.keep(file)
        metrics.set("vllm:mm_cache_hits", 1)
        assert total(metrics.exposition().decode(), "vllm:mm_cache_hits_total") == 1
