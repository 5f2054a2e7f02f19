"""LoRA adapters on real processes: as the merged weights answer, by name, loaded and unloaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

pytestmark = pytest.mark.timeout(900)

PROMPT = list(range(5, 45))
NUM_OUTPUTS = 8


@pytest.fixture(scope="module")
def adapters(model_folder: Path, tmp_path_factory: Any) -> dict[str, tuple[Path, list[int]]]:
    """Name → directory and what the merged model continues PROMPT with; "" is the model itself."""
    import torch

    from tests.support.models.lora import merged, plain, write_adapter

    folder, base = tmp_path_factory.mktemp("loras"), plain(str(model_folder))
    made = {"": (folder, base)}
    for seed, name in enumerate(("red", "blue"), 1):
        at = write_adapter(folder / name, base, seed)
        made[name] = (at, merged(str(model_folder), at))

    def continued(model: Any) -> list[int]:
        ids = torch.tensor([PROMPT])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=NUM_OUTPUTS,
                min_new_tokens=NUM_OUTPUTS, do_sample=False, eos_token_id=-1,
            )  # fmt: skip
        return out[0, len(PROMPT) :].tolist()

    found = {name: (at, continued(model)) for name, (at, model) in made.items()}
    assert len({tuple(ids) for _, ids in found.values()}) == 3, "the adapters change the answers"
    return found


def test_adapters_answer_as_merged_weights(adapters: Any, start: Any, tmp_path: Path) -> None:
    (tmp_path / "admin").write_text("root")
    red, blue = adapters["red"][0], adapters["blue"][0]
    _, [one, two] = start(
        loras=(f"red={red}",), lora_bytes=16 << 20, num_frontends=2,
        admin_key_file=str(tmp_path / "admin"),
    )  # fmt: skip

    def ask(asker: Any, name: str) -> httpx.Response:
        body: dict[str, Any] = {
            "prompt": PROMPT, "max_tokens": NUM_OUTPUTS, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True,
        }  # fmt: skip
        if name:
            body["model"] = name
        return httpx.post(f"{asker.url}/v1/completions", json=body, timeout=120)

    def order(action: str, **body: str) -> httpx.Response:
        return httpx.post(
            f"{one.url}/v1/{action}_lora_adapter", json=body, timeout=120,
            headers={"authorization": "Bearer root"},
        )  # fmt: skip

    def check(asker: Any, name: str) -> dict[str, Any]:
        answer = ask(asker, name).json()
        assert answer["choices"][0]["token_ids"] == adapters[name][1], name
        return answer["usage"]

    for name in ("", "red", "", "red"):
        check(one, name)
    assert check(two, "red")["prompt_tokens_details"]["cached_tokens"] > 0
    assert ask(one, "blue").status_code == 404
    done = order("load", lora_name="blue", lora_path=str(blue))
    assert done.json() == {"lora_name": "blue", "num_engines": 1}, done.text
    assert check(one, "blue")["prompt_tokens_details"]["cached_tokens"] == 0
    cards = httpx.get(f"{two.url}/v1/models", timeout=60).json()["data"]
    assert [card["id"] for card in cards][1:] == ["blue", "red"]
    check(two, "blue")
    again = order("load", lora_name="blue", lora_path=str(red))
    assert again.status_code == 400
    assert "is loaded; unload it first" in again.json()["error"]["message"]
    assert order("unload", lora_name="blue").status_code == 200
    assert ask(one, "blue").status_code == 404
    check(one, "red")
