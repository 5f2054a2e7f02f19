"""The options of `foveal serve`: flags, a YAML file with the flags' names, environment variables.

A flag wins over FOVEAL_SERVE_<FLAG>, which wins over the file, which wins over the default. `None`
is "planned": the budget planner decides.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, get_args

from foveal_runtime.plan.config import (
    DEFAULT_DOCUMENT_PAGES,
    Pooling,
    Quantization,
    Task,
    ToolFormat,
)
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.plan.quantity import format_bytes

PREFIX = "FOVEAL_SERVE_"
MIN_SIZE = 1 << 20
_MOST_PIXELS = 1_000_000_000  # as in the resource
MOST_SPECULATIVE = 16  # as in the resource
_MOST_BYTES = 1e18
_UNITS = {"k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}  # fmt: skip
_NOT_IN_FILES = frozenset({"help", "config", "print-config", "plan"})
DTYPES = ["auto", "float32", "bfloat16", "float16"]
QUANTIZATIONS = [*get_args(Quantization)]

EPILOG = """\
examples:
  foveal serve Qwen/Qwen2.5-VL-7B-Instruct
  foveal serve ./my-model --kv-cache 8Gi --engines 2
  foveal serve ./my-model --plan                     # what it would take, without starting
  foveal serve ./my-model --print-config > serve.yaml; foveal serve --config serve.yaml

Sizes are written 512Mi or 4Gi. Every option can stand in the file of --config under its name
without dashes, and in an environment variable: --kv-cache is FOVEAL_SERVE_KV_CACHE. Downloads obey
HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE.

exit codes: 0 drained after Ctrl-C, 1 a process cannot be kept running, 2 wrong options or model,
3 does not fit this machine, 5 not ready or not drained in time, 130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """Errors are one line, with near misses of unknown options."""

    def error(self, message: str) -> NoReturn:
        if match := re.search(r"unrecognized arguments: (--[\w-]+)", message):
            known = [name for action in self._actions for name in action.option_strings]
            if near := difflib.get_close_matches(match[1], known, n=1, cutoff=0.6):
                message = f"unknown option {match[1]} (did you mean {near[0]}?)"
        self.exit(2, f"{self.prog}: {' '.join(message.split())}; see {self.prog} --help\n")

    def all_actions(self) -> Iterator[argparse.Action]:
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    yield from parser._actions
            yield action


class CommandParser(Parser):
    """Of one command: what it does not know is told with its own options and help."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def size(text: str) -> int:
    """Bytes of "512Mi", "4GiB" or "0"; a small number without a unit is a forgotten one."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", text.strip().lower())
    if match is None or float(match[1]) > _MOST_BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: write 512Mi or 4Gi")
    found = int(float(match[1]) * _UNITS.get(match[2] or "", 1))
    if 0 < found < MIN_SIZE and not match[2]:
        raise argparse.ArgumentTypeError(f"{text} means {text} bytes: write {text}Gi or {text}Mi")
    return found


def positive(text: str) -> int:
    return _number(text, 1)


def count(text: str) -> int:
    return _number(text, 0)


def pixels(text: str) -> int:
    return _number(text, 1, _MOST_PIXELS)


def pixels_or_off(text: str) -> int:
    return _number(text, 0, _MOST_PIXELS)


def speculative(text: str) -> int:
    return _number(text, 0, MOST_SPECULATIVE)


def port(text: str) -> int:
    number = _number(text, 0)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text} is not a port: give 1 to 65535, or 0 for any")
    return number


def share(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0.1 <= found <= 0.99:
        raise argparse.ArgumentTypeError(f"{text} is not a share: give 0.1 to 0.99, such as 0.9")
    return found


def seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0.0 <= found < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: give seconds, such as 90")
    return found


def _number(text: str, least: int, most: int = 2**63 - 1) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    if number > most:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {most}")
    return number


_KEYS = "file with one key per line"
_WORKERS = "processes of a frontend that decode media"
# fmt: off
# flag with its unit, field of the documents (or of serve.py's own), kind, default, default as shown
# ("": as it is), help. A kind is a parser of text, the choices, or the value that a switch sets.
_OPTIONS: dict[str, tuple[tuple[str, str, Any, Any, str, str], ...]] = {
    "model": (
        ("--name NAME", "name", str, "", "ORG/NAME, or the folder's name",
         "what clients put into `model`"),
        ("--revision REVISION", "revision", str, "", "main",
         "branch, tag or commit of a model of the hub"),
        ("--dtype", "dtype", DTYPES, "auto", "auto, as in the checkpoint",
         "numbers of weights and activations"),
        ("--quantization", "quantization", QUANTIZATIONS, "auto", "auto, as in the checkpoint",
         "what the decoder's weights are quantised to while they are loaded"),
        ("--task", "task", [*get_args(Task)], "generate", "",
         "what is served: text that the model generates, embeddings, or both"),
        ("--pooling", "pooling", [*get_args(Pooling)], "",
         "the checkpoint's, else last, of encoders mean",
         "hidden states that an embedding is made of"),
        ("--lora NAME=DIRECTORY", "loras", list, [], "none",
         "LoRA adapter as PEFT saves it, and its name in `model` of requests; may be repeated"),
        ("--max-model-len TOKENS", "max_model_len", count, 0, "the model's own limit",
         "prompt and output together"),
    ),
    "memory": (
        ("--memory SHARE", "memory", share, 0.9, "",
         "share of the device's memory and of this machine's available memory that is planned"),
        ("--kv-cache SIZE", "kv_bytes", size, None, "planned",
         "keys and values of one engine, over all its devices"),
        ("--pretouch-kv-cache", "kv_touched", True, False, "it is taken as it fills",
         "take all memory of --kv-cache on a CPU at the start, as pods do"),
        ("--lora-memory SIZE", "lora_bytes", size, None, "what --lora needs",
         "LoRA adapters on the device, those loaded later included"),
        ("--processor-cache SIZE", "processor_bytes", size, None, "planned",
         "processed items, for each HTTP process; 0 is off"),
        ("--ipc-cache SIZE", "ipc_bytes", size, None, "planned",
         "processed items that an engine keeps; 0 is off"),
        ("--encoder-cache-embeds EMBEDS", "encoder_embeds", count, 0, "planned",
         "encoder outputs on the device, for each engine"),
        ("--encoder-host-tier SIZE", "encoder_host_bytes", size, 0, "off",
         "host memory for encoder outputs evicted from the device, for each engine"),
        ("--shm-size SIZE", "shm_bytes", size, 0, "--ipc-cache where it is given, else 1Gi",
         "/dev/shm for items with --ipc-type shm, of all frontends together"),
    ),
    "serving": (
        ("--host HOST", "host", str, "127.0.0.1", "", "address to listen on"),
        ("--port PORT", "port", port, 8000, "",
         "port of the first frontend, the next ones follow; 0 is any"),
        ("--frontends N", "num_frontends", positive, 1, "", "frontends, each with its own port"),
        ("--processes N", "processes", positive, 1, "", "HTTP processes behind each port"),
        ("--engines N", "num_engines", positive, 1, "", "engines, each with all weights"),
        ("--max-num-seqs N", "max_num_seqs", positive, 128, "", "requests in one step"),
        ("--max-num-batched-tokens TOKENS", "max_num_batched_tokens", positive, 2048, "",
         "tokens in one step"),
        ("--max-num-mixed-tokens TOKENS", "max_num_mixed_tokens", count, 0, "automatic",
         "tokens in a step that also decodes running requests; fewer keep streams smoother"),
        ("--target-itl-ms MS", "target_itl_ms", count, 0, "none",
         "time between two tokens of a stream to keep to while prompts are computed beside it; "
         "new prompts wait longer for their first token"),
        ("--num-speculative-tokens N", "num_speculative_tokens", speculative, 0, "none",
         "tokens of an answer guessed from what it and its prompt say, which one step checks: "
         "answers that quote or repeat come sooner, none changes"),
        ("--ignore-unknown-options", "ignore_unknown_options", True, False, "they are refused",
         "leave out request options that this server does not know"),
        ("--enable-mm-embeds", "media_embeds", True, False, "they are refused",
         "take images as encoder outputs (image_embeds parts)"),
        ("--max-document-pages N", "max_document_pages", positive, DEFAULT_DOCUMENT_PAGES, "",
         "pages of a PDF; one with more is refused"),
        ("--chat-template FILE", "chat_template", str, "", "the checkpoint's",
         "chat template (Jinja)"),
        ("--request-default NAME=VALUE", "request_defaults", list, [], "the checkpoint's",
         "what applies where a request does not name the option, such as temperature=0.6 or "
         'chat_template_kwargs={"enable_thinking": false}; may be repeated'),
        ("--tool-format FORMAT", "tool_format", [*get_args(ToolFormat)], "",
         "from the chat template",
         "how the model writes tool calls"),
        ("--no-page", "page", False, True, "it is at /", "do not serve the chat page"),
        ("--start-timeout SECONDS", "start_timeout_seconds", seconds, 1800.0, "1800 s",
         "until every process is ready"),
        ("--drain-timeout SECONDS", "drain_timeout_seconds", seconds, 120.0, "120 s",
         "for streams to finish after Ctrl-C"),
    ),
    "caches": (
        ("--no-prefix-caching", "prefix_caching", False, True, "caching is on",
         "do not reuse keys and values of equal prompts"),
        ("--kv-dtype", "kv_dtype", ["auto", "bfloat16", "fp8"], "auto",
         "auto, as the model computes", "numbers of keys and values"),
        ("--block-size TOKENS", "block_size", positive, 16, "", "tokens of a KV block"),
        ("--ipc-type", "ipc_type", ["inline", "shm"], "inline", "", "how items reach engines"),
        ("--encoder-eviction", "encoder_eviction", ["lru", "cost"], "lru", "",
         "which idle encoder output goes first"),
        ("--warm-directory DIRECTORY", "warm_directory", str, "", "off",
         "encoder outputs survive a restart there"),
    ),
    "security": (
        ("--api-key-file FILE", "api_key_file", str, "", "no key is needed",
         f"{_KEYS} that requests need"),
        ("--admin-key-file FILE", "admin_key_file", str, "", "off",
         f"{_KEYS} for caches, LoRA adapters and the quarantine"),
        ("--injection-key-file FILE", "injection_key_file", str, "", "off",
         f"{_KEYS} for injected media"),
        ("--trust-injected-keys", "injection_trusted", True, False, "they may not",
         "injectors may name content keys"),
        ("--allowed-domain HOST", "allowed_domains", list, [], "none",
         "host that image URLs may name; may be repeated"),
        ("--allowed-origin ORIGIN", "allowed_origins", list, [], "none",
         'origin of web pages whose scripts may call the API (CORS), "*" is any; may be repeated'),
        ("--file-root DIRECTORY", "file_root", str, "", "off",
         "directory below which file: URLs may point"),
    ),
    "devices": (
        ("--device", "device", ["auto", "cpu", "cuda"], "auto", "auto, cuda when there is one",
         "where engines compute"),
        ("--tensor-parallel N", "tensor_parallel", positive, 1, "", "devices of one engine"),
        ("--threads N", "num_threads", count, 0, "from the CPU quota",
         "compute threads of an engine"),
        ("--media-workers N", "media_workers", count, 0, "from the CPU quota", _WORKERS),
    ),
    "advanced": (
        ("--attention NAME", "attention", str, "auto", "", "attention backend"),
        ("--run-ahead", "run_ahead", ["auto", "on", "off"], "auto", "auto, on a GPU",
         "submit a decode step before the last one's result"),
        ("--no-cuda-graphs", "cuda_graphs", False, True, "they are",
         "decode steps are not recorded"),
        ("--events-port PORT", "events_port", port, 0, "off",
         "cache events on loopback from this port on, two ports for each engine (stream, replay)"),
        ("--events-format", "events_format", ["vllm", "foveal"], "vllm", "",
         "schema of cache events: vLLM's KV events, or Foveal's own"),
        ("--events-topic TOPIC", "events_topic", str, "", "the schema's own",
         "topic of cache events"),
        ("--profile FILE", "profile", str, "", "computed once for each model",
         "the model's costs, as `foveal profile` writes them"),
        ("--log-format", "log_format", ["text", "json"], "text", "",
         "format of the log files"),
        ("--idle-check-seconds SECONDS", "idle_check_seconds", seconds, 0.0, "never",
         "debugging: check all books of an idle engine"),
    ),
}
# fmt: on


class _Collect(argparse.Action):
    """A list of every time the flag is given, in place of the default."""

    def __call__(
        self, parser: argparse.ArgumentParser, found: argparse.Namespace, value: Any, *_: Any
    ) -> None:
        before = getattr(found, self.dest)
        setattr(found, self.dest, [*([] if before is self.default else before), value])


def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of `serve`."""
    add = parser.add_argument
    add("model", nargs="?", metavar="MODEL",
        help="a directory, ORG/NAME of the Hugging Face hub, hf://ORG/NAME@REVISION, "
        "s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG")  # fmt: skip
    add("--config", metavar="FILE", help="YAML file with options, by their names without dashes")
    add("--print-config", action="store_true", help="print the options as such a file, and stop")
    add("--plan", action="store_true", help="print the memory plan, and stop")
    for title, rows in _OPTIONS.items():
        group = parser.add_argument_group(title)
        for flags, dest, kind, default, shown, text in rows:
            flag, _, unit = flags.partition(" ")
            text = f"{text} (default: {shown or default})".replace("%", "%%")
            more: dict[str, Any]
            if isinstance(kind, bool):
                more = {"action": "store_true" if kind else "store_false"}
            elif isinstance(kind, list):
                more = {"choices": kind}
            elif kind is list:
                more = {"action": _Collect, "metavar": unit}
            else:
                more = {"type": kind, "metavar": unit}
            group.add_argument(flag, dest=dest, default=default, help=text, **more)


def configured(argv: Sequence[str], environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Defaults of `serve` by their field: options of the environment, then those of the file that
    `argv` names by --config. Raises StartupError that names the file or the variable."""
    first = Parser(prog="foveal-runtime serve", add_help=False, allow_abbrev=False)
    first.add_argument("--config", default="")
    file = first.parse_known_args(list(argv))[0].config
    actions = _by_name()
    found: dict[str, Any] = {}
    for name, value in _read(file).items() if file else ():
        _take(found, actions, f"--config {file}: ", str(name), value)
    for variable, value in sorted(environment.items()):
        if variable.startswith(PREFIX):
            name = variable.removeprefix(PREFIX).lower().replace("_", "-")
            _take(found, actions, f"{variable}: ", name, value)
    return found


def _by_name() -> dict[str, argparse.Action]:
    parser = Parser(add_help=False)
    add_options(parser)
    found = {flag[2:]: action for action in parser._actions for flag in action.option_strings}
    return {name: action for name, action in found.items() if name not in _NOT_IN_FILES}


def _read(file: str) -> dict[Any, Any]:
    import yaml

    try:
        found = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError(f"--config {file}: {error.strerror}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise StartupError(
            f"--config {file} is not YAML: {' '.join(str(error).split())}"
        ) from error
    if not isinstance(found, dict | None):
        raise StartupError(f"--config {file}: write one option on each line, such as port: 8000")
    return found or {}


def _take(
    found: dict[str, Any],
    actions: Mapping[str, argparse.Action],
    where: str,
    name: str,
    value: Any,
) -> None:
    """Puts one option into `found`, in place of what stands there."""
    action = actions.get(name)
    if name == "model":
        found[name] = str(value)
    elif action is None:
        near = difflib.get_close_matches(name, actions, n=1, cutoff=0.6)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise StartupError(f"{where}unknown option {name}{hint}")
    elif action.nargs == 0:
        switch = {"true": True, "1": True, "false": False, "0": False}.get(str(value).lower())
        if switch is None:
            raise StartupError(f"{where}{name} is {value}: write true or false")
        found[action.dest] = action.const if switch else action.default
    elif isinstance(action, _Collect):
        values = value if isinstance(value, list) else [value]
        found[action.dest] = [_value(action, where, name, one) for one in values]
    else:
        found[action.dest] = _value(action, where, name, value)


def _value(action: argparse.Action, where: str, name: str, value: Any) -> Any:
    if isinstance(value, dict | list) or value is None:
        number = "a" if value is None else "one"
        raise StartupError(f"{where}{name} needs {number} value")
    # YAML reads on and off as true and false.
    text = str(value) if not isinstance(value, bool) else "on" if value else "off"
    if action.choices is not None:
        if text not in action.choices:
            choices = ", ".join(one for one in action.choices if one)
            raise StartupError(f"{where}{name} is {value}: choose from {choices}")
        return text
    if isinstance(value, bool):
        raise StartupError(f"{where}{name} is {str(value).lower()}: put it in quotes")
    try:
        return action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise StartupError(f"{where}{name}: {error}") from error


def printed(arguments: argparse.Namespace) -> str:
    """The options as a file for --config; those at "planned" are left out."""
    import yaml

    found: dict[str, Any] = {"model": arguments.model} if arguments.model else {}
    for name, action in _by_name().items():
        value = getattr(arguments, action.dest)
        if value is None or value == [] or value == "":
            continue
        if action.nargs == 0:
            if value != action.default:
                found[name] = True
        else:
            found[name] = format_bytes(value) if action.type is size else value
    return yaml.safe_dump(found, sort_keys=False)
