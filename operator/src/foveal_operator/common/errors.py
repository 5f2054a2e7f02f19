"""Errors that end a command with one line (or one a problem), and the exit codes of all commands.

The codes are a contract: docs/reference/cli.md lists them and scripts rely on them. As with
kubectl diff, 1 is an answer ("no", "differs") and everything above it is an error.
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_NO = 1
"""The answer is no: something would change, a check failed, a process died."""
EXIT_USAGE = 2
EXIT_MISFIT = 3
EXIT_CLUSTER = 4
"""The cluster (or a source of metrics) cannot be reached, refuses, or has no such object."""
EXIT_TIMEOUT = 5
EXIT_INTERRUPTED = 130

EXIT_CODES = """\
exit codes:
  0    success: the plan fits, nothing would change, ready, drained
  1    a negative answer: something would change, a check failed, a process died
  2    wrong arguments, resource, podTemplate or profile
  3    the budgets do not fit
  4    the cluster cannot be reached, refuses, or has no such resource
  5    time ran out
  130  interrupted
"""


class CommandError(Exception):
    """Ends the command: the message says what is wrong and how to put it right."""

    exit_code = EXIT_NO


class UsageError(CommandError):
    """The user's input is wrong."""

    exit_code = EXIT_USAGE


class MisfitError(CommandError):
    """The budgets do not fit: no process may start."""

    exit_code = EXIT_MISFIT


class ClusterAnswerError(CommandError):
    """The cluster cannot be asked, or says no."""

    exit_code = EXIT_CLUSTER


class TimeRanOut(CommandError):
    """What was waited for did not happen in time."""

    exit_code = EXIT_TIMEOUT
