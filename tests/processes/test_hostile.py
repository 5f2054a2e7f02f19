"""The hostile suite: two frontends and two engines under attack, beside a load that is checked.

`make hostile` runs it with FOVEAL_HOSTILE generated cases of each kind (1,000), `make soak` with
10,000. Nothing dies, no answer of the load is wrong or lost, /livez answers, every refusal is a
typed error. Figures are printed by attack. FOVEAL_QUIET runs every attack alone besides, with the
frontend before other processes, as on a machine that does nothing else.
"""

from __future__ import annotations

import base64
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.processes.attacks import (
    ALONE,
    ATTACKS,
    CHAT,
    NUM_CASES,
    Attacker,
    attack_scores,
)
from tests.support.processes.livez_probe import Probe
from tests.support.processes.mutations import (
    IMAGES,
    SOUNDS,
    VIDEOS,
    chat_about,
    media_cases,
    sample,
)
from tests.support.processes.pictures import answer_of, question

pytestmark = [pytest.mark.hostile, pytest.mark.timeout(3000)]

LIVEZ_SECONDS = float(os.environ.get("FOVEAL_LIVEZ_SECONDS", "2"))
PICTURES = 6
NUM_PROMPTS = 200  # of 400 tokens: more than twice the KV memory


class Load:
    """Honest clients that know what the answers are."""

    def __init__(self, urls: list[str]) -> None:
        self.num_answers = 0
        self.wrong: list[str] = []
        self._stop = threading.Event()
        self._clients = [httpx.Client(base_url=url, timeout=300) for url in urls]
        self._known = [
            [answer_of(http.post(CHAT, json=question(seed))) for seed in range(PICTURES)]
            for http in self._clients
        ]
        assert all(known == self._known[0] for known in self._known)
        self._threads = [
            threading.Thread(target=self._run, args=pair) for pair in enumerate(self._clients)
        ]

    def _run(self, index: int, http: httpx.Client) -> None:
        seed = index
        while not self._stop.is_set():
            seed = (seed + 1) % PICTURES
            try:
                response = http.post(CHAT, json=question(seed))
                if response.status_code == 200 and answer_of(response) == self._known[0][seed]:
                    self.num_answers += 1
                else:
                    self.wrong.append(f"{response.status_code} {response.text[:300]}")
            except httpx.HTTPError as error:
                self.wrong.append(repr(error))

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        for http in self._clients:
            http.close()


def fill(urls: list[str], attacker: Attacker) -> None:
    """What a deployment at work holds anyway: KV memory that was written once, what decodes each
    kind of image, and buffers of the largest batches. What comes after may add nothing."""
    for url in urls:
        with httpx.Client(base_url=url, timeout=300) as http:
            for number in range(NUM_PROMPTS):
                tokens = [20 + number % 20, 20 + number // 20] * 200
                body = {"prompt": tokens, "max_tokens": 1}
                assert http.post("/v1/completions", json=body).status_code == 200
            for kind in IMAGES:
                assert http.post(CHAT, json=chat_about(sample(kind), kind)).status_code == 200
    attack_scores(attacker)


def cached_bytes(urls: list[str]) -> int:
    """What the processor caches hold, which fill while the suite runs; the engines hold as much."""
    pages = [httpx.get(url + "/metrics", params={"own": 1}, timeout=60).text for url in urls]
    lines = [line for page in pages for line in page.splitlines()]
    return 2 * sum(int(float(x.split()[-1])) for x in lines if x.startswith("foveal_cache_bytes{"))


def worker_ends(asker: Any) -> float:
    """Media workers that died, or hung and were killed: nobody notices their successors."""
    page, name = asker.page(), "foveal_media_worker_restarts_total"
    assert name in page
    return float(asker.metric(name, page))


def family_of(pid: int) -> Iterator[int]:
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family_of(int(child))


def resources(deployment: Any) -> tuple[dict[str, int], int, int]:
    """(pids by process, resident bytes, open descriptors) of the whole deployment."""
    pids = {child.name: child.pid for child in deployment.children}
    everybody = [one for pid in pids.values() for one in family_of(pid)]
    pages = sum(int(Path(f"/proc/{p}/statm").read_text().split()[1]) for p in everybody)
    descriptors = sum(len(list(Path(f"/proc/{p}/fd").iterdir())) for p in everybody)
    return pids, pages * os.sysconf("SC_PAGE_SIZE"), descriptors


def test_nothing_a_client_sends_stops_the_server(start: Any) -> None:
    deployment, askers = start(num_frontends=2, num_engines=2)
    urls = [asker.url for asker in askers]
    rows = []
    attacker = Attacker(urls)
    with Probe(urls) as probe:
        time.sleep(2)
        probe.phase = "honest peak"
        load = Load(urls)
        fill(urls, attacker)
        probe.phase = "load alone"
        with load:
            time.sleep(3)
            pids, before_bytes, before_descriptors = resources(deployment)
            before_bytes -= cached_bytes(urls)
            for attack in ATTACKS:
                probe.phase = attack.__name__.removeprefix("attack_")
                attacker.statuses.clear()
                began, answered = time.monotonic(), load.num_answers
                attack(attacker)
                rows.append((
                    probe.phase, time.monotonic() - began, dict(sorted(attacker.statuses.items())),
                    load.num_answers - answered,
                ))  # fmt: skip
                assert all(child.is_alive for child in deployment.children), probe.phase
            probe.phase = "after"
            time.sleep(3)
        settled_pids, after_bytes, after_descriptors = resources(deployment)
        after_bytes -= cached_bytes(urls)
        num_worker_ends = [worker_ends(asker) for asker in askers]
    attacker.close()
    idle = probe.longest["idle"]
    alone = probe.longest["load alone"]
    print(f"\n/livez: idle {idle * 1000:.0f} ms, load alone {alone * 1000:.0f} ms")
    for phase, seconds, statuses, answers in rows:
        longest = probe.longest[phase]
        print(f"{phase:16} {seconds:6.1f} s  /livez {longest * 1000:5.0f} ms ({longest / idle:.1f} "
              f"x idle)  load answers {answers:4}  {statuses}")  # fmt: skip
    print(
        f"memory without caches {before_bytes >> 20} -> {after_bytes >> 20} MiB, descriptors "
        f"{before_descriptors} -> {after_descriptors}, load answers {load.num_answers}"
    )
    assert settled_pids == pids
    assert num_worker_ends == [0, 0]
    assert attacker.untyped == []
    assert load.wrong == []
    assert load.num_answers > 0
    assert probe.failures == []
    assert max(probe.longest.values()) < LIVEZ_SECONDS
    assert after_descriptors <= before_descriptors + 64
    assert after_bytes <= before_bytes * 1.05


def test_the_event_loop_is_never_held_for_long(start: Any) -> None:
    """Each attack by itself, without a load: what /livez waits for is the frontend's own work.
    Requests are made before, and the probe is a process of its own."""
    first = () if "FOVEAL_QUIET" not in os.environ else ("nice", "-n", "-15")
    deployment, askers = start()
    urls = [asker.url for asker in askers]
    if first:
        for pid in family_of(deployment.frontends[0].pid):
            os.setpriority(os.PRIO_PROCESS, pid, -15)
    with Probe(urls, *first) as probe:
        assert httpx.post(urls[0] + CHAT, json=question(0), timeout=300).status_code == 200
        time.sleep(2)
        for attack in (*ATTACKS, *ALONE):
            attacker = Attacker(urls)
            probe.phase = attack.__name__.removeprefix("attack_")
            attack(attacker)
            attacker.close()
            assert attacker.untyped == []
            assert worker_ends(askers[0]) == 0, probe.phase
        probe.phase = "after"
        time.sleep(1)
    for phase, seconds in probe.longest.items():
        print(f"{phase:16} /livez {seconds * 1000:5.0f} ms")
    assert probe.failures == []
    assert max(probe.longest.values()) < LIVEZ_SECONDS


async def test_damaged_sound_and_video_end_in_typed_errors() -> None:
    """The model of the suite takes pictures alone, so its workers never decode these."""
    from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
    from foveal_runtime.plan.config import ModalitiesConfig
    from foveal_runtime.plan.errors import EngineFailure, FovealError

    pool = MediaWorkers(
        WorkerSettings(
            model_path="/tiny", namespace=b"n" * 16, limits=ModalitiesConfig(), num_workers=1,
            module="foveal_runtime.frontend.testing.fake_worker", job_timeout_seconds=60,
        )
    )  # fmt: skip
    await pool.start()
    ends: Counter[str] = Counter()
    try:
        for kind, data in media_cases(NUM_CASES // 2, 5, (*SOUNDS, *VIDEOS)):
            if data[:1] == b"!":
                continue
            try:
                await pool.process(2 if kind in SOUNDS else 1, b"{}", data)
                ends["decoded"] += 1
            except FovealError as error:
                ends[error.code] += 1
    finally:
        await pool.close()
    print(f"\n{dict(ends)}")
    assert pool.restarts == 0
    assert ends[EngineFailure.code] == 0
    assert ends["decoded"] > 0
    assert ends["media_invalid"] > 0


def test_metadata_and_private_addresses_are_refused_before_any_connection() -> None:
    """Shown on the check itself: no request leaves this machine."""
    import ipaddress

    from foveal_runtime.frontend.media.fetch import refusal

    for address in ("169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "10.0.0.1",
                    "127.0.0.1", "::1", "0.0.0.0", "64:ff9b::a9fe:a9fe"):  # fmt: skip
        assert refusal(ipaddress.ip_address(address), allow_private=False), address
    assert not refusal(ipaddress.ip_address("93.184.216.34"), allow_private=False)


def test_base64_of_cases_is_what_was_damaged() -> None:
    kind, data = next(media_cases(1, 1, ("PNG",)))
    url = chat_about(data, kind)["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.split(",")[1]) == data
