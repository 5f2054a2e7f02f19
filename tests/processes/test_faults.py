"""Three frontends and two engines under load: processes are killed and paused, links cut and held.

What has to hold: no wrong answer, no failed request of a client whose frontend lived, every
frontend answering again after each fault, mirrors equal to what the engines hold once idle, nothing
leaked. How long a killed process takes to come back is the machine's business: the test waits for
it, and its clients ask less often meanwhile, since on a small machine they would starve it.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from foveal_runtime.main.launcher import Child, LocalDeployment

pytestmark = [pytest.mark.faults, pytest.mark.timeout(7200)]

NUM_FAULTS = int(os.environ.get("FOVEAL_FAULTS", "20"))
SEED = int(os.environ.get("FOVEAL_SEED", "1"))
PROGRESS_SECONDS = 240.0  # far more than any answer may take; what is lost stays lost
ANSWERS_EACH = 3  # that every frontend's clients must get after a fault
CAPACITY_BYTES = 192 * 1024
KINDS = (
    "kill engine", "kill frontend", "kill media worker", "pause engine", "pause frontend",
    "hold link", "cut link", "cut link",
)  # fmt: skip


class Load:
    """Clients that ask without pause; knows which frontend each request went to.

    While `gentle`, they pause for a second between answers and the next question.
    """

    def __init__(self, askers: list[Any], samples: list[Any]) -> None:
        self.askers = askers
        self.samples = samples
        self.stopping = threading.Event()
        self.frontend_lives = [0] * len(askers)  # grows with each death and birth
        self.gentle = threading.Event()
        self.answers = [0] * len(askers)  # right ones, by frontend
        self.failures: list[str] = []
        self.lock = threading.Lock()
        self.threads = [
            threading.Thread(target=self._run, args=(i,), daemon=True) for i in range(6)
        ]
        for thread in self.threads:
            thread.start()

    def _run(self, number: int) -> None:
        rng = random.Random(f"{SEED}/{number}")
        index = number % len(self.askers)
        while not self.stopping.wait(rng.uniform(0, 0.2) + self.gentle.is_set()):
            sample = rng.choice(self.samples)
            life = self.frontend_lives[index]  # odd: it is being killed or starts
            try:
                answer = self.askers[index].post(sample)
            except httpx.HTTPError as error:
                if self.frontend_lives[index] == life and life % 2 == 0:
                    self.failures.append(f"frontend {index}: {type(error).__name__}: {error}")
                time.sleep(0.2)
                continue
            if self.frontend_lives[index] != life or life % 2:
                continue
            if answer.status_code != 200:
                self.failures.append(f"frontend {index}: {answer.status_code} {answer.text[:200]}")
                continue
            text = answer.json()["choices"][0]["message"]["content"]
            if text != sample.reference:
                self.failures.append(f"wrong: {sample.family}: {text!r} != {sample.reference!r}")
                continue
            with self.lock:
                self.answers[index] += 1

    @property
    def num_answers(self) -> int:
        return sum(self.answers)

    def wait_for_answers(self, count: int, seconds: float) -> bool:
        """Until every frontend's clients have got `count` more; False after so many seconds, or as
        soon as something has failed."""
        wanted = [number + count for number in self.answers]
        deadline = time.monotonic() + seconds
        while any(have < want for have, want in zip(self.answers, wanted, strict=True)):
            if self.failures or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def __enter__(self) -> Load:
        return self

    def __exit__(self, *args: object) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)

    def stop(self) -> None:
        """Every client has its last answer."""
        self.stopping.set()
        for thread in self.threads:
            thread.join(PROGRESS_SECONDS)
            assert not thread.is_alive(), "a request never ended"


class Inspector:
    """Asks the engines for their books, again and again, while everything else goes on."""

    def __init__(self, deployment: LocalDeployment) -> None:
        self.engines = deployment.engines
        self.stopping = threading.Event()
        self.failures: list[str] = []
        self.num_reports = 0
        self.most_used_bytes = 0
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with httpx.Client(timeout=2) as http:
            while not self.stopping.wait(0.2):
                for child in self.engines:
                    try:
                        answer = http.get(child.url + "/debug/integrity")
                    except httpx.HTTPError:
                        continue  # killed, paused or starting
                    if answer.status_code == 200:
                        self._look(answer.json())

    def _look(self, state: dict[str, Any]) -> None:
        self.num_reports += 1
        self.most_used_bytes = max(self.most_used_bytes, state["mm_used_bytes"])
        if (
            state["broken"]
            or state["mm_used_bytes"] > state["mm_capacity_bytes"]
            or state["mm_staged_bytes"] > state["mm_staging_bytes"]
        ):
            self.failures.append(str(state))

    def __enter__(self) -> Inspector:
        return self

    def __exit__(self, *args: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.stopping.set()
        self.thread.join(10)


def restart(child: Child, seconds: float) -> None:
    child.kill_group()
    child.start()
    deadline = time.monotonic() + seconds
    while not child.is_ready():
        assert child.is_alive, child.last_lines()
        slow = f"{child.name} did not come back\n{child.last_lines()}"
        assert time.monotonic() < deadline, slow
        time.sleep(0.2)


def pause(child: Child) -> None:
    """Past the heartbeat's 3 s: the time itself is the fault."""
    child.signal(signal.SIGSTOP)
    time.sleep(4.0)
    child.signal(signal.SIGCONT)


def kill_media_worker(frontend: Child, asker: Any, seconds: float) -> None:
    """Its frontend lives: no client may notice. Returns when another one has taken its place: an
    item that loses two workers in a row is refused, and rightly so."""
    before = media_workers_of(frontend)
    assert before, "a frontend without media workers"
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + seconds
    while not (media_workers_of(frontend) - before and num_workers(asker, frontend)):
        assert time.monotonic() < deadline, frontend.last_lines()
        time.sleep(0.2)


def num_workers(asker: Any, frontend: Child) -> float:
    """That have loaded the processor."""
    return float(asker.metric("foveal_media_workers", process=frontend.name))


def media_workers_of(frontend: Child) -> set[int]:
    children = Path(f"/proc/{frontend.pid}/task/{frontend.pid}/children").read_text().split()
    found = set()
    for pid in children:
        with contextlib.suppress(OSError):
            if b"worker_main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def one_fault(
    kind: str,
    rng: random.Random,
    deployment: LocalDeployment,
    load: Load,
    relays: list,
    slow: float,
) -> str:
    index = rng.randrange(len(deployment.frontends))
    frontend, engine = deployment.frontends[index], rng.choice(deployment.engines)
    relay = rng.randrange(len(relays))
    if kind == "kill engine":
        restart(engine, slow)
    elif kind == "kill frontend":
        load.frontend_lives[index] += 1
        restart(frontend, slow)
        load.frontend_lives[index] += 1
    elif kind == "kill media worker":
        kill_media_worker(frontend, load.askers[index], slow)
    elif kind == "pause engine":
        pause(engine)
    elif kind == "pause frontend":
        pause(frontend)
    elif kind == "hold link":
        relays[relay].held.set()
        time.sleep(4.0)
        relays[relay].held.clear()
    else:
        relays[relay].cut()
    where = {"engine": engine.name, "link": f"link {relay}"}.get(kind.split()[-1], frontend.name)
    return f"{kind} ({where})"


def kinds_of(rng: random.Random, count: int) -> list[str]:
    """In an order of chance, and every kind as often as the others."""
    rounds = -(-count // len(KINDS))
    return [kind for _ in range(rounds) for kind in rng.sample(KINDS, len(KINDS))][:count]


def test_faults_under_load(deploy_through_relays, samples, start_seconds):
    rng = random.Random(SEED)
    began_all = time.monotonic()
    # A value cache that the samples do not fit into, so that it also evicts all the time.
    options = {"num_frontends": 3, "num_engines": 2, "ipc_bytes": CAPACITY_BYTES}
    with contextlib.ExitStack() as stack:
        found = stack.enter_context(deploy_through_relays(**options))
        deployment, askers, relays = found
        load = stack.enter_context(Load(askers, samples))
        inspector = stack.enter_context(Inspector(deployment))
        assert load.wait_for_answers(ANSWERS_EACH, PROGRESS_SECONDS), load.failures[:5]
        for number, kind in enumerate(kinds_of(rng, NUM_FAULTS), start=1):
            began = time.monotonic()
            if "kill" in kind:
                load.gentle.set()
            where = one_fault(kind, rng, deployment, load, relays, start_seconds)
            load.gentle.clear()
            fault_seconds = time.monotonic() - began
            goes_on = load.wait_for_answers(ANSWERS_EACH, PROGRESS_SECONDS)
            seconds = time.monotonic() - began - fault_seconds
            what = f"fault {number}: {where}"
            print(f"{what}: {fault_seconds:.1f} s, {ANSWERS_EACH} answers each after {seconds:.1f} "
                  f"s, {load.num_answers} in all", flush=True)  # fmt: skip
            failures = load.failures + inspector.failures
            assert not failures, (SEED, what, failures[:5])
            assert goes_on, (SEED, what, "no progress", load.answers)
        load.stop()
        inspector.stop()
        failures = load.failures + inspector.failures
        assert not failures, (SEED, failures[:5])
        print(
            f"seed {SEED}: {NUM_FAULTS} faults in {time.monotonic() - began_all:.0f} s, "
            f"{load.num_answers} answers, none wrong or lost; "
            f"{inspector.num_reports} looks at the books, at most {inspector.most_used_bytes} of "
            f"{CAPACITY_BYTES} bytes of values"
        )
        assert inspector.most_used_bytes > CAPACITY_BYTES // 2, "the cache was never under pressure"
        check_idle(deployment)


def check_idle(deployment: LocalDeployment) -> None:
    """Once idle: every block, slot and reference is back, and mirrors equal the engines' sets."""
    deadline = time.monotonic() + 120
    while True:
        engines = [
            httpx.get(c.url + "/debug/integrity", timeout=120).json() for c in deployment.engines
        ]
        fronts = [
            httpx.get(c.url + "/debug/mirrors", timeout=120).json() for c in deployment.frontends
        ]
        held = {e["engine"]: e["mm_digest"] for e in engines}
        same = all(
            f["mirrors"].get(name) == digest for f in fronts for name, digest in held.items()
        )
        sent = sum(
            v["inflight_bytes"] + v["num_optimistic"] for f in fronts for v in f["views"].values()
        )
        if same and not sent and all(e["idle"] for e in engines):
            break
        assert time.monotonic() < deadline, (engines, fronts)
        time.sleep(0.2)
    for state in engines:
        assert not state["broken"], state
        assert state["kv_blocks_in_use"] == 0
        assert state["encoder_references"] == 0
        assert state["mm_pinned_bytes"] == 0
        assert state["mm_staged_bytes"] == 0
