"""The engine: what is stored is found, what is found is copied back, what is pinned stays, and
nothing else is claimed.

CHUNK is 4 tokens, and a prompt of 16 has four chunks. Slots are those of the toy paged cache, 64
blocks of 4.
"""

import io
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    CHUNK_BYTES,
    ROOT,
    client_of,
    config,
    kv,
    metadata,
    new_engine,
    new_pages,
    put_prompt,
    range_of,
    running_server,
    silent_server,
    threads_named,
    wait_for,
)

import remote_server
from engine import ENGINE_COUNTERS, LMCacheEngine, MemoryFormat, PagedKVCache
from remote_server import RemoteClient, connect_remote

PROMPT = list(range(100, 116))
OTHER = list(range(500, 516))


@pytest.fixture
def engine():
    with new_engine() as made:
        yield made


def back(engine, tokens, first_slot=128, **more):
    """Retrieves to other slots; how many tokens came, which must be a prefix and equal to what
    slots 0.. hold."""
    slots = range_of(first_slot, len(tokens))
    written = engine.retrieve(tokens, slot_mapping=slots, **more)
    assert written.dtype == torch.bool and written.shape == (len(tokens),)
    here = [slot for slot, there in zip(range(len(tokens)), written, strict=True) if there]
    if here:
        assert torch.equal(
            kv(engine.pages, [first_slot + slot for slot in here]), kv(engine.pages, here)
        )
    return int(written.sum())


# -- store, lookup, retrieve


@pytest.mark.parametrize("as_what", [list, tuple, torch.tensor], ids=["list", "tuple", "tensor"])
@pytest.mark.parametrize("count", [0, 3, 4, 15, 16])
def test_store_lookup_retrieve(engine, count, as_what):
    tokens, slots = as_what(PROMPT[:count]), torch.arange(count)
    if not isinstance(tokens, torch.Tensor) or count:
        full = count // 4 * 4
        assert engine.lookup(tokens) == 0
        assert engine.store(tokens, slot_mapping=slots) == full
        assert engine.store(tokens, slot_mapping=slots) == 0
        assert engine.lookup(tokens) == full == back(engine, PROMPT[:count])


@settings(max_examples=30)
@given(st.permutations(range(256)), st.integers(1, 64))
def test_any_slots_to_any_slots(slots, count):
    """Equality with a loop over slots; what lies at other slots is not touched."""
    with new_engine() as engine:
        tokens, source, target = (
            list(range(count * 2)),
            slots[: count * 2],
            slots[128 : 128 + count * 2],
        )
        full = count * 2 // 4 * 4
        wanted, rest = (
            kv(engine.pages, source[:full]),
            kv(engine.pages, slots[:128] + target[full:]),
        )
        engine.store(tokens, slot_mapping=torch.tensor(source))
        written = engine.retrieve(tokens, slot_mapping=target)
        assert written.tolist() == [index < full for index in range(count * 2)]
        assert torch.equal(kv(engine.pages, target[:full]), wanted)
        assert torch.equal(kv(engine.pages, slots[:128] + target[full:]), rest)


def test_a_chunk_by_hand(engine):
    """[K, L, T, H*D], float32, under the prefix's hash."""
    put_prompt(engine, PROMPT[:4])
    (key,) = engine.chunks.keys()
    assert key == engine.token_database.process_tokens(PROMPT[:4])[0][2]
    (chunk,) = engine.chunks.acquire_each([key], [4])
    data = engine.chunks.memory.of(chunk).clone().view(torch.float32).view(2, 2, 4, 8)
    assert torch.equal(data, kv(engine.pages, range(4))) and engine.pages[1][
        1, 0, 2
    ].flatten().equal(data[1, 1, 2])
    engine.chunks.release([chunk])


def test_a_chunk_that_is_present_is_not_copied_again(engine):
    """LMCache copies it again."""
    put_prompt(engine, PROMPT)
    before = kv(engine.pages, range(16))
    assert put_prompt(engine, PROMPT, first_slot=64) == 0
    assert back(engine, PROMPT) == 16 and torch.equal(kv(engine.pages, range_of(128, 16)), before)


@pytest.mark.parametrize(
    "unfull, stored, hits", [(False, [256, 0, 0], [256, 256]), (True, [300, 0, 44], [300, 256])]
)
def test_partial_chunks(unfull, stored, hits):
    """LM#2206: chunk 256; 300 tokens, the same again, 256 shared and 44 others. Partial hits only
    at its length."""
    shape = dict(kv_shape=(2, 2, 256, 2, 4))
    with new_engine(4096, meta=shape, chunk_size=256, save_unfull_chunk=unfull) as engine:
        pages = [torch.randn(2, 100, 4, 2, 4) for _ in range(2)]
        engine.register_kv_caches(pages, "2BNHD")
        same, mixed = list(range(300)), [*range(256), *range(1000, 1044)]
        assert [
            engine.store(tokens, slot_mapping=range_of(0, 300)) for tokens in (same, same, mixed)
        ] == stored
        assert [engine.lookup(same), engine.lookup(same[:299])] == hits
        assert engine.lookup([*same, 1]) == 256


def test_a_hole_ends_the_hit(engine):
    """LM#1279: chunks 0 and 2 are there, 1 is not."""
    put_prompt(engine, PROMPT)
    engine.chunks.remove(engine.token_database.process_tokens(PROMPT)[1][2])
    assert engine.lookup(PROMPT) == back(engine, PROMPT) == 4


@pytest.mark.parametrize("kept", [0, 1, 2, 4])
def test_masks(engine, kept):
    """False for a prefix of whole chunks: nothing of it is stored, or written."""
    mask = torch.arange(16) >= 4 * kept
    assert put_prompt(engine, PROMPT, mask=mask) == 16 - 4 * kept
    assert engine.lookup(PROMPT) == (16 if kept == 0 else 0)
    put_prompt(engine, PROMPT)
    before = kv(engine.pages, range_of(128, 4 * kept))
    written = engine.retrieve(PROMPT, mask=mask, slot_mapping=range_of(128, 16))
    assert torch.equal(written, mask)
    assert torch.equal(kv(engine.pages, range_of(128, 4 * kept)), before)


def test_by_hash(engine):
    spans = engine.token_database.process_tokens(PROMPT)
    hashes, lengths = [span[2] for span in spans], [4] * 4
    assert engine.store(hashes=hashes, offsets=lengths, slot_mapping=range_of(0, 16)) == 16
    assert engine.lookup(hashes=hashes, offsets=lengths) == engine.lookup(PROMPT) == 16
    assert engine.lookup(hashes=hashes, offsets=[100] * 4) == 0  # LMCache sums them unchecked: 400
    assert engine.lookup(hashes=hashes, offsets=[4, 4, 3, 4]) == 8
    assert (
        int(engine.retrieve(hashes=hashes, offsets=lengths, slot_mapping=range_of(64, 16)).sum())
        == 16
    )


@pytest.mark.parametrize(
    "some", [[bytes(range(32)), bytes(32)], [-1, -(2**63)], [2**63, 2**64 - 1], [0, bytes(9)]]
)
def test_hashes_of_every_kind(engine, some):
    """LM#2997, VA#13602."""
    engine.store(hashes=some, offsets=[4, 2], slot_mapping=range_of(0, 6))
    assert engine.lookup(hashes=some, offsets=[4, 2]) == 6


@pytest.mark.parametrize("size", [0, 1, 8])
def test_a_digest_of_up_to_8_bytes_is_refused(size, engine):
    """At a remote it would have the name of an int."""
    good = dict(hashes=[bytes(size)], offsets=[4])
    for act in (engine.store, engine.retrieve):
        with pytest.raises(ValueError, match="hashes"):
            act(**good, slot_mapping=range(4))
    with pytest.raises(ValueError, match="hashes"):
        engine.lookup(**good)


def test_tags_are_names_of_their_own(engine):
    """LM#3301: 60 images in request_configs are 60 keys, and other entries name nothing."""
    for number in range(60):
        put_prompt(engine, PROMPT[:4], request_configs={"lmcache.tag.image": f"{number}"})
    assert len(engine.chunks.keys()) == 60
    ann, bob = {"lmcache.tag.user": "ann", "temperature": 1}, {"lmcache.tag.user": "bob"}
    put_prompt(engine, PROMPT, request_configs=ann)
    assert [engine.lookup(PROMPT, request_configs=configs) for configs in (ann, bob, None)] == [
        16,
        0,
        0,
    ]
    assert (
        back(engine, PROMPT, request_configs=bob) == 0
        and back(engine, PROMPT, request_configs=ann) == 16
    )


@pytest.mark.parametrize(
    "arguments",
    [dict(slot_mapping=None), dict(slot_mapping=[0] * 15), dict(slot_mapping=[-1] * 16),
     dict(slot_mapping=[256] * 16),
     dict(slot_mapping=[0.5] * 16), dict(slot_mapping="x" * 16),
     dict(slot_mapping=[[0] * 16]),
     dict(slot_mapping=[2**70] * 16), dict(kvcaches=[torch.zeros(1)] * 2),
     dict(request_configs=[1]),
     dict(request_configs={"lmcache.tag.a": "b@c"}),
     dict(request_configs={"lmcache.tag.a": "x" * 200}),
     dict(request_configs={1: 2}), dict(mask=torch.ones(3).bool())],
    ids=lambda arguments: str(arguments)[:40],
)  # fmt: skip
def test_what_cannot_be_is_refused_and_nothing_is_stored(engine, arguments):
    for act in (engine.store, engine.retrieve):
        with pytest.raises(ValueError):
            act(PROMPT, **{"slot_mapping": range_of(0, 16)} | arguments)
    assert engine.stats()["bytes_used"] == 0


def test_no_paged_cache():
    with LMCacheEngine(config(), metadata()) as engine:
        with pytest.raises(ValueError, match="register_kv_caches"):
            put_prompt(engine, PROMPT)
        assert engine.store(PROMPT, slot_mapping=range_of(0, 16), kvcaches=new_pages()) == 16


def test_counters_move_once(engine):
    """LM#1260: one lookup of 512 tokens of which 256 hit."""
    put_prompt(engine, list(range(256)))
    before = engine.stats()
    engine.lookup(list(range(256)) + [7] * 256)
    after = engine.stats()
    moved = {
        name: after[name] - before[name] for name in ENGINE_COUNTERS if after[name] != before[name]
    }
    assert moved == {"lookups": 1, "lookup_tokens": 512, "hit_tokens": 256, "hits": 1}


def test_hits_and_misses_count_lookups(engine):
    """LM#405, LM#2574: 10 that hit, in part too, and 5 that miss."""
    put_prompt(engine, PROMPT)
    for number in range(10):
        engine.lookup(PROMPT[: 4 + number])
    for _ in range(5):
        engine.lookup(OTHER)
    stats = engine.stats()
    assert (stats["hits"], stats["misses"], stats["lookups"]) == (10, 5, 15)


# -- eviction and pins


def test_the_tail_goes_first():
    """LMCache drops the head: 4 chunks and 1 new one leave 0 hits, here 3."""
    with new_engine(4) as engine:
        put_prompt(engine, PROMPT)
        put_prompt(engine, OTHER[:4])
        assert engine.lookup(PROMPT) == 12


@pytest.mark.parametrize("touch", ["store", "retrieve"])
def test_the_tail_goes_first_also_where_a_mask_left_out_the_head(touch):
    with new_engine(4) as engine:
        put_prompt(engine, PROMPT[:8])
        mask = torch.arange(16) >= 8
        put_prompt(engine, PROMPT, mask=mask if touch == "store" else None)
        if touch == "retrieve":
            engine.retrieve(PROMPT, mask=mask, slot_mapping=range_of(0, 16))
        put_prompt(engine, OTHER[:4])
        assert engine.lookup(PROMPT) == 12


def test_the_last_prompt_hits_and_the_budget_holds():
    """LM#987, LM#1756: 1,000 rounds at twice the capacity."""
    with new_engine(32) as engine:
        for round_ in range(1000):
            tokens = list(range(round_ % 16 * 1000, round_ % 16 * 1000 + 16))
            put_prompt(engine, tokens)
            assert engine.lookup(tokens) == 16
            stats = engine.stats()
            assert stats["bytes_used"] == stats["chunks"] * CHUNK_BYTES <= 32 * CHUNK_BYTES
        assert stats["faults"] == 0 and stats["evictions"] > 1000


@pytest.mark.parametrize("how", ["unpin", "timeout"])
def test_a_pin_ends(how):
    """LM#1034, LM#2004: by unpin, or by itself."""
    with new_engine(4, pin_timeout_sec=0.05 if how == "timeout" else 300) as engine:
        put_prompt(engine, PROMPT)
        assert engine.lookup(PROMPT, lookup_id="id", pin=True) == 16
        if how == "unpin":
            engine.lookup_unpin("id")
            engine.lookup_unpin("id")
        assert wait_for(lambda: engine.stats()["pinned_chunks"] == 0)
        assert put_prompt(engine, OTHER) == 16 and engine.lookup(PROMPT) == 0


def test_what_a_lookup_pinned_is_there_for_retrieve():
    """V#39702, LM#4133: with a pin all of it; without a shorter prefix, and no exception."""
    with new_engine(6) as engine:
        put_prompt(engine, PROMPT)
        assert engine.lookup(PROMPT, lookup_id="id", pin=True) == 16
        assert put_prompt(engine, OTHER, first_slot=32) == 8  # as much as there is room for
        assert back(engine, PROMPT) == 16
        engine.lookup_unpin("id")
        put_prompt(engine, list(range(900, 912)), first_slot=64)
        assert back(engine, PROMPT) == engine.lookup(PROMPT) in (4, 8, 12)


def test_everything_pinned():
    """LM#2942, LM#1330: a store returns at once, having stored nothing."""
    with new_engine(4) as engine:
        put_prompt(engine, PROMPT)
        engine.lookup(PROMPT, lookup_id="id", pin=True)
        began = time.monotonic()
        assert put_prompt(engine, OTHER) == 0
        with pytest.raises(MemoryError):
            engine.store(hashes=[1], offsets=[4], slot_mapping=range_of(0, 4))
        assert time.monotonic() - began < 1.0 and engine.lookup(PROMPT) == 16
        assert engine.stats()["chunks"] == 4 and engine.stats()["bytes_used"] == 4 * CHUNK_BYTES


def test_pins_of_lookups_that_repeat_or_find_nothing(engine):
    """LM#3766, LM#4525: one unpin releases all; an id that is unknown, and a lookup of nothing, are
    nothing."""
    put_prompt(engine, PROMPT)
    for _ in range(3):
        engine.lookup(PROMPT, lookup_id="y", pin=True)
    engine.lookup(OTHER, lookup_id="none", pin=True)
    engine.lookup(PROMPT[:3], lookup_id="short", pin=True)
    assert (engine.stats()["pins"], engine.stats()["pinned_chunks"]) == (1, 4)
    engine.lookup_unpin("y")
    engine.lookup_unpin("unknown")
    assert engine.stats()["pins"] == 0
    with pytest.raises(ValueError, match="lookup_id"):
        engine.lookup(PROMPT, pin=True)


def test_hashes_are_stored_all_or_none():
    with new_engine(4) as engine:
        put_prompt(engine, PROMPT[:4])
        with pytest.raises(MemoryError):
            engine.store(hashes=[1, 2, 3, 4, 5], offsets=[4] * 5, slot_mapping=range_of(0, 20))
        assert (
            engine.lookup(hashes=[1], offsets=[4]) == 0
            and engine.stats()["bytes_used"] <= 4 * CHUNK_BYTES
        )


@pytest.mark.parametrize("lengths", [[4] * 65, [4] * 50 + [1, 2, 3] * 25], ids=["one", "mixed"])
def test_an_offload_that_finds_no_room_leaves_all_as_it_was(lengths):
    """65 chunks, or as many of several lengths, where there is room for 64."""
    with new_engine(64) as engine:
        for first in range(0, 256, 16):
            put_prompt(engine, range_of(first, 16))
        before, keys = engine.stats(), engine.chunks.keys()
        with pytest.raises(MemoryError):
            slots = [number % 256 for number in range(sum(lengths))]
            engine.store(hashes=range_of(1, len(lengths)), offsets=lengths, slot_mapping=slots)
        moved = {name for name, value in engine.stats().items() if value != before[name]}
        assert moved == {"rejected"} and engine.chunks.keys() == keys and len(keys) == 64


@pytest.mark.parametrize("by", ["tokens", "hashes"])
@pytest.mark.parametrize("when", ["before", "during the copy"])
def test_what_is_too_late_is_not_stored(by, when, engine, monkeypatch):
    """Whoever asked for it has given up, and its pages may be another's."""
    deadline, gather = time.monotonic() + 0.05 * (when != "before"), PagedKVCache.gather

    def slow(*arguments):
        gather(*arguments)
        time.sleep(max(0.0, deadline + 0.001 - time.monotonic()))

    monkeypatch.setattr(PagedKVCache, "gather", slow)
    more = dict(slot_mapping=range(4), deadline=deadline)
    if by == "tokens":
        assert engine.store(PROMPT[:4], **more) == 0
    else:
        with pytest.raises(TimeoutError):
            engine.store(hashes=[1], offsets=[4], **more)
    assert engine.stats()["bytes_used"] == engine.stats()["in_use"] == 0
    assert engine.store(PROMPT[:4], slot_mapping=range(4), deadline=time.monotonic() + 60) == 4


def test_a_prompt_over_the_capacity_is_stored_as_far_as_it_fits():
    with new_engine(3) as engine:
        assert put_prompt(engine, PROMPT) == engine.lookup(PROMPT) == back(engine, PROMPT) == 12


# -- ranks, MLA, blending


@pytest.mark.parametrize(
    "other", [dict(kv_dtype=torch.float8_e4m3fn), dict(world_size=2, worker_id=1),
              dict(world_size=2),
              dict(model_name="another")], ids=str,
)  # fmt: skip
def test_another_rank_world_dtype_or_model_finds_nothing(other):
    """SG#33268: through a remote that all of them share."""
    with running_server() as server, client_of(server) as one, client_of(server) as two:
        with new_engine(remote=one) as engine:
            put_prompt(engine, PROMPT)
            assert engine.flush()
        with LMCacheEngine(config(), metadata(**other), remote=two) as engine:
            assert engine.lookup(PROMPT) == 0
        with LMCacheEngine(config(), metadata(), remote=two) as engine:
            assert engine.lookup(PROMPT) == 16


def mla_engine(rank, remote=None, **extra):
    meta = metadata(world_size=4, worker_id=rank, use_mla=True, kv_shape=(2, 1, 4, 1, 8))
    engine = LMCacheEngine(config(extra_config=extra or None), meta, remote=remote)
    engine.register_kv_caches([torch.randn(64, 4, 8) for _ in range(2)], "BNC")
    return engine


def test_mla_rank_0_stores_for_all():
    """The key says world_size 1, worker 0, and every rank reads what rank 0 wrote."""
    with running_server() as server, client_of(server) as one, client_of(server) as two:
        with mla_engine(0, one) as zero, mla_engine(3, two) as three:
            assert three.store(PROMPT, slot_mapping=range_of(0, 16)) == 0
            assert zero.store(PROMPT, slot_mapping=range_of(0, 16)) == 16 and zero.flush()
            assert all(key.startswith("toy@1@0@") for key in one.list_keys())
            assert server.store.acquire(one.list_keys()[0].encode()).meta[8:12] == bytes(
                [MemoryFormat.KV_MLA_FMT, 0, 0, 0]
            )
            assert three.lookup(PROMPT) == 16
            assert int(three.retrieve(PROMPT, slot_mapping=range_of(32, 16)).sum()) == 16


@pytest.mark.parametrize("mla, extra, alone", [
    (True, {}, True), (True, {"save_only_first_rank": False}, False),
    (False, {"save_only_first_rank": True}, False)])  # fmt: skip
def test_save_only_first_rank_is_for_mla(mla, extra, alone):
    """Else every rank stores its own."""
    second = dict(world_size=2, worker_id=1)
    made = mla_engine(1, **extra) if mla else new_engine(meta=second, extra_config=extra)
    with made as engine:
        assert engine.store(PROMPT, slot_mapping=range_of(0, 16)) == (0 if alone else 16)


def test_blending_hits_in_any_order():
    """Segments of any length between separators; the separators are neither stored nor written."""
    extra = {"blend_special_token_ids": [9, 9]}
    with new_engine(enable_blending=True, extra_config=extra) as engine:
        assert put_prompt(engine, [1, 2, 3, 9, 9, 4, 5]) == 5
        assert engine.lookup([4, 5, 9, 9, 1, 2, 3, 9, 9, 6]) == 7
        assert engine.lookup([6, 9, 9, 4, 5]) == 0
        written = engine.retrieve([4, 5, 9, 9, 1, 2, 3], slot_mapping=range_of(64, 7))
        assert written.tolist() == [True, True, False, False, True, True, True]
        assert torch.equal(kv(engine.pages, range_of(68, 3)), kv(engine.pages, range(3)))


# -- faults


def broken(*_):
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_a_copy_that_fails(engine, monkeypatch):
    """A store stores nothing, a retrieve claims nothing, the counter says so, and afterwards all is
    well."""
    put_prompt(engine, PROMPT[:8])
    with monkeypatch.context() as patch:
        patch.setattr(PagedKVCache, "gather", broken)
        patch.setattr(PagedKVCache, "scatter", broken)
        assert put_prompt(engine, PROMPT) == back(engine, PROMPT) == 0
        with pytest.raises(RuntimeError):
            engine.store(hashes=[1], offsets=[4], slot_mapping=range_of(0, 4))
    stats = engine.stats()
    assert (stats["faults"], stats["chunks"], stats["bytes_used"]) == (2, 2, 2 * CHUNK_BYTES)
    assert put_prompt(engine, PROMPT) == 8 and back(engine, PROMPT) == 16


def test_the_log_is_not_flooded(engine, monkeypatch, caplog):
    """A device that fails at every store is one traceback a second; so are a thousand pins that
    time out."""
    monkeypatch.setattr(PagedKVCache, "gather", broken)
    for _ in range(100):
        put_prompt(engine, PROMPT)
    assert 1 <= len(caplog.records) <= 3 and "illegal memory access" in caplog.text
    assert engine.stats()["faults"] == 100


def test_a_chunk_gone_before_it_is_touched(engine):
    """LM#4143, LM#4817."""
    put_prompt(engine, PROMPT)
    engine.lookup(PROMPT, lookup_id="id", pin=True)
    for key in engine.chunks.keys():  # noqa: SIM118  it is a method of ours
        engine.chunks.remove(key)
    assert engine.lookup(PROMPT) == back(engine, PROMPT) == 0
    engine.lookup_unpin("id")
    assert engine.stats()["bytes_used"] == 0
    for first in range(0, 4000, 16):
        put_prompt(engine, range_of(first, 16))


def test_close_is_for_good_and_may_be_repeated(engine):
    """And an offload is told: it is all or nothing."""
    put_prompt(engine, PROMPT)
    engine.lookup(PROMPT, lookup_id="id", pin=True)
    engine.close()
    engine.close()
    assert (
        put_prompt(engine, PROMPT)
        == engine.lookup(PROMPT)
        == int(engine.retrieve(PROMPT, slot_mapping=range(16)).sum())
        == 0
    )
    with pytest.raises(RuntimeError, match="closed"):
        engine.store(hashes=[1], offsets=[4], slot_mapping=range_of(0, 4))
    engine.lookup_unpin("id")
    assert engine.stats()["bytes_used"] == 0


def test_close_with_stores_in_flight():
    """Threads store, look up and retrieve while the engine is closed: no exception, and nothing
    stays behind."""
    for _ in range(5):
        with new_engine(16) as engine:
            began = threading.Barrier(5)

            def work(seed, engine=engine, began=began):
                began.wait()
                for first in range(seed * 1000, seed * 1000 + 400, 16):
                    tokens = range_of(first, 16)
                    put_prompt(engine, tokens)
                    engine.lookup(tokens, lookup_id=f"{seed}", pin=True)
                    engine.retrieve(tokens, slot_mapping=range_of(64 * seed, 16))
                    engine.lookup_unpin(f"{seed}")

            with ThreadPoolExecutor(4) as pool:
                futures = [pool.submit(work, seed) for seed in range(4)]
                began.wait()
                engine.close()
                for future in futures:
                    future.result()
            assert engine.stats()["faults"] == 0


def test_many_threads_on_one_engine():
    """Each prompt's KV is its own: whatever comes back equals what that prompt had stored."""
    with new_engine(24) as engine:
        began = time.monotonic()

        def work(seed):
            slots, copied = range_of(seed * 32, 16), 0
            wanted = kv(engine.pages, slots)
            tokens = range_of(seed * 1000, 16)
            while time.monotonic() - began < 1.0:
                put_prompt(engine, tokens, first_slot=slots[0])
                hits = engine.lookup(tokens, lookup_id=f"{seed}", pin=True)
                written = engine.retrieve(tokens, slot_mapping=range_of(slots[0] + 16, 16))
                count = int(written.sum())
                assert count >= hits
                assert torch.equal(
                    kv(engine.pages, range_of(slots[0] + 16, 16))[:, :, :count],
                    wanted[:, :, :count],
                )
                engine.lookup_unpin(f"{seed}")
                copied += count
            return copied

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(work, range(8))) > 0
        stats = engine.stats()
        assert stats["faults"] == 0 and stats["pins"] == 0
        assert stats["bytes_used"] == stats["chunks"] * CHUNK_BYTES


# -- with a remote


@pytest.fixture
def server():
    with running_server() as running:
        yield running


def test_a_second_engine_finds_what_the_first_stored(server):
    with client_of(server) as one, client_of(server) as two:
        with new_engine(remote=one) as first:
            put_prompt(first, PROMPT)
            assert first.flush() and first.stats()["remote_puts"] == 4
            with new_engine(remote=two) as second:
                assert second.lookup(PROMPT, lookup_id="id", pin=True) == 16
                assert second.stats()["pinned_chunks"] == 0  # nothing of it is here yet
                written = second.retrieve(PROMPT, slot_mapping=range_of(64, 16))
                assert int(written.sum()) == 16
                assert torch.equal(kv(second.pages, range_of(64, 16)), kv(first.pages, range(16)))
                server.store.clear()
                assert second.lookup(PROMPT) == 16  # it keeps what came


def test_here_there_and_here_again(server):
    """Chunks 0 and 3 are here, 1 and 2 at the remote."""
    with client_of(server) as client, new_engine(remote=client) as engine:
        put_prompt(engine, PROMPT)
        assert engine.flush()
        for _, _, chunk_hash in engine.token_database.process_tokens(PROMPT)[1:3]:
            engine.chunks.remove(chunk_hash)
        assert (
            engine.lookup(PROMPT, lookup_id="id", pin=True) == 16
            and engine.stats()["pinned_chunks"] == 2
        )
        engine.lookup_unpin("id")
        assert back(engine, PROMPT) == 16
        assert engine.stats()["bytes_used"] == 4 * CHUNK_BYTES
        assert engine.stats()["in_use"] == 0


def test_the_remote_too_loses_the_tail_first():
    """After a lookup and a retrieve from another engine the head is the last to go, there and
    here."""
    with (
        running_server(max_bytes=6 * CHUNK_BYTES) as server,
        client_of(server) as one,
        client_of(server) as two,
    ):
        with new_engine(remote=one) as first, new_engine(8, remote=two) as second:
            put_prompt(first, PROMPT)
            assert first.flush() and second.lookup(PROMPT) == 16
            assert int(second.retrieve(PROMPT, slot_mapping=range_of(64, 16)).sum()) == 16
            put_prompt(second, OTHER)
            assert second.flush()
            second.clear()
            assert second.lookup(PROMPT) == 8 and second.lookup(OTHER) == 16


def test_a_remote_chunk_of_another_shape_is_a_miss(server):
    with client_of(server) as client, new_engine(remote=client) as engine:
        put_prompt(engine, PROMPT)
        assert engine.flush()
        engine.clear()
        client.put(client.list_keys()[0], torch.zeros(2, 2, 4, 9))
        assert back(engine, PROMPT) < 16 and engine.stats()["remote_errors"] == 0
        assert engine.stats()["bytes_used"] == engine.stats()["chunks"] * CHUNK_BYTES


def test_a_length_that_nobody_stored_is_not_claimed_for_the_remote(server):
    """The remote says only that the key is there: by hash, lengths other than a chunk's are no
    hit."""
    with client_of(server) as client, new_engine(remote=client) as engine:
        put_prompt(engine, PROMPT)
        assert engine.flush()
        engine.clear()
        hashes = [span[2] for span in engine.token_database.process_tokens(PROMPT)]
        assert engine.lookup(hashes=hashes, offsets=[100] * 4) == 0
        assert engine.lookup(hashes=hashes, offsets=[4] * 4) == 16


def test_a_key_that_fits_no_request_is_a_miss_and_no_fault_of_the_remote(server):
    """A hash of 64 bytes, 128 hex digits: the next lookup still asks the remote."""
    with client_of(server) as client, new_engine(remote=client) as engine:
        put_prompt(engine, PROMPT)
        assert engine.flush()
        engine.clear()
        assert engine.lookup(hashes=[bytes(100)], offsets=[4]) == 0
        assert engine.lookup(PROMPT) == 16 and engine.stats()["remote_skipped"] == 0


def test_a_dtype_without_a_number_on_the_wire_has_no_remote():
    with RemoteClient("lm://127.0.0.1:1") as client, pytest.raises(ValueError, match="int16"):
        LMCacheEngine(config(), metadata(kv_dtype=torch.int16), remote=client)


def test_a_name_too_long_for_any_key_fails_at_once():
    with pytest.raises(ValueError, match="150"):
        LMCacheEngine(config(), metadata(model_name="m" * 140))


def test_close_hands_over_what_is_on_its_way(server):
    with client_of(server) as client:
        with new_engine(remote=client) as engine:
            put_prompt(engine, PROMPT)
        assert len(client.list_keys()) == 4


def test_flush_tells_of_what_was_dropped(server):
    """More is stored at once than the outbox takes: half of the memory stays evictable."""
    with client_of(server) as client, new_engine(8, remote=client) as engine:
        gate = threading.Event()
        client.put_many, taken = lambda items: gate.wait(5) and taken(items), client.put_many  # type: ignore
        assert put_prompt(engine, range_of(0, 32)) == 32
        gate.set()
        assert not engine.flush()
        assert engine.flush()  # since then nothing was lost
        stats = engine.stats()
        assert stats["remote_dropped"] == 4 and stats["remote_puts"] == 4


@pytest.mark.parametrize(
    "fault", [ConnectionError("gone"), TimeoutError("slow"), RuntimeError("odd"), KeyError("no")]
)
def test_whatever_the_remote_raises_is_a_miss(fault):
    """And it is left alone for a second, so that not every request waits for it."""

    class Broken:
        asked = 0

        def fail(self, *_):
            self.asked += 1
            raise fault

        exists_many = get_many = put_many = flush = fail

    remote = Broken()
    with new_engine(remote=remote) as engine:
        assert engine.lookup(PROMPT) == 0
        assert put_prompt(engine, PROMPT) == engine.lookup(PROMPT) == back(engine, PROMPT) == 16
        assert not engine.flush()
        stats = engine.stats()
        assert remote.asked == stats["remote_errors"] == 1 and stats["remote_skipped"] > 0
        assert stats["remote_dropped"] == 4
        assert engine.stats()["in_use"] == 0


class SlowRemote:
    """Takes puts when its gate opens."""

    def __init__(self):
        self.entered, self.gate, self.sent = threading.Event(), threading.Event(), []

    def exists_many(self, keys):
        return [bool(self.sent)] * len(keys)

    def get_many(self, keys, fill):
        pass

    def put_many(self, items):
        self.entered.set()
        self.gate.wait(5)
        self.sent += [b"".join(bytes(piece) for piece in pieces) for _, _, pieces in items]


def test_what_the_outbox_holds_is_not_evicted():
    remote = SlowRemote()
    with new_engine(8, remote=remote) as engine:
        wanted = kv(engine.pages, range(4)).flatten().view(torch.uint8)
        put_prompt(engine, PROMPT[:4])
        assert remote.entered.wait(5)
        for first in range(1000, 1400, 16):
            put_prompt(engine, range_of(first, 16), first_slot=64)
        remote.gate.set()
        assert wait_for(lambda: remote.sent) and remote.sent[0] == bytes(wanted.tolist())
    assert engine.stats()["bytes_used"] == 0


def test_what_the_outbox_still_holds_at_close_is_let_go_and_counted():
    remote = SlowRemote()
    with new_engine(remote=remote) as engine:
        put_prompt(engine, PROMPT[:4])
        assert remote.entered.wait(5)
        put_prompt(engine, OTHER)
        opener = threading.Timer(0.3, remote.gate.set)
        opener.start()
        engine.close(timeout_sec=0.05)
        opener.join()
        assert wait_for(lambda: not threads_named("remote-writer"))
        stats = engine.stats()
        assert (stats["remote_puts"], stats["remote_dropped"], stats["bytes_used"]) == (1, 4, 0)


class DictRemote:
    """A remote in a dict. got: the keys that were fetched; before(name), if set, runs at the start
    of every call; extra: answers too many, or too few where it is negative."""

    def __init__(self):
        self.held, self.got, self.before, self.extra = {}, [], lambda name: None, 0

    def exists_many(self, keys):
        self.before("exists_many")
        answers = [key in self.held for key in keys] + [True] * self.extra
        return answers[: len(keys) + self.extra]

    def get_many(self, keys, fill):
        self.before("get_many")
        for index, key in enumerate(keys[: len(keys) + self.extra]):
            if key in self.held:
                self.got.append(key)
                meta, data = self.held[key]
                fill(index, meta, io.BytesIO(data).readinto)
        for index in range(len(keys), len(keys) + self.extra):
            fill(index, meta, io.BytesIO(data).readinto)

    def put_many(self, items):
        self.before("put_many")
        for key, meta, pieces in items:
            self.held[key] = meta, b"".join(map(bytes, pieces))


@pytest.fixture
def dict_remote():
    """One that holds PROMPT as the pages of `dict_remote.pages` had it at slots 0..15."""
    remote = DictRemote()
    with new_engine(remote=remote) as engine:
        put_prompt(engine, PROMPT)
        assert engine.flush() and len(remote.held) == 4
        remote.pages = engine.pages
        yield remote


def fetched(engine, pages, count=16, tokens=PROMPT):
    """Whether a retrieve brings so many leading tokens of what was stored from these pages."""
    written = engine.retrieve(tokens, slot_mapping=range(len(tokens)))
    assert written.tolist() == [number < count for number in range(len(tokens))]
    return torch.equal(kv(engine.pages, range(count)), kv(pages, range(count)))


def test_a_lookup_is_one_question_to_a_server_of_ours(monkeypatch):
    """The head is its last to go; an answer that cannot be is cut to what can."""
    with (
        running_server(eviction="lru") as server,
        client_of(server) as client,
        new_engine(remote=client) as engine,
    ):
        put_prompt(engine, PROMPT)
        assert engine.flush()
        names = client.list_keys()
        monkeypatch.setattr(client, "exists_many", None)
        client.delete(names[0])
        engine.clear()
        assert engine.lookup(PROMPT) == 12 and client.list_keys() == names[1:]
        monkeypatch.setattr(client, "leading", lambda keys: 1 << 40)
        assert engine.lookup(PROMPT) == 16
        monkeypatch.setattr(client, "leading", lambda keys: -1)
        assert engine.lookup(PROMPT) == 0 and engine.stats()["remote_errors"] == 0


def test_flush_is_true_only_where_the_remote_has_it():
    """A server whose budget is too small for one chunk refuses each, and has no reply to a PUT."""
    with running_server(max_bytes=CHUNK_BYTES // 2) as server, client_of(server) as client:
        with new_engine(remote=client) as engine:
            put_prompt(engine, PROMPT)
            assert not engine.flush() and not client.list_keys()
            assert engine.flush()  # nothing was stored since


def test_every_thread_hears_of_a_lost_store():
    """And each of them once."""
    remote = DictRemote()
    with new_engine(remote=remote) as engine, ThreadPoolExecutor(1) as pool:
        remote.put_many = lambda items: [*items]  # taken, and lost
        put_prompt(engine, PROMPT)
        for wanted in (False, True):
            assert engine.flush() == pool.submit(engine.flush).result(10) == wanted


def test_what_finds_no_room_in_the_outbox_is_the_tail(server):
    """Room for 64 chunks, an outbox of 32, a prompt of 33: another worker finds the first 32."""
    with client_of(server) as one, client_of(server) as two, new_engine(remote=one) as engine:
        assert put_prompt(engine, range_of(0, 132)) == 132
        assert not engine.flush() and engine.stats()["remote_dropped"] == 1
        with new_engine(remote=two) as other:
            assert other.lookup(range_of(0, 132)) == 128


@pytest.mark.parametrize("act", ["store", "lookup"])
def test_what_the_remote_lost_comes_back(act, server, monkeypatch):
    """At most once in RECHECK_SEC it is asked whether it still has them."""
    with client_of(server) as client, new_engine(remote=client) as engine:
        again = engine.lookup if act == "lookup" else lambda tokens: put_prompt(engine, tokens)
        put_prompt(engine, PROMPT)
        assert engine.flush() and len(client.list_keys()) == 4
        client.clear()
        for _ in range(50):
            again(PROMPT)
        assert not client.list_keys()
        monkeypatch.setattr(remote_server, "RECHECK_SEC", 0.0)
        again(PROMPT)
        assert wait_for(lambda: len(client.list_keys()) == 4)
        assert engine.stats()["remote_puts"] == 8


@pytest.mark.parametrize("pinned", [0, 2, 4])
def test_a_lookup_promises_what_a_retrieve_can_keep(pinned, dict_remote):
    """Also where some, or all, of the room here is pinned."""
    with new_engine(4, remote=dict_remote) as engine:
        put_prompt(engine, OTHER[: 4 * pinned])
        engine.lookup(OTHER, lookup_id="other", pin=True)
        assert engine.stats()["pinned_chunks"] == pinned
        assert engine.lookup(PROMPT, lookup_id="id", pin=True) == 16
        assert fetched(engine, dict_remote.pages)
        stats = engine.stats()
        assert stats["in_use"] == stats["pinned_chunks"] == pinned and len(dict_remote.got) == 4


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_blending_and_chunked_engines_share_no_names(algorithm, monkeypatch):
    """One remote for both; a segment of a chunk's tokens is not the chunk."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    remote, extra = DictRemote(), {"blend_special_token_ids": [9]}
    kind = dict(pre_caching_hash_algorithm=algorithm)
    blending = kind | dict(enable_blending=True, extra_config=extra)
    for mine, other in ((kind, blending), (blending, kind)):
        remote.held.clear()
        with new_engine(remote=remote, **mine) as engine, new_engine(remote=remote, **other) as two:
            assert put_prompt(engine, PROMPT[:4]) == 4 and engine.flush() and remote.held
            assert two.lookup(PROMPT[:4]) == 0 and engine.lookup(PROMPT[:4]) == 4


@pytest.mark.parametrize("room", [1, 2, 4, 8, 64])
def test_each_chunk_is_fetched_once(room):
    """64 chunks at the remote, with room for few of them here."""
    remote, tokens = DictRemote(), range_of(0, 256)
    with new_engine(128, remote=remote) as engine:
        put_prompt(engine, tokens)
        assert engine.flush()
        with new_engine(room, remote=remote) as other:
            assert other.lookup(tokens) == 256 and fetched(other, engine.pages, 256, tokens)
            assert sorted(remote.got) == sorted(remote.held) and len(remote.got) == 64
            assert other.stats()["in_use"] == 0 and other.stats()["chunks"] == room


def test_only_what_is_missing_is_fetched(server):
    """15 of 16 chunks are here, and it is one of the middle that is not."""
    remote, tokens = DictRemote(), range_of(0, 64)
    with new_engine(remote=remote) as engine:
        put_prompt(engine, tokens)
        assert engine.flush()
        engine.chunks.remove(engine.token_database.process_tokens(tokens)[7][2])
        assert fetched(engine, engine.pages, 64, tokens) and len(remote.got) == 1


def test_a_remote_that_hangs_keeps_nobody_waiting():
    """LM#1938: it accepts and never answers. A lookup each 20 ms for 3 s: what is here, at
    once, the first time too."""
    with silent_server() as port, RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=5) as client:
        with new_engine(remote=client) as engine:
            put_prompt(engine, PROMPT[:8])
            began, took = time.monotonic(), []
            while time.monotonic() - began < 3.0:
                asked = time.monotonic()
                assert engine.lookup(PROMPT) == engine.lookup(PROMPT[:8]) == 8
                took.append(time.monotonic() - asked)
                time.sleep(0.02)
            assert took[0] < 0.1 and sorted(took)[-2] < 0.1 and sum(took) < 1.5
            assert back(engine, PROMPT) == 8 and not engine.flush(0.1)
            client.close()  # what waits for its answer ends


@pytest.mark.parametrize("what", ["exists_many", "get_many", "put_many"])
def test_a_remote_that_is_well_again_is_used_again(what, dict_remote):
    """It is asked in the background; nobody has to try."""
    faults = ["once"]

    def fail(name):
        if name == what and faults:
            faults.pop()
            raise ConnectionError("gone")

    with new_engine(remote=dict_remote) as engine:
        dict_remote.before = fail
        engine.lookup(PROMPT)
        engine.retrieve(PROMPT, slot_mapping=range(16))
        put_prompt(engine, OTHER)
        engine.flush(1.0)
        engine.clear()
        assert not faults and engine.stats()["remote_errors"] == 1
        assert wait_for(lambda: engine.lookup(PROMPT) == 16) and fetched(engine, dict_remote.pages)


def interrupt(*_):
    raise KeyboardInterrupt


@pytest.mark.parametrize("where", ["gather", "scatter"])
def test_ctrl_c_in_a_copy_leaves_nothing_in_use(where, engine, monkeypatch):
    put_prompt(engine, PROMPT)
    monkeypatch.setattr(PagedKVCache, where, interrupt)
    with pytest.raises(KeyboardInterrupt):
        put_prompt(engine, OTHER) if where == "gather" else back(engine, PROMPT)
    with pytest.raises(KeyboardInterrupt):
        act = engine.store if where == "gather" else engine.retrieve
        chunk_hash = 7 if where == "gather" else engine.chunks.keys()[-1]
        act(hashes=[chunk_hash], offsets=[4], slot_mapping=range(4))
    stats = engine.stats()
    assert (stats["in_use"], stats["chunks"], stats["bytes_used"]) == (0, 4, 4 * CHUNK_BYTES)


@pytest.mark.parametrize("pin", [False, True])
def test_ctrl_c_while_the_remote_is_asked(pin, dict_remote):
    """The first chunk is here, the question is on its way."""
    with new_engine(remote=dict_remote) as engine:
        put_prompt(engine, PROMPT[:4])
        assert engine.flush()
        asked = threading.Event()

        def press(name):
            if not asked.is_set():
                asked.set()
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.1)

        dict_remote.before = press
        with pytest.raises(KeyboardInterrupt):
            engine.lookup(PROMPT, lookup_id="id", pin=pin)
        assert engine.stats()["in_use"] == engine.stats()["pins"] == 0
        assert wait_for(lambda: engine.lookup(PROMPT) == 16)


@pytest.mark.parametrize("at", [0, 2])
def test_ctrl_c_in_a_fetch(at, dict_remote, monkeypatch):
    """Before the first chunk, and with two of four received."""
    with new_engine(remote=dict_remote) as engine:
        get_many = dict_remote.get_many

        def broken_off(keys, fill):
            get_many(keys[:at], fill)
            fill(at, dict_remote.held[keys[at]][0], interrupt)

        monkeypatch.setattr(dict_remote, "get_many", broken_off)
        with pytest.raises(KeyboardInterrupt):
            engine.retrieve(PROMPT, slot_mapping=range(16))
        stats = engine.stats()
        assert (stats["in_use"], stats["bytes_used"]) == (0, at * CHUNK_BYTES)


@pytest.mark.parametrize("extra", [-1, 1])
def test_a_remote_that_answers_one_item_too_few_or_too_many(extra, dict_remote):
    """No exception, nothing in use, and no more claimed than was written."""
    with new_engine(remote=dict_remote) as engine:
        dict_remote.extra = extra
        assert engine.lookup(PROMPT, lookup_id="id", pin=True) in (0, 12, 16)
        written = engine.retrieve(PROMPT, slot_mapping=range(16))
        count = int(written.sum())
        assert torch.equal(kv(engine.pages, range(count)), kv(dict_remote.pages, range(count)))
        put_prompt(engine, [*PROMPT, *OTHER])
        engine.flush(1.0)
        engine.lookup_unpin("id")
        assert wait_for(lambda: engine.stats()["in_use"] == 0)


def test_local_cpu_false_keeps_nothing_here(dict_remote):
    """Straight between the remote and the pages."""
    with new_engine(remote=dict_remote, local_cpu=False) as engine:
        assert engine.lookup(PROMPT, lookup_id="id", pin=True) == 16
        assert fetched(engine, dict_remote.pages)
        assert put_prompt(engine, OTHER) == 16 and engine.flush() and len(dict_remote.held) == 8
        before = [page.clone() for page in engine.pages]
        assert engine.lookup(OTHER) == 16
        for page in engine.pages:
            page.zero_()
        assert fetched(engine, before, tokens=OTHER)
        stats = engine.stats()
        assert stats["chunks"] == stats["bytes_used"] == stats["pins"] == stats["in_use"] == 0
    with new_engine(local_cpu=False) as alone:
        assert put_prompt(alone, PROMPT) == alone.lookup(PROMPT) == 0


def test_a_remote_url_that_nobody_connected_is_an_error_that_says_how(server):
    url = f"lm://127.0.0.1:{server.port}"
    line = "LMCacheEngine(config, metadata, remote=remote_server.connect_remote(config))"
    with pytest.raises(ValueError, match=re.escape(line)):
        LMCacheEngine(config(remote_url=url), metadata())
    assert connect_remote(config()) is None
    with connect_remote(config(remote_url=url)) as client:
        with new_engine(remote=client, remote_url=url) as engine:
            assert put_prompt(engine, PROMPT) == 16 and engine.flush()
            assert len(client.list_keys()) == 4
    with pytest.raises(ValueError, match="lms"):
        connect_remote(config(remote_url="lms://127.0.0.1:1"))
    with pytest.raises(ValueError, match="(?i)tls.*None, None, .?x"):
        connect_remote(config(remote_url="lms://h:1", extra_config={"remote_tls_ca": "x"}))


FORK = """
import os, signal, sys
sys.path[:0] = [".", "tests"]
from toys import kv, new_engine, put_prompt, range_of
from remote_server import RemoteClient, connect_remote
signal.alarm(40)  # whoever hangs is killed by it, the child too
def check(engine, first):
    tokens, other = range_of(0, 16), range_of(first, 16)
    for _ in range(40):
        engine.clear()
        assert engine.lookup(tokens) == 16
        assert engine.retrieve(tokens, slot_mapping=range_of(16, 16)).all()
        assert kv(engine.pages, range_of(16, 16)).equal(kv(engine.pages, range(16)))
    assert put_prompt(engine, other) == 16 and engine.flush()
    engine.clear()
    assert engine.lookup(other) == 16
with RemoteClient(f"lm://127.0.0.1:{sys.argv[1]}") as client, new_engine(remote=client) as engine:
    put_prompt(engine, range_of(0, 16))
    assert engine.flush()
    child = os.fork()
    signal.alarm(40)
    if not child:
        try:
            check(engine, 1000)
            engine.close()
            os._exit(0)
        finally:
            os._exit(1)
    check(engine, 2000)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_an_engine_with_a_remote_after_a_fork(server):
    """Parent and child at once: each its own connection, its own writer, its own bytes."""
    command = [sys.executable, "-c", FORK, str(server.port)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=60)
