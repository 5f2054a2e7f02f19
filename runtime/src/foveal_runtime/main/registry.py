"""A model out of a registry: `oci://REGISTRY/NAME:TAG`, an image whose layers hold a checkpoint.

The references are those that the operator mounts as image volumes. Of the distribution API
(github.com/opencontainers/distribution-spec) it reads manifests and blobs; every one is compared
with its digest before it is used. Layers come one by one: downloaded, resumed where they broke,
unpacked, removed. Archives are hostile until shown otherwise. Needs no torch.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import ipaddress
import os
import platform
import re
import shutil
import tarfile
import urllib.request
import zlib
from collections.abc import Callable, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import IO, Annotated, Any, NamedTuple
from urllib.error import HTTPError
from urllib.parse import urlencode, urlsplit

import msgspec

from foveal_runtime.main.bars import Bars
from foveal_runtime.main.fetch import Progress, fill
from foveal_runtime.main.revision import SOURCE_FILE
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.quantity import short_bytes

_IMAGE = re.compile(
    r"(?:(?P<host>localhost|[\w.:\[\]-]*[.:][\w.:\[\]-]*)/)?(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_HUB = "https://registry-1.docker.io"
_HUB_NAMES = {"index.docker.io", "docker.io", "registry-1.docker.io"}
_DOCKER = "docker.distribution.manifest"
_KINDS = ("oci.image.index.v1", "oci.image.manifest.v1", f"{_DOCKER}.list.v2", f"{_DOCKER}.v2")
_ACCEPT = ", ".join(f"application/vnd.{kind}+json" for kind in _KINDS)
_LAYER = re.compile(r"image\.(layer|rootfs).*tar(.?gzip)?$")
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
_TIMEOUT_SECONDS = 60.0
_CHUNK_BYTES = 1 << 20
_MAX_MANIFEST_BYTES = 4 << 20  # what registries take at most, by the distribution API
_MAX_FILES = 100_000
_MAX_HEADER_BYTES = 1 << 20
_OURS = (".cache", SOURCE_FILE)  # names at the top that an image neither writes nor removes
_BROKEN = (OSError, HTTPException)
_WRONG = (tarfile.TarError, EOFError, RecursionError, ValueError, OverflowError, zlib.error,
          msgspec.MsgspecError)  # fmt: skip


class _Image(NamedTuple):
    host: str
    name: str
    tag: str
    digest: str


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


class _Part(msgspec.Struct, rename="camel"):
    digest: Annotated[str, msgspec.Meta(pattern="^sha256:[0-9a-f]{64}$")]
    size: Annotated[int, msgspec.Meta(ge=0)]
    media_type: str = ""
    platform: _Platform | None = None


class _Manifest(msgspec.Struct):
    """Of an image (`layers`) or of an index (`manifests`)."""

    layers: list[_Part] = []
    manifests: list[_Part] = []


class _Login(msgspec.Struct):
    auth: str = ""
    username: str = ""
    password: str = ""


class _Logins(msgspec.Struct, rename="camel"):
    """docker's config.json."""

    auths: dict[str, _Login] = {}
    creds_store: str = ""
    cred_helpers: dict[str, str] = {}


def pinned(rest: str, folder: Path) -> str:
    """What follows `oci://`, with the digest that its tag means now. It is noted in `folder`: where
    the registry cannot be reached, it is the digest of the last time. Raises StartupError."""
    image = _parsed(rest)
    note = folder / (re.sub(r"[^A-Za-z0-9._-]+", "--", f"oci://{rest}") + ".digest")
    digest = image.digest
    if not digest:
        try:
            digest, _ = _Registry(image, rest).manifest(image.tag)
            note.write_text(digest)
        except _BROKEN as error:
            if not note.is_file():
                raise _failed(rest, error) from error
            digest = note.read_text()
            print(f"oci://{rest}: no answer ({_reason(error)}); as last time, {digest}", flush=True)
        except _WRONG as error:
            raise _failed(rest, error) from error
    return f"{image.host}/{image.name}@{digest}"


def download(rest: str, revision: str, directory: Path, progress: Progress) -> str:
    """The files of an image into `directory`; what an earlier attempt left of it is used.

    Returns the digest that tag or index had. Raises StartupError."""
    if revision:
        raise StartupError("oci:// models have no revision: put tag or digest behind the name")
    image = _parsed(rest)
    notes = directory / ".cache/oci"
    try:
        registry = _Registry(image, rest)
        digest, layers = registry.layers(image.digest or image.tag)
        if not (notes / digest).is_file():  # nothing, or another image's
            shutil.rmtree(directory)
            notes.mkdir(parents=True)
            (notes / digest).touch()
        done = [notes / f"{number}-{one.digest}" for number, one in enumerate(layers)]
        missing = [one.size for one, note in zip(layers, done, strict=True) if not note.is_file()]
        there = sum(part.stat().st_size for part in notes.glob("*.part"))
        # A layer lies there twice, packed and unpacked, until it is whole.
        _check_room(sum(missing) + max(missing, default=0) - there, directory)
        progress.total_bytes = sum(one.size for one in layers)
        with Bars(progress.total_bytes, progress.out) as bars:
            for number, (layer, note) in enumerate(zip(layers, done, strict=True), 1):
                came = bars.begin(f"layer {number} of {len(layers)}", layer.size)
                if note.is_file():
                    came(layer.size)
                    continue
                part = note.with_name(note.name + ".part")
                registry.save(layer, part, came)
                _unpack(part, directory)
                note.touch()
                part.unlink()
        _check_links(directory)
    except (*_BROKEN, *_WRONG) as error:
        raise _failed(rest, error) from error
    return digest


def _parsed(rest: str) -> _Image:
    found = _IMAGE.fullmatch(rest)
    if found is None:
        raise StartupError(f"oci://{rest}: write oci://REGISTRY/NAME:TAG or …/NAME@sha256:DIGEST")
    host, name = found["host"] or "docker.io", found["name"]
    if host in _HUB_NAMES and "/" not in name:
        name = f"library/{name}"
    return _Image(host, name, found["tag"] or "latest", found["digest"] or "")


def _reason(error: Exception) -> str:
    error = getattr(error, "reason", error) if not isinstance(error, HTTPError) else error
    text = (error.strerror if isinstance(error, OSError) else "") or str(error)
    return next(iter(text.strip().splitlines()), type(error).__name__)


def _failed(rest: str, error: Exception) -> StartupError:
    return StartupError(f"oci://{rest}: {_reason(error)}")


def _is_plain(host: str) -> bool:
    """Whether http:// may be spoken: this machine itself, or what the user has listed."""
    name = urlsplit(f"//{host}").hostname or ""
    try:
        is_loopback = ipaddress.ip_address(name).is_loopback
    except ValueError:
        is_loopback = name == "localhost"
    return is_loopback or host in os.environ.get("FOVEAL_INSECURE_REGISTRIES", "").split(",")


def _checked(url: str) -> str:
    """Raises StartupError for an address that credentials or layers must not travel from."""
    found = urlsplit(url)
    if found.scheme != "https" and not (found.scheme == "http" and _is_plain(found.netloc)):
        raise StartupError(f"the registry names {url!r}: other machines must have https://")
    return url


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        try:
            return super().redirect_request(req, fp, code, msg, headers, _checked(newurl))
        except StartupError:
            fp.close()
            raise


class _Registry:
    """One repository. Requests raise StartupError for what another attempt would not change, and
    OSError or HTTPException for what it might."""

    def __init__(self, image: _Image, rest: str) -> None:
        self._image, self._uri = image, f"oci://{rest}"
        is_plain = _is_plain(image.host)
        base = f"http{'' if is_plain else 's'}://{image.host}"
        self._base = f"{_HUB if image.host in _HUB_NAMES else base}/v2/{image.name}"
        proxies = urllib.request.ProxyHandler({} if is_plain else None)
        self._opener = urllib.request.build_opener(proxies, _Redirects)
        self._authorization = ""

    def _open(self, url: str, headers: dict[str, str], authorization: str) -> Any:
        request = urllib.request.Request(url, headers=headers)
        if authorization:  # not for where a registry sends us: addresses there are signed
            request.add_unredirected_header("Authorization", authorization)
        try:
            return self._opener.open(request, timeout=_TIMEOUT_SECONDS)
        except HTTPError as error:
            error.close()  # it is the connection, too
            raise

    def _get(self, path: str, **headers: str) -> Any:
        try:
            return self._open(self._base + path, headers, self._authorization)
        except HTTPError as error:
            # A place that blobs are sent from names no realm that credentials may go to.
            if error.code != 401 or urlsplit(error.url).netloc != urlsplit(self._base).netloc:
                raise self._refusal(error) from error
            self._authorization = self._authorized(error.headers.get("WWW-Authenticate", ""))
        try:
            return self._open(self._base + path, headers, self._authorization)
        except HTTPError as error:
            raise self._refusal(error) from error

    def _refusal(self, error: HTTPError) -> Exception:
        if error.code in (401, 403):
            return self._denied(error.code)
        if error.code == 404:
            return StartupError(f"{self._uri}: not found in the registry: check name and tag")
        if error.code == 429 or error.code >= 500:
            return error
        return StartupError(f"{self._uri}: the registry answers {error.code} {error.reason}")

    def _denied(self, code: int) -> StartupError:
        """In one line with a remedy, which depends on where docker has the credentials."""
        file, logins = _read_logins()
        if self._login():
            what = f"does not accept the credentials in {file}: docker login {self._image.host}"
        elif logins.creds_store or self._image.host in logins.cred_helpers:
            what = (f"asks for credentials, and {file} leaves them to a helper, which is not run: "
                    "write them into auths of another config.json and set DOCKER_CONFIG to its "
                    "directory")  # fmt: skip
        else:
            what = f"asks for credentials: docker login {self._image.host}, or check the name"
        return StartupError(f"{self._uri}: the registry ({code}) {what}")

    def _login(self) -> str:
        """A header's value; "" without credentials."""
        host = self._image.host
        for key, one in _read_logins()[1].auths.items():
            name = re.sub("^https?://", "", key).partition("/")[0]
            if name == host or {name, host} <= _HUB_NAMES:
                pair = f"{one.username}:{one.password}".encode() if one.username else b""
                found = one.auth or base64.b64encode(pair).decode()
                return f"Basic {found}" if found else ""
        return ""

    def _authorized(self, challenge: str) -> str:
        """The header that answers a 401, with a token where the registry wants one."""
        kind, _, text = challenge.partition(" ")
        login = self._login()
        if kind.lower() == "basic" and login:
            return login
        if kind.lower() != "bearer":
            raise self._denied(401)
        said = dict(re.findall(r'(\w+)="([^"]*)"', text))
        asked = {"service": said.get("service", ""),
                 "scope": said.get("scope", f"repository:{self._image.name}:pull")}  # fmt: skip
        realm = _checked(said.get("realm", ""))
        try:
            url = f"{realm}{'&' if '?' in realm else '?'}{urlencode(asked)}"
            with self._open(url, {}, login) as answer:
                found = msgspec.json.decode(answer.read(_CHUNK_BYTES), type=dict[str, Any])
        except HTTPError as error:
            raise self._denied(error.code) if error.code < 429 else error from error
        return f"Bearer {found.get('token') or found.get('access_token')}"

    def manifest(self, reference: str) -> tuple[str, _Manifest]:
        """(digest, content) of a tag or a digest."""
        with self._get(f"/manifests/{reference}", Accept=_ACCEPT) as answer:
            body = answer.read(_MAX_MANIFEST_BYTES)
        digest = "sha256:" + hashlib.sha256(body).hexdigest()
        if ":" in reference and reference != digest:
            raise StartupError(f"{self._uri}: the registry's manifest has the digest {digest}")
        try:
            return digest, msgspec.json.decode(body, type=_Manifest)
        except msgspec.MsgspecError as error:
            raise StartupError(f"{self._uri}: manifest of no image: {error}") from error

    def layers(self, reference: str) -> tuple[str, Sequence[_Part]]:
        """(digest of the reference, layers from the lowest); of an index, this machine's."""
        digest, found = self.manifest(reference)
        if found.manifests:
            _, found = self.manifest(self._choose(found.manifests).digest)
        wrong = [one.media_type for one in found.layers if not _LAYER.search(one.media_type)]
        if wrong or not found.layers:
            what = f"a layer of type {wrong[0]}" if wrong else "no layers"
            raise StartupError(f"{self._uri} has {what}: push an image of tar or tar+gzip layers")
        return digest, found.layers

    def _choose(self, manifests: Sequence[_Part]) -> _Part:
        named = [(one, one.platform or _Platform()) for one in manifests]
        images = [(one, kind) for one, kind in named if kind.os != "unknown"]  # no attestations
        here = ("linux", _ARCHITECTURES.get(platform.machine(), platform.machine()))
        fits = [one for one, kind in images if (kind.os, kind.architecture) == here]
        if not fits and len(images) != 1:
            known = ", ".join(f"{kind.os}/{kind.architecture}" for _, kind in images) or "nothing"
            raise StartupError(f"{self._uri} has {known}, not {'/'.join(here)}: give a digest")
        return fits[0] if fits else images[0][0]

    def save(self, layer: _Part, part: Path, came: Callable[[int], None]) -> None:
        """A layer's bytes into `part`, after those that are there."""
        part.touch()
        with part.open("rb") as file:
            hashed = hashlib.file_digest(file, "sha256")
        came(part.stat().st_size)

        def append(start: int) -> None:
            nonlocal hashed
            span = {"Range": f"bytes={start}-"} if start else {}
            with self._get(f"/blobs/{layer.digest}", **span) as answer:
                if start and answer.status != 206:  # the whole layer
                    came(-start)
                    start, hashed = 0, hashlib.sha256()
                with part.open("ab" if start else "wb") as out:
                    while chunk := answer.read(min(_CHUNK_BYTES, layer.size + 1 - start)):
                        start += out.write(chunk)
                        hashed.update(chunk)
                        came(len(chunk))
            if start < layer.size:
                raise ConnectionError("the connection broke off")

        fill(part, layer.size, append, _BROKEN)
        if f"sha256:{hashed.hexdigest()}" != layer.digest:
            part.unlink()
            what = f"layer {layer.digest[:19]}… was damaged on its way and is removed"
            raise StartupError(f"{self._uri}: {what}: start again, which downloads it again")


def _read_logins() -> tuple[Path, _Logins]:
    file = Path(os.environ.get("DOCKER_CONFIG") or "~/.docker").expanduser() / "config.json"
    try:
        return file, msgspec.json.decode(file.read_bytes(), type=_Logins)
    except FileNotFoundError:
        return file, _Logins()
    except (OSError, msgspec.MsgspecError) as error:
        raise StartupError(f"{file} cannot be read: {error}") from error


def _check_room(needed_bytes: int, directory: Path) -> None:
    free = shutil.disk_usage(directory).free
    if needed_bytes > free:
        raise ValueError(
            f"needs {short_bytes(needed_bytes)} on the disk of {directory}, which has "
            f"{short_bytes(free)} free: free some"
        )


class _Bounded:
    """What tarfile reads from. It would take headers as long as the archive says into memory; with
    `left` it gets so many bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.left = stream, _MAX_HEADER_BYTES
        self.seek, self.tell = stream.seek, stream.tell

    def read(self, size: int) -> bytes:
        self.left -= size
        if self.left < 0:
            raise tarfile.ReadError(f"an entry's header has over {_MAX_HEADER_BYTES} bytes")
        data: bytes = self._stream.read(size)
        return data


def _unpack(packed: Path, directory: Path) -> None:
    """Applies a layer: files, directories, symbolic links that stay inside, and what it deletes.

    Raises tarfile.TarError, OSError or ValueError for any other entry."""
    with packed.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"
    with gzip.open(packed) if is_gzip else packed.open("rb") as stream:
        bounded: Any = _Bounded(stream)
        with tarfile.open(fileobj=bounded, mode="r:") as tar:
            for _ in range(_MAX_FILES):
                bounded.left = _MAX_HEADER_BYTES
                member = tar.next()
                if member is None:
                    return
                bounded.left = member.size + _MAX_HEADER_BYTES  # padding is read, too
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
                _place(tar, member, directory)
    raise ValueError(f"a layer has more than {_MAX_FILES} entries: no model has")


def _place(tar: tarfile.TarFile, member: tarfile.TarInfo, directory: Path) -> None:
    parts = [one for one in member.name.split("/") if one not in ("", ".")]
    if not parts or parts[0] in _OURS:  # the root is there
        return
    path = directory.joinpath(*parts)
    above = [directory.joinpath(*parts[:depth]) for depth in range(1, len(parts))]
    # Whatever the filter of this Python overlooks: nothing is written through a link.
    if ".." in parts or any(one.is_symlink() for one in above):
        raise ValueError(f"a layer's entry {member.name!r} would leave its folder")
    if path.name.startswith(".wh."):
        hidden = path.name.removeprefix(".wh.")
        if hidden in ("", ".", "..") or hidden.startswith(".wh."):
            raise ValueError(f"a layer has {member.name!r}: build the image in one layer")
        if len(parts) > 1 or hidden not in _OURS:
            _remove(path.with_name(hidden))
        return
    if not (member.isreg() or member.isdir() or member.issym()):
        raise ValueError(f"a layer's entry {member.name!r} is no file: copy what it stands for")
    _check_room(member.size, directory)
    if path.is_symlink() or not (member.isdir() and path.is_dir()):
        _remove(path)
    tar.extract(member, directory, filter="data")


def _check_links(directory: Path) -> None:
    """Raises ValueError for links that lead outside since a directory has replaced another link."""
    root = os.path.realpath(directory)
    for path in directory.rglob("*"):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(root):
            raise ValueError(f"a layer's link {path.name!r} would leave its folder")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
