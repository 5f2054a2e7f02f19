"""The reasons of conditions: for each a constant, the next step and its place in the docs.

The headings of docs/reference/reasons.md are these names. No other file invents a reason.
"""

from __future__ import annotations

import msgspec

DOCS = "docs/reference/reasons.md"


class Reason(msgspec.Struct, frozen=True):
    """`action` ends every message with this reason; "" where nothing is to be done.
    `names_object`: each message is about another object, and an Event of its own."""

    name: str
    action: str = ""
    is_permanent: bool = False
    names_object: bool = False

    @property
    def anchor(self) -> str:
        return f"{DOCS}#{self.name.lower()}"

    def message(self, what: str) -> str:
        """What happened, what to do next, where to read more."""
        if not self.action:
            return what
        end = "" if what.endswith((".", "!", "?")) else "."
        return f"{what}{end} {self.action} ({self.anchor})"


ACCEPTED = Reason("Accepted")
INVALID_SPEC = Reason("InvalidSpec", "Correct the named field and apply again.", True)
REFUSED = Reason(
    "Refused", "Change the field that the refused object follows from, or what refuses it.", True
)
POD_SECURITY = Reason(
    "PodSecurityViolated",
    "Change the podTemplate's field that the message names, or the namespace's standard.",
)
QUOTA_EXCEEDED = Reason(
    "QuotaExceeded", "Raise the namespace's ResourceQuota or LimitRange, or ask for less."
)
ADMISSION_DENIED = Reason(
    "AdmissionDenied", "Satisfy the webhook or policy that the message names, or ask its owner."
)
PRIORITY_CLASS_MISSING = Reason(
    "PriorityClassMissing", "Create the PriorityClass or correct podTemplate.priorityClassName."
)
SERVICE_ACCOUNT_MISSING = Reason(
    "ServiceAccountMissing", "Find out what deletes the resource's ServiceAccount."
)
FAILED_CREATE = Reason("FailedCreate", "Change what the API server's message names.")
MISSING_RIGHT = Reason(
    "MissingRight", "Give the operator's Role the right that the message names: upgrade the chart."
)
RECONCILE_FAILED = Reason(
    "ReconcileFailed", "The operator retries; its log and the message name what fails."
)
NAME_TAKEN = Reason(
    "NameTaken",
    "Rename the resource, remove the object, or hand it over with the annotation foveal.dev/adopt.",
    True,
    True,
)
MISSING_API = Reason(
    "MissingApi", "Install the API in the cluster or remove the field that asks for it.", True
)
FITS = Reason("Fits")
SHRUNK = Reason("Shrunk")
BUDGET_MISFIT = Reason("BudgetMisfit", "Make one of the named edits.", True)
PROFILING = Reason("Profiling")
RESOLVED = Reason("Resolved")
DOWNLOADING = Reason("Downloading")
FETCH_FAILED = Reason("FetchFailed", "Check model.uri, model.secretRef and the claim's free space.")
FETCH_DENIED = Reason(
    "FetchDenied",
    "Put a token that may read the model into model.secretRef's Secret, and accept its licence.",
)
NOT_FOUND = Reason(
    "NotFound",
    "Correct model.uri and model.revision; if the model has come since, delete the Job, which runs "
    "again.",
    True,
)
UNSUPPORTED_MODEL = Reason(
    "UnsupportedModel",
    "Choose a model that the runtime can load, or replace its files and delete the Job, which runs "
    "again.",
    True,
)
PROFILE_FAILED = Reason(
    "ProfileFailed", "Read the profile Job's log; deleting the Job runs it again."
)
CLAIM_PENDING = Reason(
    "ClaimPending", "Give model.cache a storageClassName and accessMode that the cluster has."
)
WAITING = Reason("Waiting")
SERVING = Reason("Serving")
VERSION_SKEW = Reason(
    "VersionSkew", "Set spec.image to an image of the operator's release or the one before it."
)
SCALED_TO_ZERO = Reason("ScaledToZero")
STARTING = Reason("Starting")
ROLLING = Reason("Rolling")
UNSCHEDULABLE = Reason(
    "Unschedulable", "Free or add nodes with the devices and memory asked for, or ask for less."
)
NO_NODE_YET = Reason(
    "NoNodeYet",
    "Wait for the cluster autoscaler, add such a node, or correct podTemplate and accelerator.",
)
TERMINATION_STUCK = Reason(
    "TerminationStuck",
    "Delete the Node if its machine is gone, or taint it node.kubernetes.io/out-of-service.",
)
QUEUED = Reason("Queued")
IMAGE_PULL = Reason("ImagePull", "Check spec.image and the nodes' access to its registry.")
IMAGE_DENIED = Reason(
    "ImageDenied",
    "Give the registry's credentials: imagePullSecrets in podTemplate, or on the nodes.",
)
CONFIG_ERROR = Reason(
    "ConfigError", "Create the Secret, key or claim that the message names; pods start then."
)
OOM_KILLED = Reason(
    "OOMKilled", "Raise the pod's hostMemory or caches.headroomPercent, or pin smaller caches."
)
DEVICE_FULL = Reason(
    "DeviceFull", "Raise caches.headroomPercent, pin smaller encoder and kv caches, or batch less."
)
SHM_FULL = Reason(
    "ShmFull", "Make the shared volume at least as large as caches.ipc.size, or lower that."
)
INVALID_ARGUMENT = Reason(
    "InvalidArgument",
    "Correct the field that the runtime names; one that it does not know needs a newer image "
    "(spec.image).",
    True,
)
CRASHED = Reason("Crashed", "Read status.lastFailure and the pod's log.")
EVICTED = Reason(
    "Evicted", "Give the node what the message says it lacks, or keep the pods off that node."
)
DEADLINE_EXCEEDED = Reason(
    "ProgressDeadlineExceeded",
    "Correct or revert the last change, or raise rollout.progressDeadlineSeconds; older pods keep "
    "serving.",
    True,
)
MIRRORED = Reason("Mirrored")
SESSION_DOWN = Reason(
    "SessionDown",
    "Check NetworkPolicies between frontends and engines, and the logs of frontends for "
    "'incompatible'.",
)
STALE_HINTS = Reason("StaleHints", "Raise caches.ipc.size: values leave before they are used.")
ROUTED = Reason("Routed")
ROUTE_PENDING = Reason("RoutePending", "Check the Gateway's listeners and allowed routes.")
SCALING = Reason("Scaling")
AUTOSCALER_INERT = Reason(
    "AutoscalerInert",
    "Give the autoscaler its figures: metrics-server for CPU, else KEDA and prometheusAddress.",
)
FOREIGN_AUTOSCALER = Reason(
    "ForeignAutoscaler",
    "Delete it: set frontend.autoscaling or engine.autoscaling, or let it scale the resource "
    "itself (engines).",
    names_object=True,
)
AVAILABLE = Reason("Available")
UNAVAILABLE = Reason("Unavailable")
READY = Reason("Ready")
PAUSED = Reason("Paused")

ALL: tuple[Reason, ...] = tuple(
    value for value in list(globals().values()) if isinstance(value, Reason)
)
BY_NAME = {reason.name: reason for reason in ALL}
