"""Fetching: what may be connected to is decided before any connection, on every hop.

Everything here stays on loopback; addresses that must never be asked are only shown to the check.
"""

import asyncio
import contextlib
import ipaddress
import socket

import pytest

from foveal_runtime.frontend.media.addresses import is_host_allowed, refusal
from foveal_runtime.frontend.media.fetch import Fetcher, read_below
from foveal_runtime.plan.config import MediaSources
from foveal_runtime.plan.errors import (
    MediaFetchFailed,
    MediaForbidden,
    MediaInvalid,
    MediaTooLarge,
    RateLimited,
)


class Server:
    """A tiny HTTP server on loopback; `requests` are the paths it was asked for."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.routes: dict[str, list[bytes]] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.requests.append(path)
            await self.gate.wait()
            answers = self.routes.get(path, [reply(404)])
            writer.write(answers.pop(0) if len(answers) > 1 else answers[0])
            await writer.drain()
        writer.close()


def reply(status: int, body: bytes = b"", **headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", "Connection: close"]
    headers.setdefault("Content_Length", str(len(body)))
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items() if value]
    return ("\r\n".join(lines) + "\r\n\r\n").encode() + body


@contextlib.asynccontextmanager
async def serving(**changes: object):
    """A server, its base URL by name, and a fetcher that may reach loopback."""
    server = Server()
    listener = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    sources = MediaSources(
        **({"allowed_domains": ("localhost",), "allow_private_addresses": True} | changes)
    )
    fetcher = Fetcher(sources)
    try:
        yield server, f"http://localhost:{port}", fetcher
    finally:
        await fetcher.close()
        listener.close()
        await listener.wait_closed()


async def test_a_file_arrives_and_is_charged():
    async with serving() as (server, base, fetcher):
        server.routes["/a"] = [reply(200, b"picture")]
        charged: list[int] = []
        assert await fetcher.fetch(f"{base}/a", max_bytes=100, charge=charged.append) == b"picture"
        assert fetcher.fetched_bytes == len(b"picture")
        assert sum(charged) == 7


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/a%2Fb%2Cc?name=x%2By&sig=%2c%3D/%41", "/a%2Fb%2Cc?name=x%2By&sig=%2c%3D/%41"),
        ("/\u00e4 b?c|d", "/%C3%A4%20b?c%7Cd"),
        ("/a\r\nX: y", "/a%0D%0AX:%20y"),
        ("?a=%2F", "/?a=%2F"),
    ],
)
async def test_a_url_is_asked_for_as_it_is_written(path, asked):
    """A signature covers the escapes in it; they were written anew, and the server refused."""
    async with serving() as (server, base, fetcher):
        server.routes[asked] = [reply(200, b"picture")]
        server.routes["/moved"] = [reply(302, Location=f"{base}{asked}")]
        for url in (base + path, f"{base}/moved"):
            assert await fetcher.fetch(url, max_bytes=100) == b"picture"
        assert server.requests == [asked, "/moved", asked]


async def test_size_limits_hold_with_and_without_a_length():
    async with serving() as (server, base, fetcher):
        server.routes["/told"] = [reply(200, b"", Content_Length="1000")]
        server.routes["/untold"] = [reply(200, b"x" * 1000, Content_Length="")]
        for path in ("/told", "/untold"):
            with pytest.raises(MediaTooLarge):
                await fetcher.fetch(base + path, max_bytes=100)


async def test_encoded_bodies_are_not_unpacked():
    """A compressed body could grow a thousandfold behind the size limit."""
    async with serving() as (server, base, fetcher):
        server.routes["/z"] = [reply(200, b"\x1f\x8bnot really", Content_Encoding="gzip")]
        assert (await fetcher.fetch(f"{base}/z", max_bytes=100)).startswith(b"\x1f\x8b")


async def test_who_has_no_budget_left_stops_the_transfer():
    """The process's media budget is asked with Content-Length, before the body is read."""
    asked: list[int] = []

    def charge(num_bytes: int) -> None:
        asked.append(num_bytes)
        raise RateLimited("full")

    async with serving() as (server, base, fetcher):
        server.routes["/a"] = [reply(200, b"", Content_Length="90")]
        with pytest.raises(RateLimited):
            await fetcher.fetch(f"{base}/a", max_bytes=100, charge=charge)
        assert asked == [90]


async def test_failures_are_counted_by_the_entry_that_let_them_through():
    """A client cannot make new names: what no entry allows is one of the others."""
    async with serving() as (server, base, fetcher):
        server.routes["/gone"] = [reply(404)]
        with pytest.raises(MediaFetchFailed):
            await fetcher.fetch(f"{base}/gone", max_bytes=100)
        assert sum(fetcher.failures.values()) == 1
        assert fetcher.failures["other"] == 0


async def test_redirects_are_followed_and_counted():
    async with serving(max_redirects=2) as (server, base, fetcher):
        server.routes["/1"] = [reply(302, Location="/2")]
        server.routes["/2"] = [reply(302, Location=f"{base}/3")]
        server.routes["/3"] = [reply(200, b"here")]
        server.routes["/loop"] = [reply(302, Location="/loop")]
        assert await fetcher.fetch(f"{base}/1", max_bytes=100) == b"here"
        with pytest.raises(MediaFetchFailed, match="redirects"):
            await fetcher.fetch(f"{base}/loop", max_bytes=100)


@pytest.mark.parametrize(
    "target",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://metadata.internal/",
        "file:///etc/passwd",
        "ftp://localhost/x",
        "http://user:pw@localhost/",
    ],
)
async def test_redirects_to_forbidden_places_are_refused(target):
    async with serving() as (server, base, fetcher):
        server.routes["/r"] = [reply(302, Location=target)]
        with pytest.raises(MediaForbidden):
            await fetcher.fetch(f"{base}/r", max_bytes=100)
        assert server.requests == ["/r"]


async def test_failures_that_may_pass_are_tried_again_a_few_times():
    async with serving() as (server, base, fetcher):
        server.routes["/flaky"] = [reply(503), reply(200, b"ok")]
        server.routes["/down"] = [reply(500)]
        assert await fetcher.fetch(f"{base}/flaky", max_bytes=10) == b"ok"
        with pytest.raises(MediaFetchFailed):
            await fetcher.fetch(f"{base}/down", max_bytes=10)
        assert server.requests.count("/down") == 3
        with pytest.raises(MediaFetchFailed, match="404"):
            await fetcher.fetch(f"{base}/none", max_bytes=10)
        assert server.requests.count("/none") == 1


async def test_timeouts():
    async with serving(fetch_timeout_seconds=0.1) as (server, base, fetcher):
        server.gate.clear()
        with pytest.raises(MediaFetchFailed, match="within"):
            await fetcher.fetch(f"{base}/slow", max_bytes=10)
        server.gate.set()


async def test_identical_fetches_are_one_and_survive_a_cancelled_caller():
    async with serving() as (server, base, fetcher):
        server.routes["/a"] = [reply(200, b"once")]
        server.gate.clear()
        tasks = [asyncio.create_task(fetcher.fetch(f"{base}/a", max_bytes=10)) for _ in range(5)]
        while not server.requests:  # noqa: ASYNC110 - the server has no event
            await asyncio.sleep(0.001)
        tasks[0].cancel()
        server.gate.set()
        results = await asyncio.gather(*tasks[1:])
        assert results == [b"once"] * 4
        assert server.requests == ["/a"]


async def test_fetches_of_another_salt_are_not_joined():
    """A joined fetch would tell by its time that somebody else wants the URL."""
    async with serving() as (server, base, fetcher):
        server.routes["/a"] = [reply(200, b"once"), reply(200, b"once")]
        server.gate.clear()
        tasks = [
            asyncio.create_task(fetcher.fetch(f"{base}/a", max_bytes=10, salt=salt))
            for salt in (b"a", b"b", b"a")
        ]
        while len(server.requests) < 2:  # noqa: ASYNC110 - the server has no event
            await asyncio.sleep(0.001)
        server.gate.set()
        assert await asyncio.gather(*tasks) == [b"once"] * 3
        assert server.requests == ["/a"] * 2
        assert fetcher.flights.joins == 1


async def test_a_name_is_judged_by_every_address_it_has():
    """DNS rebinding: what is checked is what is connected to, and one bad address spoils a name."""
    asked = []

    def resolve(host: str, port: int) -> list:
        asked.append(host)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("93.184.216.34", port)),
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("10.0.0.7", port)),
        ]

    fetcher = Fetcher(MediaSources(allowed_domains=("cdn.example",)), resolve=resolve)
    with pytest.raises(MediaForbidden, match="private"):
        await fetcher.fetch("http://cdn.example/x.png", max_bytes=10)
    assert asked == ["cdn.example"]
    await fetcher.close()


async def test_the_checked_address_is_the_one_connected_to():
    """The name resolves once; a second answer would have no effect."""
    answers = []
    async with serving() as (server, base, _):
        port = int(base.rpartition(":")[2])
        server.routes["/a"] = [reply(200, b"ok")]

        def resolve(host: str, wanted: int) -> list:
            answers.append(host)
            return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", wanted))]

        sources = MediaSources(allowed_domains=("cdn.example",), allow_private_addresses=True)
        named = Fetcher(sources, resolve=resolve)
        assert await named.fetch(f"http://cdn.example:{port}/a", max_bytes=10) == b"ok"
        assert answers == ["cdn.example"]
        await named.close()


@pytest.mark.parametrize(
    ("url", "error"),
    [
        ("http://localhost/x", MediaForbidden),
        ("http://127.0.0.1/x", MediaForbidden),
        ("http://[::1]/x", MediaForbidden),
        ("http://2130706433/x", MediaForbidden),
        ("http://0x7f.1/x", MediaForbidden),
        ("http://evil.example/x", MediaForbidden),
        ("https://ok.example.evil.example/", MediaForbidden),
        ("http://user@ok.example/", MediaForbidden),
        ("http://:secret@ok.example/", MediaForbidden),
        ("gopher://ok.example/", MediaInvalid),
        ("http:///x", MediaInvalid),
        ("http://ok.example:99999/", MediaInvalid),
        ("javascript:alert(1)", MediaInvalid),
        ("no url", MediaInvalid),
        ("http://ok.example/" + "x" * 9000, MediaInvalid),
    ],
)
async def test_urls_refused_without_any_io(url, error):
    def resolve(host: str, port: int) -> list:
        raise AssertionError(f"{host} must not be resolved")

    domains = ("ok.example", "127.0.0.1", "::1", "2130706433", "0x7f.1")
    fetcher = Fetcher(MediaSources(allowed_domains=domains), resolve=resolve)
    with pytest.raises(error):
        await fetcher.fetch(url, max_bytes=10)


@pytest.mark.parametrize(
    ("url", "fix"),
    [
        ("http://cdn.example/x.png", "--allowed-domain (security.mediaSources.allowedDomains)"),
        ("file:///x.png", "--file-root (security.mediaSources.localFiles)"),
    ],
)
async def test_a_source_that_is_off_is_named_as_its_option(url, fix):
    """Clients read `media_sources.allowed_domains`, which no user can set."""
    with pytest.raises(MediaForbidden) as caught:
        await Fetcher(MediaSources()).fetch(url, max_bytes=10)
    assert fix in caught.value.message


@pytest.mark.parametrize("url", ["iVBORw0KGgo=", "iVBO" * 4000, "/tmp/x.png"])
async def test_what_is_no_url_is_told_what_one_begins_with(url):
    """Bare base64 was a URL that is too long, or one of the scheme 'ivborw0kggo='."""
    with pytest.raises(MediaInvalid, match="base64 needs data:<type>;base64, before it"):
        await Fetcher(MediaSources()).fetch(url, max_bytes=10)


@pytest.mark.parametrize("host", ["adac.de", "cafe.bad", "1.fm", "x.de.", "käse.de"])
async def test_hosts_made_of_hex_letters_are_names(host):
    """adac.de was refused: each of its letters may stand in a number."""
    asked = []

    def resolve(name: str, port: int) -> list:
        asked.append(name)
        raise OSError("no such name")

    fetcher = Fetcher(MediaSources(allowed_domains=(host,)), resolve=resolve)
    with pytest.raises(MediaFetchFailed):
        await fetcher.fetch(f"http://{host}/x", max_bytes=10)
    await fetcher.close()
    assert asked == [host.replace("käse", "xn--kse-qla")]


@pytest.mark.parametrize(
    "address",
    [
        "169.254.169.254", "169.254.0.1", "fe80::1", "fd00:ec2::254", "224.0.0.1", "ff02::1",
        "0.0.0.0", "::", "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1",
        # Other clouds' metadata; NAT64 by a local prefix; IPv4-compatible and -translated.
        "168.63.129.16", "100.100.100.200", "192.0.0.192", "fd20:ce::254", "64:ff9b:1::a9fe:a9fe",
        "::169.254.169.254", "::7f00:1", "::ffff:0:a9fe:a9fe", "5f00::1", "::ffff:168.63.129.16",
    ],
)  # fmt: skip
def test_addresses_refused_always(address):
    assert refusal(ipaddress.ip_address(address), allow_private=True)


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1", "127.9.9.9", "::1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "100.64.0.1",
        "fc00::1", "::ffff:10.0.0.1", "64:ff9b::7f00:1", "198.18.0.1", "192.0.2.1", "240.0.0.1",
        "255.255.255.255", "2001:db8::1", "fec0::1",
    ],
)  # fmt: skip
def test_addresses_refused_by_default(address):
    assert refusal(ipaddress.ip_address(address), allow_private=False)


@pytest.mark.parametrize("address", [
    "93.184.216.34", "2606:2800:220:1::1", "2606:2800:220:1::a00:1", "::ffff:8.8.8.8",
    "64:ff9b::808:808",
])  # fmt: skip
def test_public_addresses_pass(address):
    assert not refusal(ipaddress.ip_address(address), allow_private=False)


def test_domain_lists():
    allowed = ("img.example", ".cdn.example")
    yes = ["img.example", "IMG.Example.", "cdn.example", "a.cdn.example", "a.b.cdn.example"]
    no = ["x.img.example", "acdn.example", "cdn.example.evil", "", "example"]
    assert all(is_host_allowed(host, allowed) for host in yes)
    assert not any(is_host_allowed(host, allowed) for host in no)
    assert not is_host_allowed("img.example", ())


# ---- file: ----
@pytest.fixture
def folder(tmp_path):
    root = tmp_path / "media"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "a b.png").write_bytes(b"inside")
    (tmp_path / "secret").write_bytes(b"outside")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "door").symlink_to(tmp_path)
    (root / "ok").symlink_to(root / "sub" / "a b.png")
    return root


async def test_files_below_the_root(folder):
    fetcher = Fetcher(MediaSources(file_root=str(folder)))
    for url in ("file:///sub/a%20b.png", f"file://{folder}/sub/a%20b.png", "file:///ok"):
        assert await fetcher.fetch(url, max_bytes=100) == b"inside"


@pytest.mark.parametrize(
    "url",
    [
        "file:///../secret", "file:///sub/../../secret", "file:///%2e%2e/secret", "file:///link",
        "file:///door/secret", "file:///sub", "file:///", "file://host/sub/x", "file:///a%00b",
    ],
)  # fmt: skip
async def test_no_way_out_of_the_root(folder, url):
    fetcher = Fetcher(MediaSources(file_root=str(folder)))
    with pytest.raises(MediaForbidden):
        await fetcher.fetch(url, max_bytes=100)


async def test_files_need_a_root_and_obey_limits(folder):
    with pytest.raises(MediaForbidden):
        await Fetcher(MediaSources()).fetch("file:///x", max_bytes=10)
    fetcher = Fetcher(MediaSources(file_root=str(folder)))
    with pytest.raises(MediaTooLarge):
        await fetcher.fetch("file:///sub/a%20b.png", max_bytes=3)
    with pytest.raises(MediaFetchFailed):
        await fetcher.fetch("file:///none", max_bytes=3)
    with pytest.raises(MediaInvalid, match="malformed"):
        await fetcher.fetch("file://[/x", max_bytes=3)


def test_pipes_and_devices_are_no_files(folder):
    import os

    os.mkfifo(folder / "pipe")
    with pytest.raises(MediaForbidden):
        read_below(folder, "/pipe", 10)
