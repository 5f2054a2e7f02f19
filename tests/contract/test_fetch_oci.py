"""`oci://` against a registry on the loopback: every byte, resumed, refused, kept."""

from __future__ import annotations

import errno
import gzip
import io
import json
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foveal_runtime.main import download
from foveal_runtime.main.fetch import fetch
from foveal_runtime.main.local.model import find_model
from foveal_runtime.main.revision import resolved_revision
from foveal_runtime.plan.errors import StartupError
from tests.support.checkpoint_files import checkpoint
from tests.support.refused_fetch import reason_of
from tests.support.registry import LAYER, LOGIN, NAME, Registry, digest_of, layer

CONFIG = layer(("config.json", b"{}"), ("./extra/vocab.json", b"[]"))
WEIGHTS = layer(("model.safetensors", bytes(range(256)) * 20_000), packed=False)


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    monkeypatch.setattr(download, "_BACKOFF_SECONDS", 0.0)
    registry = Registry()
    registry.push([CONFIG, WEIGHTS])
    with registry.running():
        yield registry


def files_of(folder: Path) -> dict[str, bytes]:
    found = {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}
    del found["foveal-source.json"]
    return found


def log_in(folder: Path, **content: Any) -> None:
    (folder / "docker").mkdir()
    (folder / "docker/config.json").write_text(json.dumps(content))


def refused(registry: Registry, folder: Path, tag: str = ":1") -> str:
    """What is said, in one line; nothing has appeared where the model was to be."""
    with pytest.raises(StartupError) as caught:
        fetch(registry.uri(tag), folder / "model")
    assert not (folder / "model").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"{registry.uri(tag)}: ")


@pytest.mark.parametrize("by_digest", [False, True])
def test_every_file_of_every_layer_comes(
    registry: Registry, tmp_path: Path, by_digest: bool
) -> None:
    digest = registry.tags["1"]
    assert fetch(registry.uri(f":1@{digest}" if by_digest else ":1"), tmp_path / "model")
    assert files_of(tmp_path / "model") == {
        "config.json": b"{}",
        "extra/vocab.json": b"[]",
        "model.safetensors": bytes(range(256)) * 20_000,
    }
    assert resolved_revision(tmp_path / "model") == digest


def test_of_an_index_comes_what_fits_this_machine_else_the_only_one(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, other = (registry.push([layer(("config.json", name)), WEIGHTS]) for name in (b"1", b"2"))
    attestation = ("unknown/unknown", registry.push([layer(("x", b""))]))
    both = [("linux/s390x", other), ("linux/arm64", mine), attestation]
    index = registry.push_index(both)
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert fetch(registry.uri(), tmp_path / "a")
    assert (tmp_path / "a/config.json").read_bytes() == b"1"
    assert resolved_revision(tmp_path / "a") == index
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert refused(registry, tmp_path) == (
        f"{registry.uri()} has linux/s390x, linux/arm64, not linux/riscv64: give a digest"
    ).removeprefix(f"{registry.uri()}: ")
    registry.push_index([("linux/s390x", other), attestation])
    assert fetch(registry.uri(), tmp_path / "b")
    assert (tmp_path / "b/config.json").read_bytes() == b"2"


@pytest.mark.parametrize("whole", [False, True])
def test_a_download_that_breaks_is_resumed_or_begun_again(
    registry: Registry, tmp_path: Path, whole: bool
) -> None:
    registry.whole = whole
    registry.cuts += [digest_of(WEIGHTS)] * (1 if whole else 3)
    assert fetch(registry.uri(), tmp_path / "model")
    assert (tmp_path / "model/model.safetensors").read_bytes() == bytes(range(256)) * 20_000
    spans = [one.split("=")[1] for one in registry.asked if "bytes=" in one]
    starts = [int(span.rstrip("-")) for span in spans]
    assert len(starts) == (1 if whole else 3)
    assert starts == sorted(set(starts))
    assert starts[0] > 0


def test_what_an_earlier_attempt_left_is_used_of_the_same_image_only(
    registry: Registry, tmp_path: Path
) -> None:
    registry.cuts += [digest_of(WEIGHTS)] * 20
    body = registry.blobs[digest_of(WEIGHTS)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "MAX_ATTEMPTS", 1)
        assert refused(registry, tmp_path) == "the connection broke off"
    registry.cuts.clear()
    registry.asked.clear()
    assert fetch(registry.uri(), tmp_path / "model")
    blobs = [one for one in registry.asked if "/blobs/" in one]
    assert blobs == [f"/v2/{NAME}/blobs/{digest_of(WEIGHTS)} bytes={len(body) // 2}-"]
    shutil.rmtree(tmp_path / "model")
    left = tmp_path / "model.partial"
    (left / ".cache/oci").mkdir(parents=True)
    (left / ".cache/oci" / digest_of(b"another")).touch()
    (left / "left.safetensors").write_bytes(b"of another image")
    assert fetch(registry.uri(), tmp_path / "model")
    assert "left.safetensors" not in files_of(tmp_path / "model")


def test_a_terminal_gets_a_bar_for_each_layer(registry: Registry, tmp_path: Path) -> None:
    out = io.StringIO()
    out.isatty = lambda: True  # type: ignore[method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TERM", "xterm")
        assert fetch(registry.uri(), tmp_path / "model", out=out)
    assert "all files" in out.getvalue()
    assert "layer 2 of 2" in out.getvalue()


@pytest.mark.parametrize("kind", ["basic", "bearer"])
def test_logins_are_dockers(registry: Registry, tmp_path: Path, kind: str) -> None:
    registry.login = kind
    said = refused(registry, tmp_path)
    assert said.startswith("the registry (401) asks for credentials: docker login 127.0.0.1:")
    log_in(tmp_path, auths={f"https://{registry.address}/v2/": {"auth": LOGIN}, "x.example": {}})
    assert fetch(registry.uri(), tmp_path / "model")
    (tmp_path / "docker/config.json").write_text(
        json.dumps({"auths": {registry.address: {"username": "someone", "password": "wrong"}}})
    )
    said = refused(registry, tmp_path / "again")
    assert said.startswith("the registry (401) does not accept the credentials in ")
    (tmp_path / "docker/config.json").write_text('{"credsStore": "desktop"}')
    assert "leaves them to a helper, which is not run" in refused(registry, tmp_path / "again")
    (tmp_path / "docker/config.json").write_text("{")
    assert "config.json cannot be read" in refused(registry, tmp_path / "again")


def test_anyone_may_need_a_token(registry: Registry, tmp_path: Path) -> None:
    registry.login = "token"
    assert fetch(registry.uri(), tmp_path / "model")
    registry.token = b"no JSON"
    assert "JSON is malformed" in refused(registry, tmp_path / "again")
    with pytest.raises(StartupError, match="JSON is malformed"):
        find_model(registry.uri())


@pytest.mark.parametrize("uri", ["[::1/a:1", "127.0.0.1:99999/a:1", "127.0.0.1:x/a:1", "a..b:1/a"])
def test_addresses_that_are_none_are_said_in_one_line(
    registry: Registry, tmp_path: Path, uri: str
) -> None:
    for take in (find_model, lambda uri: fetch(uri, tmp_path / "model")):
        with pytest.raises(StartupError, match=r"^oci://.*: .+$"):
            take(f"oci://{uri}")


def test_a_full_disk_is_not_tried_again(tmp_path: Path) -> None:
    starts: list[int] = []

    def append(start: int) -> None:
        starts.append(start)
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "part").touch()
    with pytest.raises(OSError, match="No space"):
        download.fill(tmp_path / "part", 1, append, (OSError,))
    assert starts == [0]


def test_credentials_go_nowhere_else(registry: Registry, tmp_path: Path) -> None:
    """Blobs are often at an object store's signed address, which refuses a second login."""
    registry.login = "bearer"
    log_in(tmp_path, auths={registry.address: {"auth": LOGIN}})
    with Registry().running() as store:
        store.blobs = registry.blobs
        registry.elsewhere = f"http://{store.address}"
        assert fetch(registry.uri(), tmp_path / "model")
        assert [one.partition(":")[0] for one in store.asked] == ["/elsewhere/sha256"] * 2
        assert store.leaked == []
    registry.elsewhere = "http://store.example"
    said = refused(registry, tmp_path / "plain")
    assert said.startswith("the registry names 'http://store.example/elsewhere/sha256:")
    assert said.endswith("': other machines must have https://")


def test_a_store_that_refuses_gets_no_credentials(registry: Registry, tmp_path: Path) -> None:
    """Its 401 named a realm of its own choice, and the registry's login was sent there."""
    registry.login = "basic"
    log_in(tmp_path, auths={registry.address: {"auth": LOGIN}})
    with Registry().running() as store:
        store.blobs, store.login, store.refuses_elsewhere = registry.blobs, "bearer", True
        registry.elsewhere = f"http://{store.address}"
        assert "the registry (401)" in refused(registry, tmp_path)
        assert [one.partition(":")[0] for one in store.asked] == ["/elsewhere/sha256"]


def test_layers_replace_and_delete_what_is_below(registry: Registry, tmp_path: Path) -> None:
    link = tarfile.TarInfo("vocab.json")
    link.type, link.linkname = tarfile.SYMTYPE, "extra/words.json"
    registry.push([
        CONFIG, WEIGHTS, layer(("config.json", b'{"a": 1}'), ("extra/words.json", b"3"), link),
        layer(("extra/.wh.vocab.json", b""), ("old/x", b"1"), (".cache/oci/x", b"not ours")),
        layer((".wh.old", b""), ("/absolute.json", b"4")),
    ])  # fmt: skip
    assert fetch(registry.uri(), tmp_path / "model")
    found = files_of(tmp_path / "model")
    assert found.pop("model.safetensors")
    assert found == {"config.json": b'{"a": 1}', "extra/words.json": b"3", "vocab.json": b"3",
                     "absolute.json": b"4"}  # fmt: skip


def test_what_is_ours_an_image_neither_writes_nor_deletes(
    registry: Registry, tmp_path: Path
) -> None:
    """Layers that brought `.cache` and deleted it took the notes of the download along, and a
    directory in the place of the source's note was a traceback."""
    registry.push([
        CONFIG, WEIGHTS, layer((".cache/huggingface/x", b"1"), (".wh.foveal-source.json", b"")),
        layer((".wh..cache", b"")), layer(entry("foveal-source.json", tarfile.DIRTYPE)),
    ])  # fmt: skip
    assert fetch(registry.uri(), tmp_path / "model")
    assert (tmp_path / "model/foveal-source.json").is_file()


def test_links_that_lead_outside_once_a_directory_changes_are_refused(
    registry: Registry, tmp_path: Path
) -> None:
    """`weights` stays inside while `d` is a link to e/f/g, and leaves as soon as it is none."""
    folders = [entry(name, tarfile.DIRTYPE) for name in ("e", "e/f", "e/f/g")]
    links = [entry("d", LINK, "e/f/g"), entry("weights", LINK, "d/../../secret")]
    registry.push([
        CONFIG, WEIGHTS, layer(*folders, *links), layer(entry("d", tarfile.DIRTYPE))
    ])  # fmt: skip
    assert refused(registry, tmp_path) == "a layer's link 'weights' would leave its folder"


def test_bytes_that_are_there_need_no_room_again(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A download that was resumed asked for the room of the whole."""
    registry.cuts += [digest_of(WEIGHTS)] * 20
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(download, "MAX_ATTEMPTS", 1)
        assert refused(registry, tmp_path) == "the connection broke off"
    registry.cuts.clear()
    room = SimpleNamespace(free=len(WEIGHTS) * 7 // 4)
    monkeypatch.setattr("shutil.disk_usage", lambda _: room)
    assert fetch(registry.uri(), tmp_path / "model")


def entry(name: str, kind: bytes, linkname: str = "", size: int = 0) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname, info.size = kind, linkname, size
    return info


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """An entry that says it has `size` bytes, and has few."""
    return gzip.compress(entry(name, kind, size=size).tobuf(tarfile.GNU_FORMAT) + bytes(4096))


def sparse_map(num_holes: int) -> bytes:
    """A file whose list of holes is long, in the format of GNU tar 1.0."""
    holes = f"{num_holes}\n".encode() + b"0\n" * 2 * num_holes
    info = tarfile.TarInfo("a")
    info.size = len(holes)
    info.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0",
                        "GNU.sparse.realsize": "1"}  # fmt: skip
    return gzip.compress(info.tobuf(tarfile.PAX_FORMAT) + holes)


LINK = tarfile.SYMTYPE
HOSTILE: list[tuple[bytes, str]] = [
    (layer(("../outside", b"x")), "'../outside' would leave its folder"),
    (layer(("a/../../outside", b"x")), "would leave its folder"),
    (layer(entry("a", LINK, "../..")), "link to"),
    (layer(entry("a", LINK, "/etc/passwd")), "absolute path"),
    (layer(entry("a", LINK, "extra"), ("a/outside", b"x")), "'a/outside' would leave its folder"),
    (layer(entry("a", LINK, "extra"), ("a/.wh.vocab.json", b"")), "would leave its folder"),
    (layer(entry("a", tarfile.LNKTYPE, "config.json")), "'a' is no file"),
    (layer(entry("a", tarfile.CHRTYPE)), "'a' is no file"),
    (layer(entry("a", tarfile.FIFOTYPE)), "'a' is no file"),
    (layer((".wh...", b"")), "build the image in one layer"),
    (layer((".wh..wh..opq", b"")), "build the image in one layer"),
    (header("giant", 1 << 60), "free some"),
    (header("x", 1 << 40, tarfile.XHDTYPE), "header has over 1048576 bytes"),
    (sparse_map(1 << 20), "header has over 1048576 bytes"),
    (layer(*[entry(f"{i}", LINK, "config.json") for i in range(40)]), "more than 30 entries"),
    (gzip.compress(b"no archive" * 100), "invalid header"),
    (layer(("a", bytes(1 << 20)))[:-400], "end"),
    (layer(("a", b"1" * 4096), packed=False)[:1024], "unexpected end of data"),
]  # fmt: skip


@pytest.mark.parametrize(("hostile", "said"), HOSTILE, ids=[said for _, said in HOSTILE])
def test_hostile_archives_are_refused_and_change_nothing_outside(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hostile: bytes, said: str
) -> None:
    monkeypatch.setattr("foveal_runtime.main.layers._MAX_FILES", 30)
    registry.push([CONFIG, WEIGHTS, hostile])
    before = {one.name for one in tmp_path.iterdir()}
    assert said in refused(registry, tmp_path)
    assert {one.name for one in tmp_path.iterdir()} == before | {"model.partial"}
    assert not list(tmp_path.rglob("outside"))
    assert (tmp_path / "model.partial/extra/vocab.json").is_file()


def test_what_differs_from_its_digest_is_refused_and_comes_again(
    registry: Registry, tmp_path: Path
) -> None:
    digest = digest_of(WEIGHTS)
    registry.blobs[digest] = WEIGHTS[:-1] + b"x"
    assert "was damaged on its way and is removed" in refused(registry, tmp_path)
    registry.blobs[digest] = WEIGHTS + b"more than it says"
    assert "was damaged on its way" in refused(registry, tmp_path)
    registry.blobs[digest] = WEIGHTS
    assert fetch(registry.uri(), tmp_path / "model")
    pinned = registry.tags["1"]
    registry.manifests[pinned] = (registry.manifests[pinned][0], b"{}")
    (tmp_path / "b").mkdir()
    said = refused(registry, tmp_path / "b", f"@{pinned}")
    assert said == f"the registry's manifest has the digest {digest_of(b'{}')}"


def test_what_cannot_be_had_is_said_in_one_line(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert refused(registry, tmp_path, ":2") == "not found in the registry: check name and tag"
    registry.push([CONFIG])
    assert "not a model we can load" in refused(registry, tmp_path)
    registry.push([WEIGHTS], kind=f"{LAYER}+zstd")
    assert refused(registry, tmp_path).endswith("+zstd: push an image of tar or tar+gzip layers")
    registry.put({"layers": [{"digest": "sha256:../../x", "size": 1}]}, "", "1")
    assert "manifest of no image" in refused(registry, tmp_path)
    registry.put({"layers": []}, "", "1")
    assert "has no layers" in refused(registry, tmp_path)
    registry.push([CONFIG, WEIGHTS])
    registry.refusal = 503
    assert refused(registry, tmp_path) == "HTTP Error 503: Service Unavailable"
    registry.refusal = 0
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    assert refused(registry, tmp_path).startswith("needs 9.8 MiB on the disk of ")
    with pytest.raises(StartupError, match="have no revision"):
        fetch(registry.uri(), tmp_path / "model", "v1")


@pytest.mark.parametrize(
    ("tag", "login", "reason"),
    [(":2", "", "NotFound"), (":1", "bearer", "FetchDenied"), (":1", "basic", "FetchDenied")],
)
def test_a_refusal_has_a_reason(
    registry: Registry, tmp_path: Path, tag: str, login: str, reason: str
) -> None:
    registry.login = login
    found, text = reason_of(registry.uri(tag), tmp_path / "model", {})
    assert found == reason, text


def test_serve_takes_it_once_by_digest_and_without_a_network(
    registry: Registry, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = checkpoint(tmp_path / "source")
    content = [(one.name, one.read_bytes()) for one in folder.iterdir()]
    digest = registry.push([layer(*content)])
    first = find_model(registry.uri())
    assert first.name == "tiny"
    assert first.path.parent == tmp_path / "cache/foveal/models"
    assert first.path.name.endswith(digest.replace(":", "--"))
    registry.asked.clear()
    assert find_model(registry.uri()) == first
    assert registry.asked == [f"/v2/{NAME}/manifests/1"]
    assert find_model(registry.uri(f"@{digest}")) == first
    assert len(registry.asked) == 1, "a digest in the cache needs no registry"
    registry.refusal = 503
    assert find_model(registry.uri()) == first
    assert f"as last time, {digest}" in capsys.readouterr().err
    with pytest.raises(StartupError, match="503"):
        find_model(registry.uri(":2"))
    registry.refusal = 0
    with pytest.raises(StartupError, match="put it as tag or digest behind the name"):
        find_model(registry.uri(), revision="v1")
    registry.push([layer(*content, ("new.json", b"{}"))])
    moved = find_model(registry.uri())
    assert moved.path != first.path
    assert (moved.path / "new.json").is_file()
