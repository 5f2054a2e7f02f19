"""Where a registry of `oci://` may send a download to: the check alone, without a connection."""

from __future__ import annotations

import ipaddress
import socket
from typing import Any

import pytest

from foveal_runtime.main.registry import _is_plain, checked
from foveal_runtime.plan.errors import StartupError

PUBLIC, PRIVATE, OTHER, METADATA = "20.1.2.3", "10.0.0.5", "192.168.7.7", "169.254.169.254"
NAMES = {"hub.example": [PUBLIC], "inside.example": [PRIVATE], "both.example": [PUBLIC, PRIVATE],
         "store.example": [OTHER], "cdn.example": ["20.9.9.9"], "six.example": ["fd12::1"],
         "mapped.example": ["::ffff:10.0.0.9"]}  # fmt: skip


@pytest.mark.parametrize(
    ("registry_host", "url", "why"),
    [
        ("hub.example", "https://cdn.example/blob", ""),
        ("hub.example", "https://hub.example/blob", ""),
        ("hub.example", "https://store.example/blob", "private address"),
        ("hub.example", "https://both.example/blob", "private address"),
        ("hub.example", "https://six.example/blob", "private address"),
        ("hub.example", "https://mapped.example/blob", "private address"),
        ("hub.example", f"https://{PRIVATE}:8443/blob", "private address"),
        ("hub.example", "https://127.0.0.1/blob", "loopback address"),
        ("hub.example", "http://127.0.0.1/blob", "loopback address"),
        ("hub.example", f"https://{METADATA}/blob", "link-local or metadata address"),
        ("both.example", "https://store.example/blob", "private address"),
        ("inside.example", "https://store.example/blob", ""),
        ("inside.example", "https://six.example/blob", ""),
        ("inside.example", "https://cdn.example/blob", ""),
        ("inside.example", f"https://{METADATA}/blob", "link-local or metadata address"),
        ("unknown.example", f"https://{PRIVATE}/blob", "private address"),
        ("hub.example", "https://unknown.example/blob", ""),  # only a proxy knows it
        ("hub.example", "https://listed.example/blob", ""),
    ],
)
def test_private_addresses_are_named_by_private_registries_only(
    monkeypatch: pytest.MonkeyPatch, registry_host: str, url: str, why: str
) -> None:
    """A redirect of a public registry led to any address with TLS, and to http:// of this machine.
    No connection is made here."""

    def resolve(host: str, *_: object, **__: object) -> list[Any]:
        try:
            found = [str(ipaddress.ip_address(host))]
        except ValueError:
            found = NAMES.get(host, [])
        if not found:
            raise socket.gaierror(-2, "Name or service not known")
        return [(0, 0, 0, "", (one, 0)) for one in found]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    monkeypatch.setitem(NAMES, "listed.example", [PRIVATE])
    monkeypatch.setenv("FOVEAL_INSECURE_REGISTRIES", "listed.example")
    if not why:
        assert checked(url, registry_host) == url
        return
    with pytest.raises(StartupError) as caught:
        checked(url, registry_host)
    place = url.split("/")[2]
    assert str(caught.value) == (
        f"the registry {registry_host} names {place}, which leads to a {why}: if you trust it, "
        f"list {place} in FOVEAL_INSECURE_REGISTRIES"
    )


def test_other_machines_are_spoken_to_without_tls_only_when_listed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert [_is_plain(one) for one in ("localhost:5000", "127.9.0.1", "[::1]:1")] == [True] * 3
    assert not _is_plain("registry.example:5000")
    assert not _is_plain("127.0.0.1.example")
    monkeypatch.setenv("FOVEAL_INSECURE_REGISTRIES", "other.example,registry.example:5000")
    assert _is_plain("registry.example:5000")
    assert not _is_plain("registry.example")
