"""The page of supported models says what the tests compare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS
from tests.support.model_table import page as page_of_models

pytestmark = [pytest.mark.model, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
COMPARED_AS_TEXT_OF = {"qwen3_5_text": "qwen3_5"}


@pytest.fixture(scope="module")
def page() -> str:
    return page_of_models()


def test_the_page_is_up_to_date(page: str) -> None:
    committed = ROOT / "docs/reference/models.md"
    assert committed.read_text(encoding="utf-8") == page, "run make generate"


def test_every_adapter_is_compared_with_transformers(page: str) -> None:
    """An entry that no test compares is a promise without proof."""
    compared = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M))
    assert {**ADAPTERS, **TEXT_ADAPTERS}.keys() - compared == COMPARED_AS_TEXT_OF.keys()
