"""Which GPUs a local deployment uses: what CUDA_VISIBLE_DEVICES leaves, each engine its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal_runtime.main.launcher import LocalDeployment
from foveal_runtime.main.local import sizing
from foveal_runtime.main.local.sizing import choose_device
from foveal_runtime.plan.config import EngineConfig, ModelConfig
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.machine import look

MIB = 1024**2
VISIBLE = "CUDA_VISIBLE_DEVICES"


@pytest.fixture(autouse=True)
def driver(tmp_path: Path, monkeypatch) -> None:
    """A driver's tool that lists three devices of different sizes."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho GPU-aa1, 200\necho GPU-bb2, 300\necho GPU-cc3, 100\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.delenv(VISIBLE, raising=False)


@pytest.mark.parametrize(
    ("visible", "sizes", "per_engine"),
    [
        (None, [200, 300, 100], ["0", "1"]),
        ("2,0", [100, 100], ["2", "0"]),
        ("GPU-cc, GPU-bb2", [100, 300], ["GPU-cc", "GPU-bb2"]),
        ("1,-1,0", [100], ["1", ""]),
        ("1,7,0", [100], ["1", "7"]),
        ("", [], ["", ""]),
    ],
)
def test_each_engine_gets_its_own_of_the_visible_ones(
    visible, sizes, per_engine, tmp_path, monkeypatch
) -> None:
    if visible is not None:
        monkeypatch.setenv(VISIBLE, visible)
    assert look().devices == tuple(size * MIB for size in sizes)
    engines = [
        EngineConfig(engine_id=f"engine-{i}", model=ModelConfig(path="/models/fake"))
        for i in range(2)
    ]
    local = LocalDeployment(engines, [], folder=tmp_path / "run", devices_per_engine=1)
    assert [child.env[VISIBLE] for child in local.engines] == per_engine


def test_numbers_are_those_of_slots_where_cuda_counts_so(monkeypatch) -> None:
    """By default CUDA counts the fastest first: then nobody knows whose number it is."""
    monkeypatch.setenv(VISIBLE, "1")
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert look().devices == (300 * MIB,)


@pytest.fixture(autouse=True)
def torch_build(monkeypatch) -> None:
    monkeypatch.setattr(sizing, "_torch_version", lambda: "2.15.0+cu130")


@pytest.mark.parametrize("asked", ["auto", "cuda"])
def test_a_name_of_no_whole_device_is_refused_with_the_variable(asked, monkeypatch) -> None:
    monkeypatch.setenv(VISIBLE, "MIG-1")
    with pytest.raises(StartupError, match="CUDA_VISIBLE_DEVICES=MIG-1 names no device"):
        choose_device(asked, look(), 1)


@pytest.mark.parametrize("visible", ["", "-1"])
def test_no_visible_device_is_a_cpu(visible, monkeypatch) -> None:
    monkeypatch.setenv(VISIBLE, visible)
    assert choose_device("auto", look(), 1) == "cpu"


def test_a_device_of_unknown_memory_is_not_planned_with(tmp_path, monkeypatch) -> None:
    """As of those that share the host's."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-aa1, [N/A]\n")
    assert look().devices == ()
    for asked in ("auto", "cuda"):
        with pytest.raises(StartupError, match="this machine has no device whose memory"):
            choose_device(asked, look(), 1)
    monkeypatch.setenv(VISIBLE, "0")
    with pytest.raises(StartupError, match="names no device whose memory"):
        choose_device("cuda", look(), 1)


def test_a_torch_for_cpus_asks_nothing_of_devices(tmp_path, monkeypatch) -> None:
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU-aa1, [N/A]\n")
    monkeypatch.setattr(sizing, "_torch_version", lambda: "2.15.0+cpu")
    assert choose_device("auto", look(), 1) == "cpu"


def test_a_device_cut_into_parts_is_not_planned_whole(tmp_path) -> None:
    tool = "#!/bin/sh\necho GPU-aa1, 200, Enabled\necho GPU-bb2, 300, Disabled\n"
    (tmp_path / "nvidia-smi").write_text(tool)
    assert look().devices == ()
    (tmp_path / "nvidia-smi").write_text(tool.replace("Enabled", "[N/A]"))
    assert look().devices == (200 * MIB, 300 * MIB)


def test_a_variable_without_a_driver_chooses_nothing(tmp_path, monkeypatch) -> None:
    """As a profile shared by machines with and without GPUs sets it."""
    (tmp_path / "nvidia-smi").unlink()
    monkeypatch.setenv(VISIBLE, "0")
    assert choose_device("auto", look(), 1) == "cpu"
    with pytest.raises(StartupError, match="no NVIDIA driver answers here"):
        choose_device("cuda", look(), 1)
