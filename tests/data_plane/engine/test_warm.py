"""The warm set: hot encoder outputs over a restart, and files that must not be used."""

import errno
from pathlib import Path

import msgspec
import pytest

from foveal_runtime.engine.caches.warm import INDEX, WarmSet
from foveal_runtime.engine.testing.drive import Drive, image
from foveal_runtime.engine.testing.fake_runner import FAKE_TRAITS

TRAITS = msgspec.structs.replace(FAKE_TRAITS, embed_kind="float32 v1")
NAMES = "ABCDEFGH"


def warm_set(folder, *, max_bytes=1 << 20, namespace=b"n" * 16, traits=TRAITS, **options):
    return WarmSet(str(folder), max_bytes, namespace=namespace, traits=traits, **options)


def ask(drive, name, *names):
    """A request over the named images, four embeddings each."""
    items = [image(one, 4 * at, 4) for at, one in enumerate(names)]
    drive.add(name, range(10, 10 + 4 * len(names) + 3), items)
    drive.run()


def drive_of(**limits):
    return Drive(traits=TRAITS, prefix_caching=False, **limits)


def saved(folder, names=NAMES, **limits):
    drive = drive_of(**limits)
    for name in names:
        ask(drive, f"first {name}", name)
    warm_set(folder).save(drive.scheduler.encoder, drive.runner)
    return drive


def restarted(folder, **limits):
    drive = drive_of(**limits)
    loaded = warm_set(folder).load(drive.scheduler.encoder, drive.runner)
    drive.scheduler.check_integrity()
    return drive, loaded


def names_of(keys):
    return "".join(key.decode()[0] for key in keys)


def test_an_engine_makes_its_folder_on_a_claim_and_leaves_the_others(tmp_path):
    saved(tmp_path / "engine-0", names="ABCD")
    saved(tmp_path / "engine-1", names="EFGH")
    for folder, names in (("engine-0", "DCBA"), ("engine-1", "HGFE")):
        _, loaded = restarted(tmp_path / folder)
        assert names_of(loaded.device) == names


def test_outputs_are_there_after_a_restart_without_a_host_tier(tmp_path):
    saved(tmp_path, encoder_cache_embeds=16)
    drive, loaded = restarted(tmp_path, encoder_cache_embeds=16)
    assert names_of(loaded.device) == "HGFE"
    assert not loaded.host
    for name in "EFGH":
        ask(drive, f"again {name}", name)
    assert drive.runner.num_encoded == 0
    assert drive.scheduler.encoder.num_hits == 4
    ask(drive, "an older one", "A")
    assert drive.runner.num_encoded == 1
    drive.assert_done()


def test_the_host_tier_takes_what_the_device_cannot(tmp_path):
    limits = {"encoder_cache_embeds": 8, "encoder_host_bytes": 4 * 4 * 32,
              "encoder_compute_embeds": 8}  # fmt: skip
    first = saved(tmp_path, **limits)
    assert len(first.scheduler.encoder.host) == 4
    drive, loaded = restarted(tmp_path, **limits)
    assert names_of(loaded.device) == "HG"
    assert names_of(loaded.host) == "FEDC"
    for name in "HC":
        ask(drive, f"again {name}", name)
    assert drive.runner.num_encoded == 0
    assert drive.scheduler.encoder.hits[0, "host"] == 1
    drive.assert_done()


def test_order_survives_so_the_coldest_goes_first(tmp_path):
    saved(tmp_path, encoder_cache_embeds=16)
    drive, _ = restarted(tmp_path, encoder_cache_embeds=16)
    ask(drive, "new", "Z")  # takes the place of E
    ask(drive, "hot", "H", "G")
    assert drive.runner.num_encoded == 1
    ask(drive, "cold", "E")
    assert drive.runner.num_encoded == 2


def test_bytes_are_bounded_and_the_hottest_are_chosen(tmp_path):
    drive = saved(tmp_path)
    count = warm_set(tmp_path, max_bytes=3 * 4 * 32).save(drive.scheduler.encoder, drive.runner)
    assert count == 3
    _, loaded = restarted(tmp_path)
    assert names_of(loaded.device) == "HGF"


def test_the_cost_policy_keeps_costs_over_a_restart(tmp_path):
    drive = drive_of(encoder_cache_embeds=12, encoder_eviction="cost")
    for name, seconds in (("A", 8.0), ("B", 1.0), ("C", 2.0)):
        ask(drive, name, name)
        drive.scheduler.encoder.note_cost(image(name, 0, 4)[0].mm_hash, seconds)
    warm_set(tmp_path).save(drive.scheduler.encoder, drive.runner)
    drive, loaded = restarted(tmp_path, encoder_cache_embeds=12, encoder_eviction="cost")
    assert names_of(loaded.device) == "ACB"
    ask(drive, "D", "D")  # takes the place of B, the cheapest
    ask(drive, "again", "A", "C")
    assert drive.runner.num_encoded == 1
    drive.assert_done()


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": b"m" * 16},
        {"traits": msgspec.structs.replace(TRAITS, embed_width=16)},
        {"traits": msgspec.structs.replace(TRAITS, embed_levels=4)},
        {"traits": msgspec.structs.replace(TRAITS, embed_kind="bfloat16 v1")},
    ],
    ids=["revision", "width", "levels", "dtype"],
)
def test_another_models_outputs_are_neither_used_nor_kept(tmp_path, caplog, other):
    saved(tmp_path)
    (tmp_path / "notes.txt").write_text("not ours")
    drive = drive_of()
    loaded = warm_set(tmp_path, **other).load(drive.scheduler.encoder, drive.runner)
    assert loaded == ([], [])
    assert len(drive.scheduler.encoder) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert len(caplog.records) == 1


def parts(folder):
    return sorted(folder.glob("*.safetensors"))


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x40
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-7])


def name_a_stranger(folder):
    text = (folder / INDEX).read_text().replace(parts(folder)[0].name, "../notes.txt")
    (folder / INDEX).write_text(text)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: flip(parts(folder)[0]),
        lambda folder: cut(parts(folder)[0]),
        lambda folder: parts(folder)[0].unlink(),
        lambda folder: cut(folder / INDEX),
        lambda folder: (folder / INDEX).write_bytes(b"\xff\xfe"),
        lambda folder: (folder / INDEX).write_bytes(b"{}"),
        name_a_stranger,
    ],
    ids=["flipped", "cut", "gone", "index cut", "index binary", "index empty", "path"],
)
def test_a_damaged_set_is_dropped_with_one_warning(tmp_path, caplog, damage):
    folder = tmp_path / "warm"
    saved(folder)
    (tmp_path / "notes.txt").write_text("not ours")
    damage(folder)
    drive, loaded = restarted(folder)
    assert loaded == ([], [])
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert not list(folder.iterdir())
    assert (tmp_path / "notes.txt").exists()
    ask(drive, "again", "A", "B")
    drive.assert_done()
    assert warm_set(folder).save(drive.scheduler.encoder, drive.runner) == 2


def test_a_set_replaces_the_last_one_and_leftovers(tmp_path):
    drive = saved(tmp_path)
    (tmp_path / "foveal-warm-0123456789abcdef-3.tmp").write_bytes(b"half written")
    before = parts(tmp_path)
    warm_set(tmp_path).save(drive.scheduler.encoder, drive.runner)
    assert len(list(tmp_path.iterdir())) == 2
    assert parts(tmp_path) != before
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o600}


def test_a_directory_that_cannot_be_made_costs_a_warning(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    drive = saved(tmp_path / "file" / "warm")
    assert len(caplog.records) == 1
    assert len(drive.scheduler.encoder) > 0


def test_saving_stops_at_its_deadline(tmp_path, caplog):
    drive = drive_of()
    ask(drive, "one", "A")
    times = iter([0.0, 100.0])
    late = warm_set(tmp_path, clock=lambda: next(times))
    assert late.save(drive.scheduler.encoder, drive.runner) == 0
    assert "cut short" in caplog.text


class Volume:
    """A runner whose files lie on a volume of so many bytes."""

    def __init__(self, runner, folder, size_bytes):
        self.runner, self.folder, self.size_bytes = runner, folder, size_bytes
        self.seen = []  # what lay there before each write

    def save_encoder(self, path, mm_hashes):
        self.seen.append(parts(self.folder))
        saved = self.runner.save_encoder(path, mm_hashes)
        above = sum(file.stat().st_size for file in self.folder.iterdir()) - self.size_bytes
        if above > 0:
            data = Path(path).read_bytes()
            Path(path).write_bytes(data[: max(len(data) - above, 0)])
            raise OSError(errno.ENOSPC, "No space left on device")
        return saved


def size_of(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


def test_a_volume_of_one_set_is_written_at_every_end(tmp_path):
    """The old set stayed until the new one was complete: on a volume without room for both, only
    the first was ever saved, and each attempt left its files."""
    drive = saved(tmp_path)
    volume = Volume(drive.runner, tmp_path, size_of(tmp_path) * 5 // 4)
    (tmp_path / "foveal-warm-0123456789abcdef-0.safetensors").write_bytes(bytes(10_000))
    for _ in range(3):
        before = parts(tmp_path)
        assert warm_set(tmp_path).save(drive.scheduler.encoder, volume) == len(NAMES)
        assert parts(tmp_path) != before
        assert len(list(tmp_path.iterdir())) == 2
    _, loaded = restarted(tmp_path)
    assert names_of(loaded.device) == "HGFEDCBA"


def test_a_volume_with_room_for_both_keeps_the_last_set_until_the_new_one_is_there(tmp_path):
    drive = saved(tmp_path)
    volume = Volume(drive.runner, tmp_path, size_of(tmp_path) * 3)
    before = parts(tmp_path)
    assert warm_set(tmp_path).save(drive.scheduler.encoder, volume) == len(NAMES)
    assert volume.seen == [before]
    assert parts(tmp_path) != before


def test_a_volume_that_is_too_small_gets_the_hottest_outputs(tmp_path, caplog):
    drive = saved(tmp_path)
    each = 4 * TRAITS.embed_bytes
    volume = Volume(drive.runner, tmp_path, parts(tmp_path)[0].stat().st_size // 2)
    for _ in range(2):
        whole = warm_set(tmp_path, part_bytes=each)
        count = whole.save(drive.scheduler.encoder, volume)
        assert 0 < count < len(NAMES)
        assert len(list(tmp_path.iterdir())) == count + 1
        _, loaded = restarted(tmp_path)
        assert names_of(loaded.device) == "HGFEDCBA"[:count]
    assert "cut short: [Errno 28]" in caplog.text


def test_what_cannot_be_saved_leaves_no_file(tmp_path, caplog):
    drive = saved(tmp_path)
    volume = Volume(drive.runner, tmp_path, 10)
    assert warm_set(tmp_path).save(drive.scheduler.encoder, volume) == 0
    assert "was not saved" in caplog.text
    assert not list(tmp_path.iterdir())
