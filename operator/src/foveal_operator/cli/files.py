"""Files that users give to commands: a resource, a profile. Every fault is a UsageError."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from foveal_operator.api.parse import InferenceSpec, SpecError, parse
from foveal_operator.common.errors import UsageError
from foveal_runtime.plan import profile as model_profile
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.profile import ModelProfile

MAX_FILE_BYTES = 4 << 20


class _Documents(yaml.SafeLoader):
    """Refuses a key that stands twice in a map: of the first, nothing would be left."""

    def compose_mapping_node(self, anchor: Any) -> Any:
        node = super().compose_mapping_node(anchor)
        seen = set[str]()
        for key, _ in node.value if node else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    text = f"the key {key.value!r} stands twice in one map: remove one"
                    raise yaml.MarkedYAMLError(problem=text, problem_mark=key.start_mark)
                seen.add(key.value)
        return node

    def rest(self) -> Iterator[Any]:
        while self.check_data():  # type: ignore[no-untyped-call]
            yield self.get_data()


def _read(path: str, what: str) -> str:
    try:
        if path == "-":
            data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
        text = data.decode("utf-8")
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the {what} {path} is not UTF-8 text") from error
    if len(data) > MAX_FILE_BYTES:
        raise UsageError(f"the {what} {path} is larger than {MAX_FILE_BYTES >> 20} MiB")
    return text


def read_resource(path: str, namespace: str = "") -> InferenceSpec:
    """The one MultiModalInference of a file that may hold other objects beside it. `namespace`: the
    user's, for a resource that names none."""
    return _read_both(path, namespace)[1]


def read_resource_object(path: str, namespace: str) -> dict[str, Any]:
    """The same as it stands in the file, once it has been found in order."""
    return _read_both(path, namespace)[0]


def _read_both(path: str, namespace: str) -> tuple[dict[str, Any], InferenceSpec]:
    try:
        text = _read(path, "resource")
        documents = [d for d in _Documents(text).rest() if d is not None]
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a date, a number, depth
        raise UsageError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    found = [d for d in documents if isinstance(d, dict) and d.get("kind") == "MultiModalInference"]
    if not found and len(documents) == 1:
        found = documents
    if len(found) != 1:
        raise UsageError(f"{path} holds {len(found)} MultiModalInference objects; give one")
    try:
        body = _placed(path, found[0], namespace) if namespace else found[0]
        return body, parse(body)
    except SpecError as error:
        raise invalid(path, error) from error
    except RecursionError as error:
        raise UsageError(f"{path} has an anchor inside itself: write its content out") from error


def _placed(path: str, body: dict[str, Any], namespace: str) -> dict[str, Any]:
    metadata = body.get("metadata")
    if not isinstance(metadata, dict):
        return body  # is refused for that
    own = metadata.get("namespace") or namespace
    if own != namespace:
        raise UsageError(
            f"--namespace {namespace}: {path} names namespace {own}: leave the flag out, or change "
            "metadata.namespace"
        )
    return {**body, "metadata": {**metadata, "namespace": namespace}}


def read_profile(path: str) -> ModelProfile:
    try:
        return model_profile.decode(_read(path, "profile").encode())
    except StartupError as error:
        raise UsageError(
            f"{path}: {error.message}; make one with `foveal-runtime profile MODEL_DIRECTORY`"
        ) from error


def invalid(path: str, error: SpecError) -> UsageError:
    """The error about a file whose resource has problems; a single one stands on its line."""
    head = f"{'standard input' if path == '-' else path} is not a valid MultiModalInference:"
    if len(error.problems) == 1:
        return UsageError(f"{head}{bullets(error)[1:]}")
    return UsageError(f"{head}\n{bullets(error)}")


def bullets(error: SpecError) -> str:
    return "\n".join(f"  {path}: {what}" for path, what in error.problems)
