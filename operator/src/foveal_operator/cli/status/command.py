"""`foveal status`, `foveal budget` and `foveal wait`: what the operator says about a resource.

They read the resource alone; a user who may `get` it needs no other right.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable

from foveal_operator.cli.arguments import (
    OUTPUTS,
    Commands,
    Connect,
    add_cluster_flags,
    add_command,
    connect,
    duration,
    formatted,
)
from foveal_operator.cli.status.view import (
    CONDITIONS,
    WHILE_TRUE,
    budget_rows,
    budget_text,
    is_current,
    resource_table,
    status_text,
)
from foveal_operator.cli.terminal import style_of
from foveal_operator.common.errors import (
    EXIT_NO,
    EXIT_OK,
    TimeRanOut,
    UsageError,
)
from foveal_operator.kube.reader import (
    Reader,
    UnreachableError,
    get_inference,
    inferences_path,
    list_inferences,
)
from foveal_operator.kube.types import Obj, condition

POLL_SECONDS = 1.0
_STATUS_EPILOG = """\
Without a name: every resource of the namespace, a line each.

exit codes: 0 answered (ready or not: see `foveal wait`), 4 no such resource or no cluster
"""
_BUDGET_EPILOG = """\
PLANNED is what the operator derived or was told, MEASURED what the pods report, OFF the difference;
of a limit (names that end in Memory) it says how much is in use.

exit codes: 0 answered, 4 no such resource or no cluster
"""
_WAIT_EPILOG = """\
examples:
  foveal wait qwen                          # Ready, within 30 minutes
  foveal wait qwen --for Available --timeout 5m
  foveal wait qwen --for Ready=False
  foveal wait qwen --for delete

A condition counts only when the operator has seen the present spec. A resource that is Stalled
will not become Ready by waiting, so that ends the wait, unless --keep-waiting is given.

exit codes: 0 it holds, 1 the resource is stalled, 4 no such resource or no cluster, 5 time ran out
"""


def add_parsers(commands: Commands) -> None:
    status = add_command(
        commands, "status", "conditions, pods, caches and last failure of a resource", run_status,
        "Shows the conditions, pods, caches and last failure of a resource, from its status.",
        _STATUS_EPILOG,
    )  # fmt: skip
    status.add_argument("name", nargs="?", help="name of the MultiModalInference")
    budget = add_command(
        commands, "budget", "planned and measured memory of a resource", run_budget,
        "Shows the planned and the measured memory of a resource.", _BUDGET_EPILOG,
    )  # fmt: skip
    budget.add_argument("name", help="name of the MultiModalInference")
    for one in (status, budget):
        one.add_argument("-o", "--output", choices=OUTPUTS, default="table")
        add_cluster_flags(one)
    wait = add_command(
        commands, "wait", "wait until a resource is ready", run_wait,
        "Waits until a resource is Ready, or until another condition holds.", _WAIT_EPILOG,
    )  # fmt: skip
    wait.add_argument("name", help="name of the MultiModalInference")
    wait.add_argument("--for", dest="goal", default="Ready", metavar="CONDITION",
                      help="such as Available=False, or delete (default: Ready)")  # fmt: skip
    wait.add_argument("--timeout", type=duration, default=1800.0, metavar="TIME",
                      help="longest wait, such as 90s; 0 looks once (default: 30m)")  # fmt: skip
    wait.add_argument(
        "--keep-waiting", action="store_true", help="wait on when the resource is stalled"
    )
    add_cluster_flags(wait)


def run_status(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    reader, style = open_cluster(arguments), style_of(sys.stdout)
    if arguments.name:
        found = get_inference(reader, arguments.name)
        if arguments.output != "table":
            sys.stdout.write(formatted(_essence(found), arguments.output))
        else:
            sys.stdout.write(status_text(found, time.time(), style))
        return EXIT_OK
    items = list_inferences(reader)
    if arguments.output != "table":
        sys.stdout.write(formatted([_essence(item) for item in items], arguments.output))
    elif items:
        sys.stdout.write(resource_table(items, time.time(), style))
    else:
        print(f"no resources in namespace {reader.namespace}", file=sys.stderr)
    return EXIT_OK


def _essence(resource: Obj) -> Obj:
    """Who it is and how it is; the spec is the user's own."""
    metadata = resource["metadata"]
    kept = {key: metadata[key] for key in ("name", "namespace", "generation") if key in metadata}
    return {"metadata": kept, "current": is_current(resource),
            "status": resource.get("status") or {}}  # fmt: skip


def run_budget(arguments: argparse.Namespace, open_cluster: Connect = connect) -> int:
    found = get_inference(open_cluster(arguments), arguments.name)
    if arguments.output == "table":
        sys.stdout.write(budget_text(found, style_of(sys.stdout)))
    else:
        rows = budget_rows((found.get("status") or {}).get("budgets") or {})
        sys.stdout.write(formatted(rows, arguments.output))
    return EXIT_OK


def run_wait(
    arguments: argparse.Namespace,
    open_cluster: Connect = connect,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Looks once a second. Raises TimeRanOut. A short loss of the API server is waited through."""
    goal = _goal(arguments.goal)
    reader = open_cluster(arguments)
    deadline, said = clock() + arguments.timeout, ""
    while True:
        state, done = _look(reader, arguments.name, goal)
        if state != said:
            print(f"{arguments.name}: {state}", flush=True)
            said = state
        if done:
            return EXIT_OK
        if state.startswith("Stalled") and not arguments.keep_waiting and goal != "delete":
            return EXIT_NO
        if clock() >= deadline:
            wanted = "deleted" if goal == "delete" else goal
            raise TimeRanOut(
                f"{arguments.name} is not {wanted} after {arguments.timeout:g} s: "
                f"{said.partition(': ')[0]}"
            )
        sleep(POLL_SECONDS)


def _goal(text: str) -> str:
    """A condition, with a status where that is not True, or delete. As kubectl's, in any case."""
    name, _, status = text.removeprefix("condition=").partition("=")
    if text.lower() in ("delete", "deleted"):
        return "delete"
    kinds = {kind.lower(): kind for kind in CONDITIONS}
    if name.lower() not in kinds:
        known = ", ".join(CONDITIONS)
        raise UsageError(f"--for {text}: there is no such condition; give delete or one of {known}")
    statuses = {"": "", "true": "", "false": "=False", "unknown": "=Unknown"}
    if status.lower() not in statuses:
        raise UsageError(f"--for {text}: the status of a condition is True, False or Unknown")
    return kinds[name.lower()] + statuses[status.lower()]


def _look(reader: Reader, name: str, goal: str) -> tuple[str, bool]:
    """How it stands, in one line, and whether the goal is reached."""
    try:
        if goal == "delete":
            gone = reader.get(inferences_path(reader.namespace, name)) is None
            return ("deleted" if gone else "still there"), gone
        found = get_inference(reader, name)
    except UnreachableError as error:
        return str(error), False
    if not is_current(found):
        return "the operator has not seen this generation yet", False
    kind, _, status = goal.partition("=")
    wanted = condition(found, kind)
    stands = wanted.get("status") or ("False" if kind in WHILE_TRUE else "")
    if stands == (status or "True"):
        return f"{goal} ({wanted.get('reason', '')})" if wanted else goal, True
    stalled = condition(found, "Stalled")
    if stalled.get("status") == "True":
        return f"Stalled ({stalled.get('reason', '')}): {stalled.get('message', '')}", False
    if not wanted:
        return f"there is no condition {kind} yet", False
    return f"not {goal} ({wanted.get('reason', '')}): {wanted.get('message', '')}", False
