"""What crosses the sockets between frontends and engines, and uuids that cross frontends.

Bytes are counted by relays in the links: both directions, framing and control messages included,
all links of the deployment together, heartbeats left out (they flow without requests, too).
"""

from __future__ import annotations

import base64
import io
import statistics
import time
from typing import Any

import httpx
import pytest

from tests.support.processes.relay import Relay

pytestmark = pytest.mark.timeout(900)

MAX_EXTRA_BYTES = 128
ROUNDS = 8


def picture(number: int) -> str:
    """A PNG that no other number gives, as a data URL."""
    from PIL import Image

    image = Image.new("RGB", (48, 48), (number * 37 % 256, number * 91 % 256, 64))
    image.paste((255, 255, 255), (number % 24, 8, number % 24 + 16, 24))
    file = io.BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def body(text: str, url: str | None = None, uuid: str | None = None) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if url is not None or uuid is not None:
        part: dict[str, Any] = {"type": "image_url"}
        if url is not None:
            part["image_url"] = {"url": url}
        if uuid is not None:
            part["uuid"] = uuid
        content.insert(0, part)
    return {
        "model": "tiny-vlm",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
    }


class Site:
    """A deployment with a counting relay in every link."""

    def __init__(self, deployment: Any, askers: list[Any], relays: list[Relay]) -> None:
        self.deployment = deployment
        self.askers = askers
        self.relays = relays

    def post(self, frontend: int, request: dict[str, Any]) -> httpx.Response:
        return self.askers[frontend].http.post("/v1/chat/completions", json=request)

    def settle(self) -> None:
        """Waits until every mirror equals its engine's set and nothing is on its way."""
        deadline = time.monotonic() + 120
        while not self.is_settled():
            assert time.monotonic() < deadline, "the mirrors did not converge"
            time.sleep(0.02)

    def is_settled(self) -> bool:
        engines = [self._get(c.url + "/debug/integrity") for c in self.deployment.engines]
        fronts = [self._get(c.url + "/debug/mirrors") for c in self.deployment.frontends]
        held = {e["engine"]: e["mm_digest"] for e in engines}
        views = [view for front in fronts for view in front["views"].values()]
        return (
            all(e["idle"] for e in engines)
            and all(front["mirrors"] == held for front in fronts)
            and not any(v["num_optimistic"] or v["inflight_bytes"] for v in views)
        )

    def _get(self, url: str) -> Any:
        return self.askers[0].http.get(url).json()

    def quiet_bytes(self) -> int:
        """Bytes so far, once the notes that follow a request have come, too."""
        self.settle()
        last, since = -1, time.monotonic()
        while time.monotonic() - since < 0.3:  # notes wait for 50 ms at most
            now = sum(relay.num_bytes for relay in self.relays)
            if now != last:
                last, since = now, time.monotonic()
            time.sleep(0.02)
        return last

    def cost(self, frontend: int, request: dict[str, Any]) -> int:
        before = self.quiet_bytes()
        answer = self.post(frontend, request)
        assert answer.status_code == 200, answer.text
        return self.quiet_bytes() - before


@pytest.fixture(
    scope="module",
    params=["2x1", pytest.param("4x2", marks=pytest.mark.extended)],
)
def site(request, deploy_through_relays):
    """Frontends x engines."""
    if request.param == "2x1":
        yield Site(*request.getfixturevalue("shared_links"))
        return
    with deploy_through_relays(num_frontends=4, num_engines=2) as found:
        yield Site(*found)


def test_a_repeated_image_costs_at_most_128_bytes(site):
    url = picture(1)
    num = len(site.askers)
    text = "What is this? Say it in few words."
    for frontend in range(num):  # both prompts are known everywhere, the image at one engine
        for request in (body(text, url), body(text)):
            assert site.post(frontend, request).status_code == 200
    extra = []
    for number in range(ROUNDS):
        with_image = site.cost(number % num, body(text, url))
        without = site.cost(number % num, body(text))
        extra.append(with_image - without)
        print(f"{num} frontends: {with_image} bytes with the image, {without} without it")
    print(f"{num} frontends: a repeated image costs {extra} bytes more")
    # A request that lasts long enough on a busy machine is told to the other frontends as load,
    # with or without an image: most rounds have no such note, or have it on both sides.
    assert statistics.median(extra) <= MAX_EXTRA_BYTES


def test_a_new_image_costs_its_value_once(site):
    """Afterwards every frontend knows it: none of them sends it again."""
    url = picture(2)
    first = site.cost(0, body("And this?", url))
    for frontend in range(len(site.askers)):
        again = site.cost(frontend, body("And this?", url))
        print(f"first {first} bytes, from frontend {frontend} again {again}")
        assert again < first / 4


def test_a_uuid_means_the_same_at_every_frontend(site):
    """Bound at the first frontend, used alone at the last; other content there is a conflict."""
    last = len(site.askers) - 1
    url, other = picture(3), picture(4)
    bound = site.post(0, body("Name it.", url, "picture-three"))
    assert bound.status_code == 200, bound.text
    site.settle()
    alone = site.post(last, body("Name it.", uuid="picture-three"))
    assert alone.status_code == 200, alone.text
    assert alone.json()["choices"][0]["message"] == bound.json()["choices"][0]["message"]
    again = site.post(last, body("Name it.", url, "picture-three"))
    assert again.status_code == 200, again.text
    conflict = site.post(last, body("Name it.", other, "picture-three"))
    assert conflict.status_code == 409, conflict.text
    assert conflict.json()["error"]["code"] == "media_conflict"
    unknown = site.post(last, body("Name it.", uuid="never-seen"))
    assert unknown.status_code == 400
    assert unknown.json()["error"]["code"] == "media_unknown"
