"""Tiny random checkpoints, made once, and a runner beside transformers' own model."""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    from tests.support.models import tiny_checkpoints

    tiny_checkpoints.load_cases()
    return tiny_checkpoints


@pytest.fixture(scope="session")
def tiny(checkpoints: ModuleType, tmp_path_factory: pytest.TempPathFactory):
    """tiny(name) → directory of a saved random checkpoint of that case, made once."""
    made: dict[str, Path] = {}

    def get(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            checkpoints.save(name, made[name])
        return made[name]

    return get


@pytest.fixture
def bench(tiny):
    """bench(name, **options) → a runner beside transformers' own model (see bench.py)."""
    from tests.support.models.bench import Bench

    return lambda name, **options: Bench(name, tiny(name), **options)


@pytest.fixture
def named(checkpoints: ModuleType):
    """named(kind) → the name of a case of that kind whose heads the kernels know."""
    from tests.support.models.decoders import decoder_case

    return lambda kind: decoder_case(checkpoints, kind)
