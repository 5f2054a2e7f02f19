"""`s3://` with the real client against a bucket on the loopback: every byte, resumed, refused."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from foveal_runtime.main.fetch import fetch
from foveal_runtime.main.revision import resolved_revision
from foveal_runtime.plan.errors import StartupError
from tests.support import s3
from tests.support.refused_fetch import reason_of

URI = f"s3://{s3.BUCKET}/tiny"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[s3.Store]:
    folder = tmp_path / "bucket"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40_000)
    (folder / "vocabulary & words.txt").write_text("a b")
    (folder / "pytorch_model.bin").write_bytes(b"not wanted")
    with s3.Store(folder).running() as running:
        for name, value in running.environment().items():
            monkeypatch.setenv(name, value)
        yield running


def test_every_object_of_every_page_comes_and_is_named(store: s3.Store, tmp_path: Path) -> None:
    store.objects["tiny/parts/one.json"] = b"{}"
    store.objects["tinyother/config.json"] = b"another model's"
    store.objects["tiny/empty/"] = b""
    target = tmp_path / "model"
    assert fetch(URI, target)
    found = {str(f.relative_to(target)): f.read_bytes() for f in target.rglob("*") if f.is_file()}
    del found["foveal-source.json"]
    assert found == {
        key.removeprefix("tiny/"): data
        for key, data in store.objects.items()
        if key.startswith("tiny/") and not key.endswith(("/", ".bin"))
    }
    first = resolved_revision(target)
    assert first.startswith("sha256:")
    assert fetch(URI, tmp_path / "again")
    assert resolved_revision(tmp_path / "again") == first
    store.objects["tiny/config.json"] = b"{ }"
    assert fetch(URI, tmp_path / "changed")
    assert resolved_revision(tmp_path / "changed") != first


def test_a_terminal_gets_bars_and_a_log_none(store: s3.Store, tmp_path: Path) -> None:
    for width in ("40", "100"):
        out = io.StringIO()
        out.isatty = lambda: True  # type: ignore[method-assign]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("COLUMNS", width)
            patch.setenv("TERM", "xterm")
            assert fetch(URI, tmp_path / width, out=out)
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()
        assert any(line.startswith("all files") for line in lines)
        assert all(len(line) <= int(width) for line in lines)
    assert any(line.startswith("model.safetensors ") for line in lines)
    out = io.StringIO()
    assert fetch(URI, tmp_path / "log", out=out)
    assert out.getvalue() == "", "there is a line after ten seconds at the earliest"


def test_a_download_that_breaks_is_resumed_where_it_broke(store: s3.Store, tmp_path: Path) -> None:
    key = "tiny/model.safetensors"
    store.cuts += [key] * 3
    assert fetch(URI, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == store.objects[key]
    spans = [line.split("=")[1] for line in store.asked if line.startswith(f"{key} bytes=")]
    starts = [int(span.rstrip("-")) for span in spans]
    assert len(starts) == 3
    assert starts == sorted(set(starts))
    assert starts[0] > 0


def test_what_an_earlier_attempt_left_is_used_unless_the_object_changed(
    store: s3.Store, tmp_path: Path
) -> None:
    key = "tiny/model.safetensors"
    store.cuts.append(key)
    del store.objects["tiny/config.json"]
    with pytest.raises(StartupError, match="not a model"):
        fetch(URI, tmp_path / "model")
    asked = len(store.asked)
    store.objects["tiny/config.json"] = b"{}"
    store.objects[key] = store.objects[key][::-1]
    (tmp_path / "model.partial/model.safetensors.000000000000.part").write_bytes(b"an old one")
    assert fetch(URI, tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == store.objects[key]
    assert not list((tmp_path / "model").rglob("*.part"))
    assert not any("vocabulary" in line for line in store.asked[asked:])


def test_an_object_cannot_leave_its_folder(store: s3.Store, tmp_path: Path) -> None:
    store.objects["tiny/../../escaped.json"] = b"{}"
    with pytest.raises(StartupError, match="leave its folder"):
        fetch(URI, tmp_path / "model")
    assert not (tmp_path / "escaped.json").exists()


@pytest.mark.parametrize(
    ("uri", "changes", "reason"),
    [
        (URI, {"AWS_SECRET_ACCESS_KEY": "a wrong one"}, "FetchDenied"),
        (URI, {"AWS_ACCESS_KEY_ID": "AKIASOMEBODYELSE00000"}, "FetchDenied"),
        ("s3://nowhere/tiny", {}, "NotFound"),
        (f"s3://{s3.BUCKET}/nothing", {}, "NotFound"),
        (URI, {"S3_ENDPOINT_URL": "no address"}, "FetchFailed"),
    ],
)
def test_a_refusal_has_a_reason(
    store: s3.Store, tmp_path: Path, uri: str, changes: dict[str, str], reason: str
) -> None:
    """What the runtime says, read by the operator."""
    found, text = reason_of(uri, tmp_path / "model", {**changes, "HOME": str(tmp_path)})
    assert found == reason, text
