"""What the media tests share: workers without a model, pictures, part and option makers."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.frontend.testing.fake import NoEngines
from foveal_runtime.frontend.testing.fake_worker import InlineWorkers
from foveal_runtime.plan.config import FrontendConfig, ModalitiesConfig, ModelConfig

FAKE = "foveal_runtime.frontend.testing.fake_worker"


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """PNG bytes of a small picture that differs by seed."""

    def make(seed: int = 0, side: int = 24) -> bytes:
        noise = np.random.default_rng(seed).integers(0, 255, (side, side, 3), dtype=np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(noise).save(buffer, "PNG")
        return buffer.getvalue()

    return make


@pytest.fixture
def data_url() -> Callable[[bytes], str]:
    return lambda data: "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture
async def start_workers() -> AsyncIterator[Callable[..., Any]]:
    """Starts a pool of fake workers; all are closed at the end."""
    pools: list[MediaWorkers] = []

    async def start(num_workers: int = 1, path: str = "/tiny", **changes: Any) -> Any:
        settings = WorkerSettings(
            model_path=path, namespace=b"n" * 16, limits=ModalitiesConfig(),
            num_workers=num_workers, module=FAKE, **changes,
        )  # fmt: skip
        pool = MediaWorkers(settings)
        pools.append(pool)
        return pool, await pool.start()

    yield start
    for pool in pools:
        await pool.close()


@pytest.fixture
async def start_input() -> AsyncIterator[Callable[..., Any]]:
    """Makes an MediaInput whose workers are threads."""
    made: list[MediaInput] = []

    async def start(knowledge: Any = None, **config: Any) -> MediaInput:
        defaults = {"model": ModelConfig(path="/tiny"), "processor_bytes": 1 << 20}
        document = FrontendConfig(**(defaults | config))
        workers = InlineWorkers(document.modalities)
        made.append(MediaInput(document, workers, workers.info, knowledge=knowledge or NoEngines()))
        return made[-1]

    yield start
    for processor in made:
        processor.cache.check_integrity()
        processor.aliases.check_integrity()
        await processor.fetcher.close()
