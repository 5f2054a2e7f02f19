"""Several HTTP processes behind one port: one service, one /metrics, one cache to administrate."""

from __future__ import annotations

import concurrent.futures
import os
import signal
import time
from typing import Any

import httpx
import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(1200)]


def pages(url: str) -> str:
    """/metrics over a connection of its own, so that the kernel chooses a process anew."""
    return httpx.get(f"{url}/metrics", timeout=120).raise_for_status().text


def processes_in(text: str) -> dict[str, float]:
    """process label → items that it was asked for."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "foveal_cache_queries_total" and sample.labels["cache"] == "ipc":
                name = sample.labels["process"]
                found[name] = found.get(name, 0) + sample.value
    return found


def until(condition: Any, seconds: float = 60) -> Any:
    deadline = time.monotonic() + seconds
    while True:
        try:
            if found := condition():
                return found
        except httpx.HTTPError:
            pass
        assert time.monotonic() < deadline, "the condition did not come true"
        time.sleep(0.1)


def children_of(pid: int) -> list[int]:
    """HTTP processes that a frontend's parent process started."""
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def test_two_processes_are_one_service(start, asker_for, samples, tmp_path, start_seconds) -> None:
    (tmp_path / "admin").write_text("root")
    deployment, (first,) = start(
        processes=2, ipc_type="shm", media_workers=2, admin_key_file=str(tmp_path / "admin")
    )
    url = first.url
    both = {"frontend-0/0", "frontend-0/1"}
    until(lambda: set(processes_in(pages(url))) == both, start_seconds)
    pictured = [sample for sample in samples if sample.pictures][:16]

    def ask(sample: Any) -> None:
        asker_for(url).check_beginning(sample)  # a connection of its own

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(ask, pictured * 3))
    num_items = 3 * sum(len({id(p) for p in s.pictures}) for s in pictured)
    seen = [processes_in(pages(url)) for _ in range(6)]
    assert all(one == seen[0] for one in seen), "whichever process is asked, all are shown"
    assert all(count > 0 for count in seen[0].values()), seen[0]
    assert sum(seen[0].values()) <= num_items

    # What an administrator empties is empty in every process.
    entries = lambda: asker_for(url).metric("foveal_cache_entries", cache="processor")  # noqa: E731
    assert entries() > 0
    answer = httpx.post(f"{url}/reset_mm_cache", headers={"authorization": "Bearer root"})
    assert answer.json() == {"cache": "mm", "num_engines": 1}
    assert entries() == 0

    # A process that dies comes back; meanwhile the other one answers.
    parent = deployment.frontends[0].pid
    before = children_of(parent)
    assert len(before) == 2
    os.kill(before[0], signal.SIGKILL)
    until(lambda: len(set(children_of(parent)) - set(before)) == 1)
    for sample in pictured[:4]:
        ask(sample)
    until(lambda: set(processes_in(pages(url))) == both, start_seconds)
    ask(pictured[0])

    # The parent's end is everyone's.
    everyone = children_of(parent)
    deployment.stop(20)
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in everyone))
