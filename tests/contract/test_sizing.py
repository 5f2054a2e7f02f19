"""The sizing page and its profiles are what their generator writes."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from foveal_runtime.plan.profile import decode
from tests.support import sizing, sizing_page

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of transformers' processors


def test_the_page_is_what_its_generator_writes() -> None:
    sources = {name: model.source for name, model in sizing.MODELS.items()}
    assert sizing_page.PAGE.read_text(encoding="utf-8") == sizing_page.page(sources), (
        "run: make sizing"
    )


# What the page was asked for: models, and devices with their GiB.
ASKED_MODELS = {
    "qwen2.5-vl-3b", "qwen2.5-vl-7b", "qwen2.5-vl-72b", "qwen3-vl-8b", "internvl3-8b",
    "gemma3-4b", "gemma3-12b", "gemma3-27b", "llava-1.5-7b", "llava-onevision-7b",
    "smolvlm-2b", "smolvlm2-500m", "pixtral-12b", "mistral-small-3.1-24b",
}  # fmt: skip
ASKED_DEVICES = ["L4, 24", "A10, 24", "L40S, 48", "A100 40", "A100 80", "H100, 80", "H200, 141"]
_CELL = re.compile(r"no|–|[\d,]+ \([\d,]+\)(?: → `[\w.]+: \w+`)*")


def test_every_model_is_there_on_every_device_and_number_of_them() -> None:
    """With figures, with edits, or with a word that the head explains."""
    assert sizing.MODELS.keys() == ASKED_MODELS
    text = sizing_page.PAGE.read_text(encoding="utf-8")
    head, *sections = re.split(r"^## ", text, flags=re.M)
    assert '"no" means' in head
    assert '"–" that' in head
    found = {part.partition("\n")[0]: part for part in sections[:-1]}
    assert found.keys() == ASKED_MODELS
    for name, part in found.items():
        assert sizing.MODELS[name].source.strip()
        profile = decode((sizing_page.PROFILES / f"{name}.json").read_bytes())
        possible = [ranks in profile.possible_ranks() for ranks in (1, 2, 4, 8)]
        rows = [row.strip("| ").split(" | ") for row in part.splitlines() if row.startswith("| ")]
        by_device = {row[0]: row[1:] for row in rows[1:-2]}
        assert list(by_device) == ASKED_DEVICES, name
        assert [row[0] for row in rows[-2:]] == ["frontend pod", "engine pod"]
        for device, cells in by_device.items():
            assert [cell != "–" for cell in cells] == possible, (name, device)
            assert all(_CELL.fullmatch(cell) for cell in cells), (name, device, cells)


def test_tokens_of_an_image_are_those_that_vllm_expects_of_the_model() -> None:
    """1,377 for 4 x 4 tiles of 384 pixels and the whole image (tests of its processor)."""
    profile = decode((sizing_page.PROFILES / "smolvlm-2b.json").read_bytes())
    assert profile.items["image"].num_embeds == 1377


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
