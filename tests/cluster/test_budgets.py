"""Budgets are real: pods at the derived limits, under images that nobody has seen before."""

from __future__ import annotations

import copy
import io
import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from PIL import Image
from tests.cluster import kit
from tests.cluster.memory import Sampler

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_REQUESTS = 1000
NUM_CLIENTS = 8
SEED = 7
PEAKS: dict[str, int] = {}
SIZES = {
    "processor": {"size": "16Mi"},
    "ipc": {"size": "16Mi"},
    "encoder": {"hostSize": "16Mi"},
    "kv": {"size": "96Mi"},
}
"""Small enough for a thousand images to fill. Limits are not set: they follow from these."""


def picture(random_: random.Random) -> bytes:
    """A new image of up to the largest size that the resource admits, quick to encode."""
    side = random_.choice((256, 512, 1024))
    colours = bytes(random_.randrange(256) for _ in range(3 * 8 * 8))
    image = Image.frombytes("RGB", (8, 8), colours).resize((side, side), Image.Resampling.NEAREST)
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def soak(url: str, num_requests: int) -> list[str]:
    """Nine of ten requests bring a new image; returns what failed."""
    print(f"seed {SEED}")

    def client(number: int) -> list[str]:
        random_ = random.Random(SEED * 1000 + number)
        known = picture(random_)
        failures = []
        for _ in range(num_requests // NUM_CLIENTS):
            image = known if random_.random() < 0.1 else picture(random_)
            try:
                kit.ask(url, "what is in the picture?", image, model="soak", seconds=180)
            except OSError as error:
                failures.append(f"{type(error).__name__}: {error}")
        return failures

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return [text for found in pool.map(client, range(NUM_CLIENTS)) for text in found]


def body(**caches: object) -> kit.Obj:
    found: kit.Obj = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text("utf-8"))
    spec = found["spec"]
    found["metadata"]["name"] = spec["model"]["name"] = "soak"
    for role in ("frontend", "engine"):
        spec[role]["replicas"] = 1
        del spec[role]["hostMemory"]
    spec["caches"] = {**copy.deepcopy(SIZES), **caches}
    return found


@pytest.fixture(scope="module")
def soaked(operator: str, models: str) -> Iterator[str]:
    kit.apply(body())
    kit.kubectl("wait", "mmi/soak", "--for=condition=Ready", "--timeout=600s", seconds=620)
    yield kit.service_url("soak")
    kit.kubectl("delete", "mmi", "soak", "--ignore-not-found", "--timeout=120s")


def the_pods() -> dict[str, kit.Obj]:
    return {role: next(iter(kit.pods(role, "soak").values())) for role in ("frontend", "engine")}


def limit_bytes(pod: kit.Obj) -> int:
    text = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


def test_a_thousand_new_images_stay_within_the_derived_limits(soaked: str) -> None:
    pods = the_pods()
    budgets = kit.get("mmi", "soak")["status"]["budgets"]
    limits = {role: limit_bytes(pod) for role, pod in pods.items()}
    for role in limits:
        assert limits[role] == budgets[f"{role}PodMemory"]["bytes"]
    sampler = Sampler(pods)
    started = time.monotonic()
    failures = soak(soaked, NUM_REQUESTS)
    sampler.stop()
    seconds = time.monotonic() - started
    PEAKS.update(sampler.peaks)
    now = the_pods()
    metrics = kit.metrics(f"http://{now['engine']['status']['podIP']}:5580")
    report = {
        "requests": NUM_REQUESTS,
        "seconds": round(seconds),
        "samples": sampler.num_samples,
        "late_samples": sampler.num_late,
        "slowest_ms": round(sampler.slowest_seconds * 1000),
        **{
            role: {
                "limit_MiB": limits[role] >> 20,
                "predicted_MiB": int(limits[role] * 0.9) >> 20,
                "peak_MiB": sampler.peaks[role] >> 20,
                "page_cache_MiB": sampler.caches[role] >> 20,
            }
            for role in limits
        },
        "evictions": {
            name: value for name, value in metrics.items() if "cache_evictions_total{" in name
        },
    }
    print(json.dumps(report, indent=1))
    assert failures == []
    for role, pod in now.items():
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, role
        assert sampler.peaks[role] < limits[role] * 0.9, role  # without the headroom
    assert sampler.num_late < sampler.num_samples / 20


def test_with_a_fifth_less_the_kernel_kills_and_the_status_says_so(soaked: str) -> None:
    """As if the plan had been wrong: the limit of a pod that has just begun becomes four fifths of
    what the last one used, and the same images come."""
    before = the_pods()["engine"]
    name, container = before["metadata"]["name"], before["spec"]["containers"][0]["name"]
    assert PEAKS, "needs the soak before it"
    kit.kubectl("delete", "pod", name, "--wait=true", "--timeout=180s", seconds=200)

    def running() -> bool:
        status = kit.pods("engine", "soak")[name]["status"].get("containerStatuses", [{}])[0]
        return "running" in status.get("state", {})

    kit.until("its successor runs", running, 60)
    memory = {"memory": f"{int(PEAKS['engine'] * 0.8) >> 20}Mi"}
    change = {"name": container, "resources": {"requests": memory, "limits": memory}}
    patch = json.dumps({"spec": {"containers": [change]}})
    kit.kubectl("patch", "pod", name, "--subresource=resize", "--patch", patch)

    def failure() -> kit.Obj:
        found = kit.get("mmi", "soak")["status"].get("lastFailure", {})
        return found if found.get("reason") == "OOMKilled" and found["pod"] == name else {}

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(soak, soaked, NUM_CLIENTS * 8)
        found = kit.until("the status names the kill", failure, 300)
        asked.result(600)
    print(found)
    assert found["exitCode"] == 137
    assert found["memoryPeak"]
    message = kit.condition("soak", "EnginesReady")["message"]
    print(message)
    assert "hostMemory" in message
