"""Shared-memory values: written once, read by any engine of the node, freed by their writer."""

import logging
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from foveal_runtime.mirror.messages import NIL, SharedValue
from foveal_runtime.mirror.receiver import Receiver, ReceiverLimits
from foveal_runtime.mirror.sender import Sender, SendItem, SendValue
from foveal_runtime.plan.errors import StartupError
from foveal_runtime.wire import codec
from foveal_runtime.wire.item import pack_item
from foveal_runtime.wire.shm import (
    HEADER_BYTES,
    SharedReader,
    SharedWriter,
    check_capacity,
    max_mappings,
    pack_header,
    sweep,
)


def value(index: int) -> bytes:
    return pack_item(0, (1, 2), ((1, 1),), {"x": ("float32", np.full(64, index, np.float32))})


SIZE = HEADER_BYTES + len(value(0))


def hash_of(index: int) -> bytes:
    return index.to_bytes(32, "big")


def put(writer: SharedWriter, index: int) -> SharedValue | None:
    data = value(index)
    name = writer.put(hash_of(index), data, codec.digest(data))
    return None if name is None else SharedValue(name, len(data), codec.digest(data))


@pytest.fixture
def writer(tmp_path):
    made = SharedWriter(tmp_path, 7, 3 * SIZE)
    yield made
    made.close()


def test_a_value_is_written_once_and_read_without_a_copy(tmp_path, writer):
    ref = put(writer, 1)
    assert put(writer, 1) == ref
    assert (writer.num_written, writer.num_reused) == (1, 1)
    view = SharedReader(tmp_path).open(ref, hash_of(1))
    assert bytes(view) == value(1)
    assert view.readonly
    writer.check_integrity()


def test_a_reader_keeps_what_it_mapped_after_the_writer_unlinks(tmp_path, writer):
    reader = SharedReader(tmp_path)
    ref = put(writer, 1)
    view = reader.open(ref, hash_of(1))
    for index in (2, 3, 4):
        put(writer, index)
    assert writer.lookup(hash_of(1)) is None
    assert reader.open(ref, hash_of(1)) is None
    assert reader.num_absent == 1
    assert bytes(view) == value(1)


def test_what_engines_hold_is_not_given_away_twice(writer):
    for index in (1, 2, 3):
        put(writer, index)
        writer.sent(hash_of(index), "e0")
    writer.sent(hash_of(1), "e1")
    assert put(writer, 4) is None  # goes inline
    assert writer.num_no_room == 1
    writer.reconcile("e0", lambda h: h == hash_of(3))
    assert put(writer, 4) is not None
    assert writer.lookup(hash_of(1)) is not None  # e1 still holds it
    assert writer.lookup(hash_of(2)) is None
    writer.forget_engine("e1")
    assert put(writer, 5) is not None
    assert writer.lookup(hash_of(1)) is None
    writer.check_integrity()


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "/etc/passwd",
        "0000000000000007/../lock",
        f"0000000000000007/1-{hash_of(2).hex()}",  # another value's name
        f"000000000000000G/1-{hash_of(1).hex()}",
        f"0000000000000007/1-{hash_of(1).hex()}/",
        f"0000000000000007//1-{hash_of(1).hex()}",
        "",
    ],
)
def test_names_never_lead_elsewhere(tmp_path, writer, name):
    ref = put(writer, 1)
    forged = SharedValue(name, ref.length, ref.digest)
    with pytest.raises(codec.BadValue, match="malformed"):
        SharedReader(tmp_path).open(forged, hash_of(1))


def test_links_are_not_followed(tmp_path, writer):
    ref = put(writer, 1)
    path = tmp_path / "mm" / ref.name
    target = tmp_path / "elsewhere"
    path.rename(target)
    path.symlink_to(target)
    assert SharedReader(tmp_path).open(ref, hash_of(1)) is None
    path.unlink()
    target.rename(path)


def test_files_that_are_something_else_are_asked_for_again(tmp_path, writer):
    """Each ended the session, and the next one was sent the same name."""
    reader = SharedReader(tmp_path)
    ref = put(writer, 1)
    path = tmp_path / "mm" / ref.name
    good = path.read_bytes()
    other = pack_header(hash_of(2), ref.length, ref.digest) + good[HEADER_BYTES:]
    for bad in (good[:-1], good + b"x", good[:-1] + b"x", b"", other, b"x" * len(good)):
        path.write_bytes(bad)
        assert reader.open(ref, hash_of(1)) is None
    path.write_bytes(good)
    assert reader.open(SharedValue(ref.name, ref.length, b"8" * 8), hash_of(1)) is None
    assert (reader.num_opened, reader.num_damaged) == (0, 7)
    assert bytes(reader.open(ref, hash_of(1))) == value(1)


@contextmanager
def soft_limit(kind: int, value: int):
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


def lowest_free_descriptor() -> int:
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.close(descriptor)
    return descriptor


def test_no_descriptor_left_means_absent(tmp_path, writer, caplog):
    """Every error of the system but a missing folder ended the engine."""
    reader, ref = SharedReader(tmp_path), put(writer, 1)
    for spare in (0, 1, 2):
        with soft_limit(resource.RLIMIT_NOFILE, lowest_free_descriptor() + spare):
            assert reader.open(ref, hash_of(1)) is None
    assert reader.num_absent == 3
    [told] = caplog.records
    assert (told.levelno, "Too many open files" in told.message) == (logging.WARNING, True)
    assert bytes(reader.open(ref, hash_of(1))) == value(1)


def test_no_memory_to_map_means_absent(tmp_path):
    """ENOMEM, as above vm.max_map_count, ended the engine."""
    data = value(1) + bytes(64 << 20)
    writer = SharedWriter(tmp_path, 7, 128 << 20)
    ref = SharedValue(
        writer.put(hash_of(1), data, codec.digest(data)), len(data), codec.digest(data)
    )
    mapped_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    reader = SharedReader(tmp_path)
    with soft_limit(resource.RLIMIT_AS, mapped_bytes + (32 << 20)):
        assert reader.open(ref, hash_of(1)) is None
    assert reader.num_absent == 1
    assert bytes(reader.open(ref, hash_of(1))) == data
    writer.close()


def test_values_leave_descriptors_and_mappings_for_the_rest(tmp_path, writer, caplog):
    """Each resident value keeps one descriptor: a thousand of them left none for sockets."""
    reader = SharedReader(tmp_path, max_mapped=2)
    views = [reader.open(put(writer, index), hash_of(index)) for index in (1, 2, 3)]
    assert [view is not None for view in views] == [True, True, False]
    [told] = caplog.records
    assert "ulimit -n" in told.message
    views[0] = None  # evicted
    assert bytes(reader.open(put(writer, 3), hash_of(3))) == value(3)
    assert (reader.num_opened, reader.num_absent) == (3, 1)


def test_the_lower_of_two_limits_bounds_mappings(tmp_path):
    counts = tmp_path / "max_map_count"
    descriptors = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    counts.write_text("100\n")
    assert max_mappings(str(counts)) == 50
    counts.write_text(f"{2 * descriptors}\n")
    assert max_mappings(str(counts)) == descriptors // 2
    assert max_mappings(str(tmp_path / "none")) == min(descriptors, 65530) // 2


def test_a_value_that_differs_gets_a_file_of_its_own(tmp_path, writer):
    """The name of the first file went out with the digest of the second value, and every engine
    refused it, session after session."""
    reader, other = SharedReader(tmp_path), value(1)[::-1]
    first = put(writer, 1)
    writer.sent(hash_of(1), "e0")
    assert writer.put(hash_of(1), other, codec.digest(other)) is None  # inline: e0 holds the first
    writer.reconcile("e0", lambda h: False)
    name = writer.put(hash_of(1), other, codec.digest(other))
    assert name != first.name
    ref = SharedValue(name, len(other), codec.digest(other))
    assert bytes(reader.open(ref, hash_of(1))) == other
    assert reader.open(first, hash_of(1)) is None
    writer.check_integrity()


class SlotWriter(SharedWriter):
    """Weakened: a few slots are used again and again, under the same names."""

    def put(self, mm_hash, data, value_digest):
        self._sequence = 0
        self.files.clear()
        self.used_bytes = 0
        for path in self.folder.glob("1-*"):
            path.unlink()
        name = super().put(mm_hash, data, value_digest)
        slot = self.folder / "1-slot"
        (self.root / name).rename(slot)
        return f"{self._boot}/1-slot"


class TrustingReader(SharedReader):
    """Weakened: opens whatever has the name, once checked or never."""

    def open(self, ref, mm_hash):
        path = self.root / ref.name
        return path.read_bytes()[HEADER_BYTES:]


def test_reused_slots_without_checks_hand_out_another_image(tmp_path):
    """What names that never come back, and the header check, are for."""
    writer = SlotWriter(tmp_path, 9, 10 * SIZE)
    first = put(writer, 1)
    put(writer, 2)  # while the engine has not opened the first yet
    assert TrustingReader(tmp_path).open(first, hash_of(1)) == value(2)  # the wrong picture
    with pytest.raises(codec.BadValue):
        SharedReader(tmp_path).open(first, hash_of(1))
    writer.close()


def test_the_folders_of_dead_writers_are_swept(tmp_path):
    code = (
        "import sys, pathlib\n"
        "from foveal_runtime.wire.shm import SharedWriter\n"
        "w = SharedWriter(pathlib.Path(sys.argv[1]), 3, 10**6)\n"
        "w.put(bytes(32), b'x' * 100, bytes(8))\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment,
    ) as process:  # fmt: skip
        assert process.stdout.readline() == b"ready\n"
        assert sweep(tmp_path / "mm") == 0  # alive: left alone
        process.send_signal(signal.SIGKILL)
        process.wait(60)
    writer = SharedWriter(tmp_path, 4, 10**6)
    assert writer.num_swept == 1
    assert [p.name for p in (tmp_path / "mm").iterdir()] == [f"{4:016x}"]
    writer.close()
    assert list((tmp_path / "mm").iterdir()) == []


def test_a_full_file_system_means_inline(tmp_path, writer):
    writer.folder.chmod(0o500)
    try:
        if os.geteuid() == 0:
            writer.folder.rename(tmp_path / "gone")  # root ignores modes: take the folder away
        assert put(writer, 1) is None
        assert writer.num_failed == 1
        assert writer.used_bytes == 0
    finally:
        if os.geteuid() == 0:
            (tmp_path / "gone").rename(writer.folder)
        writer.folder.chmod(0o700)


def test_too_small_a_mount_or_limit_is_a_startup_error(tmp_path):
    limit = tmp_path / "memory.max"
    check_capacity(tmp_path, 1, str(limit))
    with pytest.raises(StartupError, match=r"shm_bytes .* lower shm_bytes or mount"):
        check_capacity(tmp_path, 2**60, str(limit))
    limit.write_text("max\n")
    check_capacity(tmp_path, 4096, str(limit))
    limit.write_text("4095\n")
    with pytest.raises(StartupError, match="memory limit of 4095"):
        check_capacity(tmp_path, 4096, str(limit))
    with pytest.raises(StartupError, match="shm_directory"):
        check_capacity(tmp_path / "absent", 1)
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="shm_directory"):
        SharedWriter(tmp_path / "file", 1, 1)


def test_through_both_halves_of_the_mirror(tmp_path):
    """A frontend writes once; two engines of its node map the same pages; a file that is gone is
    asked for and comes inline."""
    writer = SharedWriter(tmp_path, 5, 100 * SIZE)
    reader = SharedReader(tmp_path)
    limits = ReceiverLimits(capacity_bytes=10**6)
    engines = [Receiver(limits, node="n1"), Receiver(limits, node="n1")]
    senders = [Sender("f0", frontend_boot=5, node="n1") for _ in engines]

    def up(i: int, sending) -> None:
        frames = [memoryview(bytes(f)) for f in codec.encode_up(sending)]
        message = codec.decode_up(frames)
        values = codec.open_values(message, frames, reader.open)
        for answer in engines[i].on_message("f0", message, values):
            senders[i].on_down(answer)

    def shared(index: int) -> dict[bytes, SendValue]:
        data, h = value(index), hash_of(index)
        name = writer.put(h, data, codec.digest(data))
        return {h: SendValue(data, codec.digest(data), name)}

    items = [SendItem(hash_of(1), len(value(1)))]
    for i, sender in enumerate(senders):
        up(i, sender.hello())
        sending = sender.request((f"r{i}", 1), items, NIL, shared(1))
        assert sending.frames == []
        writer.sent(hash_of(1), f"e{i}")
        up(i, sending)
        [ready] = engines[i].take_ready()
        assert bytes(ready.items[hash_of(1)].data) == value(1)
        senders[i].on_down(engines[i].down("f0"))
        engines[i].finish("f0", ready.rid)
        sender.finished(ready.rid)
        assert sender.stats.bytes_sent["shm"] == len(value(1))
    assert writer.num_written == 1

    engines[0].reset()
    senders[0].on_down(engines[0].down("f0"))
    for i, sender in enumerate(senders):
        writer.reconcile(f"e{i}", lambda h, s=sender: s.believes(h) or s.is_needed(h))
    assert writer.files[hash_of(1)].holders == {"e1"}

    gone = shared(2)
    os.unlink(tmp_path / "mm" / gone[hash_of(2)].shared_name)
    up(0, senders[0].request(("r2", 1), [SendItem(hash_of(2), len(value(2)))], NIL, gone))
    [need] = senders[0].on_down(engines[0].down("f0")).needs
    up(0, senders[0].fill(need, SendValue(value(2), codec.digest(value(2)))))
    [ready] = engines[0].take_ready()
    assert bytes(ready.items[hash_of(2)].data) == value(2)
    assert senders[0].stats.bytes_sent["fill"] == len(value(2))
    writer.close()
