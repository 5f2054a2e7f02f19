"""The options of `foveal serve`: groups with defaults and units, files, the environment."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from foveal_runtime.main import cli
from foveal_runtime.main.launcher import Child
from foveal_runtime.main.local import options, serve
from foveal_runtime.main.local.options import Parser, add_options, configured, printed
from foveal_runtime.main.local.serve import known_items, local_documents
from foveal_runtime.main.local.sizing import installed_versions
from foveal_runtime.plan.budget.types import BudgetPlan
from foveal_runtime.plan.config import ModalitiesConfig, RequestDefaults
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.local import LocalDeploymentConfig
from foveal_runtime.plan.machine import Machine
from foveal_runtime.plan.profile import ItemProfile, ModelProfile, ProfileLimits
from tests.support.checkpoint_files import PROFILE, checkpoint


def profile_of_today(**versions: str) -> ModelProfile:
    return msgspec.structs.replace(
        PROFILE,
        items={"image": ItemProfile(num_tokens=64, num_embeds=64, processed_bytes=1 << 20)},
        limits=ProfileLimits.of(ModalitiesConfig()),
        versions={**installed_versions(), **versions},
    )


def parse(*argv: str, environment: dict[str, str] | None = None) -> argparse.Namespace:
    parser = Parser()
    add_options(parser)
    parser.set_defaults(**configured(argv, environment or {}))
    return parser.parse_args(argv)


def help_text(capsys: Any) -> str:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    return str(capsys.readouterr().out)


def test_help_has_groups_and_says_every_default(capsys: Any) -> None:
    text = help_text(capsys)
    groups = ["model", "memory", "serving", "caches", "security", "devices", "advanced"]
    assert re.findall(r"^(\w+):$", text, re.M)[-len(groups) - 1 : -1] == groups
    parser = Parser(add_help=False)
    add_options(parser)
    for action in parser._actions:
        assert action.help
        if action.option_strings and action.dest not in ("config", "print_config", "plan"):
            assert "(default: " in action.help, action.dest


@pytest.mark.parametrize("command", ["fetch", "profile"])
def test_help_of_the_other_commands_says_every_default_too(command: str, capsys: Any) -> None:
    """`--max-pixels MAX_PIXELS` stood there alone."""
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "exit codes:" in capsys.readouterr().out
    commands = next(a for a in cli.parser()._actions if isinstance(a, argparse._SubParsersAction))
    for action in commands.choices[command]._actions[1:]:
        assert action.help, action.dest
        assert not action.option_strings or "(default: " in action.help, action.dest


def test_every_option_is_a_field_of_the_documents_or_of_the_command() -> None:
    own = {"model", "config", "print_config", "plan", "memory", "revision", "profile",
           "start_timeout_seconds"}  # fmt: skip
    parser = Parser(add_help=False)
    add_options(parser)
    given = {action.dest for action in parser._actions} - own
    assert given <= serve._OPTIONS
    assert given >= local_documents.__kwdefaults__.keys()
    with pytest.raises(TypeError, match="no document has a field prot"):
        local_documents(lambda: 1, model="m", prot=80)


def test_a_flag_beats_the_environment_beats_the_file_beats_the_default(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: org/tiny\nport: 1\nengines: 2\nkv-cache: 8Gi\n")
    found = parse("--config", str(file), "--port", "3",
                  environment={"FOVEAL_SERVE_PORT": "2", "FOVEAL_SERVE_ENGINES": "4"})  # fmt: skip
    assert (found.port, found.num_engines, found.kv_bytes) == (3, 4, 8 << 30)
    assert (found.model, found.max_num_seqs) == ("org/tiny", 128)


def test_switches_and_lists_of_one_source_replace_those_of_another(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "no-page: true\nrun-ahead: on\nallowed-domain: [a.example, b.example]\nlora: x=/x\n"
    )
    argv = ["--config", str(file)]
    found = parse(*argv)
    assert (found.page, found.run_ahead, found.loras) == (False, "on", ["x=/x"])
    assert found.allowed_domains == ["a.example", "b.example"]
    environment = {"FOVEAL_SERVE_NO_PAGE": "false", "FOVEAL_SERVE_ALLOWED_DOMAIN": "c.example"}
    found = parse(*argv, "--lora", "y=/y", "--lora", "z=/z", environment=environment)
    assert (found.page, found.loras) == (True, ["y=/y", "z=/z"])
    assert found.allowed_domains == ["c.example"]
    flags = ["--no-page", "--allowed-domain", "d.example"]
    found = parse(*argv, *flags, environment=environment)
    assert (found.page, found.allowed_domains) == (False, ["d.example"])


@pytest.mark.parametrize(
    ("text", "said"),
    [("port: web", "port: 'web' is not a whole number of at least 0"),
     ("dtype: float8", "dtype is float8: choose from auto, float32, bfloat16, float16"),
     ("name: on", "name is true: put it in quotes"),
     ("port: [1, 2]", "port needs one value")],
)  # fmt: skip
def test_a_refused_value_names_where_it_stands(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(StartupError) as refused:
        parse("--config", str(file))
    assert refused.value.message == f"--config {file}: {said}"
    with pytest.raises(StartupError) as refused:
        parse(environment={"FOVEAL_SERVE_KV_CACHE": "much"})
    assert refused.value.message.startswith("FOVEAL_SERVE_KV_CACHE: kv-cache: 'much' is not a size")


def test_cache_events_have_two_ports_for_each_engine() -> None:
    ports = iter(range(20_000, 20_100))
    options = {"num_engines": 2, "events_port": 5557, "events_topic": "kv@a@m"}
    engines, _ = local_documents(lambda: next(ports), model="m", **options)
    assert [one.events_bind for one in engines] == ["tcp://127.0.0.1:5557", "tcp://127.0.0.1:5559"]
    assert {(one.events_format, one.events_topic) for one in engines} == {("vllm", "kv@a@m")}
    taken = [Child(one, Path("/unused"), {}).listens_on() for one in engines]
    assert [port for one in taken for _, port in one if port < 20_000] == [5557, 5558, 5559, 5560]
    engines, _ = local_documents(lambda: next(ports), model="m")
    assert engines[0].events_bind == ""


def test_largest_items_of_other_versions_are_asked_for_again() -> None:
    assert known_items(profile_of_today(), 4096)["image"].num_tokens == 64
    assert known_items(profile_of_today(transformers="4.0.0"), 4096) == {}
    nameless = msgspec.structs.replace(profile_of_today(), versions={})
    assert known_items(nameless, 4096) == {}


def launched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *options: str
) -> LocalDeploymentConfig:
    """What `serve` would start with a profile from a file and these options."""
    started: list[LocalDeploymentConfig] = []
    here = Machine(memory_bytes=64 << 30, available_bytes=64 << 30, cpus=4.0, devices=())
    monkeypatch.setattr(serve.machine, "look", lambda: here)
    monkeypatch.setattr(serve, "launch", lambda config: started.append(config) or 0)
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(profile_of_today()))
    model = str(checkpoint(tmp_path / "model"))
    argv = ["serve", model, "--port", "0", "--device", "cpu", "--kv-cache", "2Gi"]
    assert cli.main([*argv, "--profile", str(file), *options]) == 0
    return started[0]


def test_a_profile_from_a_file_says_nothing_of_this_models_items(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be another model's, or of another processor configuration."""
    started = launched(tmp_path, monkeypatch)
    assert [engine.items for engine in started.engines] == [{}]


def test_a_chat_template_and_defaults_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}\n")
    options = ["temperature=0", 'chat_template_kwargs={"enable_thinking": false}']
    argv = [part for one in options for part in ("--request-default", one)]
    started = launched(tmp_path, monkeypatch, "--chat-template", str(file), *argv)
    [frontend] = started.frontends
    assert frontend.chat_template == "{{ messages }}\n"
    assert frontend.request_defaults == RequestDefaults(
        temperature=0.0, chat_template_kwargs={"enable_thinking": False}
    )


@pytest.mark.parametrize(("pages", "images"), [(40, 40), (4, 16)])
def test_a_document_may_have_as_many_pages_as_asked(pages: int, images: int) -> None:
    """Its pages count as images of the prompt: 40 pages were refused for 16 images."""
    engines, frontends = local_documents(lambda: 20_000, model="m", max_document_pages=pages)
    assert engines[0].modalities == frontends[0].modalities
    limits = frontends[0].modalities.image
    assert (limits.max_pages, limits.max_per_prompt) == (pages, images)


@pytest.mark.parametrize(
    ("argv", "each"),
    [([], 1 << 29), (["--ipc-cache", "6Gi"], 3 << 30), (["--shm-size", "4Gi"], 2 << 30),
     (["--ipc-cache", "0"], 0)],
)  # fmt: skip
def test_shared_values_have_what_was_planned_for_them(
    argv: list[str], each: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A frontend had its part of an engine's planned pool, of which the plan knew nothing, and each
    was charged for the shared memory of all."""
    plans: list[BudgetPlan] = []
    size_up = serve.size_up
    monkeypatch.setattr(serve, "size_up", lambda *a: plans.append(size_up(*a)) or plans[-1])
    started = launched(tmp_path, monkeypatch, "--frontends", "2", "--ipc-type", "shm", *argv)
    assert [one.shm_bytes for one in started.frontends] == [each, each]
    lines = [line.bytes for line in plans[0].frontend.lines if line.name == "sharedValues"]
    assert sum(lines) == each


@pytest.mark.parametrize(("argv", "is_touched"), [([], False), (["--pretouch-kv-cache"], True)])
def test_memory_of_the_kv_cache_is_taken_when_asked(
    argv: list[str], is_touched: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the command to the engine's document; a pod's own default is to take it at the start."""
    started = launched(tmp_path, monkeypatch, *argv)
    assert [engine.caches.kv_touched for engine in started.engines] == [is_touched]


def test_what_is_printed_can_be_read_again(tmp_path: Path) -> None:
    argv = ["org/tiny", "--kv-cache", "1536Mi", "--no-prefix-caching", "--memory", "0.8",
            "--allowed-domain", "a.example", "--allowed-domain", "b.example"]  # fmt: skip
    first = parse(*argv)
    file = tmp_path / "serve.yaml"
    file.write_text(printed(first))
    second = parse("--config", str(file))
    assert {**vars(second), "config": None} == vars(first)
    assert "kv-cache: 1536Mi" in printed(first)
    assert "ipc-cache" not in printed(first), "what the planner decides stays open"


@pytest.mark.parametrize(
    ("text", "size"),
    [("0", 0), ("512Mi", 512 << 20), ("4GiB", 4 << 30), ("1.5gi", 3 << 29), ("2G", 2 * 10**9),
     ("1048576", 1 << 20)],
)  # fmt: skip
def test_sizes(text: str, size: int) -> None:
    assert options.size(text) == size
