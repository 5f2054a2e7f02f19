"""Budgets are real: pods at the derived limits, under images that nobody has seen before."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import threading
import time
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from PIL import Image

from tests.support.node import commands
from tests.support.node.memory import Sampler

pytestmark = [pytest.mark.cluster, pytest.mark.slow]

NUM_REQUESTS = 1000
NUM_CLIENTS = 8
SEED = 7
SIDE = 1024
SIZES = {
    "processor": {"size": "4Mi"},
    "ipc": {"size": "4Mi"},
    "encoder": {"hostSize": "4Mi"},
    "kv": {"size": "24Mi"},
}
"""Small enough for a thousand images to fill. Limits are not set: they follow from these."""
ADMISSION = {"maxMedia": "36Mi", "maxBody": "5Mi"}
"""Eight bodies of the largest picture, 4.1 MiB each, are just admitted at a time."""


def picture(random_: random.Random, side: int) -> bytes:
    """A new image; noise, so that its file is as long as pictures of its size get."""
    image = Image.frombytes("RGB", (side, side), random_.randbytes(3 * side * side))
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=0)
    return file.getvalue()


def ask(url: str, image: bytes) -> str:
    """A body that comes before the one it follows was forgotten may be one too many."""
    for _ in range(20):
        try:
            return commands.ask(url, "what is in the picture?", image, model="soak", seconds=180)
        except urllib.error.HTTPError as error:
            if error.code != 429:
                raise
            time.sleep(0.1)
    raise OSError("refused 20 times with 429")


def soak(url: str, num_requests: int) -> list[str]:
    """Nine of ten requests bring a new image; the first tenth are the largest, of all clients at
    once. Returns what failed."""
    print(f"seed {SEED}")
    each = num_requests // NUM_CLIENTS

    def client(number: int) -> list[str]:
        random_ = random.Random(SEED * 1000 + number)
        known = picture(random_, SIDE)
        failures = []
        for turn in range(each):
            side = SIDE if turn < each // 10 else random_.choice((SIDE // 4, SIDE // 2, SIDE))
            image = known if random_.random() < 0.1 else picture(random_, side)
            try:
                ask(url, image)
            except OSError as error:
                failures.append(f"{type(error).__name__}: {error}")
        return failures

    with ThreadPoolExecutor(NUM_CLIENTS) as pool:
        return [text for found in pool.map(client, range(NUM_CLIENTS)) for text in found]


def body(name: str, **caches: object) -> commands.Obj:
    found: commands.Obj = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text("utf-8"))
    spec = found["spec"]
    found["metadata"]["name"], spec["model"]["name"] = name, "soak"
    for role in ("frontend", "engine"):
        spec[role]["replicas"] = 1
        del spec[role]["hostMemory"]
    spec["frontend"]["admission"] = ADMISSION
    spec["engine"]["maxNumBatchedTokens"] = 512  # eight new prompts with their images
    spec["caches"] = {**copy.deepcopy(SIZES), **caches}
    return found


@contextlib.contextmanager
def serving(name: str, **caches: object) -> Iterator[str]:
    commands.apply(body(name, **caches))
    try:
        commands.kubectl(
            "wait", f"mmi/{name}", "--for=condition=Ready", "--timeout=600s", seconds=620
        )
        yield commands.service_url(name)
    finally:
        commands.kubectl("delete", "mmi", name, "--ignore-not-found", "--timeout=120s", seconds=130)


@pytest.fixture(scope="module")
def soaked(operator: str, models: str) -> Iterator[str]:
    with serving("soak") as url:
        yield url


@pytest.fixture
def shared(operator: str, models: str) -> Iterator[str]:
    """Values go through a tmpfs of the node that both pods mount."""
    folder = commands.ROOT / "node/soak-shared"
    folder.mkdir(exist_ok=True)
    commands.run("e2e/cluster/node.sh", "run", "mount", "-t", "tmpfs", "-o", "size=64m,mode=1777",
            "tmpfs", str(folder))  # fmt: skip
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    size = {"storage": "64Mi"}
    commands.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "soak-shared"},
         "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "soak-shared"},
         "spec": {**common, "volumeName": "soak-shared", "resources": {"requests": size}}},
    )  # fmt: skip
    ipc = {
        "type": "SharedMemory",
        "claimName": "soak-shared",
        "size": "4Mi",
        "minSharedValue": "4Ki",
    }
    with serving("shared", ipc=ipc) as url:
        yield url


def the_pods(name: str = "soak") -> dict[str, commands.Obj]:
    return {role: next(iter(commands.pods(role, name).values())) for role in ("frontend", "engine")}


def limit_bytes(pod: commands.Obj) -> int:
    text = pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
    units = {"Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
    return int(text[:-2]) * units[text[-2:]] if text[-2:] in units else int(text)


def check_soak(name: str, url: str) -> None:
    """Soaks the one frontend and the one engine; prints what was planned and what was taken."""
    pods = the_pods(name)
    budgets = commands.get("mmi", name)["status"]["budgets"]
    limits = {role: limit_bytes(pod) for role, pod in pods.items()}
    for role in limits:
        assert limits[role] == budgets[f"{role}PodMemory"]["bytes"]
    predicted = {role: limit * 9 // 10 for role, limit in limits.items()}  # without the headroom
    sampler = Sampler(pods)
    started = time.monotonic()
    failures = soak(url, NUM_REQUESTS)
    sampler.stop()
    seconds = time.monotonic() - started
    now = the_pods(name)
    metrics = commands.metrics(f"http://{now['engine']['status']['podIP']}:5580")
    report = {
        "requests": NUM_REQUESTS,
        "seconds": round(seconds),
        "samples": sampler.num_samples,
        "late_samples": sampler.num_late,
        "slowest_ms": round(sampler.slowest_seconds * 1000),
        **{
            role: {
                "limit_MiB": limits[role] >> 20,
                "predicted_MiB": predicted[role] >> 20,
                "peak_MiB": sampler.peaks[role] >> 20,
                "page_cache_MiB": sampler.caches[role] >> 20,
                "formula": budgets[f"{role}PodMemory"].get("formula", ""),
            }
            for role in limits
        },
        "evictions": {
            name: value for name, value in metrics.items() if "cache_evictions_total{" in name
        },
    }
    print(json.dumps(report, indent=1))
    assert failures == []
    for cache in ("encoder", "kv", "ipc"):
        assert metrics[f"foveal_cache_evictions_total{{{cache}}}"] > 0, f"{cache} was never full"
    for role, pod in now.items():
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0, role
        assert sampler.peaks[role] <= predicted[role] <= sampler.peaks[role] * 1.1, role
    assert sampler.num_late < sampler.num_samples / 20


def test_a_thousand_new_images_stay_within_the_derived_limits(soaked: str) -> None:
    """And the plan is no more than a tenth above what they take."""
    check_soak("soak", soaked)


def test_with_a_fifth_less_the_kernel_kills_and_the_status_says_so(soaked: str) -> None:
    """As if the plan had been wrong: the limit of a pod that has just begun becomes four fifths of
    the derived one, and the same images come."""
    before = the_pods()["engine"]
    name, container = before["metadata"]["name"], before["spec"]["containers"][0]["name"]
    limit = limit_bytes(before)
    commands.kubectl("delete", "pod", name, "--wait=true", "--timeout=180s", seconds=200)

    def running() -> bool:
        pod = commands.pods("engine", "soak").get(name, {"status": {}})
        status = pod["status"].get("containerStatuses", [{}])[0]
        return "running" in status.get("state", {})

    commands.until("its successor runs", running, 60)
    memory = {"memory": f"{limit * 4 // 5 >> 20}Mi"}
    change = {"name": container, "resources": {"requests": memory, "limits": memory}}
    patch = json.dumps({"spec": {"containers": [change]}})
    commands.kubectl("patch", "pod", name, "--subresource=resize", "--patch", patch)

    def failure() -> commands.Obj:
        found = commands.get("mmi", "soak")["status"].get("lastFailure", {})
        return found if found.get("reason") == "OOMKilled" and found["pod"] == name else {}

    def told() -> str:
        """While it is down: one that had little to do yet begins again and serves."""
        message = commands.condition("soak", "EnginesReady")["message"]
        return message if "hostMemory" in message else ""

    enough = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(soak, soaked, NUM_REQUESTS, enough)
        try:
            found = commands.until("the status names the kill", failure, 300)
            message = commands.until("a condition says what to raise", told, 120)
        finally:
            enough.set()  # an engine that cannot even start would keep every client waiting
        asked.result(300)
    print(found, message)
    assert found["exitCode"] == 137
    assert found["memoryPeak"]


def test_shared_values_are_part_of_the_frontends_budget(shared: str) -> None:
    """Whoever writes a page of a tmpfs is charged for it, and frontends write."""
    check_soak("shared", shared)
