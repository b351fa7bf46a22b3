"""The arena and the chunk store: no byte in two places, no chunk lost, evicted or freed before its
time."""

import hashlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import wait_for

import engine
from engine import ALIGN_BYTES, Arena, ChunkStore, parse_device

# -- the arena


@given(st.lists(st.integers(1, 40) | st.integers(-20, -1), max_size=80))
def test_pieces_never_overlap_and_merge_again(steps):
    """A positive step takes so many bytes, a negative one gives back one of the pieces taken."""
    arena, taken = Arena(100), []  # type: ignore[var-annotated]  # (offset, size)
    for step in steps:
        if step > 0 and (offset := arena.take(step)) is not None:
            taken.append((offset, step))
        elif step < 0 and taken:
            arena.give_back(*taken.pop(step % len(taken)))
        in_use = sorted(taken)
        assert all(a + size <= b for (a, size), (b, _) in zip(in_use, in_use[1:], strict=False))
        assert all(offset >= 0 and offset + size <= 100 for offset, size in in_use)
        assert arena.used == sum(size for _, size in taken)
        largest = max((b - a for a, b in holes(in_use)), default=0)
        assert largest == max(
            [*arena._sizes, 100 - arena.top]
        )  # what is free is one piece, not many
    for piece in taken:
        arena.give_back(*piece)
    assert arena.take(100) == 0


def holes(in_use):
    ends = [0, *(offset + size for offset, size in in_use)]
    return [
        (end, start)
        for end, start in zip(ends, [*(offset for offset, _ in in_use), 100], strict=True)
    ]


def test_the_smallest_piece_that_fits_is_taken():
    arena = Arena(100)
    pieces = [arena.take(size) for size in (30, 5, 20, 5, 40)]
    assert pieces == [0, 30, 35, 55, 60]
    arena.give_back(0, 30)
    arena.give_back(35, 20)
    assert [arena.take(size) for size in (18, 20, 20)] == [35, 0, None]


# -- the store


@pytest.fixture
def store():
    made = ChunkStore("cpu", 4 * ALIGN_BYTES, warm_bytes=0)
    yield made
    made.close()


def put(store, key, text=b"x" * ALIGN_BYTES, meta=None, keep=False):
    """Stores `text` under key and lets go of it."""
    chunk = store.reserve(len(text))
    if chunk is None:
        return None
    store.fill(chunk, lambda view: view.__setitem__(slice(None), text))
    chunk.meta = meta
    store.release([store.commit(key, chunk, keep)])
    return chunk


def read(store, chunk):
    return b"".join(bytes(piece) for piece in store.pieces(chunk))


def test_put_and_get(store):
    put(store, "a", b"hello")
    chunk = store.acquire("a")
    assert read(store, chunk) == bytes(store.bytes_of(chunk).tolist()) == b"hello"
    store.release([chunk])
    assert store.acquire("b") is None
    assert store.stats() == dict(chunks=1, bytes_used=64, max_bytes=256, pins=0, pinned_chunks=0,
                                 hits=1, misses=1,
                                 evictions=0, rejected=0)  # fmt: skip


def test_the_least_recently_used_goes_first(store):
    for key in "abcd":
        put(store, key)
    store.contains("a")
    store.release([store.acquire("b")])
    put(store, "e")
    put(store, "f")
    assert store.keys() == ["a", "b", "e", "f"] and store.stats()["evictions"] == 2


def test_what_is_reserved_is_seen_by_nobody(store):
    chunk = store.reserve(64)
    assert store.keys() == [] and store.stats()["bytes_used"] == 64
    store.abandon(chunk)
    assert store.stats()["bytes_used"] == 0


def test_a_new_value_comes_whole_and_the_old_one_stays_for_its_reader(store):
    put(store, "a", b"old" * 20)
    reader = store.acquire("a")
    put(store, "a", b"new" * 20)
    assert read(store, reader) == b"old" * 20
    assert read(store, store.acquire("a")) == b"new" * 20
    assert store.stats()["bytes_used"] == 128
    store.release([reader])
    assert store.stats()["bytes_used"] == 64


def test_keep_drops_the_newcomer_unless_it_is_another_length(store):
    put(store, "a", b"first", meta=5)
    put(store, "a", b"later", meta=5, keep=True)
    assert read(store, store.acquire("a")) == b"first"
    put(store, "a", b"longer", meta=6, keep=True)
    assert read(store, store.acquire("a")) == b"longer"


def test_what_is_in_use_is_not_evicted(store):
    """And what is too large, or finds no room, is rejected and counted."""
    for key in "abcd":
        put(store, key)
    used = [store.acquire(key) for key in "abcd"]
    assert store.reserve(64) is None
    store.release(used[1:2])
    assert put(store, "e") is not None
    assert sorted(store.keys()) == ["a", "c", "d", "e"]
    assert store.reserve(257) is None and store.stats()["rejected"] == 2


def test_a_prefix_stops_at_the_first_that_is_not_there(store):
    for key, meta in (("a", 1), ("b", 1), ("d", 1)):
        put(store, key, meta=meta)
    assert [chunk.key for chunk in store.acquire_prefix("abcd", [1] * 4)] == ["a", "b"]
    assert [chunk.key for chunk in store.acquire_prefix("ab", [1, 2])] == ["a"]
    assert store.keys() == ["d", "b", "a"]  # the tail is the first to go


def test_a_pin_is_released_once_or_times_out(store):
    for key in "abcd":
        put(store, key)
    store.pin("one", store.acquire_prefix("ab", [None] * 2), 0.2)
    store.pin("two", store.acquire_prefix("ab", [None] * 2), 0.2)
    assert store.stats()["pinned_chunks"] == 4
    store.unpin("one")
    store.unpin("one")
    assert store.stats()["pinned_chunks"] == 2
    assert wait_for(lambda: store.stats()["pinned_chunks"] == 0)
    store.unpin("never")
    assert [chunk.refs for chunk in store._chunks.values()] == [0] * 4


def test_pins_that_time_out_do_not_flood_the_log(store, caplog):
    put(store, "a")
    for number in range(100):
        store.pin(f"{number}", store.acquire_prefix("a", [None]), 0.0)
    assert store.stats()["pins"] == 0 and 1 <= len(caplog.records) <= 3


def test_a_second_pin_under_an_id_replaces_the_first(store):
    put(store, "a")
    for _ in range(3):
        store.pin("id", store.acquire_prefix("a", [None]), 100.0)
    assert store.stats()["pinned_chunks"] == store._chunks["a"].refs == 1
    store.pin("id", [], 100.0)
    assert store.stats()["pins"] == store._chunks["a"].refs == 0


def test_remove_and_clear_leave_readers_their_bytes(store):
    """LM#4143, LM#4817: a chunk that is gone before it is touched is nobody's trouble."""
    for key in "abc":
        put(store, key, key.encode() * 64)
    reader = store.acquire("b")
    assert store.remove("b") and not store.remove("b")
    store.pin("id", store.acquire_prefix("a", [None]), 100.0)
    store.clear()
    assert (
        store.keys() == []
        and read(store, reader) == b"b" * 64
        and store.stats()["bytes_used"] == 64
    )
    store.release([reader])
    for key in "abcdef":
        assert put(store, key)
    assert store.stats()["bytes_used"] == 256


def test_close_gives_up_the_memory_and_takes_no_more(store):
    put(store, "a")
    store.close()
    store.close()
    assert store._map is None and store.reserve(1) is None and store.acquire("a") is None
    assert store.stats()["bytes_used"] == 0


def test_close_leaves_a_reader_its_bytes(store):
    put(store, "a", b"a" * 64)
    reader = store.acquire("a")
    store.close()
    assert read(store, reader) == b"a" * 64
    store.release([reader])


@pytest.mark.parametrize("device", ["cpu:1", "tpu", "cuda:99", "", "meta"])
def test_devices_that_are_not_here(device):
    """LMCache's server refuses every one but cpu; here any that is there works."""
    with pytest.raises(ValueError, match=r"this host has cpu"):
        parse_device(device)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_cuda_without_a_gpu():
    with pytest.raises(ValueError, match="device 'cuda' is not here"):
        ChunkStore("cuda", 1 << 20)


@pytest.mark.parametrize("size", [0, -1])
def test_no_room_at_all(size):
    with pytest.raises(ValueError, match="max_bytes"):
        ChunkStore("cpu", size)


@pytest.mark.parametrize(
    "fault", [OSError("no memory"), RuntimeError("CUDA error: out of memory"), MemoryError()]
)
def test_an_allocation_that_fails_says_how_much_and_where(fault, monkeypatch):
    def allocate(self, size):
        raise fault

    monkeypatch.setattr(ChunkStore, "_allocate", allocate)
    with pytest.raises(MemoryError, match="1048576 bytes on cpu"):
        ChunkStore("cpu", 1 << 20)


def test_more_than_there_is_to_map():
    with pytest.raises(MemoryError, match="no room for a chunk store"):
        ChunkStore("cpu", 1 << 62)


def test_no_more_threads_to_warm_memory(store, monkeypatch):
    def start(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    cold = ChunkStore("cpu", 256 << 20)
    assert put(cold, "a") and cold.stats()["bytes_used"] == 64
    cold.close()


@pytest.mark.parametrize("warm_bytes", [0, 1 << 20, engine.WARM_BYTES])
def test_warming_changes_no_byte(warm_bytes):
    store = ChunkStore("cpu", 8 << 20, warm_bytes)
    texts = {key: bytes([key]) * (1 << 20) for key in range(8)}
    for key, text in texts.items():
        put(store, key, text)
        store.warm(8 << 20)
    for key, text in texts.items():
        assert read(store, store.acquire(key)) == text
    store.close()


@pytest.mark.parametrize("busy", [False, True])
def test_warming_waits_for_quiet(busy, monkeypatch):
    """Somebody takes memory during every step: from the third on, 4 MiB are ready, and it pauses
    before each."""
    monkeypatch.setattr(engine, "WARM_BYTES", 8 << 20)
    store, pauses = ChunkStore("cpu", 16 << 20, warm_bytes=0), []

    class Kernel:
        def madvise(self, *_):
            assert not busy or store.reserve(64)

    monkeypatch.setattr(engine, "_LIBC", Kernel())
    monkeypatch.setattr(time, "sleep", pauses.append)
    store.warm(16 << 20, wait_for_quiet=True)
    assert len(pauses) == (6 if busy else 0) and store._warm_end == 16 << 20
    store.close()


def test_threads_never_see_half_a_chunk_or_anothers():
    """8 threads put, get, pin and remove under a few keys in a small store; each read is whole and
    its key's."""
    store = ChunkStore("cpu", 40 * 1024, warm_bytes=0)
    began = time.monotonic()

    def work(seed):
        reads = 0
        while time.monotonic() - began < 1.0:
            seed = (seed * 1103515245 + 12345) % 2**31
            key, act = seed // 7 % 12, seed // 101 % 10
            if act < 4:
                body = bytes([key, seed % 256]) * (100 + seed % 2000)
                put(store, key, hashlib.sha256(body).digest() + body, keep=act == 0, meta=act)
            elif act < 8 and (chunk := store.acquire(key)):
                data = read(store, chunk)
                assert hashlib.sha256(data[32:]).digest() == data[:32] and data[32] == key
                store.release([chunk])
                reads += 1
            elif act == 8:
                store.pin(f"{seed % 3}", store.acquire_prefix([key, key + 1], [2, 2]), 0.02)
            else:
                store.remove(key)
        return reads

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(1, 9))) > 100
    for name in "012":
        store.unpin(name)
    assert all(chunk.refs == 0 for chunk in store._chunks.values())
    assert (
        store.stats()["bytes_used"]
        == sum(-(-c.nbytes // 64) * 64 for c in store._chunks.values())
        <= 40 * 1024
    )
    store.clear()
    assert store.stats()["bytes_used"] == 0 and store._arena.top == 0
    store.close()
