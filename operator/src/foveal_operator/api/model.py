"""The model part of the resource: source, revision, where fetched weights stay."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from foveal_operator.api.rules import ObjectName, Part, Quantity, Rule, Text, Transition
from foveal_runtime.plan.quantity import parse

_SPACE = r"\t\n\f\r "
"""What CEL means by a space."""
DEFAULT_SIZE = "50Gi"
"""Of the resource's own claim."""
_HAS_OWN_CLAIM = (
    "(self.uri.startsWith('hf://') || self.uri.startsWith('s3://'))"
    " && !(has(self.cache) && has(self.cache.claimName))"
)


def _has_own_claim(model: Any) -> bool:
    is_fetched = model.uri.startswith(("hf://", "s3://"))
    return is_fetched and not (model.cache and model.cache.claim_name)


def _fixed(
    field: str, attribute: str, advice: str = "", *, of_own_claim: bool = False
) -> Transition:
    """A field of the cache that cannot change once set, unless the model does; `of_own_claim`: and
    no longer lies in the resource's own claim, which is the same for every model."""
    another = "self.uri != oldSelf.uri"
    if of_own_claim:
        another = f"({another} && !({_HAS_OWN_CLAIM}))"

    def check(new: Any, old: Any) -> bool:
        before = getattr(old.cache, attribute, None)
        is_kept = before is None or getattr(new.cache, attribute, None) == before
        return is_kept or (new.uri != old.uri and not (of_own_claim and _has_own_claim(new)))

    return Transition(
        f"{another} || !has(oldSelf.cache) ||"
        f" !has(oldSelf.cache.{field}) || (has(self.cache)"
        f" && has(self.cache.{field}) && self.cache.{field} == oldSelf.cache.{field})",
        f"cache.{field} cannot change once set{advice}",
        check,
        f"cache.{field}",
    )


class SecretName(Part, frozen=True, kw_only=True):
    """A Secret in the resource's namespace."""

    name: Annotated[ObjectName, Meta(description="Name of the Secret.")]


class ModelCache(Part, frozen=True, kw_only=True):
    """Where fetched weights stay between restarts."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            "!has(self.claimName) || !(has(self.size) || has(self.storageClassName)"
            " || has(self.accessMode))",
            "an existing claim brings its own size, class and access mode: set only claimName",
            lambda s: (
                s.claim_name is None
                or (s.size is None and s.storage_class_name is None and s.access_mode is None)
            ),
            "claimName",
        ),
    )
    claim_name: Annotated[
        ObjectName | None,
        Meta(description="An existing PersistentVolumeClaim to use. Cannot change once set."),
    ] = None
    size: Annotated[
        Quantity | None,
        Meta(
            description=f"Size of the resource's own claim; default: {DEFAULT_SIZE}. Only grows; "
            "a claim that is larger keeps its size."
        ),
    ] = None
    storage_class_name: Annotated[
        ObjectName | None,
        Meta(description="Storage class of the claim; default: the cluster's. Cannot change."),
    ] = None
    access_mode: Annotated[
        Literal["ReadWriteOnce", "ReadWriteMany"] | None,
        Meta(
            description="ReadWriteMany (default) lets frontends and engines run on several nodes; "
            "ReadWriteOnce suits one node. Cannot change."
        ),
    ] = None


class Model(Part, frozen=True, kw_only=True):
    """Which model, from where, under which name."""

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            r"self.uri.matches('^(hf|s3|oci|pvc)://[^\\s/][^\\s]*$')",
            "uri must start with hf://, s3://, oci:// or pvc:// and have no space or line break",
            lambda s: bool(re.fullmatch(rf"(hf|s3|oci|pvc)://[^{_SPACE}/][^{_SPACE}]*", s.uri)),
            "uri",
        ),
        Rule(
            "!self.uri.startsWith('pvc://')"
            " || self.uri.matches('^pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|$)')",
            "uri pvc://CLAIM/PATH must begin with the name of a PersistentVolumeClaim",
            lambda s: (
                not s.uri.startswith("pvc://")
                or bool(re.match(r"pvc://[a-z0-9]([-a-z0-9.]*[a-z0-9])?(/|\Z)", s.uri))
            ),
            "uri",
        ),
        Rule(
            "!has(self.revision) || self.uri.startsWith('hf://')",
            "revision is only for hf:// models",
            lambda s: s.revision is None or s.uri.startswith("hf://"),
            "revision",
        ),
        Rule(
            "!has(self.cache) || self.uri.startsWith('hf://') || self.uri.startsWith('s3://')",
            "cache is only for models that are fetched (hf:// and s3://)",
            lambda s: s.cache is None or s.uri.startswith(("hf://", "s3://")),
            "cache",
        ),
        Rule(
            "!has(self.pooling) || (has(self.task) && self.task != 'Generate')",
            "pooling is only for task Embed or Both",
            lambda s: s.pooling is None or s.task != "Generate",
            "pooling",
        ),
    )
    TRANSITIONS: ClassVar[tuple[Transition, ...]] = (
        Transition(
            "!has(oldSelf.cache) || !has(oldSelf.cache.size)"
            f" || !({_HAS_OWN_CLAIM}) || quantity(has(self.cache) && has(self.cache.size)"
            f" ? self.cache.size : '{DEFAULT_SIZE}')"
            ".compareTo(quantity(oldSelf.cache.size)) >= 0",
            f"cache.size can only grow; left out, it is {DEFAULT_SIZE}",
            lambda new, old: (
                not (old.cache and old.cache.size and _has_own_claim(new))
                or parse((new.cache and new.cache.size) or DEFAULT_SIZE) >= parse(old.cache.size)
            ),
            "cache.size",
        ),
        _fixed("claimName", "claim_name", ": make a new resource"),
        _fixed("accessMode", "access_mode", of_own_claim=True),
        _fixed("storageClassName", "storage_class_name", of_own_claim=True),
    )
    uri: Annotated[
        Annotated[str, Meta(max_length=1024)],
        Meta(
            description="hf://ORG/NAME and s3://BUCKET/PREFIX are fetched once into a shared "
            "claim; pvc://CLAIM/PATH is used as it is; oci://IMAGE is mounted as a volume."
        ),
    ]
    revision: Annotated[
        Annotated[str, Meta(max_length=128, pattern=r"^[-._a-zA-Z0-9/]+$")] | None,
        Meta(description="Branch, tag or commit of a hf:// model; default: main."),
    ] = None
    name: Annotated[
        Text | None,
        Meta(description="What clients put into `model`; default: the resource's name."),
    ] = None
    task: Annotated[
        Literal["Generate", "Embed", "Both"],
        Meta(
            description="What is served: generated text, embeddings, or both. A change restarts "
            "frontends only. Default: Generate."
        ),
    ] = "Generate"
    pooling: Annotated[
        Literal["Mean", "Last", "Cls"] | None,
        Meta(
            description="Hidden states that an embedding is made of; default: as the checkpoint "
            "says, else its last token."
        ),
    ] = None
    secret_ref: Annotated[
        SecretName | None,
        Meta(description="Credentials for the fetch: HF_TOKEN, or AWS_* and S3_ENDPOINT_URL."),
    ] = None
    cache: Annotated[ModelCache | None, Meta(description="Where a fetched model is kept.")] = None
