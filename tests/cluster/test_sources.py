"""Where models come from, each for real: a hub with a token, a bucket, images (README).

Claims (`pvc://`) are what every other test here uses.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support import s3
from tests.support.model_hub import COMMIT, Hub
from tests.support.node import commands

pytestmark = pytest.mark.cluster
MODEL = commands.REPOSITORY / "examples/tiny-vlm/model"
REPOSITORY = "tests/tiny-vlm"
TOKEN = "hf_for_this_test_only"
FILLER_BYTES = 24 << 20
"""More than one chunk of a download, so that the first half of it is there when it breaks."""


@pytest.fixture(scope="module")
def server() -> Iterator[Hub]:
    with Hub(REPOSITORY, MODEL, address=commands.HOST_IP, token=TOKEN).running() as found:
        found.files["filler.txt"] = bytes(FILLER_BYTES)
        yield found


@pytest.fixture(scope="module")
def claim() -> str:
    """An empty volume that the fetch Job's user can write."""
    folder = commands.ROOT / "run/models/fetched"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    commands.apply(
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": "fetched"},
         "spec": {**common, "capacity": size, "hostPath": {"path": str(folder)}}},
        {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "fetched"},
         "spec": {**common, "volumeName": "fetched", "resources": {"requests": size}}},
    )  # fmt: skip
    return "fetched"


def body(name: str, server: Hub, claim: str, **model: str) -> list[commands.Obj]:
    """A Secret for the hub, and one frontend with one engine that use it."""
    found: commands.Obj = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text("utf-8"))
    found["metadata"]["name"] = name
    spec = found["spec"]
    spec["frontend"]["replicas"] = spec["engine"]["replicas"] = 1
    spec["model"] = {
        "uri": f"hf://{REPOSITORY}",
        "name": "tiny-vlm",
        "revision": COMMIT,
        "secretRef": {"name": f"{name}-hub"},
        "cache": {"claimName": claim},
        **model,
    }
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": f"{name}-hub"},
        "stringData": {"HF_TOKEN": TOKEN, "HF_ENDPOINT": server.url},
    }
    return [secret, copy.deepcopy(found)]


def forget(name: str) -> None:
    commands.kubectl("delete", f"mmi/{name}", f"secret/{name}-hub", "--ignore-not-found",
                "--timeout=120s", seconds=130)  # fmt: skip


def test_a_model_of_a_hub_is_fetched_once_and_survives_its_pods(
    operator: str, server: Hub, claim: str
) -> None:
    """The first download breaks halfway and is resumed; a new engine pod downloads nothing."""
    server.cuts.add("filler.txt")
    try:
        commands.apply(*body("hubbed", server, claim))
        commands.kubectl(
            "wait", "mmi/hubbed", "--for=condition=Ready", "--timeout=600s", seconds=620
        )
        spans = [line for line in server.asked if "filler.txt bytes=" in line]
        assert spans, server.asked
        asked = len(server.asked)
        url = commands.service_url("hubbed")
        answer = commands.ask(url, "which digit is this?", "digit-7.png")
        assert "7" in answer
        before = commands.uids(commands.pods("engine", "hubbed"))
        commands.kubectl("delete", "pod", "hubbed-engine-0", "--timeout=180s", seconds=200)
        commands.until(
            "another engine serves",
            lambda: (
                not before & commands.uids(commands.pods("engine", "hubbed"))
                and commands.is_current("hubbed")
            ),
            400,
        )
        assert commands.ask(url, "which digit is this?", "digit-7.png") == answer
        assert server.asked[asked:] == []
    finally:
        forget("hubbed")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "model", "token", "reason"),
    [
        ("token", {}, "hf_another", "FetchDenied"),
        ("repository", {"uri": "hf://tests/nothing"}, TOKEN, "NotFound"),
        ("revision", {"revision": "v9"}, TOKEN, "NotFound"),
    ],
)
def test_what_a_hub_refuses_is_the_models_reason(
    operator: str, server: Hub, claim: str, what: str, model: dict[str, str], token: str,
    reason: str,
) -> None:  # fmt: skip
    name = f"no-{what}"
    secret, resource = body(name, server, claim, **({"revision": "w1"} | model))
    secret["stringData"]["HF_TOKEN"] = token
    try:
        commands.apply(secret, resource)
        found = commands.until(
            f"ModelReady says {reason}",
            lambda: (c := commands.condition(name, "ModelReady")).get("reason") == reason and c,
            180,
        )
        print(found["message"])
    finally:
        forget(name)


@pytest.fixture(scope="module")
def bucket() -> Iterator[s3.Store]:
    with s3.Store(MODEL, "tiny-vlm", commands.HOST_IP).running() as found:
        found.objects["tiny-vlm/filler.txt"] = bytes(FILLER_BYTES)
        yield found


def in_bucket(
    name: str, store: s3.Store, claim: str, secret: str = s3.SECRET
) -> list[commands.Obj]:
    """As `body`, from a bucket."""
    found: commands.Obj = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text("utf-8"))
    found["metadata"]["name"] = name
    spec = found["spec"]
    spec["frontend"]["replicas"] = spec["engine"]["replicas"] = 1
    spec["model"] = {
        "uri": f"s3://{s3.BUCKET}/tiny-vlm",
        "name": "tiny-vlm",
        "secretRef": {"name": f"{name}-hub"},
        "cache": {"claimName": claim},
    }
    keys = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": f"{name}-hub"}}
    return [{**keys, "stringData": store.environment(secret)}, found]


def test_a_model_of_a_bucket_is_fetched_once_and_survives_its_pods(
    operator: str, bucket: s3.Store, claim: str
) -> None:
    """The download breaks twice and is resumed; a new engine pod downloads nothing. The status
    names what was fetched: a bucket has no commits, so it is a digest of what it listed."""
    bucket.cuts += ["tiny-vlm/filler.txt"] * 2
    try:
        commands.apply(*in_bucket("stored", bucket, claim))
        commands.kubectl(
            "wait", "mmi/stored", "--for=condition=Ready", "--timeout=600s", seconds=620
        )
        resumed = [line for line in bucket.asked if "filler.txt bytes=" in line]
        assert len(resumed) == 2, bucket.asked
        assert "sha256:" in json.dumps(commands.get("mmi", "stored")["status"])
        asked = len(bucket.asked)
        url = commands.service_url("stored")
        answer = commands.ask(url, "which digit is this?", "digit-7.png")
        assert "7" in answer
        before = commands.uids(commands.pods("engine", "stored"))
        commands.kubectl("delete", "pod", "stored-engine-0", "--timeout=180s", seconds=200)
        commands.until(
            "another engine serves",
            lambda: (
                not before & commands.uids(commands.pods("engine", "stored"))
                and commands.is_current("stored")
            ),
            400,
        )
        assert commands.ask(url, "which digit is this?", "digit-7.png") == answer
        assert bucket.asked[asked:] == []
    finally:
        forget("stored")


def test_a_wrong_key_is_the_models_reason(operator: str, bucket: s3.Store, claim: str) -> None:
    """The store refuses the signature, and the condition says so in its words."""
    try:
        secret, resource = in_bucket("locked", bucket, claim, "the wrong key")
        resource["spec"]["model"]["uri"] = f"s3://{s3.BUCKET}/locked"  # nothing fetched as yet
        commands.apply(secret, resource)
        found = commands.until(
            "ModelReady says FetchDenied",
            lambda: (
                (c := commands.condition("locked", "ModelReady")).get("reason") == "FetchDenied"
                and c
            ),
            180,
        )
        print(found["message"])
        assert "SignatureDoesNotMatch" in found["message"]
    finally:
        forget("locked")
