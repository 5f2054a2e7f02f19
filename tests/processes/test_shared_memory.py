"""Values through /dev/shm between real processes: fewer bytes, right answers, nothing left over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytestmark = [pytest.mark.extended, pytest.mark.timeout(900)]

MIB = 1024**2


@pytest.fixture
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shm")


def small(frontend: Any, **settings: Any) -> Any:
    """The bundled model's pictures are of 10 kB, less than what is worth a file otherwise."""
    return msgspec.structs.replace(frontend, shm_min_value_bytes=1024, **settings)


def within(folder: Path) -> Callable[[list[Any], list[Any]], tuple[list[Any], list[Any]]]:
    """Documents that share `folder` instead of /dev/shm, so that tests do not meet."""

    def change(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        return (
            [msgspec.structs.replace(e, shm_directory=str(folder)) for e in engines],
            [small(f, shm_directory=str(folder)) for f in frontends],
        )

    return change


def folders(path: Path) -> list[str]:
    return sorted(entry.name for entry in (path / "mm").iterdir())


def sent_by_kind(asker: Any) -> dict[str, float]:
    name = "foveal_mirror_value_bytes_sent_total"
    return {kind: asker.metric(name, kind=kind) for kind in ("req", "fill", "put", "shm")}


def test_values_leave_the_socket_and_files_leave_with_their_writer(
    start, samples, shared_folder: Path, start_seconds: float
) -> None:
    """Two engines get names of the same files; a frontend that was killed leaves files, which the
    next start removes; one that is stopped leaves nothing."""
    deployment, (asker,) = start(
        ipc_type="shm", num_engines=2, processor_bytes=8 * MIB, change=within(shared_folder)
    )
    pictured = [sample for sample in samples if sample.pictures][:24]
    for sample in pictured + pictured:
        asker.check_beginning(sample)
    sent = sent_by_kind(asker)
    print(sent)
    assert sent["shm"] > 0
    assert sent["req"] == sent["fill"] == 0
    written = asker.metric("foveal_shm_files_written_total")
    assert written > 0
    assert asker.metric("foveal_shm_fallbacks_total") == 0
    assert 0 < asker.metric("foveal_shm_bytes") <= asker.metric("foveal_shm_capacity_bytes")
    (writer,) = folders(shared_folder)
    assert sum(1 for _ in (shared_folder / "mm" / writer).iterdir()) == written + 1  # the lock

    child = deployment.frontends[0]
    child.kill_group()
    assert folders(shared_folder) == [writer]
    child.start()
    deployment.wait_ready(start_seconds)
    assert writer not in folders(shared_folder)
    assert asker.metric("foveal_shm_swept_writers_total") == 1
    for sample in pictured[:6]:
        asker.check_beginning(sample)
    deployment.stop(20)
    assert folders(shared_folder) == []


@pytest.mark.extended
def test_an_engine_that_sees_another_volume_gets_bytes(start, samples, tmp_path: Path) -> None:
    """No endless round trips: after three files that it could not open, values go inline."""

    def elsewhere(engines: list[Any], frontends: list[Any]) -> tuple[list[Any], list[Any]]:
        for name in ("mine", "yours"):
            (tmp_path / name).mkdir()
        return (
            [msgspec.structs.replace(e, shm_directory=str(tmp_path / "yours")) for e in engines],
            [small(f, shm_directory=str(tmp_path / "mine")) for f in frontends],
        )

    _, (asker,) = start(ipc_type="shm", change=elsewhere)
    for sample in [s for s in samples if s.pictures][:12]:
        asker.check_beginning(sample)
    assert asker.metric("foveal_shm_fallbacks_total", reason="engine_blind") > 0
    assert 3 <= asker.metric("foveal_mirror_needs_received_total") <= 6
    assert sent_by_kind(asker)["req"] > 0


@pytest.mark.extended
def test_a_budget_that_does_not_fit_is_said_at_start(deploy, tmp_path: Path) -> None:
    from foveal_runtime.plan.errors import StartupError

    deployment = deploy(ipc_type="shm", shm_bytes=1 << 50, change=within(tmp_path))
    with deployment, pytest.raises(StartupError, match=r"lower shm_bytes"):
        deployment.wait_ready(120)
