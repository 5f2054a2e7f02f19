"""Two replicas of the operator under leader election."""

from __future__ import annotations

from collections.abc import Sequence

from tests.support.api_server.audit import Audit
from tests.support.api_server.fork_server import ForkServer
from tests.support.api_server.programs import wait_until
from tests.support.api_server.sandbox import Sandbox
from tests.support.api_server.scenarios import STEP_SECONDS, Step, is_over

LEASE_SECONDS = 8.0
FLAGS = (f"--lease-seconds={LEASE_SECONDS}", "--renew-seconds=6", "--retry-seconds=0.5")


def two_replicas(
    sandbox: Sandbox, fork_server: ForkServer, flags: Sequence[str] = FLAGS
) -> Sandbox:
    """a and b; the audit lets only the holder of the Lease write."""
    sandbox.proxy.audit = Audit(needs_lease=True)
    sandbox.fork_server = fork_server
    for name in ("a", "b"):
        sandbox.operator(name, *flags).start()
    return sandbox


def holder(sandbox: Sandbox) -> str:
    """Name of the replica that holds the Lease, or ""."""
    lease = sandbox.api.get("Lease", sandbox.namespace, "foveal-operator")
    return str((lease or {}).get("spec", {}).get("holderIdentity") or "").partition("_")[0]


def live_on(sandbox: Sandbox, but: str = "") -> bool:
    """Whoever has ended starts again, as a kubelet would see to: on a busy machine a replica can
    miss its short lease, and then ends at once. Always True."""
    for operator in sandbox.operators:
        if operator.name != but and not operator.is_alive:
            sandbox.proxy.audit.forget(operator.name)
            operator.start()
    return True


def is_led(sandbox: Sandbox) -> bool:
    """By a replica that lives: the holder may have died and be remembered still."""
    name = holder(sandbox)
    return any(o.name == name and o.is_alive for o in sandbox.operators)


def does(sandbox: Sandbox, step: Step, but: str = "") -> None:
    step.act(sandbox)
    wait_over(sandbox, step, but)


def wait_over(sandbox: Sandbox, step: Step, but: str = "") -> None:
    try:
        wait_until(
            f"step {step.name!r} is over",
            lambda: live_on(sandbox, but) and is_over(sandbox, step),
            STEP_SECONDS,
        )
    except TimeoutError as error:
        raise TimeoutError(f"{error}\n{sandbox.told()}") from None
