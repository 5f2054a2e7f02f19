"""Self-contained HTML pages of the server: the chat at `/` and the API at `/docs`."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from starlette.responses import HTMLResponse

_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


def page_response(name: str) -> HTMLResponse:
    """The page `name`.html under a policy that lets only its own script and style run and only
    this server be called, so that a model's text or a file's name can never become a script."""
    text = resources.files(__name__).joinpath(f"{name}.html").read_text(encoding="utf-8")
    digests: dict[str, list[str]] = {"script": [], "style": []}
    for kind, code in _INLINE.findall(text):
        digest = base64.b64encode(hashlib.sha256(code.encode()).digest()).decode()
        digests[kind].append(f"'sha256-{digest}'")
    policy = "; ".join([
        "default-src 'none'",
        *(f"{kind}-src {' '.join(found)}" for kind, found in digests.items()),
        "connect-src 'self'",
        "img-src 'self' blob: data:",
        "media-src blob:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ])  # fmt: skip
    headers = {
        "content-security-policy": policy,
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)
