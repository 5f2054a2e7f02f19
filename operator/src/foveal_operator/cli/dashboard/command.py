"""`foveal dashboard`: the overview as one HTML page, from a Prometheus or from /metrics directly.

Holds the arguments; cli/dashboard/run.py does the work and is loaded only when it is wanted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from foveal_operator.cli.arguments import Commands, add_command, duration
from foveal_operator.common.errors import ClusterAnswerError

_DESCRIPTION = """\
Draws one page with the overview: requests, what the caches save, mirror, encoder, queue, pods. The
page needs nothing else: no script, no network. Figures come from a Prometheus, or from /metrics of
frontends and engines, read a few times; queries are those of the Grafana dashboards.
"""
_EPILOG = """\
examples:
  foveal dashboard                # reads http://127.0.0.1:8000/metrics for 30 s
  foveal dashboard --watch        # the same, live, on http://127.0.0.1:8765/
  foveal dashboard --prometheus http://127.0.0.1:9090 qwen -n models --since 6h
  foveal dashboard --prometheus http://127.0.0.1:9090 --board rollout

exit codes: 0 the page is written (with --watch: Ctrl-C), 2 wrong arguments, 4 the source does not
answer, refuses, or shows nothing of Foveal
"""
DEFAULT_METRICS = "http://127.0.0.1:8000/metrics"
DEFAULT_OUT = "foveal-dashboard.html"
BOARD_NAMES = ("overview", "caches", "memory", "mirror", "encoder", "rollout", "operator")

Sleep = Callable[[float], None]


def add_parser(commands: Commands) -> None:
    parser = add_command(commands, "dashboard", "the overview as one HTML page, without Grafana",
                         run, _DESCRIPTION, _EPILOG)  # fmt: skip
    parser.add_argument(
        "name",
        nargs="?",
        default="",
        metavar="NAME",
        help="a resource; all without it (with --prometheus)",
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prometheus", metavar="URL", help="ask this Prometheus")
    source.add_argument(
        "--metrics",
        metavar="URL",
        action="append",
        help=f"read this; may be repeated (default {DEFAULT_METRICS})",
    )
    parser.add_argument("-n", "--namespace", default="", help="one namespace (with --prometheus)")
    parser.add_argument(
        "--board",
        choices=BOARD_NAMES,
        default="",
        metavar="BOARD",
        help="all panels of one of the Grafana dashboards instead: "
        f"{', '.join(BOARD_NAMES)} (with --prometheus)",
    )
    parser.add_argument("--pod", default="", help="one pod (with --prometheus)")
    parser.add_argument(
        "--since",
        type=duration,
        metavar="TIME",
        help="how far back (default 1h); how long to read /metrics (default 30s)",
    )
    parser.add_argument(
        "--interval",
        type=duration,
        metavar="TIME",
        help="between two readings of /metrics, and between two pages of --watch "
        "(default 2s; 15s with --prometheus)",
    )
    parser.add_argument(
        "--window",
        type=duration,
        metavar="TIME",
        help="rates are taken over this (default: 60s or 4 steps, the larger; "
        "15s or 5 intervals of /metrics)",
    )
    parser.add_argument("--token-file", metavar="FILE", help="a bearer token for the source")
    parser.add_argument(
        "-o",
        "--out",
        metavar="FILE",
        help=f"where to write the page (default {DEFAULT_OUT}; with --watch none)",
    )
    parser.add_argument(
        "--watch",
        action="store_true",
        help="keep it fresh and serve it on the loopback address until Ctrl-C",
    )
    parser.add_argument(
        "--port", type=_port, default=8765, help="of --watch (default 8765; 0: any)"
    )


def run(arguments: argparse.Namespace, sleep: Sleep = time.sleep) -> int:
    # Here, not above: no other command has a use for the boards.
    from foveal_operator.cli.dashboard.run import DashboardRun
    from foveal_operator.cli.dashboard.sources import SourceError

    if not arguments.prometheus and not arguments.metrics:
        arguments.metrics = [DEFAULT_METRICS]
    if not arguments.out and not arguments.watch:
        arguments.out = DEFAULT_OUT
    page = DashboardRun(arguments, sleep)
    try:
        return page.watch() if arguments.watch else page.once()
    except SourceError as error:
        raise ClusterAnswerError(str(error)) from error


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is no port")
    return int(text)
