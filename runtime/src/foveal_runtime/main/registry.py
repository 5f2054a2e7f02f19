"""A model out of a registry: `oci://REGISTRY/NAME:TAG`, an image whose layers hold a checkpoint.

The references are those that the operator mounts as image volumes. Of the distribution API
(github.com/opencontainers/distribution-spec) it reads manifests and blobs; every one is compared
with its digest before it is used. Layers come one by one: downloaded, resumed where they broke,
unpacked (layers.py), removed. Needs no torch.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import ipaddress
import os
import platform
import re
import shutil
import socket
import sys
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
from foveal_runtime.main.download import Progress, fill
from foveal_runtime.main.layers import check_links, check_room, unpack
from foveal_runtime.plan.errors import StartupError

_IMAGE = re.compile(
    r"(?:(?P<host>localhost|[\w.:\[\]-]*[.:][\w.:\[\]-]*)/)?(?P<name>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>\w[\w.-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile("sha256:[0-9a-f]{64}")
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
    digest = image.digest
    if not digest:
        note = folder / (re.sub(r"[^A-Za-z0-9._-]+", "--", f"oci://{rest}") + ".digest")
        try:
            digest, _ = _Registry(image, rest).manifest(image.tag)
        except _BROKEN as error:
            digest = _noted(note)
            if not digest:
                raise _failed(rest, error) from error
            said = f"oci://{rest}: no answer ({_reason(error)}); as last time, {digest}"
            print(said, file=sys.stderr, flush=True)
        except _WRONG as error:
            raise _failed(rest, error) from error
        else:
            with contextlib.suppress(OSError):  # only a start without the registry needs it
                note.write_text(digest)
    return f"{image.host}/{image.name}@{digest}"


def _noted(note: Path) -> str:
    """The digest of the last time; "" without a whole one."""
    try:
        found = note.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
    return found if _DIGEST.fullmatch(found) else ""


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
        check_room(sum(missing) + max(missing, default=0) - there, directory)
        progress.total_bytes = sum(one.size for one in layers)
        with Bars(progress.total_bytes, progress.out) as bars:
            for number, (layer, note) in enumerate(zip(layers, done, strict=True), 1):
                came = bars.begin(f"layer {number} of {len(layers)}", layer.size)
                if note.is_file():
                    came(layer.size)
                    continue
                part = note.with_name(note.name + ".part")
                registry.save(layer, part, came)
                unpack(part, directory)
                note.touch()
                part.unlink()
        check_links(directory)
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
    return is_loopback or host in _listed()


def _listed() -> list[str]:
    return os.environ.get("FOVEAL_INSECURE_REGISTRIES", "").split(",")


def _addresses(host: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    """What a name stands for; nothing where only a proxy can tell."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return []
    return [ipaddress.ip_address(str(one[4][0]).partition("%")[0]) for one in found]


def checked(url: str, registry: str) -> str:
    """An address that a registry (its host) sends us to. Raises StartupError for one without TLS,
    and for one that a user's URL may not lead to either (frontend/media/addresses.py): private ones
    are for registries whose own addresses are private. Hosts that the user has listed are trusted.
    """
    from foveal_runtime.frontend.media.addresses import refusal

    found = urlsplit(url)
    host = found.hostname or ""
    if found.scheme != "https" and not (found.scheme == "http" and _is_plain(found.netloc)):
        raise StartupError(f"the registry names {url!r}: other machines must have https://")
    if host == registry or found.netloc in _listed():
        return url
    own = _addresses(registry)
    is_private = bool(own) and all(refusal(one, allow_private=False) for one in own)
    for address in _addresses(host):
        if why := refusal(address, allow_private=is_private):
            raise StartupError(
                f"the registry {registry} names {found.netloc}, which leads to a {why}: if you "
                f"trust it, list {found.netloc} in FOVEAL_INSECURE_REGISTRIES"
            )
    return url


class _Redirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, registry: str) -> None:
        self._registry = registry

    def redirect_request(
        self, req: urllib.request.Request, fp: IO[bytes], code: int, msg: str, headers: Any,
        newurl: str,
    ) -> urllib.request.Request | None:  # fmt: skip
        try:
            url = checked(newurl, self._registry)
            return super().redirect_request(req, fp, code, msg, headers, url)
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
        self._host = urlsplit(self._base).hostname or ""
        self._opener = urllib.request.build_opener(proxies, _Redirects(self._host))
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
        realm = checked(said.get("realm", ""), self._host)
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
