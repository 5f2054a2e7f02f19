"""Fetching: complete or not there, resumed when broken, refused when it is no model."""

from __future__ import annotations

import errno
import fcntl
import logging
import threading
from pathlib import Path

import pytest

from foveal_runtime.main import cli
from foveal_runtime.main.download import Progress
from foveal_runtime.main.fetch import Download, fetch
from foveal_runtime.main.revision import SOURCE_FILE, resolved_revision
from foveal_runtime.plan.errors import StartupError


def source(*names: str, fails: bool = False) -> dict[str, Download]:
    def download(rest: str, revision: str, directory: Path, progress: Progress) -> str:
        progress.total_bytes = 100
        for name in names:
            (directory / name).write_text(f"{rest}@{revision}")
        if fails:
            raise StartupError("the line broke")
        return "f" * 40

    return {"hf": download}


MODEL = ("config.json", "model.safetensors")


def test_a_model_appears_whole_and_only_once(tmp_path: Path) -> None:
    target = tmp_path / "a" / "model"
    assert fetch("hf://org/name", target, "v1", source(*MODEL)) is True
    assert (target / "config.json").read_text() == "org/name@v1"
    assert resolved_revision(target) == "f" * 40
    assert fetch("hf://org/name", target, "v1", {"hf": source(fails=True)["hf"]}) is False


def test_an_empty_directory_is_filled_and_another_one_left_alone(tmp_path: Path) -> None:
    """`mkdir model` before it, and the command ended well with nothing fetched."""
    target, other = tmp_path / "model", tmp_path / "other"
    target.mkdir()
    assert fetch("hf://org/name", target, "", source(*MODEL)) is True
    assert (target / "config.json").is_file()
    other.mkdir()
    (other / "letter.txt").touch()
    with pytest.raises(StartupError, match="is there and is no model"):
        fetch("hf://org/name", other, "", source(*MODEL))
    assert [one.name for one in other.iterdir()] == ["letter.txt"]


def test_a_model_is_fetched_by_one_at_a_time(tmp_path: Path) -> None:
    """Jobs that share a claim, and a pod and its successor, appended to the same files."""
    target, told, results = tmp_path / "model", threading.Event(), []
    asked: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "another process" in record.getMessage():
                told.set()

    def download(rest: str, revision: str, directory: Path, progress: Progress) -> str:
        asked.append(rest)
        if len(asked) == 1:
            second.start()
            assert told.wait(60), "the second one neither waits nor downloads"
        told.set()
        return source(*MODEL)["hf"](rest, revision, directory, progress)

    def fetch_too() -> None:
        results.append(fetch("hf://org/name", target, "", {"hf": download}))

    second = threading.Thread(target=fetch_too)
    log, listener = logging.getLogger("foveal_runtime.main.fetch"), Listener()
    level = log.level
    log.setLevel(logging.INFO)
    log.addHandler(listener)
    try:
        assert fetch("hf://org/name", target, "", {"hf": download}) is True
        second.join(60)
    finally:
        log.removeHandler(listener)
        log.setLevel(level)
    assert (results, asked) == ([False], ["org/name"])
    assert sorted(one.name for one in tmp_path.iterdir()) == ["model"]
    assert {one.name for one in target.iterdir()} == {*MODEL, SOURCE_FILE}


def test_a_download_goes_on_where_nothing_can_be_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert fetch("hf://org/name", tmp_path / "model", "", source(*MODEL)) is True


def test_what_appears_at_the_target_meanwhile_is_kept(tmp_path: Path) -> None:
    """Another Job's model is taken; of anything else the command must not end well."""

    def fetch_while(target: Path, name: str) -> bool:
        def download(rest: str, revision: str, directory: Path, progress: Progress) -> str:
            target.mkdir()
            (target / name).write_text("theirs")
            return source(*MODEL)["hf"](rest, revision, directory, progress)

        return fetch("hf://org/name", target, "", {"hf": download})

    assert fetch_while(tmp_path / "model", "config.json") is False
    assert (tmp_path / "model/config.json").read_text() == "theirs"
    with pytest.raises(StartupError, match=r"cannot move .*other.partial to .*other: "):
        fetch_while(tmp_path / "other", "letter.txt")
    assert [one.name for one in (tmp_path / "other").iterdir()] == ["letter.txt"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--to", ""], "--to is empty: give a directory"),
        (["--to", "file/model"], "cannot make file/model.partial: Not a directory"),
        (["--to", "x", "--metrics-port", "99999"], "99999 is not a port: give 1 to 65535"),
    ],
)
def test_mistakes_of_the_command_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    more: list[str], said: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    try:
        code = cli.main(["fetch", "oci://127.0.0.1:1/a:1", *more])
    except SystemExit as ended:
        code = int(ended.code or 0)
    assert code == 2
    assert said in capsys.readouterr().err


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


@pytest.mark.parametrize("text", ["", "[]", "{", '{"uri": 3}'])
def test_a_spoilt_note_of_the_source_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / SOURCE_FILE).write_text(text)
    assert resolved_revision(tmp_path) == ""


def test_the_commit_is_known_of_what_the_hubs_own_tools_have_put_there(tmp_path: Path) -> None:
    commit = "0123456789" * 4
    cache = tmp_path / "models--org--name/snapshots" / commit
    cache.mkdir(parents=True)
    assert resolved_revision(cache) == commit
    assert resolved_revision(tmp_path / "snapshots/main") == ""
    notes = tmp_path / ".cache/huggingface/download/config.json.metadata"
    notes.parent.mkdir(parents=True)
    notes.write_text(f"{commit}\netag\n1.5\n")
    assert resolved_revision(tmp_path) == commit
    notes.write_text("what is this")
    assert resolved_revision(tmp_path) == ""
