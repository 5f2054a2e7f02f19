"""The page of supported models says what the tests compare.

It is made in a process of its own: some configuration classes change the dictionaries that they are
made from, and other tests of the same process have made theirs.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from foveal_runtime.model.adapters import ADAPTERS, TEXT_ADAPTERS

pytestmark = [pytest.mark.model, pytest.mark.timeout(500)]

ROOT = Path(__file__).parents[2]
COMPARED_AS_TEXT_OF = {"qwen3_5_text": "qwen3_5"}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    made = tmp_path_factory.mktemp("page") / "models.md"
    command = [sys.executable, "-m", "tests.support.model_table", str(made)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=450)
    return made.read_text(encoding="utf-8")


def test_the_page_is_up_to_date(page: str) -> None:
    committed = ROOT / "docs/reference/models.md"
    assert committed.read_text(encoding="utf-8") == page, "run make generate"


def test_every_adapter_is_compared_with_transformers(page: str) -> None:
    """An entry that no test compares is a promise without proof."""
    compared = set(re.findall(r"^\| `(\w+)` \|", page, flags=re.M))
    assert {**ADAPTERS, **TEXT_ADAPTERS}.keys() - compared == COMPARED_AS_TEXT_OF.keys()
