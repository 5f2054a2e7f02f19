"""A cluster as the command line reads it: kubectl's configuration, raw objects, live answers.

`Reader` is the seam; KubeReader speaks HTTP through the official client.
It stores nothing anywhere: its one POST is a review, which the API server only answers. The
operator's own calls are elsewhere; they run without a user.
"""

from __future__ import annotations

import email.utils
import json
import os
import re
import time
import urllib.parse
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from foveal_operator.api.crd import GROUP, PLURAL, VERSION
from foveal_operator.common.errors import ClusterAnswerError
from foveal_operator.kube.kinds import OPERATOR_LABELS
from foveal_operator.kube.types import Obj

TIMEOUT_SECONDS = 15.0
OPERATOR_SELECTOR = ",".join(f"{key}={value}" for key, value in OPERATOR_LABELS.items())
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ForbiddenError(ClusterAnswerError):
    """The caller has no right to this; the message is the API server's."""


class UnreachableError(ClusterAnswerError):
    """No answer, or an answer that is not the API server's."""


class NotConfiguredError(ClusterAnswerError):
    """There is no kubeconfig and no pod around us."""


class Reader(Protocol):
    """Every call may raise ClusterAnswerError."""

    namespace: str
    """The one that was asked for, or the context's."""
    server: str

    def get(self, path: str, **query: str) -> Obj | None:
        """The object or list at a path; None when there is none."""

    def review(self, path: str, body: Obj) -> Obj:
        """Posts a SelfSubjectAccessReview or its like."""

    def skew_seconds(self) -> float | None:
        """This machine's clock less the API server's; None before the first answer."""


class _Metadata(msgspec.Struct, kw_only=True):
    name: str
    generation: int = 0
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class _Placed(_Metadata, kw_only=True):
    namespace: str


_M = TypeVar("_M")


class _Object(msgspec.Struct, Generic[_M]):
    metadata: _M
    spec: dict[str, Any] = {}
    status: dict[str, Any] = {}


class _Page(msgspec.Struct, Generic[_M]):
    items: list[_Object[_M]] | None
    metadata: dict[str, Any] = {}


class _Named(msgspec.Struct):
    name: str


class _Served(msgspec.Struct):
    resources: list[_Named] = []


def _shape_of(path: str) -> Any:
    """What commands read of an answer without asking whether it is there."""
    root, *parts = path.strip("/").split("/")
    below = parts[1:] if root == "api" else parts[2:]
    if root == "version":
        return dict[str, Any]
    if not below:
        return _Served
    metadata = _Placed if below[0] == "namespaces" and len(below) > 2 else _Metadata
    return _Page[metadata] if len(below) % 2 else _Object[metadata]  # type: ignore[valid-type]


class KubeReader:
    """The real one. Raises NotConfiguredError, or ClusterAnswerError for a malformed kubeconfig."""

    def __init__(self, kubeconfig: str, context: str, namespace: str) -> None:
        from kubernetes import client, config

        configuration = client.Configuration()
        found = _load(config, configuration, kubeconfig, context)
        configuration.retries = False
        _check_name(namespace)
        self._client = client.ApiClient(configuration)
        self.namespace = namespace or found or "default"
        self.server = str(configuration.host)
        self._skew_seconds: float | None = None

    def get(self, path: str, **query: str) -> Obj | None:
        target = f"{path}?{urllib.parse.urlencode(query)}" if query else path
        status, body = self._call("GET", target)
        if status == 404:
            return None
        try:
            msgspec.convert(body, _shape_of(path))
        except msgspec.ValidationError as error:
            raise UnreachableError(
                f"GET {target}: {self.server} answers no Kubernetes object ({error}): check that "
                "the kubeconfig's context names a Kubernetes API server"
            ) from error
        return body

    def review(self, path: str, body: Obj) -> Obj:
        status, answer = self._call("POST", path, body)
        if status == 404 or not isinstance(answer.get("status"), dict):
            raise ClusterAnswerError(f"the cluster does not serve {path}")
        return answer

    def skew_seconds(self) -> float | None:
        return self._skew_seconds

    def _call(self, method: str, target: str, body: Obj | None = None) -> tuple[int, Obj]:
        """The status and the parsed answer; a refusal raises, all but 404."""
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        serialized = self._client.param_serialize(
            method, target, header_params=headers, body=body, auth_settings=["BearerToken"]
        )
        try:
            answer = self._client.call_api(*serialized, _request_timeout=TIMEOUT_SECONDS)
            data: bytes = answer.read() or b""
        except (ApiException, HTTPError, OSError) as error:
            raise UnreachableError(f"{self.server} does not answer: {_short(error)}") from error
        self._note_clock(answer.getheader("Date", ""))
        return _judged(method, target, int(answer.status), data)

    def _note_clock(self, date: str) -> None:
        try:
            self._skew_seconds = time.time() - email.utils.parsedate_to_datetime(date).timestamp()
        except (TypeError, ValueError):
            return


def _judged(method: str, target: str, status: int, data: bytes) -> tuple[int, Obj]:
    try:
        parsed = json.loads(data) if data else {}
    except ValueError:
        parsed = None
    body: Obj = parsed if isinstance(parsed, dict) else {}
    said = str(body.get("message") or data[:200].decode("utf-8", "replace"))
    message = " ".join(said.split())
    if status == 403:
        raise ForbiddenError(message)
    if status == 401:
        raise ClusterAnswerError("the cluster does not know this user: log in again")
    if status >= 500 or (not isinstance(parsed, dict) and status != 404):
        raise UnreachableError(f"{method} {target}: HTTP {status}: {message}")
    if status >= 400 and status != 404:
        raise ClusterAnswerError(message)
    return status, body


def _load(config: Any, configuration: Any, kubeconfig: str, context: str) -> str:
    """Fills the configuration as kubectl would; returns its namespace, "" when it names none."""
    try:
        config.load_kube_config(
            config_file=kubeconfig or None,
            context=context or None,
            client_configuration=configuration,
            persist_config=False,
        )
        contexts, active = config.list_kube_config_contexts(kubeconfig or None)
        chosen = next((c for c in contexts if c["name"] == context), active)
        return str(chosen["context"].get("namespace") or "")
    except (config.ConfigException, OSError) as error:
        if kubeconfig or context:
            raise NotConfiguredError(f"--kubeconfig/--context: {_short(error)}") from error
    except Exception as error:  # the client library takes a file apart that is another one
        name = kubeconfig or "of $KUBECONFIG or ~/.kube/config"
        raise ClusterAnswerError(f"the kubeconfig {name} is malformed: {_short(error)}") from error
    try:
        config.load_incluster_config(client_configuration=configuration)
        return _POD_NAMESPACE.read_text(encoding="utf-8").strip()
    except (config.ConfigException, OSError) as error:
        named = os.environ.get("KUBECONFIG", "")
        if named and not any(Path(one).is_file() for one in named.split(os.pathsep)):
            raise NotConfiguredError(
                f"KUBECONFIG is {named}, and there is no such file: correct it, or give "
                "--kubeconfig"
            ) from error
        raise NotConfiguredError(
            "no cluster is configured: set KUBECONFIG, give --kubeconfig, or run in a pod"
        ) from error


_NAME = re.compile("[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")


def _check_name(name: str) -> None:
    """Raises ClusterAnswerError for what would be another path, or none."""
    if name and not _NAME.fullmatch(name):
        raise ClusterAnswerError(
            f"{name!r} is no name of Kubernetes: write lower-case letters, digits, - and ."
        )


def inferences_path(namespace: str, name: str = "") -> str:
    _check_name(name)
    path = f"/apis/{GROUP}/{VERSION}/namespaces/{namespace}/{PLURAL}"
    return f"{path}/{name}" if name else path


def get_inference(reader: Reader, name: str) -> Obj:
    """Raises ClusterAnswerError when there is no such resource, saying which there are."""
    found = reader.get(inferences_path(reader.namespace, name))
    if found is not None:
        return found
    names = ", ".join(sorted(item["metadata"]["name"] for item in list_inferences(reader)))
    raise ClusterAnswerError(
        f"there is no {PLURAL}.{GROUP} {name!r} in namespace {reader.namespace}; there is "
        f"{names or 'none'}"
    )


def list_inferences(reader: Reader) -> list[Obj]:
    """Those of the namespace. Raises ClusterAnswerError where nobody has installed the resource."""
    found = reader.get(inferences_path(reader.namespace))
    if found is None:
        raise ClusterAnswerError(
            f"the cluster does not know {PLURAL}.{GROUP}: install Foveal's chart first"
        )
    return list(found.get("items") or ())


def _short(error: Exception) -> str:
    """What is wrong, without urllib3's wrapping."""
    reason = getattr(error, "reason", None) or error
    text = " ".join(str(reason).split())
    return re.sub(r"^(<[^>]*>|\w+\(host=[^)]*\)): ", "", text) or type(error).__name__
