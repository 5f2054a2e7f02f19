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
from foveal_operator.manifests.job import TEMPLATE
from tests.support.api_server import nodes as fates
from tests.support.api_server.operator_process import packages
from tests.support.api_server.scenarios import NO_LEASE
from tests.support.api_server.world import World, claim_in
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


def jobs(world: World) -> list[Obj]:
    return world.api.list("Job", world.namespace)


def told(world: World) -> tuple[dict[str, Obj], dict[str, str]]:
    """All objects, and the versions of those that an idle apply leaves alone."""
    versions = world.versions()
    claims = [key for key in versions if key.startswith("PersistentVolumeClaim")]
    for key in claims:  # an apply moves a claim's version even where it changes no field
        del versions[key]
    return world.children(), versions


@pytest.mark.timeout(300, func_only=True)
def test_an_upgrade_fetches_and_profiles_nothing_again(world: World, tmp_path: Path) -> None:
    model = {"uri": "hf://org/tiny", "cache": {"size": "1Gi"}}
    resource = world.sample("cpu", model=model)
    profile = msgspec.json.encode(profile_for(parse(resource))).decode()
    world.nodes.fate(replace(fates.SUCCEEDED, message=profile), component="model")
    world.api.create(claim_in(world.namespace))
    world.api.apply(resource, "user").must()

    older = world.operator("a", NO_LEASE)
    older.packages = older_release(tmp_path)
    older.start()
    world.wait_condition("Ready", timeout_seconds=90.0)
    world.settled(quiet_seconds=2.0)
    (fetch,) = jobs(world)
    assert fetch["spec"]["backoffLimit"] == 5
    before, pods = told(world), {p["metadata"]["uid"] for p in world.nodes.pods()}
    status = (world.resource() or {})["status"]
    older.stop()

    newer = world.operator("b", NO_LEASE)
    newer.start()
    newer.wait_ready()
    world.settled(quiet_seconds=6.0)
    assert told(world) == before
    assert {pod["metadata"]["uid"] for pod in world.nodes.pods()} == pods
    # Ready and all other conditions never flipped: no transition is younger than before.
    assert (world.resource() or {})["status"]["conditions"] == status["conditions"]

    # What the resource itself asks for anew is made by the new release, beside the old result.
    world.api.apply({**resource, "spec": {**resource["spec"], "image": "other"}}, "user").must()
    world.wait_condition("BudgetFits")
    world.settled(quiet_seconds=2.0)
    (kept,) = jobs(world)
    assert kept["metadata"]["uid"] == fetch["metadata"]["uid"], "another image fetches nothing"
    annotations = kept["metadata"]["annotations"]
    assert annotations[TEMPLATE] == fetch["metadata"]["annotations"][TEMPLATE]
