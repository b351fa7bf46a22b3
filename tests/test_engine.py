"""The engine: what is stored is found, what is found is copied back, what is pinned stays, and
nothing else is claimed.

CHUNK is 4 tokens, and a prompt of 16 has four chunks. Slots are those of the toy paged cache, 64
blocks of 4.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from toys import (
    CHUNK_BYTES,
    client_of,
    config,
    kv,
    metadata,
    new_engine,
    new_pages,
    put_prompt,
    range_of,
    running_server,
    wait_for,
)

from engine import ENGINE_COUNTERS, LMCacheEngine, MemoryFormat, PagedKVCache
from remote_server import RemoteClient

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
    (chunk,) = engine.chunks.acquire_prefix([key], [4])
    data = engine.chunks.bytes_of(chunk).clone().view(torch.float32).view(2, 2, 4, 8)
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
    with new_engine(4096, chunk_size=256, save_unfull_chunk=unfull) as engine:
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
    "some", [[bytes(range(32)), bytes(32)], [-1, -(2**63)], [2**63, 2**64 - 1], [0, b"\0"]]
)
def test_hashes_of_every_kind(engine, some):
    """LM#2997, VA#13602."""
    engine.store(hashes=some, offsets=[4, 2], slot_mapping=range_of(0, 6))
    assert engine.lookup(hashes=some, offsets=[4, 2]) == 6


def test_tags_are_names_of_their_own(engine):
    """LM#3301: 1,000 images in request_configs are 1,000 keys, and other entries name nothing."""
    assert (
        len({engine._key(1, {"lmcache.tag.image": f"{n}"}).to_string() for n in range(1000)})
        == 1000
    )
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
     dict(slot_mapping=[0.5] * 16), dict(slot_mapping="x" * 16), dict(slot_mapping=[[0] * 16]),
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
    assert moved == {"lookups": 1, "lookup_tokens": 512, "hit_tokens": 256}


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
    if mla:
        with mla_engine(1, **extra) as engine:
            assert engine.save_only_first_rank == alone
            assert engine.store(PROMPT, slot_mapping=range_of(0, 16)) == (0 if alone else 16)
    else:
        with new_engine(extra_config=extra) as engine:
            assert engine.save_only_first_rank == alone


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
        assert all(chunk.refs == 0 for chunk in engine.chunks._chunks.values())


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
        assert all(chunk.refs == 0 for chunk in engine.chunks._chunks.values())


class SlowRemote:
    """Takes puts when its gate opens."""

    def __init__(self):
        self.entered, self.gate, self.sent = threading.Event(), threading.Event(), []

    def put_many(self, items):
        self.entered.set()
        self.gate.wait(5)
        self.sent += [b"".join(bytes(piece) for piece in pieces) for _, _, pieces in items]

    def flush(self):
        pass


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
        assert wait_for(lambda: not engine._writer.is_alive())
        stats = engine.stats()
        assert (stats["remote_puts"], stats["remote_dropped"], stats["bytes_used"]) == (1, 4, 0)
