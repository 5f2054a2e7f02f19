"""`foveal up` runs the pods' documents: all that may differ from a pod is listed here."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest

from foveal_operator.cli.local.documents import LocalDocuments, LocalPlace, adapted_documents
from foveal_operator.manifests import ClusterFacts, Desired
from foveal_runtime.plan.config import EngineConfig, FrontendConfig
from tests.support.regenerate import wanted
from tests.support.samples import resource

ENGINE_MAY_DIFFER = {
    "engine_id", "model.path", "bind", "http_host", "http_port", "node", "num_threads",
    "shm_directory", "log_format", "caches.warm_directory", "curve.server_public_file",
    "curve.server_secret_file", "curve.client_public_file",
}  # fmt: skip
FRONTEND_MAY_DIFFER = {
    "frontend_id", "model.path", "host", "port", "node", "engines", "metrics_peers",
    "shm_directory", "log_format", "curve.server_public_file", "curve.client_public_file",
    "curve.client_secret_file", "api_key_file", "admin_key_file", "injection.enabled",
    "injection.api_key_file", "injection.namespace", "media_sources.file_root",
}  # fmt: skip
RICH: dict[str, Any] = {
    "frontend": {"replicas": 2, "processes": 2},
    "engine": {"replicas": 2, "maxModelLen": 20480},
    "caches": {"ipc": {"size": "2Gi", "type": "SharedMemory", "claimName": "shared"},
               "encoder": {"warmSet": {"claimName": "warm"}}},
    "security": {"apiKeySecretRef": {"name": "keys", "key": "api"},
                 "mediaSources": {"localFiles": {"claimName": "files"}},
                 "injection": {"keySecretRef": {"name": "keys", "key": "injection"}}},
}  # fmt: skip


def test_adapters_below_the_model_are_below_it_here() -> None:
    adapters = [{"name": "red", "path": "loras/red"}, {"name": "blue", "path": "/more/blue"}]
    lora = {"memory": "64Mi", "adapters": adapters}
    [engine] = adapt(wanted(resource(engine={"lora": lora}))).engines
    assert [one.path for one in engine.loras] == ["/models/here/loras/red", "/more/blue"]


def place(**more: Any) -> LocalPlace:
    return LocalPlace(model_path="/models/here", folder="/tmp/up", num_cpus=3, **more)


def adapt(objects: Desired, **more: Any) -> LocalDocuments:
    ports = itertools.count(20000)
    return adapted_documents(objects, place(**more), lambda: next(ports))


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    found = {}
    for key, item in value.items():
        found |= flat(item, f"{path}.{key}" if path else key)
    return found


def pod_document(objects: Desired, role: str) -> dict[str, Any]:
    for body in objects.of_kind("ConfigMap"):
        if f"{role}.json" in body["data"]:
            kind = EngineConfig if role == "engine" else FrontendConfig
            read = msgspec.json.decode(body["data"][f"{role}.json"], type=kind)
            return flat(msgspec.to_builtins(read))
    raise AssertionError(role)


def differences(objects: Desired, config: EngineConfig | FrontendConfig, role: str) -> set[str]:
    here, pod = flat(msgspec.to_builtins(config)), pod_document(objects, role)
    # JSON has lists where structs have tuples.
    return {key for key in here if msgspec.json.encode(here[key]) != msgspec.json.encode(pod[key])}


@pytest.mark.parametrize("spec", [{}, RICH], ids=["minimal", "rich"])
def test_only_what_a_pod_has_and_a_process_has_not_differs(spec: dict[str, Any]) -> None:
    objects = wanted(resource(**spec), ClusterFacts())
    found = adapt(objects)
    for engine in found.engines:
        assert differences(objects, engine, "engine") <= ENGINE_MAY_DIFFER
    for frontend in found.frontends:
        assert differences(objects, frontend, "frontend") <= FRONTEND_MAY_DIFFER


def test_frontends_know_every_engine_and_the_first_shows_all_metrics() -> None:
    found = adapt(wanted(resource(**RICH), ClusterFacts()))
    assert [engine.engine_id for engine in found.engines] == ["qwen-engine-0", "qwen-engine-1"]
    for frontend in found.frontends:
        assert [e.endpoint for e in frontend.engines] == [e.bind for e in found.engines]
    first, second = found.frontends
    assert f"http://127.0.0.1:{second.port}/metrics?own=1" in first.metrics_peers
    assert len(first.metrics_peers) == 3
    ports = [first.port, second.port]
    ports += [engine.http_port for engine in found.engines]
    ports += [int(engine.bind.rpartition(":")[2]) for engine in found.engines]
    assert len(set(ports)) == 6


def test_engines_have_their_own_warm_set_and_one_shared_folder() -> None:
    found = adapt(wanted(resource(**RICH), ClusterFacts()), shm_directory="/dev/shm/up")
    folders = [engine.caches.warm_directory for engine in found.engines]
    assert folders == ["/tmp/up/warm/qwen-engine-0", "/tmp/up/warm/qwen-engine-1"]
    assert {engine.shm_directory for engine in found.engines} == {"/dev/shm/up"}
    assert {frontend.shm_directory for frontend in found.frontends} == {"/dev/shm/up"}


def test_local_files_are_those_of_a_folder_or_off() -> None:
    objects = wanted(resource(**RICH), ClusterFacts())
    found = adapt(objects)
    assert found.frontends[0].media_sources.file_root == ""
    assert any("--file-root" in note for note in found.notes)
    found = adapt(objects, file_root="/data")
    assert found.frontends[0].media_sources.file_root == "/data"
    assert not any("--file-root" in note for note in found.notes)
    assert (
        adapt(wanted(resource(), ClusterFacts()), file_root="/data")
        .frontends[0]
        .media_sources.file_root
        == ""
    )


def test_the_transport_is_encrypted_as_between_pods() -> None:
    found = adapt(wanted(resource(), ClusterFacts()))
    assert found.engines[0].curve.server_secret_file == "/tmp/up/curve/server-secret"
    assert found.engines[0].curve.client_secret_file == ""
    assert found.frontends[0].curve.client_secret_file == "/tmp/up/curve/client-secret"
    assert found.frontends[0].curve.server_secret_file == ""


def test_keys_of_secrets_are_given_as_files_or_their_lack_is_said() -> None:
    objects = wanted(resource(**RICH), ClusterFacts())
    without = adapt(objects)
    assert without.frontends[0].api_key_file == ""
    assert without.frontends[0].injection.enabled is False
    assert "without --api-key-file requests need no API key here" in without.notes[0]
    assert len(without.notes) == 3
    files = {"--api-key-file": "/k/api", "--injection-key-file": "/k/injection"}
    given = adapt(objects, key_files=files, file_root="/data")
    assert given.notes == ()
    assert given.frontends[0].api_key_file == "/k/api"
    assert given.frontends[0].injection.api_key_file == "/k/injection"
    # A key that the resource does not ask for switches nothing on.
    plain = adapt(wanted(resource(), ClusterFacts()), key_files=files)
    assert plain.frontends[0].api_key_file == ""


def test_numbers_of_processes_and_ports_can_be_chosen() -> None:
    body = resource(engine={"replicas": 3}, frontend={"replicas": 2})
    found = adapt(wanted(body, ClusterFacts()), port=9000)
    assert len(found.engines) == 3
    assert [frontend.port for frontend in found.frontends] == [9000, 9001]
