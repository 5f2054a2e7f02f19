"""The page of supported models says what the tests compare, and its neighbour what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS
from foveal_runtime.model.checkpoint.kinds import check_kind
from foveal_runtime.plan.errors import StartupError
from tests.support import refused_page
from tests.support.model_table import page as page_of_models

pytestmark = pytest.mark.timeout(500)

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
    compared = set(re.findall(r"^\| `([\w-]+)` \|", page, flags=re.M))
    assert {**ADAPTERS, **TEXT_ADAPTERS}.keys() - compared == COMPARED_AS_TEXT_OF.keys()


def test_the_page_of_what_is_refused_is_what_the_code_says() -> None:
    """Making it asks the code for every case, which must refuse it."""
    committed = ROOT / "docs/reference/refused.md"
    assert committed.read_text(encoding="utf-8") == refused_page.page(), "run make generate"


def test_every_type_without_an_adapter_is_refused_in_a_line_that_names_it() -> None:
    kinds = refused_page.refused_types()
    assert len(kinds) >= 30
    for kind in kinds:
        with pytest.raises(StartupError, match=re.escape(repr(kind))) as caught:
            check_kind("MODEL", {"model_type": kind, "vision_config": {}})
        assert "\n" not in caught.value.message


def test_a_case_that_is_served_is_found() -> None:
    case = refused_page.Case("nothing", "", lambda _: check_kind("MODEL", {"model_type": "llava"}))
    with pytest.raises(AssertionError, match="not refused any more"):
        refused_page.said(case)
