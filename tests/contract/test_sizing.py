"""The sizing page and its profiles are what their generator writes."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from foveal_runtime.plan.profile import decode
from tests.support import sizing, sizing_page

pytestmark = [
    pytest.mark.model,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # of transformers' own processors
]


def test_the_page_is_what_its_generator_writes() -> None:
    sources = {name: model.source for name, model in sizing.MODELS.items()}
    assert sizing_page.PAGE.read_text(encoding="utf-8") == sizing_page.page(sources), (
        "run: make sizing"
    )


@pytest.mark.extended
@pytest.mark.parametrize("name", sizing.MODELS)
def test_profiles_are_made_of_their_configurations(name: str, tmp_path: Path) -> None:
    committed = decode((sizing_page.PROFILES / f"{name}.json").read_bytes())
    made = sizing.make_profile(name, tmp_path, ["--device", "cuda"])
    assert committed == msgspec.structs.replace(
        made, model=committed.model, kv_bytes_per_layer=(), versions=committed.versions
    )


@pytest.mark.parametrize(
    ("name", "parameters"), [("qwen3-vl-8b", 8_767_123_696), ("qwen2.5-vl-7b", 8_292_166_656)]
)
def test_weights_are_those_of_the_published_checkpoint(name: str, parameters: int) -> None:
    """Counted in the checkpoints' own weight files, two bytes each."""
    assert (
        decode((sizing_page.PROFILES / f"{name}.json").read_bytes()).weight_bytes == 2 * parameters
    )


def test_an_edit_named_in_a_cell_makes_the_resource_fit() -> None:
    profile = decode((sizing_page.PROFILES / "qwen3-vl-8b.json").read_bytes())
    tight = sizing_page.sized(profile, 1, 24)
    assert tight.plan.fits
    assert [edit.field for edit in tight.edits] == ["engine.maxModelLen"]
    assert not sizing_page.sized(profile, 1, 80).edits
