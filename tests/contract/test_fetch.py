"""Fetching: complete or not there, resumed when broken, refused when it is no model."""

from __future__ import annotations

from pathlib import Path

import pytest

from foveal_runtime.main.fetch import Download, fetch
from foveal_runtime.plan.errors import StartupError


def source(*names: str, fails: bool = False) -> dict[str, Download]:
    def download(rest: str, revision: str, directory: Path) -> None:
        for name in names:
            (directory / name).write_text(f"{rest}@{revision}")
        if fails:
            raise StartupError("the line broke")

    return {"hf": download}


MODEL = ("config.json", "model.safetensors")


def test_a_model_appears_whole_and_only_once(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    assert fetch("hf://org/name", target, "v1", source(*MODEL)) is True
    assert (target / "config.json").read_text() == "org/name@v1"
    assert fetch("hf://org/name", target, "v1", {"hf": source(fails=True)["hf"]}) is False


def test_a_broken_download_is_kept_for_the_next_attempt(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with pytest.raises(StartupError, match="broke"):
        fetch("hf://org/name", target, "", source("config.json", fails=True))
    assert not target.exists()
    assert (tmp_path / "model.partial" / "config.json").is_file()
    assert fetch("hf://org/name", target, "", source("model.safetensors")) is True


@pytest.mark.parametrize(
    "names", [("config.json",), ("model.safetensors",), ("config.json", "x.bin")]
)
def test_what_is_no_model_is_refused(tmp_path: Path, names: tuple[str, ...]) -> None:
    with pytest.raises(StartupError, match="not a model"):
        fetch("hf://org/name", tmp_path / "model", "", source(*names))
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("uri", ["org/name", "ftp://x/y", "hf://"])
def test_unknown_sources_are_refused(tmp_path: Path, uri: str) -> None:
    with pytest.raises(StartupError, match="write hf://"):
        fetch(uri, tmp_path / "model")


def test_s3_has_no_revision_and_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match=r"boto3|revision"):
        fetch("s3://bucket/model", tmp_path / "model", "v1")
