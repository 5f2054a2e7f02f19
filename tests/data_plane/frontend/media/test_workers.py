"""Media workers as processes: answers, deaths, hangs, limits; each fault costs at most its item."""

import asyncio
import io
import os
import signal
import socket
from pathlib import Path

import pytest
from PIL import Image

from foveal_runtime.frontend.media import protocol, worker_main
from foveal_runtime.frontend.media.workers import default_num_workers, item_memory_bytes
from foveal_runtime.frontend.testing.fake_worker import FakeProcessor
from foveal_runtime.plan.config import ModalitiesConfig
from foveal_runtime.plan.errors import (
    EngineFailure,
    MediaInvalid,
    MediaTooLarge,
    Overloaded,
    StartupError,
)
from foveal_runtime.plan.machine import Machine, look
from foveal_runtime.telemetry.logs import request_id_of_task
from foveal_runtime.wire.item import view_item


async def until(condition) -> None:
    async with asyncio.timeout(120):
        while not condition():  # noqa: ASYNC110 - processes have no event
            await asyncio.sleep(0.005)


async def test_an_item_comes_back_serialised(start_workers, picture):
    pool, info = await start_workers()
    done = await pool.process(0, b'{"scale": 2.0}', picture())
    item = view_item(done.value)
    assert item.meta.num_tokens == 6
    assert item.meta.num_embeds == 4
    assert item.fields["pixel_values"].numpy().shape == (1, 3, 16, 16)
    assert info.placeholder_token_id("image") == 4
    assert info.placeholder_token_id("audio") is None
    assert info.placeholder_text("image") == "<image>"


def test_what_loading_took_and_freed_is_given_back_before_the_first_item(monkeypatch):
    """And before what an item may map is counted from what is mapped."""
    done = []
    for name in ("release_free_memory", "_limit_memory"):
        monkeypatch.setattr(worker_main, name, lambda *arguments, name=name: done.append(name))
    monkeypatch.setattr(worker_main, "_limit_process", lambda load: None)  # it sets variables
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(protocol.encode(protocol.Load("model", b"n" * 16, ModalitiesConfig())))
        ours.shutdown(socket.SHUT_WR)
        assert worker_main.serve(worker_main.Link(theirs), FakeProcessor) == 0
    assert done == ["release_free_memory", "_limit_memory"]


async def test_equal_input_gives_equal_bytes_on_every_worker(start_workers, picture):
    pool, _ = await start_workers(2)
    await until(lambda: pool.num_ready == 2)
    values = await asyncio.gather(*(pool.process(0, b"{}", picture(1)) for _ in range(8)))
    assert len({bytes(v.value) for v in values}) == 1


async def test_bad_media_is_the_requests_error_and_the_worker_lives(start_workers, picture):
    pool, _ = await start_workers()
    pids = pool.pids()
    with pytest.raises(MediaInvalid, match="HTML"):
        await pool.process(0, b"{}", b"<html>")
    with pytest.raises(EngineFailure, match="LookupError"):
        await pool.process(0, b"{}", b"!bug")
    await pool.process(0, b"{}", picture())
    assert pool.pids() == pids
    assert pool.restarts == 0


async def test_a_worker_killed_in_the_middle_costs_one_retry(start_workers, tmp_path):
    pool, _ = await start_workers()
    done = await pool.process(0, b"{}", f"!kill-once:{tmp_path / 'flag'}".encode())
    assert view_item(done.value).meta.num_tokens == 6
    assert pool.retries == 1


async def test_an_item_that_kills_two_workers_is_refused(start_workers, picture):
    """It may be a bomb for the codec: no third worker, and the others' items go on."""
    pool, _ = await start_workers()
    bad = asyncio.create_task(pool.process(0, b"{}", b"!kill"))
    good = asyncio.create_task(pool.process(0, b"{}", picture()))
    with pytest.raises(MediaInvalid, match="two media workers"):
        await bad
    await good
    assert pool.retries == 1


async def test_the_log_names_the_request_whose_item_ended_a_worker(start_workers, caplog):
    """The runbook sends its reader there; the lines named the process alone."""
    pool, _ = await start_workers()
    token = request_id_of_task.set("req-7")
    try:
        with pytest.raises(MediaInvalid, match="two media workers"):
            await pool.process(0, b"{}", b"!kill")
    finally:
        request_id_of_task.reset(token)
    told = [one.request_id for one in caplog.records if "died" in one.getMessage()]
    assert told == ["req-7", "req-7"]


async def test_killed_from_outside_while_busy_and_while_idle(start_workers, tmp_path, picture):
    pool, _ = await start_workers()
    flag = tmp_path / "go"
    task = asyncio.create_task(pool.process(0, b"{}", f"!slow:{flag}".encode()))
    await until(lambda: pool.num_busy == 1)
    os.kill(pool.pids()[0], signal.SIGKILL)
    flag.touch()
    await task
    assert pool.retries == 1
    os.kill(pool.pids()[0], signal.SIGKILL)
    await pool.process(0, b"{}", picture())


async def test_an_idle_worker_that_dies_is_replaced_at_once(start_workers, picture):
    """Regression: its place stayed empty until the next item came, which then waited for the new
    process to load the processor."""
    pool, _ = await start_workers(2)
    await until(lambda: pool.num_ready == 2)
    [victim, other] = pool.pids()
    os.kill(victim, signal.SIGKILL)
    await until(lambda: pool.num_ready == 2 and victim not in pool.pids())
    assert other in pool.pids()
    assert (pool.restarts, pool.retries) == (1, 0)
    await asyncio.gather(*(pool.process(0, b"{}", picture(i)) for i in range(4)))
    assert (pool.restarts, pool.retries) == (1, 0)


async def test_a_hung_worker_is_killed_and_replaced(start_workers, picture):
    pool, _ = await start_workers(job_timeout_seconds=0.3)
    with pytest.raises(MediaInvalid, match="longer than"):
        await pool.process(0, b"{}", b"!hang")
    await pool.process(0, b"{}", picture())
    assert pool.restarts == 1


async def test_the_queue_is_bounded(start_workers, tmp_path):
    pool, _ = await start_workers(max_queue=2)
    flag = tmp_path / "go"
    slow = f"!slow:{flag}".encode()
    tasks = [asyncio.create_task(pool.process(0, b"{}", slow))]
    await until(lambda: pool.num_busy == 1)
    tasks += [asyncio.create_task(pool.process(0, b"{}", slow, name)) for name in "ab"]
    await until(lambda: pool.queue_length == 2)
    with pytest.raises(Overloaded):
        await pool.process(0, b"{}", slow, "c")
    flag.touch()
    await asyncio.gather(*tasks)


async def test_a_cancelled_caller_leaves_the_worker_usable(start_workers, tmp_path, picture):
    pool, _ = await start_workers()
    flag = tmp_path / "go"
    task = asyncio.create_task(pool.process(0, b"{}", f"!slow:{flag}".encode()))
    await until(lambda: pool.num_busy == 1)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    flag.touch()
    await pool.process(0, b"{}", picture())
    assert pool.restarts == 0


async def test_a_processor_that_does_not_load_is_a_startup_error(start_workers):
    with pytest.raises(StartupError, match="cannot load"):
        await start_workers(path="/some/broken")


async def test_closing_ends_the_processes_and_waiting_jobs(start_workers, tmp_path):
    pool, _ = await start_workers()
    pid = pool.pids()[0]
    slow = f"!slow:{tmp_path / 'never'}".encode()
    tasks = [asyncio.create_task(pool.process(0, b"{}", slow)) for _ in range(2)]
    await until(lambda: pool.queue_length == 1)
    await pool.close()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(end, Overloaded) for end in ends)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_worker_has_ended_though_its_closing_is_cancelled(start_workers):
    """Regression: where a second worker could not start either, its process was left behind."""
    pool, _ = await start_workers()
    [worker] = pool._live.values()
    closing = asyncio.create_task(worker.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert worker.process.returncode is not None


@pytest.mark.parametrize(("quota", "num"), [("50000", 1), ("200000", 1), ("max", None)])
def test_the_number_of_workers_follows_the_quota(tmp_path, quota, num):
    """In the folder of this process's own cgroup: what is above it may say something else."""
    folder = tmp_path / "sys/fs/cgroup/pod/container"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/pod/container\n")
    (folder / "cpu.max").write_text(f"{quota} 100000\n")
    here = look(tmp_path, with_devices=False)
    expected = max(1, min(8, len(os.sched_getaffinity(0)) - 1)) if num is None else num
    assert default_num_workers(here) == expected


@pytest.mark.parametrize(
    ("cpus", "num"), [(0.5, 1), (1.0, 1), (2.0, 1), (4.0, 3), (6.5, 5), (64.0, 8)]
)
def test_one_cpu_stays_with_the_http_process(cpus, num):
    assert default_num_workers(Machine(cpus=cpus)) == num


def test_what_an_item_may_take_follows_the_pods_limit():
    """It was 4 GiB in a pod of 2."""
    gib = 1 << 30
    assert item_memory_bytes(8 * gib, 4 * gib, 2) == 2 * gib
    assert item_memory_bytes(2 * gib, gib, 4) == gib // 2
    assert item_memory_bytes(64 * gib, 4 * gib, 2) == 4 * gib
    assert item_memory_bytes(0, 4 * gib, 2) == 4 * gib


async def test_an_item_that_needs_more_is_refused_and_the_worker_lives(start_workers, picture):
    pool, _ = await start_workers(1, max_memory_bytes=48 << 20)
    pixels = io.BytesIO()
    Image.new("L", (6000, 6000)).save(pixels, "PNG")
    with pytest.raises(MediaTooLarge, match="more memory than a media worker has"):
        await pool.process(0, b"{}", pixels.getvalue())
    assert (await pool.process(0, b"{}", picture())).value
    assert pool.restarts == 0


async def test_one_client_has_half_of_the_queue(start_workers, tmp_path, picture):
    pool, _ = await start_workers(1, max_queue=4)
    gate = tmp_path / "gate"
    busy = asyncio.create_task(pool.process(0, b"{}", f"!slow:{gate}".encode(), "flood"))
    await until(lambda: pool.num_busy)
    flood = [asyncio.create_task(pool.process(0, b"{}", picture(i), "flood")) for i in range(2)]
    await until(lambda: pool.queue_length == 2)
    with pytest.raises(Overloaded, match="2 of this client"):
        await pool.process(0, b"{}", picture(9), "flood")
    other = asyncio.create_task(pool.process(0, b"{}", picture(8), "other"))
    await until(lambda: pool.queue_length == 3)
    gate.touch()
    await asyncio.gather(busy, other, *flood)


async def test_threads_of_a_worker_share_memory_arenas(start_workers):
    pool, _ = await start_workers()
    environments = [Path(f"/proc/{pid}/environ") for pid in pool.pids()]
    assert all(b"MALLOC_ARENA_MAX=2\0" in found.read_bytes() for found in environments)
