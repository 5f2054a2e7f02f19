"""Who may see an engine's books: /debug/integrity."""

import socket
import urllib.request

import pytest

from foveal_runtime.engine.process.health import HealthServer, is_near

NEAR = ("127.0.0.1", "127.0.0.2", "::1", "::ffff:127.0.0.1")
FAR = ("10.0.0.3", "169.254.1.1", "fe80::1%eth0", "::ffff:10.0.0.3", "0.0.0.0")


@pytest.mark.parametrize("own", ["127.0.0.1", "10.0.0.4", "fe80::2%eth0"])
def test_books_are_shown_on_the_same_machine_alone(own):
    """/debug/integrity answered whoever reached the metrics port."""
    assert all(is_near(peer, own) for peer in NEAR)
    assert not any(is_near(peer, own) for peer in FAR)


@pytest.mark.parametrize(
    ("peer", "own"),
    [
        ("10.0.0.3", "10.0.0.3"),
        ("::ffff:10.0.0.3", "10.0.0.3"),
        ("fd00::3", "fd00::3"),
        ("fe80::1%eth0", "fe80::1%eth0"),
    ],
)
def test_who_comes_from_the_engines_own_address_is_in_its_pod(peer, own):
    assert is_near(peer, own)


def own_address() -> str:
    """The address from which this machine would reach others; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("203.0.113.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])


def test_a_server_on_the_pods_address_alone_shows_its_books_inside():
    """Every request from inside a pod got 404: no engine there listens on loopback."""
    address = own_address()
    server = HealthServer(
        address, 0, live=str, ready=str, metrics=bytes, inspect=lambda: b'{"idle": true}'
    )
    server.start()
    try:
        url = f"http://{address}:{server.port}/debug/integrity"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=60) as answer:
            assert answer.read() == b'{"idle": true}'
    finally:
        server.stop()
