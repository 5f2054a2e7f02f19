"""Caches over HTTP, from real processes: emptied and resized under load, injected into, switched
off. Whatever is done to them, answers stay those of plain transformers."""

from __future__ import annotations

import base64
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from foveal_runtime.wire.item import pack_item

pytestmark = pytest.mark.timeout(900)

INJECT = "/v1/media/items"
RESETS = ("/reset_mm_cache", "/reset_encoder_cache", "/reset_prefix_cache")
KIB = 1024
MIB = 1024 * KIB


def until(condition: Callable[[], Any], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.02)


def pictured(samples: list[Any], count: int) -> list[Any]:
    """Samples about one picture each, all different."""
    return [s for s in samples if len(s.pictures) == 1][:count]


def post(asker: Any, path: str, key: str = "admin-key", **body: Any) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(asker.url + path, json=body or None, headers=headers, timeout=120)


@pytest.fixture(scope="module", params=["inline", pytest.param("shm", marks=pytest.mark.extended)])
def served(
    request: Any, deployment_of: Any, asker_for: Any, start_seconds: float, keys: dict[str, str]
) -> Any:
    """Two frontends and an engine for all tests of one way that values travel."""
    if request.param == "inline":
        yield request.getfixturevalue("shared_links")[1]
        return
    with deployment_of(ipc_type=request.param, num_frontends=2, **keys) as deployment:
        deployment.wait_ready(start_seconds)
        yield [asker_for(child.url) for child in deployment.frontends]


def test_resets_under_load(served: Any, samples: Any) -> None:
    """Three clients ask while every cache is emptied again and again."""
    some = pictured(samples, 6)
    failures: list[BaseException] = []
    num_asked = [0, 0, 0]
    stop = threading.Event()

    def ask(number: int) -> None:
        try:
            while not stop.is_set():
                served[number % 2].check_beginning(some[num_asked[number] % len(some)])
                num_asked[number] += 1
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    try:
        for turn in range(9):
            before = sum(num_asked)
            answer = post(served[turn % 2], RESETS[turn % 3])
            assert answer.status_code == 200, answer.text
            assert answer.json()["num_engines"] == 1
            until(lambda n=before: sum(num_asked) > n or failures)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures[0]


def test_a_reset_forgets(served: Any, samples: Any) -> None:
    (sample,) = pictured(samples, 1)
    served[0].check_beginning(sample)
    processed = served[0].metric("foveal_media_items_processed_total", process="frontend-0")
    served[0].check_beginning(sample)
    again = served[0].metric("foveal_media_items_processed_total", process="frontend-0")
    assert again == processed
    for asker in served:
        assert post(asker, "/reset_mm_cache").json() == {"cache": "mm", "num_engines": 1}
    until(lambda: served[0].metric("foveal_cache_entries", cache="ipc") == 0)
    served[0].check_beginning(sample)
    assert (
        served[0].metric("foveal_media_items_processed_total", process="frontend-0")
        == processed + 1
    )


def test_resizing_at_run_time(served: Any, samples: Any) -> None:
    """As small as it gets, to room for some pictures, and back: capacity and entries follow.

    Regression: at 0, an engine that was started with a large cache refused every picture."""

    def now() -> float:
        return float(served[0].metric("foveal_cache_capacity_bytes", cache="ipc"))

    capacity = now()
    some = pictured(samples, 5)
    for size in (0, 700 * KIB, int(capacity)):
        answer = post(served[1], "/resize_ipc_cache", bytes=size)
        assert answer.json() == {"bytes": size, "num_engines": 1}
        until(lambda n=size: n <= now() <= max(n, MIB) and (n or now() < capacity))
        for index, sample in enumerate(some):
            served[index % 2].check_beginning(sample)
        assert served[0].metric("foveal_cache_bytes", cache="ipc") <= now()
    assert post(served[0], "/resize_ipc_cache", bytes=-1).status_code == 400
    assert post(served[0], "/resize_ipc_cache", key="inject-key", bytes=1).status_code == 401


class Packer:
    """What an encoder process would do: the processor's output as one item."""

    def __init__(self, model: Path) -> None:
        from transformers import AutoProcessor

        self.processor = AutoProcessor.from_pretrained(model)

    def __call__(self, sample: Any) -> bytes:
        inputs = self.processor(
            text=[self.processor.image_token], images=[sample.pictures[0].image],
            return_tensors="np",
        )  # fmt: skip
        ids = [int(i) for i in inputs["input_ids"][0] if i == self.processor.image_token_id]
        pixels = np.asarray(inputs["pixel_values"], dtype=np.float32)
        fields = {"pixel_values": ("float32", pixels)}
        return pack_item(0, tuple(ids), ((0, len(ids)),), fields)


@pytest.fixture(scope="module")
def pack(model_folder: Path) -> Packer:
    return Packer(model_folder)


def inject(asker: Any, name: str, value: bytes, key: str = "inject-key") -> httpx.Response:
    data = base64.b64encode(value).decode()
    return post(asker, INJECT, key, items=[{"modality": "image", "name": name, "value": data}])


def by_name(sample: Any, name: str) -> list[dict[str, Any]]:
    """The sample's messages with the picture replaced by a name."""
    from evaluate import to_request

    messages: list[dict[str, Any]] = to_request(sample, "tiny-vlm")["messages"]
    for message in messages:
        if not isinstance(message["content"], str):
            for part in message["content"]:
                if part["type"] == "image_url":
                    part.update(image_url=None, uuid=name)
    return messages


def test_injection(served: Any, samples: Any, pack: Packer) -> None:
    """One query and no hit; then hits in both frontends, and the same answer as the picture's."""
    (sample,) = pictured(samples, 1)
    name = "frame-17"

    def counted(frontend: str) -> tuple[float, float]:
        names = ("foveal_cache_queries_total", "foveal_cache_hits_total")
        return tuple(served[0].metric(n, cache="ipc", process=frontend) for n in names)  # type: ignore[return-value]

    assert inject(served[0], name, pack(sample), key="admin-key").status_code == 401
    unknown = served[0].post(sample, messages=by_name(sample, name))
    assert unknown.json()["error"]["code"] == "media_unknown"
    before = [counted("frontend-0"), counted("frontend-1")]
    answer = inject(served[0], name, pack(sample))
    assert answer.json() == {"stored": 1, "sent": 1}
    assert counted("frontend-0") == (before[0][0] + 1, before[0][1])
    assert counted("frontend-1") == before[1]
    # The other frontend knows as soon as the engine has announced it.
    until(
        lambda: (
            served[1].post(sample, messages=by_name(sample, name), max_tokens=1).status_code == 200
        )
    )
    for asker in served:
        text = asker.ask(sample, messages=by_name(sample, name), max_tokens=8)
        assert text
        assert sample.reference.startswith(text)
    assert counted("frontend-0") == (before[0][0] + 2, before[0][1] + 1)
    assert counted("frontend-1") == (before[1][0] + 2, before[1][1] + 2)
    # An untrusted injector cannot stand in for content: 64 hex digits are a name like others.
    assert inject(served[0], "ab" * 32, pack(sample)).status_code == 200
    served[0].check_beginning(sample)


def test_bad_items_fail_their_own_request_alone(served: Any, samples: Any, pack: Packer) -> None:
    """An item that is well-formed but no picture of this model, and one with impossible ids."""
    (sample,) = pictured(samples, 1)
    pixels = np.zeros((1, 3, 20, 4), np.float32)
    wrong = pack_item(0, (7, 7), ((0, 2),), {"pixel_values": ("float32", pixels)})
    ids = pack_item(0, (7, 2**31), ((0, 1),), {"pixel_values": ("float32", pixels)})
    for name, value in (("wrong", wrong), ("ids", ids)):
        assert inject(served[0], name, value).status_code == 200
        answer = served[0].post(sample, messages=by_name(sample, name))
        assert 400 <= answer.status_code <= 500, answer.text
        assert answer.json()["error"]["code"] in ("engine_error", "invalid_request_error")
        served[0].check_beginning(sample)
    refused = inject(served[0], "x", b"no item")
    assert refused.status_code == 400
    assert "items[0]" in refused.json()["error"]["message"]


@pytest.mark.extended
def test_every_cache_off(start: Any, samples: Any, pack: Packer, keys: dict[str, str]) -> None:
    """Sizes 0: nothing is kept, nothing fails, and no order makes room that nobody planned."""
    _, (asker,) = start(processor_bytes=0, ipc_bytes=0, prefix_caching=False, **keys)
    some = pictured(samples, 3)
    for sample in some:
        asker.check_beginning(sample)
    for path in RESETS:
        assert post(asker, path).status_code == 200
    queries = asker.metric("vllm:mm_cache_queries_total")
    assert inject(asker, "cat", pack(some[0])).json() == {"stored": 0, "sent": 0}
    assert asker.metric("vllm:mm_cache_queries_total") == queries
    missing = asker.post(some[0], messages=by_name(some[0], "cat"))
    assert missing.json()["error"]["code"] == "media_unknown"
    asker.check_beginning(some[0])
    assert asker.metric("foveal_mirror_hits_total") == 0
    assert post(asker, "/resize_ipc_cache", bytes=1 << 20).status_code == 200
    for sample in some + some:
        asker.check_beginning(sample)
    assert asker.metric("foveal_mirror_hits_total") == 0
    assert asker.metric("foveal_cache_capacity_bytes", cache="ipc") == 0


@pytest.mark.extended
def test_without_key_files_there_is_nothing_to_find(start: Any) -> None:
    _, (asker,) = start()
    for path in (*RESETS, "/resize_ipc_cache", INJECT):
        assert post(asker, path, bytes=1).status_code == 404
