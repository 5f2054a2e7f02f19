"""Tiny instances of real processors."""

from __future__ import annotations

import pytest

from foveal_runtime.plan.config import ModalitiesConfig


@pytest.fixture(scope="session")
def tiny():
    from tests.support import tiny_processors

    return tiny_processors


@pytest.fixture(scope="session")
def loaded(tiny, tmp_path_factory):
    """name → (ItemProcessor, ProcessorInfo), made once."""
    from foveal_runtime.frontend.media.processors import ItemProcessor

    cache: dict = {}

    def load(name: str):
        if name not in cache:
            path = tiny.save(name, tmp_path_factory.mktemp("models"))
            processor = ItemProcessor(str(path), ModalitiesConfig())
            cache[name] = processor, processor.examine(b"n" * 16)
        return cache[name]

    return load
