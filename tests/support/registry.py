"""A registry on the loopback, for tests: the reading half of the distribution API, from memory.

`e2e/cluster/registry.py` serves a node's layouts; this one also asks for logins, breaks off,
ignores ranges, sends blobs elsewhere and lies.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from tests.support.loopback_server import LoopbackHandler, LoopbackServer

NAME = "models/tiny"
LOGIN = base64.b64encode(b"someone:not-a-secret").decode()
TOKEN = "a-token-for-a-while"
_OCI = "application/vnd.oci.image"
MANIFEST, INDEX = f"{_OCI}.manifest.v1+json", f"{_OCI}.index.v1+json"
LAYER = f"{_OCI}.layer.v1.tar"


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def layer(*entries: tuple[str, bytes] | tarfile.TarInfo, packed: bool = True) -> bytes:
    """A layer of files by name and content, and of entries as they are."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            if isinstance(entry, tarfile.TarInfo):
                tar.addfile(entry)
            else:
                info = tarfile.TarInfo(entry[0])
                info.size = len(entry[1])
                tar.addfile(info, io.BytesIO(entry[1]))
    return gzip.compress(out.getvalue(), 1, mtime=0) if packed else out.getvalue()


class Registry(LoopbackServer):
    """Attributes: `blobs` and `manifests` by digest, may change; `tags`: digest by tag; `login`: ""
    (anyone), "token" (anyone, who has fetched one), "basic" or "bearer"; `token`: what is said of
    it; `cuts`: digests whose next answer ends halfway; `whole`: ranges are ignored; `elsewhere`:
    where blobs are; `refuses_elsewhere`: others' blobs need a login here; `refusal`: status of
    every answer; `asked`: paths with ranges, in order; `leaked`: logins that were sent elsewhere.
    """

    def __init__(self) -> None:
        super().__init__(_Handler)
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[str, tuple[str, bytes]] = {}
        self.tags: dict[str, str] = {}
        self.token = json.dumps({"token": TOKEN}).encode()
        self.login, self.elsewhere, self.refusal, self.whole = "", "", 0, False
        self.refuses_elsewhere = False
        self.cuts: list[str] = []
        self.asked: list[str] = []
        self.leaked: list[str] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def challenge(self) -> str:
        if self.login == "basic":
            return 'Basic realm="test"'
        return f'Bearer realm="http://{self.address}/token",service="test"'

    def uri(self, tag: str = ":1") -> str:
        return f"oci://{self.address}/{NAME}{tag}"

    def push(self, layers: Sequence[bytes], tag: str = "1", kind: str = "") -> str:
        """An image; returns its digest."""
        kinds = [kind or (f"{LAYER}+gzip" if one[:2] == b"\x1f\x8b" else LAYER) for one in layers]
        self.blobs |= {digest_of(one): one for one in layers}
        found = [{"mediaType": k, "digest": digest_of(one), "size": len(one)}
                 for k, one in zip(kinds, layers, strict=True)]  # fmt: skip
        config = {"mediaType": f"{_OCI}.config.v1+json", "digest": digest_of(b"{}"), "size": 2}
        return self.put({"config": config, "layers": found}, MANIFEST, tag)

    def push_index(self, images: Sequence[tuple[str, str]]) -> str:
        """An index of (OS/ARCHITECTURE, digest of an image); returns its digest."""
        found = [{"mediaType": MANIFEST, "digest": digest, "size": len(self.manifests[digest][1]),
                  "platform": dict(zip(("os", "architecture"), name.split("/"), strict=True))}
                 for name, digest in images]  # fmt: skip
        return self.put({"manifests": found}, INDEX, "1")

    def put(self, content: dict[str, Any], kind: str, tag: str) -> str:
        body = json.dumps({"schemaVersion": 2, "mediaType": kind, **content}).encode()
        self.tags[tag] = digest_of(body)
        self.manifests[self.tags[tag]] = (kind, body)
        return self.tags[tag]


def write_layout(registry: Registry, folder: Path, reference: str) -> None:
    """The images of `registry` as an OCI layout, as e2e/cluster/registry.py serves it."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)
    everything = registry.blobs | {key: body for key, (_, body) in registry.manifests.items()}
    for digest, body in everything.items():
        (blobs / digest.removeprefix("sha256:")).write_bytes(body)
    entries = [{"mediaType": registry.manifests[digest][0], "digest": digest,
                "annotations": {"org.opencontainers.image.ref.name": f"{reference}:{tag}"}}
               for tag, digest in registry.tags.items()]  # fmt: skip
    (folder / "index.json").write_text(json.dumps({"manifests": entries}))


class _Handler(LoopbackHandler):
    server: Registry

    def do_GET(self) -> None:
        url, server = urlsplit(self.path), self.server
        given = self.headers.get("authorization", "")
        server.asked.append(f"{url.path} {self.headers.get('range', '')}".strip())
        asked = re.fullmatch(rf"/v2/{NAME}/(manifests|blobs)/(.+)", url.path)
        wanted = f"Basic {LOGIN}" if server.login == "basic" else f"Bearer {TOKEN}"
        if server.refusal:
            self.send(server.refusal)
        elif url.path == "/token":
            self._token(parse_qs(url.query), given)
        elif url.path.startswith("/elsewhere/"):
            server.leaked += [given] if given else []
            if server.refuses_elsewhere:
                self.send(401, headers={"WWW-Authenticate": server.challenge})
            else:
                self._blob(url.path.removeprefix("/elsewhere/"))
        elif given != wanted and server.login:
            self.send(401, headers={"WWW-Authenticate": server.challenge})
        elif asked is None:
            self.send(404)
        elif asked[1] == "blobs":
            if server.elsewhere:
                self.send(307, headers={"Location": f"{server.elsewhere}/elsewhere/{asked[2]}"})
            else:
                self._blob(asked[2])
        else:
            found = server.manifests.get(server.tags.get(asked[2], asked[2]))
            kind, body = found or ("", b"")
            self.send(200 if found else 404, body, {"Content-Type": kind})

    def _token(self, query: dict[str, list[str]], given: str) -> None:
        is_right = query == {"service": ["test"], "scope": [f"repository:{NAME}:pull"]}
        if not is_right or given != ("" if self.server.login == "token" else f"Basic {LOGIN}"):
            self.send(401)
        else:
            self.send(200, self.server.token)

    def _blob(self, digest: str) -> None:
        data = self.server.blobs.get(digest)
        if data is None:
            self.send(404)
            return
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        start = int(span[1]) if span and not self.server.whole else 0
        is_cut = digest in self.server.cuts
        if is_cut:
            self.server.cuts.remove(digest)
        self.send_rest(data, start, is_cut=is_cut)
