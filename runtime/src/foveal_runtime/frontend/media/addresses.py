"""Addresses that media may be fetched from. Pure: no resolving, no sockets.

Asked by `fetch` for every address of every host of every hop, before a connection is made.
"""

from __future__ import annotations

import ipaddress

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_NAT64 = ipaddress.ip_network("64:ff9b::/96")


def refusal(address: IPAddress, *, allow_private: bool) -> str:
    """Why the address is refused, "" when it is not.

    Link-local (and with it every cloud's metadata service), multicast, unspecified and reserved
    addresses are refused always; loopback and private ones unless `allow_private`. An IPv4 address
    inside an IPv6 one (mapped, 6to4, Teredo, NAT64) is judged as what it is.
    """
    for inner in _embedded(address):
        why = refusal(inner, allow_private=allow_private)
        if why:
            return why
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return ""
    if address.is_link_local or str(address) == "fd00:ec2::254":
        return "link-local or metadata address"
    if address.is_multicast:
        return "multicast address"
    if address.is_unspecified:
        return "unspecified address"
    if address.is_loopback:
        return "" if allow_private else "loopback address"
    if address.is_global:
        return ""
    if address.is_reserved or not address.is_private:
        return "" if allow_private and _is_shared(address) else "reserved address"
    return "" if allow_private else "private address"


def _is_shared(address: IPAddress) -> bool:
    return address.version == 4 and address in ipaddress.ip_network("100.64.0.0/10")


def _embedded(address: IPAddress) -> list[ipaddress.IPv4Address]:
    if not isinstance(address, ipaddress.IPv6Address):
        return []
    found = [address.ipv4_mapped, address.sixtofour]
    if address.teredo is not None:
        found += address.teredo
    if address in _NAT64:
        found.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return [inner for inner in found if inner is not None]


def is_host_allowed(host: str, allowed_domains: tuple[str, ...]) -> bool:
    """Exact names, or ".example.org" for the domain and all below it. Case and a trailing dot do
    not matter."""
    host = host.lower().rstrip(".")
    for entry in allowed_domains:
        entry = entry.lower().rstrip(".")
        if host == entry.lstrip(".") if entry.startswith(".") else host == entry:
            return True
        if entry.startswith(".") and host.endswith(entry):
            return True
    return False
