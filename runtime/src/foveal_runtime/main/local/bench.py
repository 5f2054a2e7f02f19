"""`foveal bench URL`: how fast an OpenAI-compatible server answers, and what its caches save.

Options, checks before anything is measured, and what is shown; foveal_runtime.bench does the work.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import difflib
import http.client
import os
import platform
import sys
import urllib.error
import urllib.parse
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from foveal_runtime.bench.traces import KINDS
from foveal_runtime.main.local.options import count, positive
from foveal_runtime.plan.errors import StartupError

if TYPE_CHECKING:
    from foveal_runtime.bench.client import Target
    from foveal_runtime.bench.images import ImageKind
    from foveal_runtime.bench.report import Report
    from foveal_runtime.bench.runs import BenchLoad

_PACKAGES = {"aiohttp": "aiohttp", "rich": "rich", "PIL": "pillow",
             "prometheus_client": "prometheus-client"}  # fmt: skip
_TRACES = "\n".join(f"  {name:<22} {kind.text}" for name, kind in KINDS.items())
USUAL_TRACES = "hits-0,hits-30,hits-95"

EPILOG = f"""\
traces, seeded, so that every server gets the same requests; text@32 has 32 conversations at a time:
{_TRACES}

examples:
  foveal bench http://127.0.0.1:8000
  foveal bench http://127.0.0.1:8000 --compare http://127.0.0.1:9000 --rounds 3 --plot bench.png
  foveal bench https://models.example --api-key-file key --traces multi-turn,text@32
  foveal bench http://127.0.0.1:8000 --replay requests.jsonl --rate 4

A line of --replay is {{"messages": [...]}} with, if wanted, "conversation" (a name: lines of the
same name follow each other with the whole history), "at" (seconds) and "max_tokens".

exit codes: 0 all requests were answered, 1 a request failed or replies differ (--equal-replies),
2 wrong options or no such server, 130 interrupted; never because something was slow
"""


# fmt: off
def add_options(parser: argparse.ArgumentParser) -> None:
    """All options of `bench`."""
    parser.add_argument("url", nargs="?", metavar="URL", default="http://127.0.0.1:8000",
                        help="the server, as http://HOST:PORT (default: %(default)s)")
    add = parser.add_argument_group("servers").add_argument
    add("--compare", metavar="URL", action="append", default=[],
        help="another server, which gets the same requests in turn with the first; may be repeated "
        "(default: none)")
    add("--model", metavar="NAME",
        help="model that requests name (default: the first that each server lists)")
    add("--api-key-file", metavar="FILE", default="",
        help="file whose first line is the key of the first server (default: no key)")
    add("--compare-api-key-file", metavar="FILE", default="",
        help="likewise, of the servers of --compare (default: no key)")
    add("--timeout", metavar="SECONDS", type=_seconds, default=600.0,
        help="of one request (default: 600 s)")
    add = parser.add_argument_group("requests").add_argument
    add("--traces", metavar="NAMES", type=_traces, default=USUAL_TRACES,
        help="traces of the list below, with commas, or all (default: %(default)s)")
    add("--replay", metavar="FILE",
        help="send the requests of a saved trace (JSON lines) instead (default: off)")
    add("--save-trace", metavar="FILE",
        help="save the first round's requests as such a file (default: not saved)")
    add("--requests", metavar="N", type=count, default=24,
        help="of a trace; 0 is as many as it usually has (default: %(default)s)")
    add("--rounds", metavar="N", type=positive, default=1,
        help="each with other images and texts (default: %(default)s)")
    add("--concurrency", metavar="N", type=count, default=None,
        help="conversations at the same time, also with --rate (default: 4; no limit with --rate "
        "or the times of --replay)")
    add("--rate", metavar="PER_SECOND", type=_rate, default=0.0,
        help="conversations arrive at random, so many a second (Poisson) (default: off)")
    add("--max-tokens", metavar="TOKENS", type=positive, default=16,
        help="of a reply (default: %(default)s)")
    add("--words", metavar="N", type=positive, default=50,
        help="of a question (default: %(default)s)")
    add("--image", metavar="SIZE", type=_image, default="336x336",
        help="of drawn images, such as 1024x1024.jpeg (default: %(default)s, PNG)")
    add("--seed", metavar="N", type=count, default=1,
        help="of the first round (default: %(default)s)")
    add = parser.add_argument_group("results").add_argument
    add("--json", metavar="FILE", help="every figure and reply (default: not written)")
    add("--plot", metavar="FILE", help="a plot, as .png or .svg (default: not drawn)")
    add("--show", metavar="FILE",
        help="show a file of --json again, with --plot, and measure nothing (default: off)")
    add("--equal-replies", action="store_true",
        help="fail when servers answer differently, which they do not in float32 "
        "(default: they may)")
# fmt: on


def _seconds(text: str) -> float:
    return _above_zero(text, "seconds")


def _rate(text: str) -> float:
    return _above_zero(text, "conversations a second")


def _above_zero(text: str, what: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of {what} above 0")
    return found


def _traces(text: str) -> str:
    if text == "all":
        return ",".join(KINDS)
    for kind in text.split(","):
        name, at, own = kind.partition("@")
        if at and not (own.isdecimal() and int(own)):
            raise argparse.ArgumentTypeError(f"{kind!r}: write {name}@32 for 32 at a time")
        if name not in KINDS:
            near = difflib.get_close_matches(name, KINDS, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(KINDS)}"
            raise argparse.ArgumentTypeError(f"there is no trace {name!r} ({hint})")
    return text


def _image(text: str) -> ImageKind | str:
    try:
        from foveal_runtime.bench.images import ImageKind
    except ImportError:
        return text  # `run` says which packages are missing
    try:
        return ImageKind.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    """Measures and shows. Raises StartupError."""
    if missing := [name for module, name in _PACKAGES.items() if find_spec(module) is None]:
        raise StartupError(
            f"packages are missing ({', '.join(missing)}): pip install 'foveal-runtime[bench]'"
        )
    from foveal_runtime.bench.display import check_plot

    if arguments.plot:
        check_plot(Path(arguments.plot))
    for option in ("json", "plot", "save_trace"):
        path = getattr(arguments, option)
        if path and (reason := _why_not_written(Path(path))):
            raise StartupError(f"--{option.replace('_', '-')} {path}: {reason}")
    if arguments.show:
        return _show(arguments, _saved_report(arguments.show))
    load = _load(arguments)
    targets = _targets(arguments)
    report = _new_report(arguments, targets)
    if arguments.save_trace:
        _save(Path(arguments.save_trace), load, arguments.seed)
    try:
        _measure(arguments, load, targets, report)
    except KeyboardInterrupt:
        print("foveal bench: interrupted; what was measured:", file=sys.stderr)
        _show(arguments, report)
        return 130
    except _NotWritten:
        arguments.json = ""
        _show(arguments, report)
        raise
    return _show(arguments, report)


class _NotWritten(StartupError):
    """A file of results cannot be written any more."""


@contextlib.contextmanager
def _written(option: str, file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise _NotWritten(f"{option} {file}: {error.strerror}") from error


def _why_not_written(path: Path) -> str:
    if not path.parent.is_dir():
        return f"there is no directory {path.parent}"
    target = Path(os.path.realpath(path))  # of a link, which stays
    is_new = not target.exists()
    try:
        target.open("ab").close()
        if is_new:
            target.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _load(arguments: argparse.Namespace) -> BenchLoad:
    from foveal_runtime.bench import saved
    from foveal_runtime.bench.images import ImageKind
    from foveal_runtime.bench.runs import BenchLoad

    trace = saved.load(Path(arguments.replay), arguments.max_tokens) if arguments.replay else None
    concurrency = arguments.concurrency
    if concurrency is None:
        concurrency = 0 if arguments.rate or (trace is not None and trace.starts) else 4
    image = arguments.image
    return BenchLoad(
        kinds=tuple(arguments.traces.split(",")),
        num_requests=arguments.requests,
        concurrency=concurrency,
        rate=arguments.rate,
        max_tokens=arguments.max_tokens,
        num_words=arguments.words,
        image=ImageKind.parse(image) if isinstance(image, str) else image,
        saved=trace,
        timeout_seconds=arguments.timeout,
    )


def _targets(arguments: argparse.Namespace) -> list[Target]:
    keys = [arguments.api_key_file, *(arguments.compare_api_key_file for _ in arguments.compare)]
    options = ["--api-key-file", *("--compare-api-key-file" for _ in arguments.compare)]
    found: list[Target] = []
    for url, file, option in zip([arguments.url, *arguments.compare], keys, options, strict=True):
        target = _target(url, _key(file, option), option, arguments.model or "")
        if any(one.name == target.name for one in found):  # a server beside itself: its own noise
            target = msgspec.structs.replace(target, name=f"{target.name} ({len(found) + 1})")
        found.append(target)
    return found


def _key(file: str, option: str) -> str:
    if not file:
        return ""
    try:
        lines = Path(file).read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise StartupError(f"{option} {file}: {reason}") from error
    if not lines:
        raise StartupError(f"{option} {file}: the file is empty: write the key on its first line")
    return lines[0]


def _check_url(url: str, option: str) -> None:
    try:
        parts = urllib.parse.urlsplit(url)
        is_url = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_url = False
    if "@" in url:  # not repeated: it holds a password
        raise StartupError(f"write URLs without a name and password, and the key into {option}")
    if not is_url:
        raise StartupError(f"{url} is not the URL of a server: write http://HOST:PORT")


def _target(url: str, key: str, option: str, model: str) -> Target:
    """A server that answers, and the model to ask."""
    from foveal_runtime.bench.client import Target, get

    _check_url(url, option)
    base = url.rstrip("/").removesuffix("/v1")
    target = Target((base,), model, base.partition("://")[2], key)
    try:
        answer = get(target, "/v1/models", 30)
        found = msgspec.json.decode(answer, type=dict[str, Any])
        models = [str(one["id"]) for one in found["data"]]
    except urllib.error.HTTPError as error:
        if error.code in (401, 403):
            hint = "does not accept the key of" if key else "wants an API key: give"
            raise StartupError(f"{base} {hint} {option}") from error
        raise StartupError(
            f"{base}/v1/models answers {error.code}: give the URL of an OpenAI-compatible server"
        ) from error
    except http.client.HTTPException as error:
        raise StartupError(
            f"{base} does not speak HTTP: give the URL of an OpenAI-compatible server"
        ) from error
    except (OSError, urllib.error.URLError) as error:
        reason = getattr(error, "reason", error)
        reason = getattr(reason, "strerror", None) or reason
        raise StartupError(f"no server answers at {base}: {reason}") from error
    except (msgspec.MsgspecError, LookupError, TypeError, ValueError) as error:
        raise StartupError(
            f"{base}/v1/models lists no models: give the URL of an OpenAI-compatible server"
        ) from error
    if model and model not in models:
        raise StartupError(f"{base} has no model {model}: it lists {', '.join(models) or 'none'}")
    if not models:
        raise StartupError(f"{base}/v1/models lists no models yet: wait until one is loaded")
    return msgspec.structs.replace(target, model=model or models[0])


def _new_report(arguments: argparse.Namespace, targets: list[Target]) -> Report:
    from foveal_runtime.bench.report import Report, ServerFacts

    plain = {k: v for k, v in vars(arguments).items() if isinstance(v, str | int | float | list)}
    return Report(
        date=datetime.date.today().isoformat(),
        command=sys.argv,
        machine={"client": platform.machine(), "kernel": platform.release()},
        versions={"python": platform.python_version()},
        options={**plain, "image": str(arguments.image)},
        servers=[ServerFacts(name=t.name, urls=list(t.urls), model=t.model) for t in targets],
        results=[],
    )


def _saved_report(file: str) -> Report:
    from foveal_runtime.bench.report import loads

    try:
        return loads(Path(file).read_bytes())
    except OSError as error:
        raise StartupError(f"--show {file}: {error.strerror}") from error
    except (msgspec.MsgspecError, RecursionError) as error:
        raise StartupError(f"--show {file} is no file of --json: {error}") from error


def _save(path: Path, load: BenchLoad, seed: int) -> None:
    from foveal_runtime.bench import saved
    from foveal_runtime.bench.runs import RunProgress, draw_all

    with _written("--save-trace", str(path)), path.open("wb") as file:
        for trace in [load.saved] if load.saved else [load.trace(k, seed) for k in load.kinds]:
            file.write(saved.dumps(trace, draw_all(trace, load, RunProgress())))


def _measure(
    arguments: argparse.Namespace, load: BenchLoad, targets: list[Target], report: Report
) -> None:
    from foveal_runtime.bench.display import BarProgress
    from foveal_runtime.bench.report import dumps
    from foveal_runtime.bench.runs import run_all

    with BarProgress() as progress:
        for result in run_all(targets, load, arguments.rounds, arguments.seed, progress):
            report.results.append(result)
            if arguments.json:  # what is measured is kept, whatever comes
                with _written("--json", arguments.json):
                    Path(arguments.json).write_bytes(dumps(report))


def _show(arguments: argparse.Namespace, report: Report) -> int:
    from foveal_runtime.bench.display import draw_plot, show

    if not report.results:
        return 0
    wrong = show(report)
    for option in ("json", "save_trace") if not arguments.show else ():
        if path := getattr(arguments, option):
            print(f"written: {path}")
    if arguments.plot:
        with _written("--plot", arguments.plot):
            draw_plot(report, Path(arguments.plot))
        print(f"written: {arguments.plot}")
    return 1 if wrong else 0
