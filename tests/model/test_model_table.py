"""The page of supported models says what the tests compare."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS
from tests.support.model_table import compared, page

pytestmark = pytest.mark.model

COMPARED_AS_TEXT_OF = {"qwen3_5_text": "qwen3_5"}


def test_the_page_is_up_to_date() -> None:
    committed = Path(__file__).parents[2] / "docs/reference/models.md"
    assert committed.read_text(encoding="utf-8") == page(), "run make generate"


def test_every_adapter_is_compared_with_transformers() -> None:
    """An entry that no test compares is a promise without proof."""
    missing = {**ADAPTERS, **TEXT_ADAPTERS}.keys() - compared().keys()
    assert missing == COMPARED_AS_TEXT_OF.keys()
