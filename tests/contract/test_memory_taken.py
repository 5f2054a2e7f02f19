"""What a process takes, as the kernel tells it, and what glibc gives back."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
from PIL import Image

from foveal_runtime.main.footprint import largest_image
from foveal_runtime.telemetry.memory import peak_bytes, taken_bytes

MIB = 1 << 20
_BURST = """
import sys
from foveal_runtime.telemetry.memory import give_back_large_blocks, taken_bytes
if sys.argv[1] == "fixed":
    assert give_back_large_blocks()
bytes(8 << 20)  # freed at once: this is what raises the threshold
before = taken_bytes()
bodies, kept = [], []
for _ in range(8):
    bodies.append(bytearray(b"x") * (4 << 20))
    kept.append(bytearray(b"x") * (200 << 10))
bodies.clear()
print(taken_bytes() - before)
"""


_STEPS = """
import resource, sys
from foveal_runtime.telemetry.memory import keep_free_blocks
if sys.argv[1] == "kept":
    assert keep_free_blocks()
def step():
    blocks = [bytearray(b"x") * (2 << 20) for _ in range(8)]
for _ in range(3):
    step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def test_memory_of_a_process_that_is_not_there_is_0() -> None:
    assert taken_bytes(1 << 30) == 0
    assert 2 * MIB < taken_bytes() < 4096 * MIB


def test_a_burst_of_large_blocks_is_given_back() -> None:
    """Regression: an HTTP process kept what eight bodies had taken, because small blocks lay
    between them on the heap."""

    def left(how: str) -> int:
        command = [sys.executable, "-c", _BURST, how]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    assert left("fixed") < 4 * MIB
    assert left("as it is") > left("fixed")


def test_an_engine_maps_the_memory_of_a_step_once() -> None:
    """Ten steps of 16 MiB are 41,000 pages; by itself glibc gives them back after each."""

    def faults(how: str) -> int:
        command = [sys.executable, "-c", _STEPS, how]
        return int(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)

    assert faults("kept") < 500
    assert faults("as it is") > 5000


def test_a_peak_is_no_less_than_what_is_taken() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", "x = bytearray(b'x') * (64 << 20); print(1, flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert 64 * MIB < taken_bytes(child.pid) <= peak_bytes(child.pid) + MIB
        child.communicate(b"\n", timeout=30)


@pytest.mark.parametrize(("max_pixels", "max_bytes"), [(10_000, 1 << 24), (4_000_000, 1 << 20)])
def test_the_largest_image_is_within_its_limits(max_pixels: int, max_bytes: int) -> None:
    data = largest_image(max_pixels, max_bytes)
    assert len(data) < max_bytes
    with Image.open(io.BytesIO(data)) as image:
        assert image.width * image.height <= max_pixels
