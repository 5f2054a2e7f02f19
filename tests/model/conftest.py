"""Loads the helper modules of this folder (tests are no package) and shares tiny checkpoints."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _load(name: str) -> ModuleType:
    full = f"foveal_tests_model_{name}"
    if full not in sys.modules:
        spec = importlib.util.spec_from_file_location(full, Path(__file__).parent / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[full] = module
        spec.loader.exec_module(module)
    return sys.modules[full]


_load("attention_batches")


@pytest.fixture(scope="session")
def checkpoints() -> ModuleType:
    module = _load("tiny_checkpoints")
    for name in ("tiny_images", "tiny_grids", "tiny_groups", "tiny_sounds"):
        _load(name)
    return module


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
    _load("step_driver")
    module = _load("bench")
    return lambda name, **options: module.Bench(name, tiny(name), **options)
