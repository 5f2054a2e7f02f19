"""The hostile suite: two frontends and two engines under attack, beside a load that is checked.

`make hostile` runs it with FOVEAL_HOSTILE generated cases of each kind (1,000), `make soak` with
10,000. Nothing dies, no answer of the load is wrong or lost, /livez answers, every refusal is a
typed error. Figures are printed by attack.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import io
import json
import os
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
import pytest
from PIL import Image

from tests.support.processes.mutations import (
    IMAGES,
    SOUNDS,
    VIDEOS,
    chat_about,
    media_cases,
    request_cases,
)
from tests.support.processes.pictures import answer_of, question

pytestmark = [pytest.mark.processes, pytest.mark.hostile, pytest.mark.timeout(3000)]

NUM_CASES = int(os.environ.get("FOVEAL_HOSTILE", "1000"))
CHAT = "/v1/chat/completions"
LIVEZ_SECONDS = float(os.environ.get("FOVEAL_LIVEZ_SECONDS", "2"))
PICTURES = 6


class Probe:
    """Asks every frontend for /livez without a pause; the longest wait, by phase."""

    def __init__(self, urls: list[str]) -> None:
        self.phase = "idle"
        self.longest: Counter[str] = Counter()
        self.failures: list[str] = []
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(url,)) for url in urls]

    def _run(self, url: str) -> None:
        with httpx.Client(base_url=url, timeout=120) as http:
            while not self._stop.wait(0.02):
                began, phase = time.monotonic(), self.phase
                try:
                    http.get("/livez").raise_for_status()
                except httpx.HTTPError as error:
                    self.failures.append(f"{phase}: {error!r}")
                self.longest[phase] = max(self.longest[phase], time.monotonic() - began)

    def __enter__(self) -> Probe:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


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


class Attacker:
    """Clients at another address of loopback than the load's."""

    def __init__(self, urls: list[str]) -> None:
        self.urls = urls
        transport = httpx.HTTPTransport(local_address="127.0.0.2")
        self.http = httpx.Client(transport=transport, timeout=300)
        self.statuses: Counter[int] = Counter()
        self.untyped: list[str] = []
        self._turn = 0

    def post(self, path: str, body: Any) -> int:
        self._turn += 1
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        url = self.urls[self._turn % len(self.urls)] + path
        headers = {"content-type": "application/json"}
        response = self.http.post(url, content=content, headers=headers)
        self.statuses[response.status_code] += 1
        if response.status_code >= 400:
            with contextlib.suppress(ValueError, KeyError, TypeError):
                error = response.json()["error"]
                typed = all(isinstance(error[name], str) for name in ("message", "type", "code"))
                if typed and response.status_code != 500:
                    return response.status_code
            self.untyped.append(
                f"{response.status_code} {response.text[:300]} to {content[:300]!r}"
            )
        return response.status_code

    def raw(self, sent: bytes, receive_bytes: int = 0) -> socket.socket:
        self._turn += 1
        parts = urlsplit(self.urls[self._turn % len(self.urls)])
        sock = socket.socket()
        if receive_bytes:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        sock.settimeout(60)
        sock.bind(("127.0.0.2", 0))
        sock.connect((parts.hostname or "", parts.port or 0))
        sock.sendall(sent)
        return sock


def http_head(size: int) -> bytes:
    return (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {size}\r\n\r\n"
    ).encode()


def attack_silent_uploads(attacker: Attacker) -> None:
    """Bodies that are declared and do not come, and headers that do not end."""
    sockets = [attacker.raw(http_head(60) + b"{") for _ in range(200)]
    sockets += [attacker.raw(http_head(128 << 20) + b"{") for _ in range(16)]
    sockets += [attacker.raw(b"POST / HTTP/1.1\r\nx: y") for _ in range(100)]
    time.sleep(5)
    for sock in sockets:
        sock.close()


def attack_lists(attacker: Attacker) -> None:
    """A megabyte of entries of which each is wrong."""
    for entry in (b"{}", b"-1", b"[[]]"):
        many = b",".join([entry] * (900_000 // (len(entry) + 1)))
        assert attacker.post(CHAT, b'{"messages":[' + many + b"]}") == 400
        assert attacker.post("/v1/completions", b'{"prompt":[' + many + b"]}") == 400
        assert attacker.post("/detokenize", b'{"tokens":[' + many + b"]}") == 400


def attack_depth(attacker: Attacker) -> None:
    """JSON and template arguments that are nested without end."""
    deep: Any = 1
    for _ in range(900):
        deep = {"a": deep}
    message = [{"role": "user", "content": "hi"}]
    for body in (
        b'{"messages":' + b"[" * 1_000_000,
        {"messages": message, "chat_template_kwargs": {"x": deep}},
        {"messages": message, "mm_processor_kwargs": {"x": deep}},
        {"messages": message, "x": deep},
    ):
        assert attacker.post(CHAT, body) == 400


def attack_long_texts(attacker: Attacker) -> None:
    """Four megabytes of text to everything that tokenises."""
    text = "all the words that there are " * 140_000
    assert attacker.post("/tokenize", {"prompt": text}) == 400
    assert attacker.post("/v1/completions", {"prompt": text}) == 400
    assert attacker.post(CHAT, {"messages": [{"role": "user", "content": text}]}) == 400
    assert attacker.post("/detokenize", {"tokens": [5] * 900_000}) == 400


def attack_options(attacker: Attacker) -> None:
    """Options that make a small picture large, and unknown ones."""
    image = Image.fromarray(np.zeros((64, 64, 3), np.uint8))
    for number, options in enumerate((
        {"size": {"shortest_edge": 8000}}, {"crop_size": {"height": 9000, "width": 9000}},
        {"do_resize": False}, {"do_center_crop": True}, {"no_such_option": 1}, {"resample": "x"},
    )):  # fmt: skip
        image.putpixel((number, 0), (255, 0, 0))
        out = io.BytesIO()
        image.save(out, "PNG")
        body = chat_about(out.getvalue()) | {"mm_processor_kwargs": options}
        assert attacker.post(CHAT, body) == 400, options


def attack_bombs(attacker: Attacker) -> None:
    """Pictures whose headers promise more than anybody should decode."""
    for side in (20_000, 100_000, 2**31 - 1):
        header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
        chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1 << 20))), (b"IEND", b"")]
        data = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))
            for name, body in chunks
        )
        assert attacker.post(CHAT, chat_about(data)) in (400, 413)


def attack_templates(attacker: Attacker) -> None:
    """Conversations that cost a chat template more than their bytes, and its variables."""
    words = {"role": "user", "content": "word " * 60}
    turns = [words, {"role": "assistant", "content": "yes"}] * 4000
    variables = {f"v{i}": ["x" * 100] * 30 for i in range(250)}
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}] * 4000}] * 10
    for path in (CHAT, "/tokenize"):
        assert attacker.post(path, {"messages": turns}) == 400
        assert attacker.post(path, {"messages": parts}) == 400
        small = {"messages": turns[:2], "chat_template_kwargs": variables}
        assert attacker.post(path, small | ({"max_tokens": 1} if path == CHAT else {})) == 200


def attack_scores(attacker: Attacker) -> None:
    """Every log probability that may be asked for, of many choices, streamed or not, at once."""
    hi = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True, "logprobs": True}
    assert attacker.post(CHAT, hi | {"n": 64, "max_tokens": 2000, "top_logprobs": 20}) == 400
    asked = {"n": 16, "max_tokens": 64, "top_logprobs": 20}
    bodies = [hi | asked | {"stream": stream} for stream in (False, True)]
    prompt = {"prompt": [7] * 400, "prompt_logprobs": 20, "max_tokens": 1, "n": 8}
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        found = list(pool.map(lambda body: attacker.post(CHAT, body), bodies * 3))
        found += pool.map(lambda body: attacker.post("/v1/completions", body), [prompt] * 3)
    assert set(found) <= {200, 429}


def attack_numbers(attacker: Attacker) -> None:
    """Sampling parameters at the edge of floating point."""
    for field in ("temperature", "top_p", "min_p", "repetition_penalty"):
        for value in (1e-46, 5e-324, 1e-5, 0):
            body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, field: value}
            assert attacker.post(CHAT, body) in (200, 400)


def attack_hang_ups(attacker: Attacker) -> None:
    """Clients that leave in the middle of their body, or of the answer."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "max_tokens": 200,
         "ignore_eos": True}
    ).encode()  # fmt: skip
    for number in range(40):
        sock = attacker.raw(http_head(len(body)) + (body if number % 2 else body[:-5]))
        if number % 2:
            sock.recv(100)
        sock.close()


def attack_slow_readers(attacker: Attacker) -> None:
    """Answers that nobody reads."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hi"}], "stream": True, "n": 16, "logprobs": True,
         "top_logprobs": 20, "max_tokens": 100, "ignore_eos": True}
    ).encode()  # fmt: skip
    sockets = [attacker.raw(http_head(len(body)) + body, 4096) for _ in range(4)]
    time.sleep(5)
    for sock in sockets:
        sock.close()


def attack_with_media(attacker: Attacker) -> None:
    """Damaged files of every format, all sent as pictures."""
    cases = media_cases(NUM_CASES, 20261122, (*IMAGES, *SOUNDS, *VIDEOS))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: attacker.post(CHAT, chat_about(case[1], case[0])), cases))


def attack_with_requests(attacker: Attacker) -> None:
    """Requests whose fields have values of other kinds and sizes."""
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda case: attacker.post(*case), request_cases(NUM_CASES, 16)))


ATTACKS: tuple[Callable[[Attacker], None], ...] = (
    attack_silent_uploads, attack_lists, attack_depth, attack_long_texts, attack_options,
    attack_bombs, attack_templates, attack_scores, attack_numbers, attack_hang_ups,
    attack_slow_readers, attack_with_media, attack_with_requests,
)  # fmt: skip


def cached_bytes(urls: list[str]) -> int:
    """What the processor caches hold, which fill while the suite runs; the engines hold as much."""
    pages = [httpx.get(url + "/metrics", params={"own": 1}, timeout=60).text for url in urls]
    lines = [line for page in pages for line in page.splitlines()]
    return 2 * sum(int(float(x.split()[-1])) for x in lines if x.startswith("foveal_cache_bytes{"))


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
        load = Load(urls)
        time.sleep(2)
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
    attacker.http.close()
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
    assert attacker.untyped == []
    assert load.wrong == []
    assert load.num_answers > 0
    assert probe.failures == []
    assert max(probe.longest.values()) < LIVEZ_SECONDS
    assert after_descriptors <= before_descriptors + 64
    assert after_bytes <= before_bytes * 1.05


async def test_damaged_sound_and_video_end_in_typed_errors() -> None:
    """The model of the suite takes pictures alone, so its workers never decode these."""
    from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
    from foveal_runtime.plan.config import ModalitiesConfig
    from foveal_runtime.plan.errors import EngineFailure, FovealError

    pool = MediaWorkers(
        WorkerSettings(
            model_path="/tiny", namespace=b"n" * 16, limits=ModalitiesConfig(), num_workers=1,
            module="foveal_runtime.frontend.media.fake_worker", job_timeout_seconds=60,
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

    from foveal_runtime.frontend.media.addresses import refusal

    for address in ("169.254.169.254", "fd00:ec2::254", "::ffff:169.254.169.254", "10.0.0.1",
                    "127.0.0.1", "::1", "0.0.0.0", "64:ff9b::a9fe:a9fe"):  # fmt: skip
        assert refusal(ipaddress.ip_address(address), allow_private=False), address
    assert not refusal(ipaddress.ip_address("93.184.216.34"), allow_private=False)


def test_base64_of_cases_is_what_was_damaged() -> None:
    kind, data = next(media_cases(1, 1, ("PNG",)))
    url = chat_about(data, kind)["messages"][0]["content"][0]["image_url"]["url"]
    assert base64.b64decode(url.split(",")[1]) == data
