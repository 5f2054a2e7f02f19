"""What Argo CD, Flux and `helm --wait` conclude from the status; the examples are whole."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest
import yaml

from tests.support import regenerate
from tests.support.argo_health import argo_health
from tests.support.gitops_states import states
from tests.support.kstatus import verdict

EXAMPLES = regenerate.ROOT / "examples" / "gitops"
CUSTOMIZATION = regenerate.ARGO
STATES = states()
TOOLS = os.environ.get("TOOLS", "/var/tmp/foveal-e2e/tools")
ARGO_HEALTH = shutil.which("argo-health", path=TOOLS)
FLUX_HEALTH = shutil.which("flux-health", path=TOOLS)


@pytest.mark.parametrize("name", STATES)
def test_kstatus_and_argo_agree_with_the_truth(name: str) -> None:
    obj, generic, argo = STATES[name]
    assert verdict(obj) == generic
    assert argo_health(obj)[0] == argo


@pytest.mark.skipif(ARGO_HEALTH is None, reason="argo-health is not built: e2e/tools/build.sh")
def test_argo_cd_itself_passes_its_cases() -> None:
    """Argo CD's own package runs the script of argocd-cm.yaml on cases in its own format."""
    assert ARGO_HEALTH is not None
    command = [ARGO_HEALTH, str(EXAMPLES / "argocd/argocd-cm.yaml"), str(CUSTOMIZATION)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) == len(STATES)


@pytest.mark.skipif(FLUX_HEALTH is None, reason="flux-health is not built: e2e/tools/build.sh")
def test_flux_itself_waits_by_kstatus_and_by_the_expressions_of_the_example() -> None:
    """The expressions say what kstatus says, but for a resource without a status, which is not
    current then. Deletion is not for them."""
    assert FLUX_HEALTH is not None
    files = sorted(CUSTOMIZATION.glob("testdata/*.yaml"))
    command = [FLUX_HEALTH, str(EXAMPLES / "flux/models.yaml"), *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    found = {name: rest for name, *rest in (line.split("\t") for line in done.stdout.splitlines())}
    differ = {"fresh": "Unknown", "deleting": "Current"}
    assert found == {
        name: [generic, differ.get(name, generic)] for name, (_, generic, _) in STATES.items()
    }
    assert "no such attribute(s): status" in done.stderr


def test_messages_say_what_is_wrong() -> None:
    for name in ("misfit", "refused", "unschedulable", "image-pull"):
        text = argo_health(STATES[name][0])[1]
        assert "docs/reference/reasons.md#" in text, name


def test_argo_test_data_is_what_the_operator_reports() -> None:
    """In Argo CD's own layout, so that the folder can be proposed there as it is."""
    on_disk = {
        path.relative_to(CUSTOMIZATION).as_posix(): path.read_text()
        for path in [CUSTOMIZATION / "health_test.yaml", *CUSTOMIZATION.glob("testdata/*.yaml")]
    }
    assert on_disk == regenerate.argo_files(), "run: make generate"


def test_argo_cases_pass_from_their_files() -> None:
    cases = yaml.safe_load((CUSTOMIZATION / "health_test.yaml").read_text())["tests"]
    assert len(cases) == len(STATES)
    for case in cases:
        obj = yaml.safe_load((CUSTOMIZATION / case["inputPath"]).read_text())
        status, message = argo_health(obj)
        assert {"status": status, "message": message} == case["healthStatus"]


def test_examples_hold_the_script_word_for_word() -> None:
    config = yaml.safe_load((EXAMPLES / "argocd" / "argocd-cm.yaml").read_text())
    key = "resource.customizations.health.foveal.dev_MultiModalInference"
    assert config["data"][key].strip() == (CUSTOMIZATION / "health.lua").read_text().strip()


def test_examples_parse_and_point_at_what_is_there() -> None:
    kinds = []
    for file in sorted(EXAMPLES.rglob("*.yaml")):
        if "testdata" in file.parts or file.name == "health_test.yaml":
            continue
        for body in yaml.safe_load_all(file.read_text()):
            kinds.append(body["kind"])
            spec = body.get("spec", {})
            path = spec.get("path") or spec.get("source", {}).get("path")
            chart = spec.get("chart", {}).get("spec", {}).get("chart")
            for inside in filter(None, (path, chart)):
                assert (regenerate.ROOT / inside.removeprefix("./")).exists(), inside
    assert sorted(kinds) == [
        "Application", "Application", "ConfigMap", "GitRepository", "HelmRelease",
        "Kustomization", "MultiModalInference",
    ]  # fmt: skip


def test_the_docs_table_is_the_tested_one() -> None:
    text = (regenerate.ROOT / "docs" / "how-to" / "gitops.md").read_text(encoding="utf-8")
    for name, (_, generic, argo) in STATES.items():
        assert f"| {name} | {generic} | {argo} |" in text
