"""The CURVE key Secret: created once with keys from outside this module, never read back."""

from __future__ import annotations

import msgspec

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context


class CurveKeyPairs(msgspec.Struct, frozen=True, kw_only=True):
    """Z85 text of the engines' and the frontends' key pair, 40 characters each."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str


def curve_secret(context: Context, keys: CurveKeyPairs | None) -> Obj:
    """Without keys: the object as `foveal plan` lists it, with no data in it."""
    body = context.object("v1", "Secret", "curve", "engine", type="Opaque", immutable=True)
    if keys is None:
        return body
    data = {
        "server-public": keys.server_public,
        "server-secret": keys.server_secret,
        "client-public": keys.client_public,
        "client-secret": keys.client_secret,
    }
    return {**body, "stringData": data}
