"""Three frontends and two engines under load while processes are killed, paused and cut off.

What has to hold: no wrong answer, no failed request of a client whose frontend lived, mirrors equal
to what the engines hold once idle, nothing leaked.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from foveal_runtime.main.launcher import Child, LocalDeployment
from foveal_runtime.plan.config import EngineAddress

pytestmark = [pytest.mark.processes, pytest.mark.faults, pytest.mark.timeout(3600)]

NUM_FAULTS = int(os.environ.get("FOVEAL_FAULTS", "20"))
SEED = int(os.environ.get("FOVEAL_SEED", "1"))


class Load:
    """Clients that ask without pause; knows which frontend each request went to."""

    def __init__(self, askers: list[Any], samples: list[Any]) -> None:
        self.askers = askers
        self.samples = samples
        self.stopping = threading.Event()
        self.frontend_lives = [0] * len(askers)  # grows when the test kills that frontend
        self.num_asked = 0
        self.failures: list[str] = []
        self.threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(6)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = random.Random(f"{SEED}/{number}")
        index = number % len(self.askers)
        while not self.stopping.is_set():
            sample = rng.choice(self.samples)
            life = self.frontend_lives[index]
            try:
                answer = self.askers[index].post(sample)
            except httpx.HTTPError as error:
                if self.frontend_lives[index] == life:
                    self.failures.append(f"frontend {index}: {type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            if self.frontend_lives[index] != life:
                continue
            self.num_asked += 1
            if answer.status_code != 200:
                self.failures.append(f"frontend {index}: {answer.status_code} {answer.text[:200]}")
                continue
            text = answer.json()["choices"][0]["message"]["content"]
            if text != sample.reference:
                self.failures.append(f"wrong: {sample.family}: {text!r} != {sample.reference!r}")

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)
            assert not thread.is_alive()


def through_relays(relays: list[Any]):
    """Puts a relay between every frontend and every engine."""
    from relay import Relay

    def change(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        changed = []
        for frontend in frontends:
            addresses = []
            for address in frontend.engines:
                port = urlsplit(address.endpoint).port
                relays.append(Relay(("127.0.0.1", port)))
                addresses.append(
                    EngineAddress(endpoint=f"tcp://127.0.0.1:{relays[-1].port}", http=address.http)
                )
            changed.append(msgspec.structs.replace(frontend, engines=tuple(addresses)))
        return engines, changed

    return change


def restart(child: Child) -> None:
    child.kill_group()
    child.start()


def wait_ready(child: Child, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not child.is_ready():
        assert child.is_alive, child.last_lines()
        assert time.monotonic() < deadline, f"{child.name} did not come back"
        time.sleep(0.1)


def one_fault(rng: random.Random, deployment: LocalDeployment, load: Load, relays: list) -> str:
    kind = rng.choice(["kill engine", "pause engine", "cut", "cut", "kill frontend"])
    if kind == "kill engine":
        child = rng.choice(deployment.engines)
        restart(child)
        wait_ready(child)
    elif kind == "pause engine":
        child = rng.choice(deployment.engines)
        child.signal(signal.SIGSTOP)
        time.sleep(4.0)  # past the heartbeat's 3 s: the pause itself is the fault
        child.signal(signal.SIGCONT)
    elif kind == "cut":
        child = None
        rng.choice(relays).cut()
    else:
        index = rng.randrange(len(deployment.frontends))
        child = deployment.frontends[index]
        load.frontend_lives[index] += 1
        restart(child)
        wait_ready(child)
        load.frontend_lives[index] += 1
    return f"{kind} {child.name if child else ''}"


def test_faults_under_load(deploy, asker_for, samples):
    rng = random.Random(SEED)
    relays: list[Any] = []
    deployment = deploy(change=through_relays(relays), num_frontends=3, num_engines=2)
    with deployment:
        deployment.wait_ready(180)
        load = Load([asker_for(child.url) for child in deployment.frontends], samples)
        for number in range(NUM_FAULTS):
            before = load.num_asked
            what = one_fault(rng, deployment, load, relays)
            deadline = time.monotonic() + 30
            while load.num_asked < before + 12 and time.monotonic() < deadline:
                time.sleep(0.05)
            print(f"fault {number + 1}: {what}; {load.num_asked} answers", flush=True)
            assert not load.failures, (SEED, number, what, load.failures[:5])
            assert load.num_asked >= before + 12, (SEED, number, what, "no progress")
        load.stop()
        assert not load.failures, (SEED, load.failures[:5])
        print(f"seed {SEED}: {NUM_FAULTS} faults, {load.num_asked} answers, none wrong or lost")
        check_idle(deployment)
    for relay in relays:
        relay.close()


def check_idle(deployment: LocalDeployment) -> None:
    """Once idle: every block, slot and reference is back, and mirrors equal the engines' sets."""
    deadline = time.monotonic() + 15
    while True:
        engines = [
            httpx.get(c.url + "/debug/integrity", timeout=5).json() for c in deployment.engines
        ]
        fronts = [
            httpx.get(c.url + "/debug/mirrors", timeout=5).json() for c in deployment.frontends
        ]
        held = {e["engine"]: e["mm_digest"] for e in engines}
        same = all(
            f["mirrors"].get(name) == digest for f in fronts for name, digest in held.items()
        )
        if same and all(e["idle"] for e in engines):
            return
        assert time.monotonic() < deadline, (engines, fronts)
        time.sleep(0.2)
