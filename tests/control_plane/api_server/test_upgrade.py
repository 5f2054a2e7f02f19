"""Another release of the operator, whose Jobs are made otherwise: nothing is done a second time.

The older release is this one's source with another Job template, run as a process of its own.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from foveal_operator.api.parse import parse
from foveal_operator.kube.types import Obj
from tests.support.api_server import nodes as fates
from tests.support.api_server.operator_process import packages
from tests.support.api_server.sandbox import Sandbox, claim_in
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.regenerate import profile_for


def older_release(folder: Path) -> list[str]:
    """Folders with packages: the operator's is a copy that makes Jobs with fewer attempts."""
    operator, runtime = packages()
    copied = folder / "older"
    shutil.copytree(operator, copied, ignore=shutil.ignore_patterns("__pycache__"))
    source = copied / "foveal_operator/manifests/job.py"
    text = source.read_text(encoding="utf-8")
    assert '"backoffLimit": 6,' in text
    source.write_text(text.replace('"backoffLimit": 6,', '"backoffLimit": 5,'), encoding="utf-8")
    return [str(copied), runtime]


def fetch_jobs(sandbox: Sandbox) -> list[Obj]:
    jobs = sandbox.api.list("Job", sandbox.namespace)
    return [job for job in jobs if "-fetch-" in job["metadata"]["name"]]


def told(sandbox: Sandbox) -> tuple[dict[str, Obj], dict[str, str]]:
    """All objects, and the versions of those that an idle apply leaves alone."""
    versions = sandbox.versions()
    claims = [key for key in versions if key.startswith("PersistentVolumeClaim")]
    for key in claims:  # an apply moves a claim's version even where it changes no field
        del versions[key]
    return sandbox.children(), versions


@pytest.mark.timeout(300, func_only=True)
def test_an_upgrade_fetches_and_profiles_nothing_again(sandbox: Sandbox, tmp_path: Path) -> None:
    model = {"uri": "hf://org/tiny", "cache": {"size": "1Gi"}}
    resource = sandbox.sample("cpu", model=model)
    profile = msgspec.json.encode(profile_for(parse(resource))).decode()
    sandbox.nodes.fate(replace(fates.SUCCEEDED, message=profile), component="model")
    sandbox.api.create(claim_in(sandbox.namespace))
    sandbox.api.apply(resource, "user").must()

    older = sandbox.operator("a", NO_LEASE)
    older.packages = older_release(tmp_path)
    older.start()
    sandbox.wait_condition("Ready", timeout_seconds=90.0)
    sandbox.settled(quiet_seconds=2.0)
    (fetch,) = fetch_jobs(sandbox)
    assert fetch["spec"]["backoffLimit"] == 5
    before, pods = told(sandbox), {p["metadata"]["uid"] for p in sandbox.nodes.pods()}
    status = (sandbox.resource() or {})["status"]
    older.stop()

    newer = sandbox.operator("b", NO_LEASE)
    newer.start()
    newer.wait_ready()
    sandbox.settled(quiet_seconds=6.0)
    assert told(sandbox) == before
    assert {pod["metadata"]["uid"] for pod in sandbox.nodes.pods()} == pods
    # Ready and all other conditions never flipped: no transition is younger than before.
    assert (sandbox.resource() or {})["status"]["conditions"] == status["conditions"]

    # What the cluster removes after their time to live is not run again.
    for job in sandbox.api.list("Job", sandbox.namespace):
        assert job["spec"]["ttlSecondsAfterFinished"] > 0
        sandbox.api.delete("Job", sandbox.namespace, job["metadata"]["name"]).must()
    sandbox.settled(quiet_seconds=2.0)
    assert sandbox.api.list("Job", sandbox.namespace) == []
    assert (sandbox.resource() or {})["status"]["conditions"] == status["conditions"]

    # What the resource itself asks for anew is made by the new release.
    sandbox.api.apply({**resource, "spec": {**resource["spec"], "image": "other"}}, "user").must()
    sandbox.wait_condition("BudgetFits")
    sandbox.settled(quiet_seconds=2.0)
    assert fetch_jobs(sandbox) == [], "another image fetches nothing"
