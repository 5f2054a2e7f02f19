"""`foveal-runtime`: starts one process from its document, or a whole local deployment.

Parses arguments and turns every expected failure into one line and an exit code: 0 ended well,
1 a process died, 2 bad arguments, configuration or model. Holds no behaviour of its own.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import sys
from collections.abc import Mapping
from typing import Any

from foveal_runtime.main.launcher import end_with_parent
from foveal_runtime.main.local import bench
from foveal_runtime.main.local.options import (
    DTYPES,
    EPILOG,
    QUANTIZATIONS,
    CommandParser,
    Parser,
    add_options,
    configured,
    pixels,
    pixels_or_off,
    port,
    positive,
    seconds,
)
from foveal_runtime.plan.config import DEFAULT_VIDEO_FRAMES, DEFAULT_VIDEO_PIXELS
from foveal_runtime.plan.errors import StartupError, file_problem
from foveal_runtime.telemetry.memory import ContainerMemory
from foveal_runtime.telemetry.startup import runtime_version
from foveal_runtime.telemetry.termination_message import (
    TerminationMessage,
    keep_termination_message,
)

PROGRAM = os.environ.get("FOVEAL_PROGRAM", "foveal-runtime")
"""As it was called: `foveal serve` hands on to this program."""


def parser(defaults: Mapping[str, Any] | None = None) -> argparse.ArgumentParser:
    """`defaults`: of `serve`, by their field."""
    parser = Parser(prog=PROGRAM, description="Foveal's data plane: frontends and engines.")
    parser.add_argument("--version", action="version", version=runtime_version())
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="COMMAND", parser_class=CommandParser
    )
    serve = commands.add_parser(
        "serve",
        help="frontends and engines on this machine, from one model",
        description="Serves a model on this machine, sized to it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_options(serve)
    serve.set_defaults(**(defaults or {}))
    bench.add_options(
        commands.add_parser(
            "bench",
            help="how fast a server answers, and what its caches save",
            description="Sends seeded requests to OpenAI-compatible servers and measures.",
            epilog=bench.EPILOG,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
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
    fetch = commands.add_parser(
        "fetch",
        help="download a model (hf://, s3:// or oci://) into a directory",
        description="Downloads a model. Repeat the command to continue an interrupted download.",
        epilog=_FETCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fetch.add_argument("uri", help="hf://ORG/NAME, s3://BUCKET/PREFIX or oci://REGISTRY/NAME:TAG")
    fetch.add_argument("--to", metavar="DIRECTORY",
                       help="where to (default: one in ~/.cache/foveal/models, which is "
                       "printed)")  # fmt: skip
    fetch.add_argument("--revision", default="",
                       help="branch, tag or commit of a hf:// model (default: main)")  # fmt: skip
    fetch.add_argument("--metrics-port", type=port, default=0, metavar="PORT",
                       help="port whose /metrics shows the progress (default: none)")  # fmt: skip
    _add_profile(commands)
    return parser


def _add_profile(commands: Any) -> None:
    profile = commands.add_parser(
        "profile",
        help="what a model costs, as JSON",
        description="Predicts what a model costs from config.json, the processor's files and the\n"
        "headers of the weight files. Weights are not read; with --assume-dtype they need\n"
        "not be there.",
        epilog=_PROFILE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = profile.add_argument
    add("model", metavar="MODEL", help="a directory with a Hugging Face checkpoint")
    add("--measure", action="store_true",
        help="load the model on --device and measure (default: predict)")  # fmt: skip
    add("--max-pixels", type=pixels, default=64_000_000, metavar="PIXELS",
        help="largest image (default: %(default)s)")  # fmt: skip
    add("--resize-to-pixels", type=pixels_or_off, default=0, metavar="PIXELS",
        help="larger images are shrunk to this size (default: off)")  # fmt: skip
    add("--max-video-pixels", type=pixels_or_off, default=0, metavar="PIXELS",
        help="largest frame of a video (default: as --max-pixels)")  # fmt: skip
    add("--resize-video-to-pixels", type=pixels_or_off, metavar="PIXELS",
        default=DEFAULT_VIDEO_PIXELS,
        help="larger frames are shrunk to this size, 0 is off (default: %(default)s)")  # fmt: skip
    add("--max-frames", type=positive, default=DEFAULT_VIDEO_FRAMES, metavar="N",
        help="frames that are kept of a video (default: %(default)s)")  # fmt: skip
    add("--max-seconds", type=seconds, default=600.0, metavar="SECONDS",
        help="longest video (default: %(default)g)")  # fmt: skip
    add("--max-audio-seconds", type=seconds, default=0.0, metavar="SECONDS",
        help="longest audio (default: as --max-seconds)")  # fmt: skip
    add("--max-num-batched-tokens", type=positive, default=2048, metavar="TOKENS",
        help="tokens of the step that --measure computes (default: %(default)s)")  # fmt: skip
    add("--dtype", default="auto", choices=DTYPES,
        help="type of weights and activations (default: auto, as in the checkpoint)")  # fmt: skip
    add("--quantization", default="auto", choices=QUANTIZATIONS,
        help="what the decoder's weights are quantised to while they are loaded (default: auto, "
        "as in the checkpoint)")  # fmt: skip
    add("--assume-dtype", default="", choices=["float32", "bfloat16", "float16"],
        help="type of weights that are not there; their bytes follow from config.json (default: "
        "the weights are there)")  # fmt: skip
    add("--device", default="cpu",
        help="where the model is to run, cpu or cuda (default: %(default)s)")  # fmt: skip
    add(
        "--no-processes",
        dest="processes",
        action="store_false",
        help="do not start processes to measure their memory (default: they are started)",
    )
    add("--output", default="", metavar="FILE",
        help="write one compact line into FILE (default: standard output)")  # fmt: skip


_FETCH_EPILOG = """\
examples:
  foveal fetch hf://Qwen/Qwen2.5-VL-7B-Instruct
  foveal fetch s3://models/qwen --to ./qwen

HF_HOME, HF_ENDPOINT and HF_TOKEN, S3_ENDPOINT_URL and AWS_*, and docker's logins are obeyed.

exit codes: 0 the model is there, 2 wrong arguments or the download failed, 130 interrupted
"""
_PROFILE_EPILOG = """\
examples:
  foveal profile ./my-model > profile.json
  foveal profile ./my-model --max-pixels 4194304 --device cuda

exit codes: 0 the profile is written, 2 wrong arguments or a model that cannot be served,
130 interrupted
"""


def _run(arguments: argparse.Namespace) -> int:
    # Each role imports its own packages: a frontend must not pay for torch, nor `--help` for both.
    if arguments.command == "serve":
        from foveal_runtime.main.local import serve

        return serve.run(arguments)
    if arguments.command == "bench":
        return bench.run(arguments)
    if arguments.command == "launch":
        from foveal_runtime.main.local import launch

        return launch.run(arguments.config, arguments.runtime)
    end_with_parent()
    if arguments.command in ("engine", "frontend"):
        keep_termination_message(ContainerMemory())
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


def complete() -> None:
    """Ends the process with what may follow, when a shell's completion script asks."""
    try:
        from argcomplete.completers import DirectoriesCompleter, FilesCompleter, SuppressCompleter
        from argcomplete.finders import CompletionFinder
    except ImportError:  # comes with `foveal`, whose completion script this answers
        sys.exit(1)
    root = parser()
    assert isinstance(root, Parser)
    for action in root.all_actions():
        if action.metavar == "FILE":
            action.completer = FilesCompleter()  # type: ignore[attr-defined]
        elif action.metavar in ("DIRECTORY", "MODEL") or action.dest == "model":
            action.completer = DirectoriesCompleter()  # type: ignore[attr-defined]
    CompletionFinder()(root, default_completer=SuppressCompleter())


def main(argv: list[str] | None = None) -> int:
    if "_ARGCOMPLETE" in os.environ:
        complete()
    given = sys.argv[1:] if argv is None else argv
    code = 0
    try:
        code = _answer(given)
        sys.stdout.flush()
    except BrokenPipeError:
        if given[:1] in _ROLES or not _leave_unread():
            raise
    return code


_ROLES = (["engine"], ["frontend"])


def _answer(given: list[str]) -> int:
    """Runs the command and says, in a line, how it failed."""
    try:
        defaults = configured(given[1:]) if given[:1] == ["serve"] else {}
        return _run(parser(defaults).parse_args(given))
    except StartupError as error:
        _say(f"{PROGRAM}: {error.message}")
        _tell(error.message)
        return int(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        _tell("interrupted; the next start continues")
        return 130
    except Exception as error:
        # Of a user's files and disks; an engine's or a frontend's failure keeps its traceback.
        is_ours = given[:1] not in _ROLES
        if is_ours and isinstance(error, OSError) and (said := file_problem(error)):
            _tell(said)
            return 2
        _say(f"{type(error).__name__}: {error}")
        raise


def _tell(line: str) -> None:
    try:
        print(f"{PROGRAM}: {line}", file=sys.stderr)
    except BrokenPipeError:
        _leave_unread()


def _leave_unread() -> bool:
    """Whether a reader of our output has seen enough (`| head`). What is left goes nowhere, so that
    the interpreter's end does not try again."""
    gone = [one for one in (1, 2) if _is_unread(one)]
    with open(os.devnull, "w") as nowhere:
        for one in gone:
            os.dup2(nowhere.fileno(), one)
    return bool(gone)


def _is_unread(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))


def _say(line: str) -> None:
    """Into the termination message, where a frontend or an engine keeps one."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, TerminationMessage):
            handler.say(line)


if __name__ == "__main__":
    sys.exit(main())
