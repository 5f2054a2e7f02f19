"""The chart without a Helm binary: generated files, values against their schema, the roles.

Templates are tested by charts/foveal/tests (helm-unittest) and by e2e/chart.sh.
"""

from __future__ import annotations

import base64
import copy
import json
from typing import Any

import jsonschema_rs
import pytest
import yaml

from foveal_operator.kube.kinds import BY_NAME, KINDS, SECRET
from foveal_operator.manifests import access
from tests.support import chart_files, regenerate
from tests.support.samples import LEGAL

CHART = chart_files.CHART
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CHECK = jsonschema_rs.validator_for(SCHEMA)


@pytest.mark.parametrize("name", chart_files.files())
def test_generated_files_are_committed(name: str) -> None:
    text = (CHART / name).read_text(encoding="utf-8")
    assert text == chart_files.files()[name], "run: make generate"


def test_chart_and_packages_have_one_version() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for file in ("operator/pyproject.toml", "runtime/pyproject.toml"):
        text = (regenerate.ROOT / file).read_text()
        assert f'\nversion = "{chart["appVersion"]}"' in text


def test_the_icon_is_the_file_beside_it() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head, _, data = chart["icon"].partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(data) == (CHART / "icon.svg").read_bytes().strip()


def test_sets_of_values_for_checks_fit_the_schema() -> None:
    for file in (CHART / "ci").glob("*.yaml"):
        CHECK.validate(merged(VALUES, yaml.safe_load(file.read_text())))


def merged(values: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges them."""
    found = dict(values)
    for name, value in given.items():
        is_part = isinstance(value, dict) and isinstance(values.get(name), dict)
        found[name] = merged(values[name], value) if is_part else value
    return found


# --- values -----------------------------------------------------------------------------------
def test_default_values_fit_the_schema_and_each_is_known_to_it() -> None:
    CHECK.validate(VALUES)
    assert set(SCHEMA["properties"]) - {"global"} == set(VALUES)


def needed(values: dict[str, Any], path: str = "") -> list[str]:
    """Values that have a default, but for those that a cluster may do without."""
    found = []
    for name, value in values.items():
        if value in ("", [], {}) or name in ("podSecurityContext", "resources"):
            continue
        found.append(f"{path}{name}")
        found += needed(value, f"{path}{name}.") if isinstance(value, dict) else []
    return found


@pytest.mark.parametrize("path", needed(VALUES))
def test_a_value_that_is_taken_away_is_named(path: str) -> None:
    """As by a key with nothing behind it, which Helm takes for null."""
    changed = copy.deepcopy(VALUES)
    *parents, last = path.split(".")
    at = changed
    for name in parents:
        at = at[name]
    del at[last]
    (error,) = CHECK.iter_errors(changed)
    assert error.message == f'"{last}" is a required property'
    assert list(error.instance_path) == parents


def objects(schema: dict[str, Any], path: str = "") -> list[tuple[str, dict[str, Any]]]:
    found = [(path, schema)] if "properties" in schema else []
    for name, part in schema.get("properties", {}).items():
        found += objects(part, f"{path}.{name}".lstrip("."))
    return found


@pytest.mark.parametrize("path", [path for path, _ in objects(SCHEMA)])
def test_unknown_values_are_refused(path: str) -> None:
    changed = copy.deepcopy(VALUES)
    at = changed
    for name in filter(None, path.split(".")):
        at = at[name]
    at["nonsense"] = 1
    assert not CHECK.is_valid(changed)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("replicas", "two"),
        ("replicas", -1),
        ("image.digest", "latest"),
        ("image.repository", ""),
        ("image.registry", "https://registry.example"),
        ("image.registry", "registry.example/a:1"),
        ("image.repository", "foveal/operator:0.1.0"),
        ("runtimeImage.repository", "foveal/runtime@sha256:0"),
        ("runtimeImage.tag", ":0.1.0"),
        ("image.pullPolicy", "Sometimes"),
        ("operator.workers", 0),
        ("operator.logLevel", "TRACE"),
        ("rbac.scope", "tenant"),
        ("rbac.watchNamespaces", ["a", "a"]),
        ("rbac.watchNamespaces", ["Not_A_Name"]),
        ("networkPolicy.apiServerPorts", []),
        ("networkPolicy.apiServerCidrs", ["somewhere"]),
        ("metrics.podMonitor.interval", "often"),
        ("metrics.podMonitor.enabled", "auto"),
        ("sample.name", "x" * 41),
        ("sample.name", "7b"),
        ("terminationGracePeriodSeconds", 0),
        ("commonLabels", {"a": 1}),
        ("imagePullSecrets", [{}]),
    ],
)
def test_wrong_values_are_refused(path: str, value: object) -> None:
    changed = copy.deepcopy(VALUES)
    *parents, last = path.split(".")
    at = changed
    for name in parents:
        at = at[name]
    at[last] = value
    assert not CHECK.is_valid(changed)


@pytest.mark.parametrize(
    ("registry", "repository"),
    [
        ("registry.example", "foveal/operator"),
        ("registry.example:5000/mirror/", "operator"),
        ("[fd00::1]:5000", "foveal/operator"),
        ("", "localhost:5000/foveal/operator"),
        ("", "foveal/operator"),
    ],
)
def test_registries_and_repositories_are_taken(registry: str, repository: str) -> None:
    image = {"registry": registry, "repository": repository, "tag": "v1.2.3_rc.1"}
    CHECK.validate(merged(VALUES, {"image": image, "runtimeImage": image}))


def test_one_way_of_scraping_at_a_time() -> None:
    changed = copy.deepcopy(VALUES)
    changed["metrics"]["podMonitor"]["enabled"] = True
    CHECK.validate(changed)
    changed["metrics"]["serviceMonitor"]["enabled"] = True
    assert not CHECK.is_valid(changed)
    changed["metrics"]["podMonitor"]["enabled"] = "Auto"
    CHECK.validate(changed)


# --- roles ------------------------------------------------------------------------------------
ALL_RULES = [rule for scope in ("resources", "nodes", "lease") for rule in access.rules(scope)]  # type: ignore[arg-type]


def allowed(group: str, resource: str) -> set[str]:
    return {
        verb
        for rule in ALL_RULES
        if rule.group == group and resource in rule.resources
        for verb in rule.verbs
    }


def test_roles_have_no_wildcard_and_no_dangerous_verb() -> None:
    known = {"get", "list", "watch", "create", "update", "patch", "delete"}
    for rule in ALL_RULES:
        assert set(rule.verbs) <= known
        assert not any("*" in text for text in (rule.group, *rule.resources))
        assert not {"pods/exec", "pods/log", "roles", "clusterroles"} & set(rule.resources)


def test_secrets_are_created_and_never_read() -> None:
    assert allowed("", SECRET.plural) == {"create"}


def test_only_the_operators_own_lease_can_be_changed() -> None:
    for rule in access.rules("lease"):
        assert rule.own_name or rule.verbs == ("create",)


def test_every_object_that_manifests_make_may_be_applied_and_deleted_as_the_table_says() -> None:
    made = set()
    for name in LEGAL:
        made |= {owned.body["kind"] for owned in regenerate.wanted(LEGAL[name]).objects}
    assert made <= set(BY_NAME)
    for name in made - {"Secret"}:
        kind = BY_NAME[name]
        verbs = allowed(kind.group, kind.plural)
        assert {"list", "watch", "create", "patch"} <= verbs
        assert ({"get", "delete"} <= verbs) == kind.pruned


def test_no_right_for_a_kind_that_is_not_in_the_table() -> None:
    plurals = {(kind.group, kind.plural) for kind in KINDS}
    for rule in ALL_RULES:
        for resource in rule.resources:
            assert (rule.group, resource.partition("/")[0]) in plurals


def test_a_resource_itself_is_never_written() -> None:
    """Its spec, labels and annotations belong to the user and to GitOps."""
    assert allowed("foveal.dev", "multimodalinferences") == {"list", "watch"}
    assert allowed("foveal.dev", "multimodalinferences/status") == {"patch"}


def test_chart_has_enough_template_cases() -> None:
    cases = 0
    for file in (CHART / "tests").glob("*_test.yaml"):
        suite = yaml.safe_load(file.read_text())
        names = [test["it"] for test in suite["tests"]]
        assert len(set(names)) == len(names)
        cases += len(names)
    assert cases >= 60


def test_templates_neither_look_up_nor_roll_dice() -> None:
    for file in (CHART / "templates").rglob("*"):
        if file.is_file():
            text = file.read_text()
            for word in (
                "lookup ",
                "rand",
                "genCA",
                "genSignedCert",
                "uuidv4",
                " now ",
                "htpasswd",
            ):
                assert word not in text, f"{file.name}: {word}"
