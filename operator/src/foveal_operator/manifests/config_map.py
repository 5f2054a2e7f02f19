"""Immutable ConfigMaps with the start-up documents, named by the hash of what they hold."""

from __future__ import annotations

from foveal_operator.kube.types import Obj
from foveal_operator.manifests.context import Context, Role, content_hash
from foveal_operator.manifests.documents import document_json, engine_document, frontend_document


def engine_config_map(context: Context) -> Obj:
    return _config_map(context, "engine", document_json(engine_document(context)))


def frontend_config_map(context: Context) -> Obj:
    return _config_map(context, "frontend", document_json(frontend_document(context)))


def _config_map(context: Context, role: Role, document: str) -> Obj:
    data = {f"{role}.json": document}
    suffix = f"{role}-{content_hash(data)}"
    return context.object("v1", "ConfigMap", suffix, role, immutable=True, data=data)
