"""A registry for one node: serves the OCI layouts that load.sh writes, read-only, over HTTP.

registry.py FOLDER ADDRESS PORT: up.sh starts it in the cluster's network, where containerd looks
for `localhost/NAME:TAG`. Layers that the node has already lie here without content, and are not
served.
"""

from __future__ import annotations

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REQUEST = re.compile(r"/v2/(?P<name>[a-z0-9._/-]+)/(?P<kind>manifests|blobs)/(?P<what>[\w.:-]+)")


def find(name: str, kind: str, what: str) -> tuple[str, Path] | None:
    """Media type and file of a manifest or a blob; None when no layout has it whole."""
    for layout in Path(sys.argv[1]).glob("*/index.json"):
        for entry in json.loads(layout.read_text())["manifests"]:
            tag = entry.get("annotations", {}).get("org.opencontainers.image.ref.name")
            known = (entry["digest"], str(tag).removeprefix(f"localhost/{name}:"))
            if kind == "manifests" and what in known:
                return entry["mediaType"], blob(layout, entry["digest"])
        path = blob(layout, what)
        if kind == "blobs" and path.is_file() and path.stat().st_blocks:
            return "application/octet-stream", path
    return None


def blob(layout: Path, digest: str) -> Path:
    return layout.parent / "blobs" / digest.replace(":", "/", 1)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.answer(with_body=False)

    def do_GET(self) -> None:
        self.answer(with_body=True)

    def answer(self, *, with_body: bool) -> None:
        asked = REQUEST.fullmatch(self.path.partition("?")[0])
        found = find(asked["name"], asked["kind"], asked["what"]) if asked else None
        if found is None:
            is_root = self.path == "/v2/"
            self.send_response(200 if is_root else 404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        media_type, path = found
        self.send_response(200)
        self.send_header("Content-Type", media_type)
        self.send_header("Content-Length", str(path.stat().st_size))
        if path.parent.name == "sha256":
            self.send_header("Docker-Content-Digest", f"sha256:{path.name}")
        self.end_headers()
        if with_body:
            with path.open("rb") as file:
                while part := file.read(1 << 20):
                    self.wfile.write(part)


if __name__ == "__main__":
    ThreadingHTTPServer((sys.argv[2], int(sys.argv[3])), Handler).serve_forever()
