"""Hosts and addresses that media may be fetched from. Pure; asked before a connection is made."""

from __future__ import annotations

import ipaddress

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_METADATA = frozenset(
    ipaddress.ip_address(text)
    for text in (
        "100.100.100.200",  # Alibaba Cloud
        "168.63.129.16",  # Azure: public by its number, but each host's own
        "192.0.0.192",  # Oracle Cloud
        "fd00:ec2::254",  # AWS
        "fd20:ce::254",  # Google Cloud
    )
)
"""Services of clouds that answer each machine with its own credentials; others are link-local."""
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_PROTOCOLS = ipaddress.ip_network("192.0.0.0/24")
_SHARED = ipaddress.ip_network("100.64.0.0/10")
_GLOBAL_V6 = ipaddress.ip_network("2000::/3")
_LOCAL_V6 = (ipaddress.ip_network("fc00::/7"), ipaddress.ip_network("fec0::/10"))


def refusal(address: IPAddress, *, allow_private: bool) -> str:
    """Why the address is refused, "" when it is not.

    Link-local addresses and every cloud's metadata service, multicast, unspecified and reserved
    addresses are refused always; loopback and private ones unless `allow_private`. An IPv4 address
    inside an IPv6 one (mapped, 6to4, Teredo, NAT64) is judged as what it is. What else is not
    global unicast is reserved, whatever it may hold: NAT64 by a prefix of the network's own, say.
    """
    for inner in _embedded(address):
        why = refusal(inner, allow_private=allow_private)
        if why:
            return why
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return ""
    if address.is_link_local or address in _METADATA:
        return "link-local or metadata address"
    if address.is_multicast:
        return "multicast address"
    if address.is_unspecified:
        return "unspecified address"
    if address.is_loopback:
        return "" if allow_private else "loopback address"
    if any(address in network for network in _LOCAL_V6):
        return "" if allow_private else "private address"
    if address.version == 6 and address not in _GLOBAL_V6 and address not in _NAT64:
        return "reserved address"
    if address in _PROTOCOLS:
        return "reserved address"
    if address.is_global:
        return ""
    if address.is_reserved or not address.is_private:
        return "" if allow_private and address in _SHARED else "reserved address"
    return "" if allow_private else "private address"


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
