"""The profile as a Job writes it: small enough for a termination message, and the committed one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from foveal_runtime.main.profile import MAX_TERMINATION_MESSAGE_BYTES, compact
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ItemProfile, ModelProfile, decode

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "foveal_runtime.main.cli", "profile", *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=115,
    )


@pytest.mark.extended
def test_the_committed_profile_is_what_the_command_writes(tmp_path: Path) -> None:
    """After a change that is meant: write it again with
    `foveal-runtime profile examples/tiny-vlm/model --max-pixels 4194304`, with "tiny-vlm" as the
    model's name. What processes take is this machine's, so it is only about the same."""
    note = tmp_path / "termination-log"
    model = str(EXAMPLES / "tiny-vlm" / "model")
    done = run(model, "--max-pixels", "4194304", "--output", str(note))
    assert done.returncode == 0, done.stderr
    data = note.read_bytes()
    assert len(data) <= MAX_TERMINATION_MESSAGE_BYTES
    committed = decode((EXAMPLES / "profiles" / "tiny-vlm.json").read_bytes())
    found = msgspec.structs.replace(decode(data), model="tiny-vlm")
    measured, known = found.processes, committed.processes
    assert msgspec.structs.replace(found, processes=known) == committed
    for name in ("http_bytes", "worker_bytes", "worker_bytes_per_pixel", "engine_bytes"):
        size, usual = getattr(measured, name), getattr(known, name)
        assert usual / 2 <= size <= 2 * usual, (name, measured)


def test_a_model_that_is_none_leaves_the_message_to_the_log(tmp_path: Path) -> None:
    note = tmp_path / "termination-log"
    note.touch()
    done = run(str(tmp_path / "absent"), "--output", str(note))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("foveal-runtime: ")
    assert note.read_text() == ""


def large(num_layers: int, name: str = "m") -> ModelProfile:
    item = ItemProfile(
        num_tokens=2**40, num_embeds=2**40, processed_bytes=2**50, example="65535x65535 pixels"
    )
    names = ("image", "video", "audio")
    return ModelProfile(
        model=name,
        max_model_len=2**40,
        weight_bytes=2**50,
        kv_bytes_per_token=2**50,
        items=dict.fromkeys(names, item),
        kv_bytes_per_layer=tuple(2**40 + i for i in range(num_layers)),
        sources={f"items.{name}": "processor" for name in names},
    )


@pytest.mark.parametrize("num_layers", [64, 126, 1000])
def test_large_models_fit_a_termination_message(num_layers: int) -> None:
    profile = large(num_layers)
    data = compact(profile)
    assert len(data) <= MAX_TERMINATION_MESSAGE_BYTES
    read = decode(data)
    assert read.items == profile.items
    assert read.kv_bytes_per_token == profile.kv_bytes_per_token


def test_a_profile_that_cannot_fit_is_refused_and_not_cut() -> None:
    with pytest.raises(StartupError, match="termination message"):
        compact(large(1, "m" * 5000))


@pytest.mark.parametrize("field", ["max_model_len", "kv_bytes_per_token", "embed_bytes"])
def test_what_is_divided_by_is_not_0(field: str) -> None:
    """`foveal plan --profile` divided by it and ended in a traceback."""
    written = msgspec.to_builtins(large(1)) | {field: 0}
    with pytest.raises(StartupError, match=rf"`int` >= 1 - at `\$.{field}`"):
        decode(msgspec.json.encode(written))
