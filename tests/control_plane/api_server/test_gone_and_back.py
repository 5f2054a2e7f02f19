"""The resource's definition, or a watched namespace, goes and comes back: the log says so in plain
lines, and the operator goes on by itself."""

from __future__ import annotations

import pytest
import yaml

from tests.support.api_server.chart_role import role, token
from tests.support.api_server.operator_process import OperatorProcess
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import KIND, Sandbox
from tests.support.api_server.scenarios import NO_LEASE, STEPS, run
from tests.support.regenerate import CRD_FILE
from tests.support.samples import put

DEFINITION = "multimodalinferences.foveal.dev"
WORDS = "does not serve multimodalinferences of foveal.dev/v1alpha1; install the chart's"
SLOW = "--resync-seconds=600"
"""What a full list would notice, the watches notice."""


def check_log(text: str) -> None:
    assert "Traceback" not in text, text
    assert len([line for line in text.splitlines() if " kopf" in line]) <= 1, text


@pytest.mark.timeout(400, func_only=True)
def test_a_definition_that_comes_back_is_watched_again_at_once(sandbox: Sandbox) -> None:
    """kopf's end hung: for four minutes nothing at all was watched, /readyz was fine, and the log
    had a traceback for each kind."""
    operator = sandbox.operator("a", NO_LEASE, SLOW)
    operator.start()
    run(sandbox, STEPS[0])
    sandbox.api.delete("CustomResourceDefinition", "", DEFINITION).must()
    wait_until("it is missed", lambda: WORDS in operator.log_tail(1000), 60)
    assert "no watch of multimodalinferences" in operator.ask("/readyz")[1]
    wait_until("nothing of it is left", lambda: not sandbox.children(), 60)
    sandbox.api.install(yaml.safe_load(CRD_FILE.read_text(encoding="utf-8")))
    run(sandbox, STEPS[0])
    operator.wait_ready(90.0)
    text = operator.log_tail(1000)
    path = sandbox.api.path(KIND, sandbox.namespace)
    assert f"the watches have ended: {path}: 404 page not found: restarting the watches" in text
    check_log(text)


@pytest.mark.timeout(400, func_only=True)
def test_a_namespace_that_is_made_again_is_watched_again(sandbox: Sandbox) -> None:
    """Of each kind a line of 1,500 characters at each attempt, and the namespace was not known to
    be gone before the next full list."""
    api, home, other = sandbox.api, sandbox.namespace, f"{sandbox.namespace}-other"

    def make() -> None:
        api.namespace(other)
        for body in role("foveal", other, "resources"):
            for subject in body.get("subjects", ()):
                subject["namespace"] = home
            api.create(body).must()

    def apply() -> None:
        api.apply(put(sandbox.sample("cpu"), "metadata.namespace", other), "user").must()
        api.wait(KIND, other, "qwen", lambda obj: obj and obj.get("status", {}).get("url"), 90)

    make()
    url = sandbox.proxy.url("a")
    config = sandbox.cluster.kubeconfig(f"{home}-both", token(sandbox), url=url)
    operator = OperatorProcess("a", config, home, NO_LEASE, SLOW, f"--namespaces={home},{other}")
    sandbox.operators.append(operator)
    operator.start()
    operator.wait_ready()
    apply()
    api.delete("Namespace", "", other).must()
    api.wait("Namespace", "", other, lambda obj: obj is None, 60)
    # As the API server itself ends each watch, every two minutes.
    sandbox.proxy.close_doors()
    sandbox.proxy.open_doors()
    gone = f"going on without namespace {other}"
    wait_until("it is found to be gone", lambda: gone in operator.log_tail(1000), 90)
    assert sandbox.resource() is None
    sandbox.apply(sandbox.sample("cpu"))
    sandbox.wait_condition("Ready")
    make()
    apply()
    operator.wait_ready()
    text = operator.log_tail(1000)
    assert f"namespace {other} can be listed again" in text
    check_log(text)
