"""`foveal-runtime`: starts one process from its document, or a whole local deployment.

Parses arguments and turns every expected failure into one line and an exit code: 0 ended well,
1 a process died, 2 bad arguments, configuration or model. Holds no behaviour of its own.
"""

from __future__ import annotations

import argparse
import logging
import re
import sys
from importlib.metadata import PackageNotFoundError, version

from foveal_runtime.main.launcher import end_with_parent
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.telemetry.last_words import LastWords, begin_last_words
from foveal_runtime.telemetry.memory import ContainerMemory

_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "ki": 1024, "mi": 1024**2, "gi": 1024**3}


def size(text: str) -> int:
    """Bytes of "512Mi", "4GiB", "0" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]?i?)b?", text.strip().lower())
    if not match or match.group(2) not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write 512Mi, 4Gi or bytes")
    return int(float(match.group(1)) * _UNITS[match.group(2)])


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be at least 1")
    return number


def _serve_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("model", help="directory of a Hugging Face checkpoint (safetensors)")
    add("--name", default="", help="what clients put into `model` (default: the folder's name)")
    add("--host", default="127.0.0.1")
    add("--port", type=positive, default=8000, help="first frontend's port")
    add("--frontends", type=positive, default=1, metavar="N", help="frontend processes, own ports")
    add("--engines", type=positive, default=1, metavar="M", help="engine processes")
    add("--processes", type=positive, default=1, help="HTTP processes behind each frontend's port")
    add("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    add("--max-model-len", type=int, default=0, help="0: the model's own limit")
    add("--max-num-batched-tokens", type=positive, default=2048)
    add("--max-num-mixed-tokens", type=int, default=0, metavar="N",
        help="the same beside streams, so that prompts stall them less; 0: derived")  # fmt: skip
    add("--max-num-seqs", type=positive, default=128)
    add("--block-size", type=positive, default=16, help="tokens of a KV block")
    add("--kv-cache", type=size, default=size("1Gi"), metavar="SIZE")
    add("--kv-dtype", default="auto", choices=["auto", "bfloat16", "fp8"],
        help="what keys and values are kept as; auto: as the model computes")  # fmt: skip
    add("--ipc-cache", type=size, default=size("4Gi"), metavar="SIZE", help="values, per engine")
    add("--ipc-type", default="inline", choices=["inline", "shm"])
    add("--shm-size", type=size, default=0, metavar="SIZE",
        help="/dev/shm for values with --ipc-type shm; 0: as the value cache")  # fmt: skip
    add("--processor-cache", type=size, default=size("4Gi"), metavar="SIZE", help="per process")
    add("--encoder-cache-embeds", type=int, default=0, metavar="N", help="0: derived")
    add("--encoder-host-tier", type=size, default=0, metavar="SIZE", help="behind it, per engine")
    add("--encoder-eviction", default="lru", choices=["lru", "cost"])
    add("--warm-directory", default="", help="encoder outputs survive a planned restart here")
    add("--no-prefix-caching", action="store_true")
    add("--device", default="cpu", help="cpu or cuda")
    add("--attention", default="auto", help="attention backend")
    add("--run-ahead", default="auto", choices=["auto", "on", "off"],
        help="submit a decode step before the last one's result; auto: on a GPU")  # fmt: skip
    add("--no-cuda-graphs", action="store_true", help="decode steps are not recorded")
    add("--threads", type=int, default=0, help="compute threads per engine; 0: from the CPU quota")
    add("--media-workers", type=int, default=0, help="0: from the CPU quota")
    add("--tensor-parallel", type=positive, default=1)
    add("--allowed-domain", action="append", default=[], help="host that image URLs may name")
    add("--file-root", default="", help="folder below which file: URLs may point")
    add("--allowed-origin", action="append", default=[],
        help='origin of web pages whose scripts may call the API (CORS); "*": any')  # fmt: skip
    add(
        "--ignore-unknown-options",
        action="store_true",
        help="leave out request options that this server does not know, instead of refusing them",
    )
    add("--api-key-file", default="", help="file with one API key per line")
    add("--admin-key-file", default="", help="file with keys for cache resets and resizes")
    add("--injection-key-file", default="", help='file with keys for injected media; "": off')
    add("--trust-injected-keys", action="store_true", help="injectors may name content keys")
    add("--log-format", default="auto", choices=["auto", "text", "json"])
    add(
        "--idle-check-seconds", type=float, default=0.0, help="debugging: check all books when idle"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="foveal-runtime", description="Foveal's data plane: frontends and engines."
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve_options(
        commands.add_parser("serve", help="frontends and engines on this machine, from one model")
    )
    for role in ("frontend", "engine"):
        part = commands.add_parser(role, help=f"one {role} process from its document")
        part.add_argument("--config", required=True, help="JSON document")
        if role == "frontend":  # given by the parent when the document asks for several processes
            part.add_argument("--process", type=int, default=None, help=argparse.SUPPRESS)
            part.add_argument("--sockets", default="", help=argparse.SUPPRESS)
    launch = commands.add_parser("launch", help="a deployment on this machine, from its document")
    launch.add_argument("--config", required=True, help="JSON document")
    launch.add_argument("--runtime", default="", help=argparse.SUPPRESS)
    fetch = commands.add_parser("fetch", help="download a model (hf:// or s3://) into a directory")
    fetch.add_argument("uri", help="hf://ORG/NAME or s3://BUCKET/PREFIX")
    fetch.add_argument("--to", required=True, metavar="DIRECTORY")
    fetch.add_argument("--revision", default="", help="branch, tag or commit of a hf:// model")
    fetch.add_argument("--metrics-port", type=int, default=0, metavar="PORT",
                       help="serve the progress at /metrics there; 0 (default): not")  # fmt: skip
    profile = commands.add_parser("profile", help="what a model costs, as JSON")
    profile.add_argument("model")
    profile.add_argument("--measure", action="store_true", help="load the model and measure")
    profile.add_argument("--max-pixels", type=positive, default=64_000_000)
    profile.add_argument("--max-video-pixels", type=int, default=0, help="0: as --max-pixels")
    profile.add_argument("--max-frames", type=positive, default=768)
    profile.add_argument("--max-seconds", type=float, default=600.0)
    profile.add_argument("--max-audio-seconds", type=float, default=0.0, help="0: as --max-seconds")
    profile.add_argument("--max-num-batched-tokens", type=positive, default=2048)
    profile.add_argument("--dtype", default="auto",
                         choices=["auto", "float32", "bfloat16", "float16"])  # fmt: skip
    profile.add_argument("--device", default="cpu", help="cpu or cuda: where it is to run")
    profile.add_argument("--no-processes", dest="processes", action="store_false",
                         help="do not start processes to see what they take")  # fmt: skip
    profile.add_argument("--output", default="", metavar="FILE",
                         help="one compact line into FILE instead of standard output")  # fmt: skip
    return parser


def _version() -> str:
    try:
        return version("foveal-runtime")
    except PackageNotFoundError:
        return "0+unknown"


def _run(arguments: argparse.Namespace) -> int:
    # Each role imports its own room only: a frontend must not pay for torch, nor `--help` for both.
    if arguments.command == "serve":
        from foveal_runtime.main.local import serve

        return serve.run(arguments)
    if arguments.command == "launch":
        from foveal_runtime.main.local import launch

        return launch.run(arguments.config, arguments.runtime)
    end_with_parent()
    if arguments.command in ("engine", "frontend"):
        begin_last_words(ContainerMemory())
    if arguments.command == "engine":
        from foveal_runtime.main import engine

        return engine.run(arguments.config)
    if arguments.command == "frontend":
        from foveal_runtime.main import frontend

        return frontend.run(arguments.config, arguments.process, arguments.sockets)
    if arguments.command == "fetch":
        from foveal_runtime.main import fetch

        return fetch.run(arguments)
    from foveal_runtime.main import profile

    return profile.run(arguments)


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except StartupError as error:
        _say(f"foveal-runtime: {error.message}")
        print(f"foveal-runtime: {error.message}", file=sys.stderr)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        _say(f"{type(error).__name__}: {error}")
        raise


def _say(line: str) -> None:
    """Into the termination message, where a frontend or an engine keeps one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LastWords):
            handler.say(line)


if __name__ == "__main__":
    sys.exit(main())
