"""One run of `foveal dashboard`: the source, its times, and where the page goes.

Used by command.py. Reads only; writes one file, or serves the page on the loopback address.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from foveal_operator.cli.dashboard.layout import CHOICE, Chosen, Contents, whole
from foveal_operator.cli.dashboard.page import POLICY, About, page
from foveal_operator.cli.dashboard.promql.samples import Line
from foveal_operator.cli.dashboard.sources import Direct, Prometheus, Source, SourceError
from foveal_operator.common.errors import EXIT_OK, UsageError
from foveal_operator.common.versions import installed_version
from foveal_operator.observability.boards import BOARDS

NUM_STEPS = 90
_LEAST_WINDOW_SECONDS = 60
_LEAST_DIRECT_WINDOW_SECONDS = 15

Sleep = Callable[[float], None]


class DashboardRun:
    """`arguments` as command.py parses them. Raises UsageError for what cannot be meant."""

    def __init__(self, arguments: argparse.Namespace, sleep: Sleep) -> None:
        self._sleep = sleep
        self._began = time.time() - time.monotonic()
        self._arguments = arguments
        self._prometheus = _address(arguments.prometheus) if arguments.prometheus else ""
        chosen = {"name": arguments.name, "--namespace": arguments.namespace,
                  "--pod": arguments.pod}  # fmt: skip
        for flag, value in chosen.items():
            if value and not self._prometheus:
                raise UsageError(
                    f"{flag} {value!r} chooses from a Prometheus' series; /metrics "
                    "shows one deployment: add --prometheus URL, or leave it out"
                )
        self._contents = _contents(arguments.board, bool(self._prometheus))
        self._interval = _given(arguments.interval, 15.0 if self._prometheus else 2.0)
        self._since = _given(arguments.since, 3600.0 if self._prometheus else 30.0)
        _check_times(self._interval, self._since, is_direct=not self._prometheus)
        self._token = _token(arguments.token_file)
        self._direct = (
            None
            if self._prometheus
            else Direct(list(map(_address, arguments.metrics)), self._token)
        )
        self._out = _out(arguments.out or "")

    def once(self) -> int:
        self._gather()
        text = self._page(0)
        self._write(text)
        print(f"{self._out}: {len(text) >> 10} KiB; open it in a browser")
        return EXIT_OK

    def watch(self) -> int:
        """Until Ctrl-C, which is the way to end it."""
        try:
            server = PageServer(self._arguments.port)
        except OSError as error:
            raise UsageError(f"port {self._arguments.port} cannot be used: {error.strerror}; "
                             "give another --port (0: any)") from error  # fmt: skip
        refresh_seconds = max(1, round(self._interval))
        try:
            self._read()
            self._sleep(self._interval if self._direct else 0.0)
            self._read()
            text = self._page(refresh_seconds)
            print(f"{server.url} shows the page; Ctrl-C stops", flush=True)
            while True:
                server.show(text)
                if self._out:
                    self._write(text)
                self._sleep(self._interval)
                try:
                    self._read()
                    text = self._page(refresh_seconds)
                except SourceError as error:  # away for a while: the page keeps what it has
                    print(f"foveal: {error}; trying again", file=sys.stderr)
        except KeyboardInterrupt:
            return EXIT_OK
        finally:
            server.close()

    def _now(self) -> float:
        """The time of a reading: the machine's at the start, and on from there when it is set."""
        return self._began + time.monotonic()

    def _read(self) -> None:
        if self._direct is not None:
            self._direct.scrape(self._now())

    def _gather(self) -> None:
        if self._direct is None:
            return
        num_readings = max(2, round(self._since / self._interval) + 1)
        is_shown = sys.stderr.isatty()
        began = time.monotonic()
        for number in range(num_readings):
            if number:  # a slow answer does not move the next reading
                due = began + number * self._interval
                self._sleep(max(0.01, due - time.monotonic()))
            self._direct.scrape(self._now())
            if is_shown:
                print(f"\rreading {number + 1}/{num_readings}", end="", file=sys.stderr, flush=True)
        if is_shown:
            print("\r\x1b[K", end="", file=sys.stderr)

    def _source(self) -> Source:
        if self._direct is not None:
            return self._direct
        return Prometheus(self._prometheus, now=time.time(), since_seconds=self._since,
                          num_steps=NUM_STEPS, token=self._token)  # fmt: skip

    def _page(self, refresh_seconds: int) -> str:
        source = self._source()
        window = self._window(source)
        chosen = Chosen(namespace=self._arguments.namespace, resource=self._arguments.name,
                        pod=self._arguments.pod, window_seconds=window)  # fmt: skip
        self._check_known(source, chosen)
        answers: dict[str, list[Line]] = {}

        def ask(expr: str) -> Sequence[Line]:
            filled = chosen.fill(expr)
            if filled not in answers:
                answers[filled] = source.ask(filled)
            return answers[filled]

        about = About(
            subject=_subject(self._arguments, self._direct),
            source=self._prometheus or "from " + ", ".join(self._targets),
            window_seconds=window,
            version=installed_version("foveal-operator", ""),
            notes=tuple(self._direct.notes) if self._direct else (),
            refresh_seconds=refresh_seconds,
        )
        return page(about, source.times, ask, self._contents)

    @property
    def _targets(self) -> list[str]:
        return self._direct.targets if self._direct else []

    def _window(self, source: Source) -> int:
        if self._arguments.window:
            return max(1, round(float(self._arguments.window)))
        if isinstance(source, Prometheus):
            return max(_LEAST_WINDOW_SECONDS, 4 * source.step_seconds)
        return max(_LEAST_DIRECT_WINDOW_SECONDS, round(5 * self._interval))

    def _check_known(self, source: Source, chosen: Chosen) -> None:
        """A page without any figure is a mistake in what was asked."""
        if isinstance(source, Direct):
            return
        marker = chosen.fill('foveal_build_info{namespace=~"$namespace",resource=~"$resource",'
                             'pod=~"$pod"}')  # fmt: skip
        markers = [marker]
        if any("foveal_inference_" in expr or "foveal_operator_" in expr
               for expr in self._board_queries()):  # fmt: skip
            markers.append("foveal_operator_watch_is_up")
        if not any(map(source.ask, markers)):
            raise SourceError(
                f"{self._prometheus} has no series {' or '.join(markers)}; check NAME, "
                "--namespace, --since, and that it scrapes Foveal's pods"
            )

    def _board_queries(self) -> list[str]:
        """Of the board that was asked for by name: some show what the operator tells."""
        if not self._arguments.board:
            return []
        panels = (panel for section in self._contents.sections for panel in section.panels)
        return [query.expr for panel in panels for query in panel.queries]

    def _write(self, text: str) -> None:
        assert self._out is not None
        target = _target(self._out)
        try:
            if target.exists() and not target.is_file():
                target.write_text(text, encoding="utf-8")  # a pipe or a device stays one
            else:
                _replace(target, text)
        except OSError as error:
            raise UsageError(f"cannot write {self._out}: {error.strerror}") from error


def _replace(target: Path, text: str) -> None:
    """Whole or not at all: a browser may read it at any time."""
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=target.parent, prefix=".foveal-", delete=False
    ) as file:
        made = Path(file.name)
        try:
            file.write(text)
            file.flush()
            made.chmod(0o644)
            made.replace(target)
        except BaseException:
            made.unlink(missing_ok=True)
            raise


def _contents(name: str, has_prometheus: bool) -> Contents:
    """Its own choice of panels, or one board's."""
    if not name:
        return CHOICE
    if not has_prometheus:
        raise UsageError(f"--board {name} needs the functions of a Prometheus: add --prometheus "
                         "URL, or leave it out")  # fmt: skip
    return whole(next(board for board in BOARDS if board.uid == f"foveal-{name}"))


def _given(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _address(text: str) -> str:
    try:
        parts = urllib.parse.urlsplit(text)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        is_good &= not parts.query and not parts.fragment
    except ValueError:
        is_good = False
    if not is_good:
        raise UsageError(f"{text!r} is no address such as http://127.0.0.1:9090")
    if parts.username is not None:
        raise UsageError("an address may not hold a password; use --token-file")
    return text


def _check_times(interval: float, since: float, is_direct: bool) -> None:
    if interval < 0.5:
        raise UsageError(f"--interval {interval:g}s is too short; give 1s or more")
    if since <= 0:
        raise UsageError("--since must be longer than 0s")
    if is_direct and since > 600 * interval:
        raise UsageError(f"--since {since:g}s with --interval {interval:g}s is more than 600 "
                         "readings; give a larger --interval")  # fmt: skip


def _token(path: str | None) -> str:
    if not path:
        return ""
    try:
        token = Path(path).read_text(encoding="ascii").strip()
    except OSError as error:
        raise UsageError(f"cannot read the token {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"the token {path} is not ASCII text") from error
    if not token or not token.isprintable() or len(token) > 16384:
        raise UsageError(f"{path} holds no token: one line of text is wanted")
    return token


def _out(path: str) -> Path | None:
    """Asked before the readings, so that nobody waits for nothing."""
    if not path:
        return None
    found = Path(path)
    target = _target(found)
    if target.is_dir():
        raise UsageError(f"{path} is a folder; give a file to --out")
    if target.exists() and not target.is_file():
        if not os.access(target, os.W_OK):
            raise UsageError(f"cannot write {path}: it may not be written")
    elif not target.parent.is_dir() or not os.access(target.parent, os.W_OK):
        raise UsageError(f"cannot write {path}: {target.parent} is no folder that may be written")
    return found


def _target(path: Path) -> Path:
    """What a link points to; it is written, and the link stays."""
    return Path(os.path.realpath(path))


def _subject(arguments: argparse.Namespace, direct: Direct | None) -> str:
    if direct is not None:
        return "processes of one deployment"
    parts = [
        f"{word} {value}"
        for word, value in (("resource", arguments.name), ("namespace", arguments.namespace),
                            ("pod", arguments.pod))
        if value
    ]  # fmt: skip
    return ", ".join(parts) or "all resources"


LOOPBACK = "127.0.0.1"


class PageServer:
    """Serves the newest page to browsers of this machine, for --watch. `url` is where it listens.

    Listens on the loopback address alone and answers only to its own name, so that a page of
    another site cannot read it through a name that points here. Raises OSError when the port is
    taken.
    """

    def __init__(self, port: int) -> None:
        self._page = b""
        outer = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 10

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: Any) -> None:
                return

        self._server = ThreadingHTTPServer((LOOPBACK, port), Handler)
        self._server.daemon_threads = True
        self.url = f"http://{LOOPBACK}:{self._server.server_port}/"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def show(self, page: str) -> None:
        """From now on this page is the answer."""
        self._page = page.encode("utf-8")

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        port = self._server.server_port
        names = {f"{LOOPBACK}:{port}", f"localhost:{port}"}
        if request.headers.get("Host") not in names:
            request.send_error(421, "asked by another name")
        elif request.path.partition("?")[0] != "/":
            request.send_error(404)
        else:
            page = self._page
            request.send_response(200)
            request.send_header("Content-Type", "text/html; charset=utf-8")
            request.send_header("Content-Length", str(len(page)))
            request.send_header("Content-Security-Policy", POLICY)
            request.send_header("X-Content-Type-Options", "nosniff")
            request.send_header("Cache-Control", "no-store")
            request.end_headers()
            request.wfile.write(page)
