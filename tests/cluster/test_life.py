"""A resource's life on a real node: questions, metrics, changes, lost pods, and its end."""

from __future__ import annotations

import io
import os
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from PIL import Image

from foveal_operator.common.clock import seconds
from foveal_operator.status.verdicts import SETTLE_SECONDS
from tests.support.node import commands
from tests.support.node.questions import ANSWERS, QUESTIONS, asking, wrong_answers
from tests.support.node.rolls import ready, roll
from tests.support.node.volumes import make_memory_claim

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("prometheus")]


def new_image() -> bytes:
    file = io.BytesIO()
    Image.frombytes("RGB", (48, 48), os.urandom(48 * 48 * 3)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture(scope="module")
def shared_claim(cluster: None) -> str:
    """Of the node's memory; it goes when the resource has gone."""
    make_memory_claim("values", 64)
    return "values"


def test_the_first_request_after_ready_is_answered(operator: str, models: str) -> None:
    """Ready came before the Service had an endpoint, and the first connection was refused; then
    while kube-proxy wrote its rules, and it was never answered."""
    body = yaml.safe_load((Path(__file__).parent / "tiny.yaml").read_text(encoding="utf-8"))
    body["metadata"]["name"] = "first"
    body["spec"]["frontend"]["replicas"] = body["spec"]["engine"]["replicas"] = 1
    commands.apply(body)
    try:
        commands.kubectl(
            "wait", "mmi/first", "--for=condition=Ready", "--timeout=300s", seconds=320
        )
        assert commands.ask(commands.service_url("first"), "read the digit.", "digit-7.png") == "7"
        slices = commands.get("endpointslices", "", "default", "kubernetes.io/service-name=first")
        ready = commands.condition("first", "Ready")["lastTransitionTime"]
        assert [one for item in slices["items"] for one in item["endpoints"]], slices
        changed = [
            item["metadata"]["annotations"]["endpoints.kubernetes.io/last-change-trigger-time"]
            for item in slices["items"]
        ]
        assert seconds(max(changed)) + SETTLE_SECONDS <= seconds(ready), (changed, ready)
    finally:
        commands.kubectl("delete", "mmi", "first", "--wait", seconds=120)


def test_answers_through_the_service_are_right(tiny: str) -> None:
    """The model sees the pictures: most answers are true, and asked again they are the same."""
    for _ in range(2):
        assert wrong_answers(tiny) == []
    true = [question for question, _, answer in QUESTIONS if ANSWERS[question] == answer]
    print(f"{len(true)} of {len(QUESTIONS)} answers are true")
    assert len(true) > len(QUESTIONS) // 2


def test_metrics_show_what_the_caches_saved(tiny: str) -> None:
    """Each frontend sees a picture at most once as new; the second question finds it."""
    for _ in range(4):
        commands.ask(tiny, "read the digit.", "digit-7.png")
    totals: dict[str, float] = {}
    for pod in [*commands.pods("frontend").values(), *commands.pods("engine").values()]:
        port = pod["spec"]["containers"][0]["ports"][0]["containerPort"]
        for name, value in commands.metrics(f"http://{pod['status']['podIP']}:{port}").items():
            totals[name] = totals.get(name, 0.0) + value
    assert totals["foveal_cache_hits_total"] > 0, totals
    assert totals["foveal_mirror_hits_total"] > 0, totals
    assert totals["foveal_encoder_items_total"] > 0, totals


def test_a_change_of_frontends_leaves_engines_alone(tiny: str) -> None:
    engines = commands.uids(commands.pods("engine"))
    roll(tiny, {"caches": {"processor": {"size": "2Mi"}}}, "frontend")
    assert commands.uids(commands.pods("engine")) == engines


def test_engines_roll_when_their_budget_changes(tiny: str) -> None:
    """Surge: a third engine first; as many as asked for serve all the time."""
    frontends = commands.uids(commands.pods("frontend"))
    change = {"engine": {"hostMemory": "2112Mi"}, "rollout": {"strategy": "Surge"}}
    found = roll(tiny, change, "engine")
    assert found.most_pods == 3
    assert found.least_ready >= 2
    assert commands.uids(commands.pods("frontend")) == frontends


def test_values_begin_to_travel_by_shared_memory(tiny: str, shared_claim: str) -> None:
    """Frontends and engines are replaced for it; then values lie in files of both."""
    change = {"type": "SharedMemory", "claimName": shared_claim, "size": "2Mi"}
    change["minSharedValue"] = "4Ki"  # the model's pictures are of 10 KiB
    frontends = commands.uids(commands.pods("frontend"))
    roll(tiny, {"caches": {"ipc": change}, "rollout": {"strategy": "Surge"}}, "engine")
    commands.until(
        "frontends are new", lambda: not frontends & commands.uids(commands.pods("frontend")), 300
    )

    def num_files() -> float:
        # A new image each time: what a frontend of before has sent to the new engines is held there
        # and never written to a file.
        commands.ask(tiny, "what is it?", new_image())
        pods = commands.pods("frontend").values()
        totals = [commands.metrics(f"http://{pod['status']['podIP']}:8000") for pod in pods]
        return sum(found.get("foveal_shm_files_written_total", 0) for found in totals)

    commands.until("values are written to files", num_files)
    assert wrong_answers(tiny) == []


@pytest.mark.slow
def test_everything_rolls_when_the_image_changes(tiny: str) -> None:
    """Another tag of the same image: the operator cannot know that they speak the same. FreeFirst:
    an engine goes before its successor comes, as where no device is free."""
    socket, other = str(commands.ROOT / "node/containerd.sock"), "localhost/foveal/runtime:next"
    commands.run("e2e/cluster/node.sh", "run", "ctr", "-a", socket, "-n", "k8s.io", "images", "tag",
            "--force", "localhost/foveal/runtime:0.1.0", other)  # fmt: skip
    found = roll(tiny, {"image": other, "rollout": {"strategy": "FreeFirst"}}, "engine")
    assert found.most_pods == 2
    assert found.least_ready >= 1

    def images() -> set[str]:
        pods = [*commands.pods("engine").values(), *commands.pods("frontend").values()]
        return {pod["spec"]["containers"][0]["image"] for pod in pods}

    commands.until("the last frontend has drained", lambda: images() == {other}, 150)
    assert wrong_answers(tiny) == []


def test_frontends_scale_under_load(tiny: str) -> None:
    engines = commands.uids(commands.pods("engine"))
    with asking(tiny) as asker:
        for replicas in (3, 1):
            commands.patch("tiny", {"frontend": {"replicas": replicas}})

            def has_scaled(count: int = replicas) -> bool:
                return len(commands.pods("frontend")) == count and commands.is_current("tiny")

            commands.until(f"{replicas} frontends", has_scaled, 300)
    assert asker.failures == []
    assert commands.uids(commands.pods("engine")) == engines
    print(f"answered while frontends scaled: {asker.answered}")


def test_a_deleted_frontend_is_not_noticed(tiny: str) -> None:
    """It answers what it has, and what still comes while Services unlearn it."""
    commands.patch("tiny", {"frontend": {"replicas": 2}})
    commands.until(
        "two frontends", lambda: commands.is_current("tiny") and len(ready("frontend")) == 2, 300
    )
    lost = sorted(commands.pods("frontend"))[0]
    with asking(tiny) as asker:
        commands.until("some answers", lambda: asker.answered > 3 or asker.failures, 60)
        commands.kubectl("delete", "pod", lost, "--wait=false")
        commands.until("it is gone", lambda: lost not in commands.pods("frontend"), 120)
        commands.until("two again", lambda: len(ready("frontend")) == 2, 300)
    print(f"answered while a frontend was replaced: {asker.answered}")
    assert asker.failures == []


def test_a_deleted_engine_comes_back(tiny: str) -> None:
    """Requests of its own may fail; afterwards every answer is right again."""
    name, lost = sorted(commands.pods("engine").items())[0]
    commands.kubectl("delete", "pod", name, "--wait=false")
    commands.until(
        "another pod of that name",
        lambda: (
            commands.pods("engine").get(name, lost)["metadata"]["uid"] != lost["metadata"]["uid"]
        ),
        120,
    )
    commands.until("Ready again", lambda: commands.is_current("tiny"), 300)
    assert wrong_answers(tiny) == []


def test_a_kubelet_that_restarts_is_not_noticed(tiny: str) -> None:
    everything = commands.uids(commands.pods("engine")) | commands.uids(commands.pods("frontend"))
    with asking(tiny) as asker:
        commands.run("e2e/cluster/node.sh", "restart-kubelet")
        commands.kubectl("wait", "node/node1", "--for=condition=Ready", "--timeout=60s")
        commands.until("some more answers", lambda: asker.answered > 5 or asker.failures, 60)
    assert asker.failures == []
    assert (
        commands.uids(commands.pods("engine")) | commands.uids(commands.pods("frontend"))
        == everything
    )


def test_serving_goes_on_without_the_operator(tiny: str, operator: str) -> None:
    scale = ("scale", "deployment/foveal-operator", "-n", operator)
    commands.kubectl(*scale, "--replicas=0")
    try:
        assert wrong_answers(tiny) == []
    finally:
        commands.kubectl(*scale, "--replicas=2")
        commands.kubectl(
            "rollout", "status", "deployment/foveal-operator", "-n", operator, "--timeout=120s"
        )


def test_the_question_of_the_notes_is_answered_inside_the_cluster(tiny: str, operator: str) -> None:
    """Cluster DNS, the Service and the image that the notes name, from another namespace's pod."""
    _, _, asks, _ = commands.of_notes(operator)
    command = asks.replace(f"-n {operator}", "-n default").replace("qwen:", "tiny:")
    assert "tiny-vlm" in commands.run("bash", "-c", command)


FILL_MEMORY = """
import os, time
for pid in os.listdir("/proc"):
    if pid.isdigit() and int(pid) not in (1, os.getpid()):
        try:
            open(f"/proc/{pid}/oom_score_adj", "w").write("1000")
        except OSError:
            pass
for _ in range(60):
    if os.fork() == 0:
        memory = bytearray(64 << 20)
        time.sleep(60)
time.sleep(60)
"""


def test_a_container_at_its_limit_is_killed_and_the_status_says_so(tiny: str) -> None:
    """The limit is the kernel's: what is forked inside the engine's container counts with it, and
    the engine, the largest, is the one that goes. It comes back and answers right."""
    name, pod = sorted(commands.pods("engine").items())[0]

    def failure() -> commands.Obj:
        found = commands.get("mmi", "tiny")["status"].get("lastFailure", {})
        return found if found.get("reason") == "OOMKilled" and found["pod"] == name else {}

    subprocess.run(
        ["kubectl", "exec", name, "--", "python3", "-c", FILL_MEMORY],
        env=commands.environment(), capture_output=True, timeout=90, check=False,
    )  # fmt: skip
    found = commands.until("the status names the kill", failure, 60)
    print(f"lastFailure: {found}")
    assert found["exitCode"] == 137
    assert found["memoryLimit"] == pod["spec"]["containers"][0]["resources"]["limits"]["memory"]
    commands.until("Ready again", lambda: commands.is_current("tiny"), 300)
    assert wrong_answers(tiny) == []


@pytest.mark.slow
def test_an_engine_that_hangs_is_restarted(tiny: str) -> None:
    """A stopped process answers no probe: the kubelet ends it, and it comes back."""
    name, pod = sorted(commands.pods("engine").items())[-1]
    restarts = pod["status"]["containerStatuses"][0]["restartCount"]
    stop = (
        "import os, signal\n"
        "for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "    words = open(f'/proc/{pid}/cmdline').read().split(chr(0))\n"
        "    if int(pid) not in (1, os.getpid()) and 'engine' in words:\n"
        "        os.kill(int(pid), signal.SIGSTOP)\n"
    )
    commands.kubectl("exec", name, "--", "python3", "-c", stop)
    started = time.monotonic()

    def restarted() -> bool:
        now: commands.Obj = commands.pods("engine")[name]["status"]["containerStatuses"][0]
        return bool(now["restartCount"] > restarts)

    commands.until("its container is restarted", restarted, 240)
    print(f"hang to restart: {time.monotonic() - started:.0f} s")
    commands.until("Ready again", lambda: commands.is_current("tiny"), 300)
    assert wrong_answers(tiny) == []
