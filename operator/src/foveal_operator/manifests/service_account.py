"""The pods' ServiceAccount: no token, no Role; pods never talk to the API server."""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context


def service_account(context: Context) -> Obj:
    return context.object(
        "v1", "ServiceAccount", "", "frontend", automountServiceAccountToken=False
    )
