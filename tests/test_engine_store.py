"""The chunk store: no byte in two places, no chunk lost, evicted or freed before its time, and
nobody evicted in vain."""

import hashlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import wait_for

import engine
from engine import ALIGN_BYTES, ChunkStore, parse_device

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


def prefix_of(store, keys, metas):
    return [*filter(None, store.acquire_each(keys, metas, prefix=True))]


def test_put_and_get(store):
    put(store, "a", b"hello")
    chunk = store.acquire("a")
    assert read(store, chunk) == bytes(store.memory.of(chunk).tolist()) == b"hello"
    store.release([chunk])
    assert store.acquire("b") is None
    assert store.stats() == dict(chunks=1, bytes_used=64, max_bytes=256, pins=0, pinned_chunks=0,
                                 hits=1, misses=1, in_use=0,
                                 evictions=0, rejected=0)  # fmt: skip


def test_the_least_recently_used_goes_first(store):
    for key in "abcd":
        put(store, key)
    store.touch("a")
    store.release([store.acquire("b")])
    put(store, "e")
    put(store, "f")
    assert store.keys() == ["a", "b", "e", "f"] and store.stats()["evictions"] == 2


def test_what_is_reserved_is_seen_by_nobody(store):
    chunk = store.reserve(64)
    assert store.keys() == [] and store.stats()["bytes_used"] == 64
    store.release([chunk])
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
    for keys, metas, wanted in (("abcd", [1] * 4, ["a", "b"]), ("ab", [1, 2], ["a"])):
        found = prefix_of(store, keys, metas)
        assert [chunk.key for chunk in found] == wanted and store.stats()["in_use"] == len(wanted)
        store.release(found)
    store.clear()
    for key in "abcd":
        put(store, key)
    store.release(prefix_of(store, "abcd", [None] * 4))
    assert store.keys() == ["d", "c", "b", "a"]  # the tail is the first to go


def test_a_touch_counts_the_leading_ones_and_uses_no_other(store):
    for key in "adcb":
        put(store, key)
    reader = store.acquire("b")
    assert [store.touch(keys) for keys in ("abxc", "xab", "", "aab")] == [2, 0, 0, 3]
    assert store.stats()["in_use"] == 1 and store.keys() == ["d", "c", "a", "b"]
    store.release([reader])
    assert store.keys() == ["d", "c", "a", "b"]


def test_a_pin_is_released_once_or_times_out(store):
    for key in "abcd":
        put(store, key)
    store.pin("one", prefix_of(store, "ab", [None] * 2), 0.2)
    store.pin("two", prefix_of(store, "ab", [None] * 2), 0.2)
    assert store.stats()["pinned_chunks"] == 4
    store.unpin("one")
    store.unpin("one")
    assert store.stats()["pinned_chunks"] == 2
    assert wait_for(lambda: store.stats()["pinned_chunks"] == 0)
    store.unpin("never")
    assert store.stats()["in_use"] == 0 and store.reserve_many([64] * 4, whole=True)


def test_pins_that_time_out_do_not_flood_the_log(store, caplog):
    put(store, "a")
    for number in range(100):
        store.pin(f"{number}", prefix_of(store, "a", [None]), 0.0)
    assert store.stats()["pins"] == 0 and 1 <= len(caplog.records) <= 3


def test_a_second_pin_under_an_id_replaces_the_first(store):
    put(store, "a")
    for _ in range(3):
        store.pin("id", prefix_of(store, "a", [None]), 100.0)
    assert store.stats()["pinned_chunks"] == store.stats()["in_use"] == 1
    store.pin("id", [], 100.0)
    assert store.stats()["pins"] == store.stats()["in_use"] == 0


def test_remove_and_clear_leave_readers_their_bytes(store):
    """LM#4143, LM#4817: a chunk that is gone before it is touched is nobody's trouble."""
    for key in "abc":
        put(store, key, key.encode() * 64)
    reader = store.acquire("b")
    assert store.remove("b") and not store.remove("b")
    store.pin("id", prefix_of(store, "a", [None]), 100.0)
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
    assert store.reserve(1) is None and store.acquire("a") is None
    assert store.stats()["bytes_used"] == 0


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_closed_the_memory_is_the_machines_again():
    store = ChunkStore("cpu", 64 << 20, warm_bytes=0)
    put(store, "a", bytes(48 << 20))
    before = resident_bytes()
    store.close()
    assert before - resident_bytes() > 40 << 20


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
    def allocate(*_, **more):
        raise fault

    monkeypatch.setattr(engine.mmap, "mmap", allocate)
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
    store = ChunkStore("cpu", 8 << 20, warm_bytes=warm_bytes)
    texts = {key: bytes([key]) * (1 << 20) for key in range(8)}
    for key, text in texts.items():
        put(store, key, text)
    for key, text in texts.items():
        assert read(store, store.acquire(key)) == text
    store.close()


def test_warming_goes_so_far_ahead_and_no_further(monkeypatch):
    """And goes on when half of that is used up, in a thread of its own."""
    warmed, MiB = [], 1 << 20
    monkeypatch.setattr(engine.Memory, "populate", lambda _, *piece: warmed.append(piece))
    with ChunkStore("cpu", 64 * MiB, warm_bytes=8 * MiB) as store:
        assert wait_for(lambda: sum(size for _, size in warmed) == 8 * MiB)
        chunk = store.reserve(6 * MiB)
        assert wait_for(lambda: sum(size for _, size in warmed) == 14 * MiB)
        assert warmed == [(start * MiB, 2 * MiB) for start in range(0, 14, 2)]
        store.release([chunk])


# -- whom to evict


KIB = 1024


def filled(count, nbytes=KIB):
    """A full store of so many chunks, named by their place in memory, the first to go first."""
    store = ChunkStore("cpu", count * nbytes, warm_bytes=0)
    for key in range(count):
        put(store, key, bytes(nbytes))
    return store


def use(store, keys):
    """One after another."""
    for key in keys:
        store.release([store.acquire(key)])


def test_a_refusal_evicts_nobody():
    """64 chunks of which every eighth is in use: no 16 lie side by side, and all 56 idle ones
    stay."""
    with filled(64) as store:
        before, used = store.keys(), [store.acquire(key) for key in range(7, 64, 8)]
        for _ in range(3):
            assert store.reserve(16 * KIB) is None
            assert sorted(store.keys()) == before and store.stats()["evictions"] == 0
        assert store.reserve(7 * KIB) is not None and store.stats()["evictions"] == 7
        store.release(used)


@pytest.mark.parametrize(
    "sizes",
    [[KIB] * 65, [KIB] * 20 + [46 * KIB], [33 * KIB] * 2, [KIB, 65 * KIB], [2**40]],
    ids=str,
)
@pytest.mark.parametrize("held", [0, 48, 64])
def test_all_or_none_leaves_the_store_as_it_was(sizes, held):
    """One chunk more than there is room for: nobody is evicted, also where a hole was there."""
    with filled(64) as store:
        for key in range(held, 64):
            store.remove(key)
        before = store.stats() | {"rejected": 1}
        assert store.reserve_many(sizes, whole=True) == [] and store.stats() == before
        assert store.keys() == list(range(held))
        assert len(store.reserve_many([KIB] * 64, whole=True)) == 64


def test_as_many_leading_ones_as_there_is_room_for():
    with filled(8) as store:
        used = [store.acquire(0), store.acquire(4)]
        found = store.reserve_many([KIB, KIB, 3 * KIB, KIB, 2 * KIB, KIB])
        assert len(found) == 4 and store.keys() == [0, 4]
        store.release(used)


@pytest.mark.parametrize("size", [4, 16, 64])
def test_a_larger_chunk_evicts_about_its_own_size_and_an_old_place(size):
    """1,024 chunks in an order of use that is not that of their addresses: at most twice its size,
    and of all places one of the older half."""
    order = list(range(1024))
    random.Random(size).shuffle(order)
    with filled(1024) as store:
        use(store, order)
        assert store.reserve(size * KIB) is not None
        gone = sorted(set(order) - set(store.keys()))
        assert size <= len(gone) <= 2 * size
        assert gone == list(range(gone[0], gone[-1] + 1))
        used_at = {key: number for number, key in enumerate(order)}
        newest = [max(used_at[key] for key in range(at, at + size)) for at in range(1025 - size)]
        mine = max(used_at[key] for key in gone)
        assert sum(each >= mine for each in newest) >= len(newest) / 2


def test_the_oldest_place_and_not_the_one_around_the_oldest_chunk():
    """Chunks 3, 11, 19 are the oldest, each between the newest; 40 to 43 are a little younger."""
    with filled(64) as store:
        place = [42, 40, 43, 41]
        oldest = [3, 11, 19, *place]
        use(store, [*oldest, *(key for key in range(64) if key not in oldest)])
        assert store.reserve(4 * KIB) is not None
        assert set(range(64)) - set(store.keys()) == set(place)


def test_several_that_share_one_place():
    """The one of 4 units and those of 1 unit after it: as many are gone as were asked for."""
    with filled(64) as store:
        use(store, random.Random(0).sample(range(64), 64))
        assert len(store.reserve_many([4 * KIB] + [KIB] * 12, whole=True)) == 13
        assert store.stats()["evictions"] == 16 and store.stats()["bytes_used"] == 64 * KIB


@pytest.mark.parametrize("policy", ["lru", "slru"])
@pytest.mark.parametrize("seed", range(4))
def test_larger_chunks_do_not_evict_each_other_while_older_smaller_ones_are_there(policy, seed):
    """The small ones were all used again, in another order, so that with slru they are proven."""
    small, rng = list(range(3_000)), random.Random(seed)
    with ChunkStore("cpu", 3_000 * 64, policy, warm_bytes=0) as store:
        for key in small:
            store.release([store.commit(key, store.reserve(64))])
        rng.shuffle(small)
        for key in small:
            assert store.touch([key])
        for number in range(60):
            store.release([store.commit(("large", number), store.reserve(16 * 64))])
        assert all(store.touch([("large", number)]) for number in range(60))


UNITS = 24
STEPS = st.one_of(
    st.tuples(st.just("put"), st.integers(1, 10)),
    st.tuples(st.sampled_from(["use", "hold", "let go", "remove"]), st.integers(0, 99)),
)


@pytest.mark.parametrize("policy", ["lru", "slru"])
@settings(max_examples=200)
@given(steps=st.lists(STEPS, min_size=10, max_size=60))
def test_against_a_plain_model(policy, steps):
    """No unit in two chunks; a refusal evicts nobody, and only where no place is free or idle; who
    is evicted was idle, and they lie side by side; no more than the size asked for and the last of
    them; nobody where a hole is large enough."""
    with ChunkStore("cpu", UNITS * ALIGN_BYTES, policy, warm_bytes=0) as store:
        model, held = {}, []  # model: key -> its units; held: chunks
        for number, (act, value) in enumerate(steps):
            keys = [*model]
            key = keys[value % len(keys)] if keys else None
            if act == "put":
                found, names = store.reserve(value * ALIGN_BYTES), store.keys()
                gone = {key: model.pop(key) for key in keys if key not in names}
                in_use = {unit for chunk in held for unit in units_of(chunk)}
                taken = {unit for units in model.values() for unit in units} | in_use
                before = taken | {unit for units in gone.values() for unit in units}
                if found is None:
                    assert not gone and longest_run(in_use) < value
                    continue
                mine = set(units_of(found))
                assert not mine & taken and mine <= set(range(UNITS))
                if longest_run(before) >= value:
                    assert not gone
                if gone:
                    lost = sorted(unit for units in gone.values() for unit in units)
                    place = set(range(lost[0], lost[-1] + 1))
                    assert not place & taken, "they do not lie side by side"
                    assert len(lost) < value + max(map(len, gone.values()))
                store.release([store.commit(number, found)])
                model[number] = units_of(found)
            elif key is not None and act == "use":
                use(store, [key])
            elif key is not None and act == "hold":
                held.append(store.acquire(key))
            elif key is not None and act == "remove":
                assert store.remove(key)
                del model[key]
            elif act == "let go" and held:
                store.release([held.pop(value % len(held))])
            stats = store.stats()
            assert sorted(store.keys()) == sorted(model) and stats["chunks"] == len(model)
            every = {unit for units in model.values() for unit in units}
            every |= {unit for chunk in held for unit in units_of(chunk)}
            assert stats["bytes_used"] == len(every) * ALIGN_BYTES
            assert stats["in_use"] == len({id(chunk) for chunk in held})
        store.release(held)
        store.clear()
        assert store.reserve(UNITS * ALIGN_BYTES) is not None  # what is free is one piece again


def units_of(chunk):
    return [*range(chunk.offset // ALIGN_BYTES, (chunk.offset + chunk.size) // ALIGN_BYTES)]


def longest_run(taken):
    """Of units that are not taken, side by side."""
    longest = run = 0
    for unit in range(UNITS):
        run = 0 if unit in taken else run + 1
        longest = max(longest, run)
    return longest


QUADRATIC = "a batch looks again at all that it has claimed, for each of its chunks"
CLAIMED = "where the best hole belongs to an earlier chunk of the batch, no other hole is tried"
LEFT_OVER = "what an evicted chunk leaves free is not used by the batch that evicted it"


@pytest.mark.parametrize("whole", [False, True])
def test_several_small_ones_take_the_place_of_a_large_one(whole):
    """The oldest chunk has room for four."""
    with ChunkStore("cpu", 4 * KIB, warm_bytes=0) as store:
        put(store, "large", bytes(4 * KIB))
        assert len(store.reserve_many([KIB] * 4, whole)) == 4


@pytest.mark.parametrize("names", ["AhUiV", "AhUiBV", "AhUiiV"])
def test_a_hole_that_is_promised_is_not_the_only_one(names):
    """h, i are holes, U, V in use: one chunk of two units goes to A and h, one of one unit to i."""
    with ChunkStore("cpu", len(names) * KIB, warm_bytes=0) as store:
        for number, name in enumerate(names):
            put(store, (name, number), bytes(KIB))
        used = [store.acquire(key) for key in sorted(store.keys()) if key[0] in "UV"]
        for key in sorted(store.keys(), reverse=True):
            if key[0] in "hi":
                store.remove(key)
        assert len(store.reserve_many([2 * KIB, KIB], whole=True)) == 2
        store.release(used)


def test_a_batch_looks_at_each_of_those_that_go_about_once(monkeypatch):
    """A prompt of a million tokens is 4,096 chunks, and all others wait for the lock."""
    looked = 0

    class Counting(engine.LRU):
        def victims(self):
            nonlocal looked
            for key in super().victims():
                looked += 1
                yield key

    monkeypatch.setitem(engine.POLICIES, "counting", Counting)
    with ChunkStore("cpu", 1000 * KIB, "counting", warm_bytes=0) as store:
        for key in range(1000):
            put(store, key, bytes(KIB))
        assert len(store.reserve_many([KIB] * 500, whole=True)) == 500 and looked < 2000


@st.composite
def stores_and_batches(draw):
    sizes = draw(st.lists(st.integers(1, 3), min_size=8, max_size=16))
    fates = draw(st.lists(st.sampled_from(["idle", "in use", "gone"]), min_size=16, max_size=16))
    return sizes, fates, draw(st.lists(st.integers(1, 4), min_size=2, max_size=6))


@settings(max_examples=300)
@given(stores_and_batches())
def test_a_batch_overlaps_nobody(case):
    """And where it is to be whole and is not, nobody was evicted."""
    sizes, fates, batch = case

    def made():
        store, held = ChunkStore("cpu", UNITS * ALIGN_BYTES, warm_bytes=0), []
        for key, size in enumerate(sizes):
            put(store, key, bytes(size * ALIGN_BYTES))
        for key, fate in enumerate(fates):
            if fate == "in use" and (chunk := store.acquire(key)):
                held.append(chunk)
            elif fate == "gone":
                store.remove(key)
        return store, held

    wanted = [size * ALIGN_BYTES for size in batch]
    (one, _), (three, held) = made(), made()
    found = one.reserve_many(wanted)
    units = [unit for chunk in found for unit in units_of(chunk)]
    assert len(units) == len(set(units)) and set(units) <= set(range(UNITS))
    before = three.keys(), three.stats()["bytes_used"]
    if not three.reserve_many(wanted, whole=True):
        assert len(found) < len(batch)
        assert before == (three.keys(), three.stats()["bytes_used"])
        assert three.stats()["in_use"] == len(held)
    for store in (one, three):
        store.close()


def test_a_hundred_thousand_pins_cost_a_refusal_nothing():
    """No search through what is in use: the second refusal of each kind takes well under 20 ms."""
    count = 100_000
    store = ChunkStore("cpu", count * 64, warm_bytes=0)
    chunks = store.reserve_many([64] * count)
    store.pin("id", [store.commit(key, chunk) for key, chunk in enumerate(chunks)], 300.0)
    took = []
    for size in (64, 640, 64 * count, 64 * count + 1) * 3:
        began = time.perf_counter()
        assert store.reserve(size) is None
        took.append(time.perf_counter() - began)
    assert min(took) < 0.02 and sorted(took)[len(took) // 2] < 0.02
    store.unpin("id")
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
                store.pin(f"{seed % 3}", prefix_of(store, [key, key + 1], [2, 2]), 0.02)
            else:
                store.remove(key)
        return reads

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(work, range(1, 9))) > 100
    for name in "012":
        store.unpin(name)
    assert store.stats()["in_use"] == 0
    chunks = [store.acquire(key) for key in store.keys()]  # noqa: SIM118  it is a method of ours
    sizes = [-(-chunk.nbytes // 64) * 64 for chunk in chunks]
    assert store.stats()["bytes_used"] == sum(sizes) <= 40 * 1024
    store.release(chunks)
    store.clear()
    assert store.stats()["bytes_used"] == 0 and store.reserve(40 * 1024) is not None
    store.close()
