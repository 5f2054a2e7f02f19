"""A bucket on the loopback (or the node's host), for tests: enough of S3's HTTP for `s3://` models.

Lists in pages of two, serves ranges, checks every signature with the key it knows, and can cut a
download short. Used by test_fetch_s3.py and, on a real node, by tests/cluster/test_sources.py.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from tests.support.loopback_server import LoopbackHandler, LoopbackServer

BUCKET = "models"
KEY, SECRET = "AKIAFORTHISTESTONLY1", "not-a-secret-of-anybody"
_PAGE = 2
_XML = {"Content-Type": "application/xml"}


class Store(LoopbackServer):
    """Args: folder: its files are the objects below `prefix`; address: where it listens.

    Attributes: `objects`: key to bytes, may change; `cuts`: keys whose next answer ends halfway,
    each as often as it stands there; `asked`: what was asked for, in order.
    """

    def __init__(self, folder: Path, prefix: str = "tiny", address: str = "127.0.0.1") -> None:
        super().__init__(_Handler, address)
        files = [path for path in folder.iterdir() if path.is_file()]
        self.objects = {f"{prefix}/{path.name}": path.read_bytes() for path in files}
        self.cuts: list[str] = []
        self.asked: list[str] = []

    def environment(self, secret: str = SECRET) -> dict[str, str]:
        """What a Secret of the user's holds."""
        return {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": secret,
                "S3_ENDPOINT_URL": self.url, "AWS_DEFAULT_REGION": "eu-test-1"}  # fmt: skip


def etag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'


class _Handler(LoopbackHandler):
    server: Store

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        bucket, _, key = unquote(url.path).strip("/").partition("/")
        self.server.asked.append(f"{key or 'list'} {self.headers.get('range', '')}".strip())
        problem = self._refusal()
        if problem:
            self._error(403, problem)
        elif bucket != BUCKET:
            self._error(404, "NoSuchBucket")
        elif not key:
            self._list({name: values[0] for name, values in parse_qs(url.query).items()})
        elif key not in self.server.objects:
            self._error(404, "NoSuchKey")
        else:
            self._object(key, self.server.objects[key])

    def _refusal(self) -> str:
        """Why the signature (version 4) is not good, by the store's own word; "" when it is."""
        match = re.fullmatch(
            r"AWS4-HMAC-SHA256 Credential=([^/]+)/(\d+)/([^/]+)/s3/aws4_request, "
            r"SignedHeaders=([^,]+), Signature=([0-9a-f]{64})",
            self.headers.get("authorization", ""),
        )
        if match is None:
            return "AccessDenied"
        key, day, region, names, signature = match.groups()
        if key != KEY:
            return "InvalidAccessKeyId"
        url = urlsplit(self.path)
        signed = "".join(f"{name}:{self.headers.get(name, '').strip()}\n" for name in
                         names.split(";"))  # fmt: skip
        query = "&".join(sorted(part if "=" in part else part + "=" for part in
                                url.query.split("&") if part))  # fmt: skip
        body = self.headers.get("x-amz-content-sha256", "")
        request = "\n".join([self.command, url.path, query, signed, names, body])
        scope = f"{day}/{region}/s3/aws4_request"
        text = "\n".join(["AWS4-HMAC-SHA256", self.headers.get("x-amz-date", ""), scope,
                          hashlib.sha256(request.encode()).hexdigest()])  # fmt: skip
        secret = f"AWS4{SECRET}".encode()
        for part in (day, region, "s3", "aws4_request", text):
            secret = hmac.digest(secret, part.encode(), "sha256")
        return "" if hmac.compare_digest(secret.hex(), signature) else "SignatureDoesNotMatch"

    def _list(self, query: dict[str, str]) -> None:
        prefix, after = query.get("prefix", ""), query.get("continuation-token", "")
        keys = [k for k in sorted(self.server.objects) if k.startswith(prefix) and k > after]
        page = keys[:_PAGE]
        entries = "".join(
            f"<Contents><Key>{escape(key)}</Key><Size>{len(data)}</Size>"
            f"<ETag>{escape(etag(data))}</ETag><StorageClass>STANDARD</StorageClass></Contents>"
            for key in page
            for data in (self.server.objects[key],)
        )
        more = len(keys) > len(page)
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if more else ""
        self.send(200, (
            f"<ListBucketResult><Name>{BUCKET}</Name><Prefix>{escape(prefix)}</Prefix>"
            f"<KeyCount>{len(page)}</KeyCount><IsTruncated>{str(more).lower()}</IsTruncated>"
            f"{token}{entries}</ListBucketResult>"
        ).encode(), _XML)  # fmt: skip

    def _object(self, key: str, data: bytes) -> None:
        if self.headers.get("if-match", etag(data)) != etag(data):
            self._error(412, "PreconditionFailed")
            return
        span = re.fullmatch(r"bytes=(\d+)-", self.headers.get("range", ""))
        start = int(span[1]) if span else 0
        headers = {"ETag": etag(data)}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        is_cut = key in self.server.cuts
        if is_cut:
            self.server.cuts.remove(key)
        self.send_rest(data, start, headers, is_cut=is_cut)

    def _error(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>{code} it is</Message></Error>"
        self.send(status, text.encode(), _XML)
