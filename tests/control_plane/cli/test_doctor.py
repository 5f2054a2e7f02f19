"""`foveal doctor`: each problem is found, and each finding says what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foveal_operator.cli import main as cli
from foveal_operator.cli.doctor import command as cli_doctor
from foveal_operator.cli.doctor.cluster_checks import device_findings
from foveal_operator.cli.doctor.command import local_findings
from foveal_operator.cli.doctor.report import Finding, fail, ok, report_text
from foveal_operator.cli.terminal import Style, visible_width
from foveal_operator.kube.reader import (
    ForbiddenError,
    NotConfiguredError,
    UnreachableError,
)
from foveal_operator.testing.fake_reader import FakeReader
from foveal_runtime.plan.machine import Machine, look
from tests.support.cluster_samples import CRD_PATH, definition, healthy, node

GIB = 1024**3
GOOD = Machine(
    memory_bytes=64 * GIB, available_bytes=60 * GIB, cpus=16, shm_bytes=32 * GIB,
    shm_free_bytes=32 * GIB, cpu_flags=frozenset({"avx2", "fma", "amx_bf16"}),
    devices=(80 * GIB, 80 * GIB),
)  # fmt: skip


def findings(reader: FakeReader) -> list[Finding]:
    return list(cli_doctor.cluster_findings(reader))


def bad(reader: FakeReader) -> list[tuple[str, str, str]]:
    return [(f.level, f.area, f.text) for f in findings(reader) if f.level != "ok"]


def test_a_healthy_cluster_has_nothing_to_mend() -> None:
    reader = healthy()
    assert bad(reader) == []
    texts = {finding.area: finding.text for finding in findings(reader)}
    assert texts["api server"] == "v1.37.0 at https://fake"
    assert texts["devices"] == "8 nvidia.com/gpu on 1 node, each of 80 GiB"
    assert texts["namespace"] == "models enforces Pod Security restricted; Foveal's pods meet " \
        "restricted"  # fmt: skip


def _no_label(reader: FakeReader) -> None:
    reader.answers["/api/v1/nodes"] = {"items": [node("b", "512Gi", 8)]}


def _two_sizes(reader: FakeReader) -> None:
    sizes = ["40960", "81559"]
    label = "nvidia.com/gpu.memory"
    items = [node(size, "512Gi", 8, **{label: size}) for size in sizes]
    reader.answers["/api/v1/nodes"] = {"items": items}


def _shared(reader: FakeReader) -> None:
    labels = {"nvidia.com/gpu.memory": "81920", "nvidia.com/gpu.replicas": "4"}
    reader.answers["/api/v1/nodes"] = {"items": [node("a", "512Gi", 8, **labels)]}


def _renamed(reader: FakeReader) -> None:
    _shared(reader)
    (body,) = reader.answers["/api/v1/nodes"]["items"]
    found = body["status"]["allocatable"]
    found["nvidia.com/gpu.shared"] = found.pop("nvidia.com/gpu")


def _amd(reader: FakeReader) -> None:
    body = node("a", "512Gi", **{"amd.com/gpu.vram": "192G"})
    body["status"]["allocatable"]["amd.com/gpu"] = "8"
    reader.answers["/api/v1/nodes"] = {"items": [body]}


DEVICES = {
    "shared": (_shared, "8 nvidia.com/gpu on 1 node (4 share a device), each of 20 GiB"),
    "renamed": (_renamed, "8 nvidia.com/gpu.shared on 1 node (4 share a device), each of 20 GiB"),
    "amd": (_amd, "8 amd.com/gpu on 1 node, each of 192 GiB"),
}


@pytest.mark.parametrize("name", DEVICES)
def test_memory_of_devices_is_read_as_the_operator_reads_it(name: str) -> None:
    change, text = DEVICES[name]
    reader = healthy()
    change(reader)
    assert [one.text for one in device_findings(reader)][:1] == [text]


def _old_definition(reader: FakeReader) -> None:
    body = definition()
    properties = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    del properties["spec"]["properties"]["paused"]
    reader.answers[CRD_PATH] = body


def _not_established(reader: FakeReader) -> None:
    body = definition()
    body["status"]["conditions"][0]["status"] = "False"
    reader.answers[CRD_PATH] = body


def _quota(reader: FakeReader) -> None:
    quota = {"metadata": {"name": "team"},
             "status": {"hard": {"requests.memory": "64Gi", "pods": "9"},
                        "used": {"requests.memory": "60Gi"}}}  # fmt: skip
    reader.answers["/api/v1/namespaces/models/resourcequotas"] = {"items": [quota]}


def _default_limit(reader: FakeReader) -> None:
    limits = {"metadata": {"name": "small"}, "spec": {"limits": [{"default": {"cpu": "100m"}}]}}
    reader.answers["/api/v1/namespaces/models/limitranges"] = {"items": [limits]}


def _pressure(reader: FakeReader) -> None:
    body = node("a")
    body["status"]["conditions"].append({"type": "MemoryPressure", "status": "True"})
    reader.answers["/api/v1/nodes"]["items"][0] = body  # type: ignore[index]


def answer(path: str, value: Any) -> Any:
    return lambda reader: reader.answers.update({path: value})


def attribute(name: str, value: Any) -> Any:
    return lambda reader: setattr(reader, name, value)


def operators(*watched: str) -> Any:
    """One for each; what it watches is what the chart gives to --namespaces."""

    def change(reader: FakeReader) -> None:
        reader.answers["/apis/apps/v1/deployments"] = {"items": [
            {
                "metadata": {"namespace": f"n{i}", "name": "foveal"},
                "spec": {"replicas": 1, "template": {"spec": {"containers": [
                    {"name": "operator", "args": [f"--namespaces={names}", "--workers=8"]}
                ]}}},
                "status": {"readyReplicas": 1},
            }
            for i, names in enumerate(watched)
        ]}  # fmt: skip

    return change


CASES: dict[str, tuple[Any, str, str, str]] = {
    "old cluster": (
        answer("/version", {"minor": "30+", "gitVersion": "v1.30.1"}),
        "fail", "api server", "v1.30.1 at https://fake is older than 1.34",
    ),
    "new cluster": (
        answer("/version", {"minor": "44", "gitVersion": "v1.44.0"}),
        "warn", "api server", "v1.44.0 at https://fake is newer than 1.37",
    ),
    "clock": (attribute("skew", -90.0), "warn", "clock",
              "this machine is 90 s behind the API server"),
    "no definition": (answer(CRD_PATH, None), "fail", "definition",
                      "multimodalinferences.foveal.dev is not installed"),
    "old definition": (_old_definition, "warn", "definition",
                       "differs from this release's in 1 fields"),
    "not established": (_not_established, "fail", "definition",
                        "is installed and not established"),
    "no operator": (answer("/apis/apps/v1/deployments", {"items": []}), "fail", "operator",
                    "no operator found (by its chart's labels)"),
    "two operators": (operators("", "models,other"), "warn", "operator",
                      "n0/foveal and n1/foveal act on namespace models, and each changes back what "
                      "the other writes"),
    "operator elsewhere": (operators("other,third"), "warn", "operator",
                           "none acts on namespace models"),
    "no rights": (attribute("denied", {("get", "multimodalinferences")}), "fail", "your rights",
                  "in models you may not get multimodalinferences"),
    "few rights": (attribute("denied", {("list", "events")}), "warn", "your rights",
                   "in models you may not list events: kubectl events will not tell what happened"),
    "no namespace": (answer("/api/v1/namespaces/models", None), "fail", "namespace",
                     "models does not exist"),
    "quota": (_quota, "warn", "quota", "team: requests.memory 60Gi of 64Gi"),
    "default limit": (_default_limit, "warn", "quota",
                      "small: 100m is the CPU limit of containers without one"),
    "no nodes": (answer("/api/v1/nodes", {"items": []}), "fail", "nodes",
                 "none of 0 is ready and schedulable"),
    "pressure": (_pressure, "warn", "nodes", "a is under MemoryPressure"),
    "no label": (_no_label, "warn", "devices",
                 "8 nvidia.com/gpu on 1 node; 1 lack the label nvidia.com/gpu.memory"),
    "two sizes": (_two_sizes, "warn", "devices",
                  "devices differ in memory: budgets keep to the smallest"),
    "no gpu": (answer("/api/v1/nodes", {"items": [node("a")]}), "warn", "devices",
               "no GPU on any ready node"),
    "no storage": (answer("/apis/storage.k8s.io/v1/storageclasses", None), "warn", "storage",
                   "no storage class"),
    "no monitoring": (answer("/apis/monitoring.coreos.com/v1", None), "warn", "apis",
                      "podmonitors.monitoring.coreos.com is missing: nothing scrapes the pods by "
                      "itself"),
    "forbidden": (answer("/api/v1/nodes", ForbiddenError("nodes is forbidden")), "warn", "nodes",
                  "cannot be checked: nodes is forbidden"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_each_trouble_is_found_and_has_a_next_step(case: str) -> None:
    change, level, area, text = CASES[case]
    reader = healthy()
    change(reader)
    assert (level, area, text) in bad(reader)
    assert all(finding.next_step for finding in findings(reader) if finding.level != "ok")


def test_operators_that_share_no_namespace_are_in_order() -> None:
    reader = healthy()
    operators("models", "other,models-2")(reader)
    assert bad(reader) == []
    off = reader.answers["/apis/apps/v1/deployments"]["items"][1]  # type: ignore[index]
    off["spec"] = {"replicas": 0}
    assert ("warn", "operator") not in {found[:2] for found in bad(reader)}


def test_large_bounds_as_the_api_server_prints_them_are_no_difference() -> None:
    """Go prints the float -2^60 as -1152921504606847000: doctor called that another schema."""
    reader = healthy()
    body = definition()
    limits = json.dumps(body).replace("1152921504606846976", "1152921504606847000")
    reader.answers[CRD_PATH] = json.loads(limits)
    assert bad(reader) == []


def test_without_the_right_to_definitions_the_api_itself_is_asked() -> None:
    reader = healthy()
    reader.answers[CRD_PATH] = ForbiddenError("no")
    assert ("fail", "definition", "foveal.dev/v1alpha1 is not served") in bad(reader)
    reader.answers["/apis/foveal.dev/v1alpha1"] = {"resources": []}
    assert bad(reader) == []


def test_a_cluster_that_does_not_answer_is_one_finding() -> None:
    reader = healthy()
    reader.answers["/version"] = UnreachableError("https://fake does not answer: timed out")
    assert bad(reader) == [("fail", "cluster", "https://fake does not answer: timed out")]


def run(reader: FakeReader | None, *more: str) -> int:
    arguments = cli.parser().parse_args(["doctor", *more])

    def open_cluster(_: Any) -> FakeReader:
        if reader is None:
            raise NotConfiguredError("none")
        return reader

    return cli_doctor.run(arguments, open_cluster)


def test_exit_codes_and_formats(capsys: Any) -> None:
    assert run(healthy()) == 0
    assert "0 warnings, 0 failed" in capsys.readouterr().out
    broken = healthy()
    broken.answers[CRD_PATH] = None
    assert run(broken, "-o", "json") == 1
    body = json.loads(capsys.readouterr().out)
    assert {"area", "level", "text", "next_step"} == body[0].keys()


def test_without_a_cluster_this_machine_is_checked(capsys: Any) -> None:
    run(None)
    out = capsys.readouterr().out
    assert "none is configured; this machine was checked instead" in out
    assert "/dev/shm" in out
    assert run(None, "--kubeconfig", "/nowhere") == 1


@pytest.mark.parametrize("content", [b"[]", b"{", b"\xff", b"a: b\0"])
def test_a_kubeconfig_that_is_none_is_one_line(content: bytes, tmp_path: Path, capsys: Any) -> None:
    """The client library's errors of whatever type were tracebacks."""
    file = tmp_path / "config"
    file.write_bytes(content)
    for command in (["status"], ["doctor"]):
        code = cli.main([*command, "--kubeconfig", str(file)])
        said = capsys.readouterr()
        assert code == (1 if command == ["doctor"] else 4)
        assert f"the kubeconfig {file} is malformed: " in said.out + said.err


# --- this machine ------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "level", "area", "text"),
    [
        ({"shm_bytes": 64 << 20, "shm_free_bytes": 64 << 20}, "warn", "/dev/shm",
         "64 MiB, 64 MiB free: the default of containers, too small for video"),
        ({"shm_bytes": 0}, "fail", "/dev/shm", "is not there"),
        ({"shm_free_bytes": 1 << 20}, "fail", "/dev/shm", "32 GiB, 1.0 MiB free"),
        ({"available_bytes": GIB}, "warn", "memory", "64 GiB, 1.0 GiB available"),
        ({"cgroup_bytes": GIB}, "warn", "cgroup", "limited to 1.0 GiB"),
        ({"cgroup_bytes": 8 * GIB}, "ok", "cgroup", "limited to 8.0 GiB; budgets keep to it"),
        ({"cpus": 1.5}, "warn", "cpus", "1.5 to use"),
    ],
)  # fmt: skip
def test_machines(change: dict[str, Any], level: str, area: str, text: str) -> None:
    found = list(local_findings(msgspec.structs.replace(GOOD, **change)))
    assert (level, area, text) in [(f.level, f.area, f.text) for f in found]
    assert all(f.next_step for f in found if f.level != "ok")


def test_a_good_machine_has_nothing_to_mend() -> None:
    assert {finding.level for finding in local_findings(GOOD)} == {"ok"}


def test_facts_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal:  8192 kB\nMemAvailable: 4096 kB\n",
        "proc/cpuinfo": "processor: 0\nflags\t\t: fpu AVX2 fma\n",
        "proc/self/cgroup": "0::/kube/pod/box\n",
        "sys/fs/cgroup/kube/pod/memory.max": "2097152\n",
        "sys/fs/cgroup/kube/pod/box/memory.max": "max\n",
        "sys/fs/cgroup/kube/pod/box/cpu.max": "50000 100000\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "dev/shm").mkdir(parents=True)
    found = look(tmp_path)
    assert found.memory_bytes == 8192 * 1024
    assert found.available_bytes == 4096 * 1024
    assert found.cgroup_bytes == 2097152, "the limit of a cgroup above holds too"
    assert found.limit_bytes == 2097152
    assert found.cpus == 0.5
    assert found.cpu_flags == {"fpu", "avx2", "fma"}
    assert found.shm_bytes > 0


def test_nothing_readable_is_no_error(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert (found.memory_bytes, found.cgroup_bytes, found.shm_bytes) == (0, 0, 0)
    assert all(f.next_step for f in local_findings(found) if f.level != "ok")


def test_text_is_aligned_and_wrapped_on_a_terminal() -> None:
    some = [ok("nodes", "3 of 3 ready"), fail("definition", "is not installed", "apply it " * 20)]
    plain = report_text(some, Style()).splitlines()
    assert plain[0] == "ok    nodes       3 of 3 ready"
    assert plain[1] == "fail  definition  is not installed"
    assert plain[2].startswith("                  -> apply it apply it")
    assert plain[-1] == "1 ok, 0 warnings, 1 failed"
    wide = report_text(some, Style(is_terminal=True, width=60)).splitlines()
    assert all(visible_width(line) <= 60 for line in wide)
