"""One real API server for all tests of this folder; each test has a namespace of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.support.api_server.api import Api
from tests.support.api_server.foreign import FOREIGN, definition
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.operator_process import packages
from tests.support.api_server.programs import (
    Cluster,
    missing_programs,
    running_cluster,
    start_controllers,
    wait_until,
)
from tests.support.api_server.sandbox import KIND, Sandbox, running_sandbox
from tests.support.api_server.scenarios import Children, undisturbed
from tests.support.regenerate import CRD_FILE

HERE = Path(__file__).parent
_NUMBERS = itertools.count(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in Path(item.path).parents:
            item.add_marker(pytest.mark.api_server)
            if item.get_closest_marker("timeout") is None:
                # The first test pays for the start of the servers; they have a limit of their own.
                item.add_marker(pytest.mark.timeout(600, func_only=True))


@pytest.fixture(scope="session")
def bare_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """etcd and an API server without any custom resource."""
    missing = missing_programs("etcd", "kube-apiserver")
    if missing:
        pytest.skip(f"{', '.join(missing)} not built: make control-plane builds what is missing")
    with running_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster(bare_cluster: Cluster) -> Cluster:
    """With Foveal's resource and stand-ins for the foreign ones."""
    with Api(bare_cluster) as api:
        api.install(yaml.safe_load(CRD_FILE.read_text(encoding="utf-8")))
        for kind in FOREIGN:
            api.install(definition(kind))
    return bare_cluster


@pytest.fixture(scope="session")
def controlled_cluster(cluster: Cluster) -> Cluster:
    """With the real controllers of Deployments, StatefulSets, Jobs and owners as well."""
    if missing_programs("kube-controller-manager"):
        pytest.skip("kube-controller-manager not built: make control-plane builds what is missing")
    start_controllers(cluster)
    return cluster


@pytest.fixture(scope="session")
def api(cluster: Cluster) -> Iterator[Api]:
    """The administrator."""
    with Api(cluster) as client:
        yield client


@pytest.fixture
def namespace(api: Api) -> str:
    """A fresh namespace that admits only pods of the restricted standard."""
    standard = {"pod-security.kubernetes.io/enforce": "restricted"}
    return api.namespace(f"test-{next(_NUMBERS)}", **standard)


@pytest.fixture
def sandbox(controlled_cluster: Cluster, namespace: str) -> Iterator[Sandbox]:
    """The namespace with nodes and a proxy; operators are the test's to start."""
    with running_sandbox(controlled_cluster, namespace) as made:
        yield made


@pytest.fixture(scope="session")
def fork_server(bare_cluster: Cluster) -> Iterator[ForkServer]:
    """Operators of it start in a fraction of a second."""
    with ForkServer(bare_cluster.folder / "fork_server.log", packages()) as made:
        yield made


@pytest.fixture(scope="session")
def arena_namespace(api: Api) -> str:
    """One for all tests that compare with `expected`: names end in hashes that depend on it."""
    standard = {"pod-security.kubernetes.io/enforce": "restricted"}
    return api.namespace("arena", **standard)


@pytest.fixture(scope="session")
def expected(
    controlled_cluster: Cluster, arena_namespace: str, fork_server: ForkServer
) -> dict[str, Children]:
    """By step of the scenarios: the children after a run in which nothing goes wrong."""
    with running_sandbox(controlled_cluster, arena_namespace) as made:
        made.fork_server = fork_server
        return undisturbed(made)


@pytest.fixture
def arena(
    controlled_cluster: Cluster,
    arena_namespace: str,
    fork_server: ForkServer,
    expected: dict[str, Children],
) -> Iterator[Sandbox]:
    """The sandbox of `expected`, empty; operators start fast."""
    with running_sandbox(controlled_cluster, arena_namespace) as made:
        made.fork_server = fork_server
        try:
            yield made
        finally:
            made.proxy.clear()
            made.api.delete(KIND, arena_namespace, "qwen")
            wait_until("nothing is left", lambda: not made.children(), 60)
