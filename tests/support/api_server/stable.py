"""Objects of one namespace in words that hold in any: what lets two runs be compared.

Names of ConfigMaps and revisions are hashes of contents that name the namespace, so they differ
between two namespaces although nothing else does. They are replaced by hashes of the content
without it: equal contents stay equal, other contents stay other.
"""

from __future__ import annotations

import json
import re

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import content_hash
from foveal_operator.manifests.pods import REVISION_LABEL

_HASH = re.compile(r"[0-9a-f]{10}")


def stable(children: dict[str, Obj], namespace: str) -> dict[str, Obj]:
    """`children` by kind/name, with all that follows from the namespace replaced."""
    text = json.dumps(children, sort_keys=True)
    text = text.replace(content_hash([namespace, "qwen"]), "DASHBOARD")
    text = text.replace(namespace, "NAMESPACE")
    for key, obj in json.loads(text).items():
        suffix = key.rpartition("-")[2]
        if obj["kind"] == "ConfigMap" and _HASH.fullmatch(suffix):
            text = text.replace(suffix, content_hash(obj.get("data")))
    for obj in json.loads(text).values():
        template = obj.get("spec", {}).get("template", {})
        revision = template.get("metadata", {}).get("labels", {}).pop(REVISION_LABEL, "")
        if revision:
            # Not of its labels: a label of somebody else's is not in our revision.
            text = text.replace(revision, content_hash(template["spec"]))
    return dict(json.loads(text))
