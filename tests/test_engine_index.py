"""A store in a folder: what was committed is there again, whole, however the store before ended; or
nothing is, and it says why."""

import hashlib
import mmap
import os
import random
import shutil
import signal
import stat

import pytest

import engine
from engine import ChunkStore

SIZE = 64 << 10


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "store"


def open_store(folder, size=SIZE, **more):
    return ChunkStore("cpu", size, folder=folder, **more)


def put(store, key, text, meta=b"m" * 36):
    chunk = store.reserve(len(text))
    if chunk is not None:
        store.fill(chunk, lambda view: view.__setitem__(slice(None), text))
        chunk.meta = meta
        store.release([store.commit(key, chunk)])
    return chunk is not None


def get(store, key):
    chunk = store.acquire(key)
    if chunk is None:
        return None
    data = b"".join(bytes(piece) for piece in store.pieces(chunk))
    store.release([chunk])
    return data


def killed(work, *arguments):
    """Runs work(*arguments) in a process that ends without closing anything."""
    pid = os.fork()
    if not pid:
        try:
            work(*arguments)
        finally:
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL


def three(folder, close=False):
    store = open_store(folder, eviction="lru")
    for key in (b"a", b"b", b"c", b"d", b"\xff\n ' \x00"):
        put(store, key, key * 100, key[:1] * 36)
    store.remove(b"d")
    put(store, b"b", b"new" * 50)
    store.touch([b"a"])
    put(store, b"e", b"")
    if close:
        store.close()


@pytest.mark.parametrize("close", [True, False], ids=["closed", "killed"])
def test_what_was_committed_is_there_again_in_its_order(folder, close):
    killed(three, folder, close)
    with open_store(folder, eviction="lru") as store:
        assert store.keys() == [b"c", b"\xff\n ' \x00", b"b", b"a", b"e"]
        for key in (b"a", b"c", b"\xff\n ' \x00"):
            assert get(store, key) == key * 100 and store._chunks[key].meta == key[:1] * 36
        assert (get(store, b"b"), get(store, b"d"), get(store, b"e")) == (b"new" * 50, None, b"")
        used = sum(-(-max(size, 1) // 64) * 64 for size in (100, 100, 600, 150, 0))
        assert store.stats()["bytes_used"] == used


def test_what_is_half_written_or_let_go_of_is_not(folder):
    def work():
        store = open_store(folder)
        store.reserve(100)
        put(store, b"a", b"old" * 10)
        held = store.acquire(b"a")
        put(store, b"a", b"new" * 10)
        put(store, b"b", b"b")
        store.acquire(b"b")
        assert held.key is None
        store.pin("id", store.acquire_each([b"a"], [b"m" * 36]), 100)

    killed(work)
    with open_store(folder) as store:
        assert get(store, b"a") == b"new" * 10 and get(store, b"b") == b"b"
        stats = store.stats()
        assert (stats["chunks"], stats["bytes_used"], stats["in_use"]) == (2, 128, 0)


def test_clear_is_for_ever_and_a_close_is_not(folder):
    with open_store(folder) as store:
        put(store, b"a", b"a")
        store.clear()
        put(store, b"b", b"b")
        store.close()
    with open_store(folder) as store:
        assert store.keys() == [b"b"]


@pytest.mark.parametrize("seed", range(12))
def test_killed_at_any_time(folder, seed):
    """Every value is its own digest; memory that is shared says what there is, and what is being
    changed."""
    tally = mmap.mmap(-1, 4096)  # a byte a key: 0 absent, 1 there, 2 in doubt

    def work(seed):
        rng = random.Random(seed)
        store = open_store(folder, 256 << 10)  # room for all
        for _ in range(rng.randrange(1, 200)):
            number = rng.randrange(64)
            tally[number] = 2
            if rng.random() < 0.8:
                body = rng.randbytes(rng.randrange(3000))
                if rng.random() < 0.01:
                    os.kill(os.getpid(), signal.SIGKILL)
                put(store, b"%d" % number, hashlib.sha256(body).digest() + body)
                tally[number] = 1
            else:
                store.remove(b"%d" % number)
                tally[number] = 0

    for attempt in range(8):
        killed(work, 100 * seed + attempt)
        with open_store(folder, 256 << 10) as store:
            keys = store.keys()
            for key in keys:
                data = get(store, key)
                assert hashlib.sha256(data[32:]).digest() == data[:32]
            wanted = {number for number in range(64) if tally[number] == 1}
            doubt = {number for number in range(64) if tally[number] == 2}
            there = {int(key) for key in keys}
            assert wanted <= there <= wanted | doubt
            for number in doubt:
                tally[number] = number in there
            used = sum(-(-store._chunks[key].nbytes // 64) * 64 for key in keys)
            assert store.stats()["bytes_used"] == used


@pytest.mark.parametrize("closed", [True, False])
def test_after_a_reboot_only_what_was_closed_is_trusted(folder, closed, monkeypatch):
    killed(three, folder, closed)
    monkeypatch.setattr(engine, "boot_id", lambda: "another")
    with open_store(folder) as store:
        assert len(store.keys()) == (5 if closed else 0)
        put(store, b"x", b"x")
    with open_store(folder) as store:
        assert get(store, b"x") == b"x"


def test_another_size_or_version_or_an_arena_that_is_gone_starts_empty(folder, monkeypatch, caplog):
    three(folder, close=True)
    for size in (2 * SIZE, SIZE):
        with open_store(folder, size) as store:
            assert store.keys() == [] and put(store, b"a", b"a" * 1000)
    assert len(caplog.records) == 2 and "is removed" in caplog.text
    monkeypatch.setattr(engine, "VERSION", 2)
    with open_store(folder) as store:
        assert store.keys() == [] and put(store, b"a", b"a" * 1000)
    for size in (None, 0, 1000, SIZE - 1, SIZE + 1):
        with open_store(folder) as store:
            assert put(store, b"a", b"a" * 1000)
        if size is None:
            inside(folder, "arena").unlink()
        else:
            os.truncate(inside(folder, "arena"), size)
        with open_store(folder) as store:
            assert store.keys() == [] and put(store, b"b", b"b")
        with open_store(folder) as store:
            assert get(store, b"b") == b"b"


def inside(folder, name):
    (path,) = folder.glob(f"*/{name}")
    return path


def test_files_are_ours_alone(folder):
    with open_store(folder) as store:
        put(store, b"a", b"a")
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert stat.S_IMODE(inside(folder, "arena").stat().st_mode) == 0o600
        assert inside(folder, "arena").stat().st_blocks * 512 >= SIZE
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="no other's to write"):
        open_store(folder)


@pytest.mark.parametrize("size", [SIZE, 2 * SIZE])
def test_a_second_living_store_is_an_error(folder, size):
    with open_store(folder) as store:
        put(store, b"a", b"a")
        with pytest.raises(OSError, match="locked"):
            open_store(folder, size)
        assert get(store, b"a") == b"a"
    with open_store(folder) as store:
        assert get(store, b"a") == b"a"


def test_a_full_disk_is_an_error_at_the_start_and_takes_no_room(folder, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match=f"{SIZE} bytes in .*No space"):
            open_store(folder)
    assert list(folder.iterdir()) == []
    with open_store(folder) as store:
        assert put(store, b"a", b"a")


def test_where_the_index_cannot_be_written_the_store_goes_on_and_nothing_is_there_again(
    folder, caplog
):
    """What it says would not be so any more: the memory of what is dropped is used again."""
    store = open_store(folder)
    put(store, b"a", b"a" * 1000)
    store._index._db.execute("PRAGMA max_page_count = 1")  # as on a full disk
    for number in range(300):
        assert put(store, b"%d" % number, b"%d" % number * 300)
        assert get(store, b"%d" % number) == b"%d" % number * 300
    assert store.remove(b"299") and store.stats()["in_use"] == 0
    store.close()
    assert len([each for each in caplog.records if "cannot be written" in each.message]) == 1
    with open_store(folder) as store:
        assert store.keys() == []


def test_what_is_not_ours_in_the_folder_stays(folder):
    folder.mkdir(0o700)
    (folder / "index").write_bytes(b"somebody's diary")
    (folder / "lmcache-of-my-own").mkdir()
    with open_store(folder) as store:
        assert put(store, b"a", b"a")
    assert (folder / "index").read_bytes() == b"somebody's diary"
    assert (folder / "lmcache-of-my-own").exists()
    with pytest.raises(OSError):
        open_store(folder / "index")


@pytest.mark.parametrize("close", [True, False])
def test_a_cut_index_is_an_error_or_less_and_never_a_wrong_byte(folder, close):
    def work():
        store = open_store(folder)
        for number in range(300):
            body = b"%d" % number * 100
            put(store, b"%d" % (number % 150), hashlib.sha256(body).digest() + body)
        if close:
            store.close()

    killed(work)
    index, here = inside(folder, "index"), inside(folder, "arena").parent
    whole, arena = index.read_bytes(), inside(folder, "arena").read_bytes()
    errors = 0
    for cut in [0, 1, 100, *range(1024, len(whole), 2048)]:
        shutil.rmtree(folder)
        here.mkdir(0o700, parents=True)
        (here / "index").write_bytes(whole[:cut])
        (here / "arena").write_bytes(arena)
        try:
            store = open_store(folder)
        except OSError as error:
            assert "is damaged" in str(error)
            errors += 1
            continue
        with store:
            for key in store.keys():  # noqa: SIM118  it is a method of ours
                data = get(store, key)
                assert hashlib.sha256(data[32:]).digest() == data[:32]
    assert errors


def test_a_store_in_a_folder_is_on_the_cpu(folder):
    with pytest.raises(ValueError, match="cuda.*on the cpu"):
        ChunkStore("cuda", SIZE, folder=folder)
    assert not folder.exists()
