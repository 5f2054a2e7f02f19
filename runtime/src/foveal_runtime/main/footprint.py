"""Measured memory of the processes of this image with a model.

Called by `foveal-runtime profile`. A stand-in for an HTTP process starts in a process of its own
(`python -m foveal_runtime.main.footprint`), with a real media worker below it; the engine's figure
is that of the profiling process itself, which has imported and run what an engine imports. Never
loads weights, never listens.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
from typing import TYPE_CHECKING

import msgspec

from foveal_runtime.plan.config import MIB, FrontendConfig, ModalitiesConfig, ModelConfig
from foveal_runtime.plan.errors import FovealError
from foveal_runtime.plan.profile import ProcessMemory
from foveal_runtime.telemetry.memory import (
    give_back_large_blocks,
    peak_bytes,
    release_free_memory,
    reset_peak,
    taken_bytes,
)

if TYPE_CHECKING:
    from foveal_runtime.frontend.media.workers import MediaWorkers

log = logging.getLogger(__name__)
STEP_BYTES = 4 * MIB
"""Figures are rounded up to this, so that two measurements of one image seldom differ."""
_TIMEOUT_SECONDS = 600


def measure_frontend(path: str, limits: ModalitiesConfig) -> ProcessMemory:
    """HTTP process and media worker; all 0, with a warning, when they cannot be measured."""
    config = FrontendConfig(
        model=ModelConfig(path=path), modalities=limits, media_workers=1, processor_bytes=0
    )
    try:
        done = subprocess.run(
            [sys.executable, "-m", "foveal_runtime.main.footprint"],
            input=msgspec.json.encode(config),
            stdout=subprocess.PIPE,
            timeout=_TIMEOUT_SECONDS,
            check=True,
        )
        return msgspec.json.decode(done.stdout, type=ProcessMemory)
    except (OSError, subprocess.SubprocessError, msgspec.MsgspecError) as error:
        log.warning("frontend processes could not be measured: %s", error)
        return ProcessMemory()


def measure_engine(dtype: str, width: int) -> int:
    """This process, once a model was profiled in it, with its kernels' caches full."""
    from foveal_runtime.main import engine  # noqa: F401  what an engine imports besides
    from foveal_runtime.model.cpu import packing

    packing.fill_kernel_cache(dtype, width)
    release_free_memory()
    return _rounded(taken_bytes())


def _rounded(size: int) -> int:
    return -(-size // STEP_BYTES) * STEP_BYTES


async def _stand_in(config: FrontendConfig) -> ProcessMemory:
    """Everything of main/frontend.py's process but its sockets."""
    from foveal_runtime.frontend.engines.client import EngineClient
    from foveal_runtime.frontend.http.app import build_app
    from foveal_runtime.frontend.items.input_processor import MediaInput
    from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
    from foveal_runtime.main import frontend, http_process  # noqa: F401

    workers = MediaWorkers(
        WorkerSettings(
            model_path=config.model.path, namespace=b"", limits=config.modalities, num_workers=1
        )
    )
    info = await workers.start()
    try:
        client = EngineClient(config, b"")
        processor = MediaInput(config, workers, info, knowledge=client)
        app = build_app(config, processor=processor, info=info, generator=client)
        release_free_memory()
        http_bytes = taken_bytes()
        del app
        (pid,) = workers.pids()
        worker_bytes = taken_bytes(pid)
        pixels = max(1, config.modalities.image.max_pixels)
        peak = await _largest_image(workers, pid, config.modalities)
        await processor.fetcher.close()
    finally:
        await workers.close()
    return ProcessMemory(
        http_bytes=_rounded(http_bytes),
        worker_bytes=_rounded(worker_bytes),
        worker_bytes_per_pixel=max(0, -(-(peak - worker_bytes) // pixels)) if peak else 0,
    )


async def _largest_image(workers: MediaWorkers, pid: int, limits: ModalitiesConfig) -> int:
    """The worker's peak with the largest image that it may be given; 0 = not measured."""
    image = limits.image
    if image.max_per_prompt == 0:
        return 0
    data = await asyncio.to_thread(largest_image, image.max_pixels, image.max_bytes)
    for _ in range(2):  # the first one imports what images need
        if not reset_peak(pid):
            return 0
        try:
            await workers.process(0, b"{}", data)
        except FovealError as error:  # larger than a worker may take: that was its peak
            log.info("the largest image: %s", error.message)
            break
    return peak_bytes(pid) if pid in workers.pids() else 0


def largest_image(max_pixels: int, max_bytes: int) -> bytes:
    """A PNG of so many pixels; not compressed, when `max_bytes` allow."""
    import io
    import math

    from PIL import Image

    side = max(1, math.isqrt(max_pixels))
    level = 0 if 3 * side * side + (1 << 20) < max_bytes else 1
    file = io.BytesIO()
    Image.new("RGB", (side, side), (120, 60, 200)).save(file, "PNG", compress_level=level)
    return file.getvalue()


def main() -> int:
    give_back_large_blocks()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=FrontendConfig)
    found = asyncio.run(_stand_in(config))
    sys.stdout.buffer.write(msgspec.json.encode(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
