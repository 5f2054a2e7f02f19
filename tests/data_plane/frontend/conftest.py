"""What the media tests share: workers without a model, pictures, tiny instances of processors."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from functools import cache
from types import ModuleType
from typing import Any

import pytest

from foveal_runtime.frontend.items.input_processor import MediaInput
from foveal_runtime.frontend.media.workers import MediaWorkers, WorkerSettings
from foveal_runtime.frontend.testing.fake import NoEngines
from foveal_runtime.frontend.testing.fake_worker import InlineWorkers
from foveal_runtime.plan.config import FrontendConfig, ModalitiesConfig, ModelConfig
from tests.support.media_files import png

FAKE = "foveal_runtime.frontend.testing.fake_worker"


@pytest.fixture
def picture() -> Callable[..., bytes]:
    """PNG bytes of a small picture that differs by seed."""

    return lambda seed=0, side=24: png(seed, side, side)


@pytest.fixture
def data_url() -> Callable[[bytes], str]:
    return lambda data: "data:image/png;base64," + base64.b64encode(data).decode()


@pytest.fixture(scope="session")
def tiny() -> ModuleType:
    from tests.support import tiny_processors

    return tiny_processors


@pytest.fixture(scope="session")
def loaded(
    tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[Any, Any]]:
    """name → (ItemProcessor, ProcessorInfo), made once."""
    from foveal_runtime.frontend.media.processors import ItemProcessor

    @cache
    def load(name: str) -> tuple[Any, Any]:
        path = tiny.save(name, tmp_path_factory.mktemp("models"))
        processor = ItemProcessor(str(path), ModalitiesConfig())
        return processor, processor.examine(b"n" * 16)

    return load


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
