"""Random operations against plain models: the arena, the chunk store, the engine, the TCP and the
ZMQ protocols.

`make test` runs the short profile, the same examples every time; `make fuzz` runs some 10 minutes
of new ones:

    $ pytest tests/fuzz --hypothesis-profile=long

The profiles are in conftest.py.
"""

import contextlib
import logging
import os
import random
import socket
import struct
import tempfile
import threading
import tracemalloc
from array import array
from collections import Counter, OrderedDict
from itertools import groupby, takewhile

import msgspec
import pytest
import torch
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toys import new_engine, put_prompt, silent_server, wait_for

import remote_server
from engine import (
    Arena,
    Chunk,
    ChunkStore,
    LMCacheEngine,
    LMCacheEngineConfig,
    LMCacheMetadata,
    Piece,
    RemoteMeta,
    aligned,
)
from lookup import LMCacheLookupServer
from offload_server import ZMQOffloadServer
from remote_server import FOUND, MISS, REPLY, REQUEST, ClientCommand, LMCacheServer, RemoteClient

LONG = settings.get_current_profile_name() == "long"
PICK = st.integers(0, 2**16)  # an index into whatever there is, modulo its length


def scaled(short: int, long: int) -> settings:
    """Examples of one test, in the short profile and in the long one."""
    return settings(max_examples=long if LONG else short, stateful_step_count=60 if LONG else 40)


class Machine(RuleBasedStateMachine):
    def pick(self, items, index):
        return list(items)[index % len(items)]


# --------------------------------------------------------------------------------------------------
# Arena: offsets only


def pieces_of(arena: Arena, live: list[Chunk]) -> list[Piece]:
    """All of the arena, in order, without the walls."""
    piece = [*live, *(hole for _, _, hole in arena._holes)][0]
    while piece.left.left is not None:
        piece = piece.left
    found = []
    while piece.right is not None:
        found.append(piece)
        piece = piece.right
    return found


def check_arena(arena: Arena, live: list[Chunk]) -> None:
    """Live pieces and holes tile the arena with no gap and no overlap, holes are merged, every sum
    is right."""
    at, before, holes = 0, None, []
    for piece in pieces_of(arena, live):
        assert piece.offset == at and piece.size > 0, f"a piece at {piece.offset}, not at {at}"
        assert piece.right.left is piece
        hole = type(piece) is Piece
        assert not (hole and before), f"two holes side by side at {at}"
        at, before = at + piece.size, hole
        holes += [piece] * hole
    assert at == arena.size
    chunks = [p for p in pieces_of(arena, live) if type(p) is Chunk]
    assert {id(piece) for piece in live} == {id(piece) for piece in chunks}
    assert arena.used == sum(piece.size for piece in live)
    binned = [hole for size, _, hole in arena._holes if size == hole.size]
    assert arena._holes == sorted(arena._holes)
    assert {id(hole) for hole in binned} == {id(hole) for hole in holes}
    assert len(binned) == len(holes) == len(arena._holes)


def largest(pieces: list[Piece], free) -> int:
    """Bytes of the longest run of neighbours that are free."""
    return max((sum(p.size for p in run) for yes, run in groupby(pieces, free) if yes), default=0)


def is_hole(piece: Piece) -> bool:
    return type(piece) is Piece


class ArenaMachine(Machine):
    def __init__(self):
        super().__init__()
        self.arena = Arena(64 * 40)
        self.live = []

    @rule(size=st.integers(1, 14).map(lambda n: n * 64))
    def take(self, size):
        pieces = pieces_of(self.arena, self.live)
        fitting = [p.size for p in pieces if is_hole(p) and p.size >= size]
        hole = self.arena.find(size)
        assert (hole is not None) == bool(fitting)
        if hole is not None:
            assert hole.size == min(fitting)
            chunk = Chunk(size)
            self.arena.take(chunk, hole)
            self.live.append(chunk)

    @precondition(lambda self: self.live)
    @rule(index=PICK)
    def give_back(self, index):
        self.arena.give_back(self.live.pop(index % len(self.live)))

    @invariant()
    def is_exact(self):
        check_arena(self.arena, self.live)


# --------------------------------------------------------------------------------------------------
# ChunkStore: a model with an OrderedDict for the LRU order, and the bytes of every chunk that
# somebody can see


class ChunkStoreMachine(Machine):
    KEYS = st.integers(0, 7)

    @initialize(capacity=st.sampled_from([1, 2, 6, 10, 16]))
    def start(self, capacity):
        # With the policy whose order is plain; the others' is in test_engine_eviction.py.
        self.store = ChunkStore("cpu", capacity * 64, "lru", warm_bytes=0)
        self.model = {}  # key -> Chunk
        self.idle = OrderedDict()  # keys that nobody uses, the first to go first
        self.reserved = []  # Chunks
        self.in_use = []  # Chunks, once for each release() that is due
        self.pins = OrderedDict()  # lookup_id -> Chunks
        self.content = {}  # Chunk -> bytes: what lives
        self.made = 0

    def uses(self) -> Counter:
        pinned = (chunk for chunks in self.pins.values() for chunk in chunks)
        return Counter([*self.reserved, *self.in_use, *pinned])

    def used(self, chunks):
        """They were, and are idle again where nobody else uses them: the head as the last."""
        uses, keys = self.uses(), {chunk: key for key, chunk in self.model.items()}
        for chunk in reversed(chunks):
            if chunk in keys and not uses[chunk]:
                self.idle[keys[chunk]] = None
                self.idle.move_to_end(keys[chunk])

    def taken(self, chunks):
        keys = {chunk: key for key, chunk in self.model.items()}
        for chunk in chunks:
            self.idle.pop(keys.get(chunk), None)

    def forget(self, key):
        self.idle.pop(key, None)
        return self.model.pop(key, None)

    def forget_the_dead(self) -> None:
        living = {*self.uses(), *self.model.values()}
        self.content = {chunk: data for chunk, data in self.content.items() if chunk in living}

    def windows(self):
        """The largest hole, and the largest place that evictions could make."""
        pieces, uses = (
            pieces_of(self.store._arena, [*self.uses(), *self.model.values()]),
            self.uses(),
        )
        hole = max((p.size for p in pieces if is_hole(p)), default=0)
        return hole, largest(pieces, lambda p: is_hole(p) or not uses[p])

    def check_evictions(self, sizes, chunks, before):
        """Of what was idle, about as much as was asked for, and nobody for a refusal."""
        gone = set(self.model) - set(self.store.keys())
        assert gone <= set(self.idle), "evicted what is in use"
        assert self.store.stats()["evictions"] - before == len(gone)
        lost = sorted(self.model[key].size for key in gone)
        if not chunks:
            assert not gone, "a refusal evicted somebody"
        elif len(sizes) == 1:
            assert sum(lost[:-1]) < chunks[0].size
        for key in gone:
            self.forget(key)

    def fill(self, chunks):
        for chunk in chunks:
            self.made += 1
            data = random.Random(self.made).randbytes(chunk.nbytes)
            self.store.fill(chunk, lambda view: view.__setitem__(slice(None), data))
            self.reserved.append(chunk)
            self.content[chunk] = data

    SIZES = st.one_of(
        st.integers(0, 400), st.sampled_from([0, 1, 63, 64, 65, 128, 640, 1024, 1025, 9999])
    )

    @rule(nbytes=SIZES)
    def reserve(self, nbytes):
        size, (hole, window) = aligned(nbytes), self.windows()
        before = self.store.stats()["evictions"]
        chunk = self.store.reserve(nbytes)
        found = [] if chunk is None else [chunk]
        assert bool(found) == (window >= size), "refused, though there is a place; or the reverse"
        if hole >= size:
            assert self.store.stats()["evictions"] == before, "evicted although there was room"
        self.check_evictions([nbytes], found, before)
        self.fill(found)

    @rule(nbytes=SIZES)
    def reserve_hole(self, nbytes):
        hole, _ = self.windows()
        chunk = self.store.reserve_hole(nbytes)
        assert (chunk is not None) == (hole >= aligned(nbytes))
        self.fill([] if chunk is None else [chunk])

    @rule(sizes=st.lists(SIZES, max_size=6), whole=st.booleans())
    def reserve_many(self, sizes, whole):
        before = self.store.stats()["evictions"]
        chunks = self.store.reserve_many(sizes, whole)
        assert [chunk.nbytes for chunk in chunks] == sizes[: len(chunks)]
        assert not (whole and 0 < len(chunks) < len(sizes))
        self.check_evictions(sizes, chunks, before)
        self.fill(chunks)

    @precondition(lambda self: self.reserved)
    @rule(index=PICK, key=KEYS, keep=st.booleans(), meta=st.integers(0, 1))
    def commit(self, index, key, keep, meta):
        chunk, old = self.reserved.pop(index % len(self.reserved)), self.model.get(key)
        chunk.meta = meta
        now = self.store.commit(key, chunk, keep)
        self.in_use.append(now)
        if keep and old is not None and old.meta == meta:
            assert now is old
            self.taken([old])
        else:
            assert now is chunk
            self.forget(key)
            self.model[key] = chunk

    @precondition(lambda self: self.reserved)
    @rule(index=PICK, half=st.booleans())
    def abandon(self, index, half):
        chunk = self.reserved.pop(index % len(self.reserved))

        def fail(view):
            view[: len(view) // 2] = bytes(len(view) // 2)
            raise ConnectionError("a peer that leaves")

        if half:
            with pytest.raises(ConnectionError):
                self.store.fill(chunk, fail)
        self.store.release([chunk])

    @rule(key=KEYS)
    def acquire(self, key):
        chunk = self.store.acquire(key)
        assert chunk is self.model.get(key)
        if chunk is not None:
            self.taken([chunk])
            self.in_use.append(chunk)

    @rule(keys=st.lists(KEYS, max_size=5), pin=st.sampled_from([None, "a", "b", "c"]))
    def acquire_prefix(self, keys, pin):
        metas = [self.model[key].meta if key in self.model else 0 for key in keys]
        found = self.store.acquire_each(keys, metas)
        assert found == [self.model.get(key) for key in keys]
        leading = list(takewhile(lambda chunk: chunk is not None, found))
        rest = [chunk for chunk in found[len(leading) :] if chunk is not None]
        self.taken(leading + rest)
        self.in_use += leading
        self.store.release(rest)
        self.used(rest)
        if pin is not None:
            self.store.pin(pin, leading, 1000)
            before = self.pins.pop(pin, [])
            self.used(before)
            del self.in_use[len(self.in_use) - len(leading) :]
            if leading:
                self.pins[pin] = leading

    @rule(pin=st.sampled_from(["a", "b", "c", "unknown"]))
    def unpin(self, pin):
        self.store.unpin(pin)
        self.used(self.pins.pop(pin, []))

    @precondition(lambda self: self.in_use)
    @rule(index=PICK, count=st.integers(1, 4))
    def release(self, index, count):
        index %= len(self.in_use)
        chunks = self.in_use[index : index + count]
        del self.in_use[index : index + count]
        self.store.release(chunks)
        self.used(chunks)

    @precondition(lambda self: self.in_use)
    @rule(index=PICK)
    def hold(self, index):
        chunk = self.pick(self.in_use, index)
        self.store.hold([chunk])
        self.in_use.append(chunk)

    @rule(keys=st.lists(KEYS, max_size=4))
    def touch(self, keys):
        leading = list(takewhile(lambda key: key in self.model, keys))
        assert self.store.touch(keys) == len(leading)
        for key in reversed(list(dict.fromkeys(leading))):
            if key in self.idle:
                self.idle.move_to_end(key)

    @rule(key=KEYS)
    def remove(self, key):
        assert self.store.remove(key) == (self.forget(key) is not None)

    @rule()
    def clear(self):
        self.store.clear()
        self.model.clear()
        self.idle.clear()
        self.pins.clear()

    @invariant()
    def is_exact(self):
        self.forget_the_dead()
        uses, keys = self.uses(), self.store.keys()
        assert keys[: len(self.idle)] == list(self.idle)
        assert set(keys) == set(self.model) and len(keys) == len(self.model)
        for chunk, data in self.content.items():
            assert b"".join(self.store.pieces(chunk)) == data
        check_arena(self.store._arena, list(self.content))
        stats = self.store.stats()
        assert stats["bytes_used"] <= stats["max_bytes"] and stats["in_use"] == len(uses)
        assert stats["pinned_chunks"] == sum(map(len, self.pins.values()))
        assert stats["pins"] == len(self.pins)

    def teardown(self):
        if hasattr(self, "store"):
            self.store.release(self.in_use)
            for chunk in self.reserved:
                self.store.release([chunk])
            self.store.clear()
            assert self.store.stats()["bytes_used"] == self.store.stats()["in_use"] == 0
            self.store.close()


# --------------------------------------------------------------------------------------------------
# The engine: prompts of a few blocks, so that they share prefixes; the KV of a token follows from
# its prefix and tags

LAYERS, HEADS, DIM, BLOCKS, BLOCK, CHUNK = 2, 2, 4, 8, 4, 4
TOKEN_BYTES = 2 * LAYERS * HEADS * DIM * 4  # 128
METADATA = LMCacheMetadata(
    "toy", 1, 1, 0, 0, torch.float32, (LAYERS, 2, CHUNK, HEADS, DIM), engine_id="fuzz"
)
TAGS = [None, {"lmcache.tag.user": "ann"}, {"lmcache.tag.user": "bob", "other": 1}]
TAG = st.sampled_from([0, 0, 0, 1, 2])
LAYOUTS = {  # how the pages are made, and as [2, B, N, H, D]
    "2BNHD": ((2, BLOCKS, BLOCK, HEADS, DIM), lambda pages: pages),
    "B2NHD": ((BLOCKS, 2, BLOCK, HEADS, DIM), lambda pages: pages.permute(1, 0, 2, 3, 4)),
    "BHNC": (
        (BLOCKS, HEADS, BLOCK, 2 * DIM),
        lambda pages: pages.unflatten(-1, (2, DIM)).permute(3, 0, 2, 1, 4),
    ),
}
BLOCK_IDS = st.lists(st.sampled_from([(1, 2, 3, 4), (5, 6, 7, 8)]), max_size=5)
PROMPTS = st.tuples(BLOCK_IDS, st.integers(0, 3)).map(
    lambda made: [*sum(made[0], ()), *[9, 9, 9][: made[1]]]
)
MAKERS = st.sampled_from([list, tuple, torch.tensor, lambda ids: array("q", ids)])


def make_tokens(maker, prompt):
    return torch.tensor(prompt, dtype=torch.int64) if maker is torch.tensor else maker(prompt)


class PagedMachine(Machine):
    """Pages, and the KV that belongs in them."""

    def make(self, layout, chunks, unfull, remote=None):
        config = LMCacheEngineConfig(
            chunk_size=CHUNK,
            save_unfull_chunk=unfull,
            max_local_cpu_size=chunks * CHUNK * TOKEN_BYTES / 2**30,
        )
        self.engine = LMCacheEngine(config, METADATA, remote=remote)
        shape, view = LAYOUTS[layout]
        pages = [torch.zeros(shape) for _ in range(LAYERS)]
        self.views = [view(layer) for layer in pages]  # L of [2, B, N, H, D]
        self.engine.register_kv_caches(pages, layout)
        self.stored = []  # (prompt, tag)
        self.names = {}  # the store's key -> (tags, prefix): no two prefixes may share a key

    def choose(self, prompt, tag, seed):
        """Mostly one that has been stored of late."""
        return self.pick(self.stored[-3:], seed) if self.stored and seed % 4 else (prompt, tag)

    def spans(self, prompt, tag):
        """(start, end, hash) of each chunk, and the keys under which the engine keeps them."""
        spans = self.engine.token_database.process_tokens(prompt)
        keys = self.engine.names.of(prompt, None, None, None, TAGS[tag]).keys
        for (_, end, _), key in zip(spans, keys, strict=True):
            assert self.names.setdefault(key, (tag, tuple(prompt[:end]))) == (
                tag,
                tuple(prompt[:end]),
            )
        return spans, keys

    def kv(self, prompt, tag, start, end):
        seed = hash((tag, tuple(prompt[:end]))) % 2**31
        return torch.rand(
            LAYERS, 2, end - start, HEADS, DIM, generator=torch.Generator().manual_seed(seed)
        )

    def slots(self, seed, total):
        aligned = seed % 2  # whole blocks move in another way than slots
        order = torch.randperm(
            BLOCKS if aligned else BLOCKS * BLOCK, generator=torch.Generator().manual_seed(seed)
        )
        order = (order[:, None] * BLOCK + torch.arange(BLOCK)).flatten() if aligned else order
        return order[:total]

    def write(self, views, slots, kv):
        for view, layer in zip(views, kv, strict=True):
            view[:, slots // BLOCK, slots % BLOCK] = layer

    def fill_pages(self, prompt, tag, slots):
        for start, end, _ in self.spans(prompt, tag)[0]:
            self.write(self.views, slots[start:end], self.kv(prompt, tag, start, end))

    def check_pages(self, prompt, tag, slots, before, written):
        """Where `written` says so the prompt's KV, everywhere else what was there."""
        for start, end, _ in self.spans(prompt, tag)[0]:
            if bool(written[start]):
                self.write(before, slots[start:end], self.kv(prompt, tag, start, end))
        for view, expected in zip(self.views, before, strict=True):
            assert torch.equal(view, expected)

    def scribble(self):
        for view in self.views:
            view.copy_(torch.rand(view.shape))
        return [view.clone() for view in self.views]

    def teardown(self):
        if hasattr(self, "engine"):
            self.engine.close()


class EngineMachine(PagedMachine):
    """Without a remote: what is present is known exactly, but for which chunks an eviction took."""

    @initialize(
        layout=st.sampled_from([*LAYOUTS]),
        chunks=st.sampled_from([1, 3, 6, 8, 40]),
        unfull=st.booleans(),
    )
    def start(self, layout, chunks, unfull):
        self.make(layout, chunks, unfull)
        self.capacity = chunks
        self.present = set()  # keys of the store
        self.parents = {}  # key -> the key of the chunk before it
        self.pins = {}  # lookup_id -> keys
        self.hole = False  # a masked store has left out chunks that are not here
        self.evictions = 0

    def leading(self, keys):
        count = next(
            (index for index, key in enumerate(keys) if key not in self.present), len(keys)
        )
        return count

    def pinned(self):
        return {key for keys in self.pins.values() for key in keys}

    def settle(self, may_be_new=()):
        """Takes over what the engine evicted; whatever else it lost or made up is an error. How
        many it evicted."""
        now = set(self.engine.chunks.keys())
        evicted = self.engine.stats()["evictions"] - self.evictions
        self.evictions += evicted
        lost = self.present - now
        assert len(lost) <= evicted and not lost & self.pinned()
        assert now - self.present <= set(may_be_new)
        self.present = now
        return evicted

    @rule(
        prompt=PROMPTS,
        tag=TAG,
        maker=MAKERS,
        masked=st.integers(0, 5),
        seed=PICK,
        by_hash=st.booleans(),
    )
    def store(self, prompt, tag, maker, masked, seed, by_hash):
        self.stored.append((prompt, tag))
        spans, keys = self.spans(prompt, tag)
        masked = min(masked, len(prompt) // CHUNK) if seed % 3 else 0
        if not set(keys[:masked]) <= self.present:  # its head is not here: a hole, allowed but rare
            masked, self.hole = (masked, True) if seed % 20 == 0 else (0, self.hole)
        total = sum(end - start for start, end, _ in spans) if by_hash else len(prompt)
        slots = self.slots(seed, total)
        self.fill_pages(prompt, tag, slots)
        mask = torch.arange(total) >= masked * CHUNK
        before, pinned = set(self.present), self.pinned()
        source = {"tokens": make_tokens(maker, prompt)}
        if by_hash:
            source = {
                "hashes": [span[2] for span in spans],
                "offsets": [end - start for start, end, _ in spans],
            }
        try:
            stored = self.engine.store(
                **source, mask=mask, slot_mapping=slots, request_configs=TAGS[tag]
            )
        except MemoryError:
            assert by_hash
            self.settle()
            return
        wanted = keys[masked:]
        evicted = self.settle(wanted)
        if not evicted:
            fresh = set(wanted) & self.present - before
            assert stored == sum(
                end - start
                for (start, end, _), key in zip(spans, keys, strict=True)
                if key in fresh
            )
        if not self.engine.config.save_unfull_chunk and len(keys) <= self.capacity - len(
            pinned - set(keys)
        ):
            assert set(wanted) <= self.present, "there was room for all of it"
        for parent, key in zip(keys, keys[1:], strict=False):
            self.parents[key] = parent

    @rule(
        prompt=PROMPTS,
        tag=TAG,
        maker=MAKERS,
        pin=st.sampled_from([None, "a", "b"]),
        seed=PICK,
        by_hash=st.booleans(),
    )
    def lookup(self, prompt, tag, maker, pin, seed, by_hash):
        prompt, tag = self.choose(prompt, tag, seed)
        spans, keys = self.spans(prompt, tag)
        source = {"tokens": make_tokens(maker, prompt)}
        if by_hash:
            source = {
                "hashes": [span[2] for span in spans],
                "offsets": [end - start for start, end, _ in spans],
            }
        hits = self.engine.lookup(
            **source, lookup_id=pin, pin=pin is not None, request_configs=TAGS[tag]
        )
        count = self.leading(keys)
        assert hits == (spans[count - 1][1] if count else 0)
        if pin is not None:
            self.pins[pin] = keys[:count]

    @rule(prompt=PROMPTS, tag=TAG, index=PICK, wrong=st.integers(1, 9))
    def lookup_with_a_wrong_length(self, prompt, tag, index, wrong):
        prompt, tag = self.choose(prompt, tag, index)
        spans, keys = self.spans(prompt, tag)
        lengths = [end - start for start, end, _ in spans]
        if spans and lengths[index := index % len(spans)] != wrong:
            count = min(index, self.leading(keys))
            hits = sum(lengths[:count])
            lengths[index] = wrong
            assert (
                self.engine.lookup(
                    hashes=[span[2] for span in spans], offsets=lengths, request_configs=TAGS[tag]
                )
                == hits
            )

    @rule(prompt=PROMPTS, tag=TAG, maker=MAKERS, masked=st.integers(0, 5), seed=PICK)
    def retrieve(self, prompt, tag, maker, masked, seed):
        prompt, tag = self.choose(prompt, tag, seed)
        spans, keys = self.spans(prompt, tag)
        masked = min(masked, len(prompt) // CHUNK) if seed % 3 else 0
        slots, before = self.slots(seed, len(prompt)), self.scribble()
        mask = torch.arange(len(prompt)) >= masked * CHUNK
        written = self.engine.retrieve(
            make_tokens(maker, prompt), mask, slot_mapping=slots, request_configs=TAGS[tag]
        )
        expected = torch.zeros(len(prompt), dtype=torch.bool)
        for start, end, _ in spans[masked:][: self.leading(keys[masked:])]:
            expected[start:end] = True
        assert torch.equal(written, expected)
        self.check_pages(prompt, tag, slots, before, written)

    @rule(pin=st.sampled_from(["a", "b", "unknown"]))
    def unpin(self, pin):
        self.engine.lookup_unpin(pin)
        self.pins.pop(pin, None)

    @rule()
    def clear(self):
        self.engine.clear()
        self.hole = False
        self.present.clear()
        self.pins.clear()

    @invariant()
    def is_whole(self):
        self.settle()
        stats = self.engine.stats()
        assert stats["in_use"] == len(self.pinned())
        assert stats["bytes_used"] >= 64 * stats["chunks"]
        # A prefix loses its tail first: what is here can be reached. A partial last chunk may be
        # too small for who comes, and stay behind.
        if not self.hole and not self.engine.config.save_unfull_chunk:
            assert all(self.parents.get(key, key) in self.present for key in self.present)


class DictRemote:
    """A remote in this process, as dict; `fail_in` items from now it breaks, in the middle of a
    payload too."""

    def __init__(self):
        self.items = {}  # key text -> (RemoteMeta, bytes)
        self.fail_in = None

    def _step(self):
        if self.fail_in is not None:
            self.fail_in -= 1
            if self.fail_in < 0:
                self.fail_in = None
                raise ConnectionError("the remote is gone")

    def exists_many(self, keys):
        self._step()
        return [key in self.items for key in keys]

    def put_many(self, items):
        for key, meta, pieces in items:
            self._step()
            self.items[key] = (meta, b"".join(map(bytes, pieces)))
            assert len(self.items[key][1]) == meta.length

    def get_many(self, keys, fill):
        for index, key in enumerate(keys):
            self._step()
            if key in self.items:
                meta, data = self.items[key]
                left = memoryview(data)

                def receive(view):
                    nonlocal left
                    view[: len(view) // 2] = left[: len(view) // 2]
                    self._step()  # half of it has come
                    view[:], left = left[: len(view)], left[len(view) :]

                fill(index, meta, receive)

    def flush(self):
        self._step()


class EngineWithRemoteMachine(PagedMachine):
    """With a remote that forgets, fails, and holds what does not belong there: a miss, and never a
    wrong byte."""

    @initialize(
        layout=st.sampled_from([*LAYOUTS]), chunks=st.sampled_from([2, 4, 40]), unfull=st.booleans()
    )
    def start(self, layout, chunks, unfull):
        self.backoff, remote_server.BACKOFF_SEC = remote_server.BACKOFF_SEC, 0.0
        self.remote = DictRemote()
        self.make(layout, chunks, unfull, self.remote)

    def leading_tokens(self, prompt, tag, local=True):
        """How many leading tokens are here or, whole, at the remote."""
        spans, keys = self.spans(prompt, tag)
        here = set(self.engine.chunks.keys())
        hits = 0
        for (_, end, _), key in zip(spans, keys, strict=True):
            if key not in here and self.engine.names.text(key) not in self.remote.items:
                break
            hits = end
        return hits

    @rule(prompt=PROMPTS, tag=TAG, seed=PICK)
    def store(self, prompt, tag, seed):
        self.stored.append((prompt, tag))
        slots = self.slots(seed, len(prompt))
        self.fill_pages(prompt, tag, slots)
        self.engine.store(prompt, slot_mapping=slots, request_configs=TAGS[tag])
        self.engine.flush()

    @rule(prompt=PROMPTS, tag=TAG, pin=st.sampled_from([None, "a"]), seed=PICK)
    def lookup(self, prompt, tag, pin, seed):
        prompt, tag = self.choose(prompt, tag, seed)
        expected, sure = self.leading_tokens(prompt, tag), self.remote.fail_in is None
        hits = self.engine.lookup(
            prompt, lookup_id=pin, pin=pin is not None, request_configs=TAGS[tag]
        )
        assert hits == expected if sure else hits <= expected

    @rule(
        prompt=PROMPTS,
        tag=TAG,
        seed=PICK,
        fetch=st.booleans(),
        fail_in=st.sampled_from([None, None, *range(7)]),
    )
    def retrieve(self, prompt, tag, seed, fetch, fail_in):
        prompt, tag = self.choose(prompt, tag, seed)
        if fetch:
            self.engine.clear()
        self.remote.fail_in = fail_in if self.remote.fail_in is None else self.remote.fail_in
        expected, evictions = self.leading_tokens(prompt, tag), self.engine.stats()["evictions"]
        sure = self.remote.fail_in is None and self.engine.stats()["pins"] == 0
        bad = [key for key, (meta, _) in self.remote.items.items() if meta.fmt != 1]
        slots, before = self.slots(seed, len(prompt)), self.scribble()
        written = self.engine.retrieve(prompt, slot_mapping=slots, request_configs=TAGS[tag])
        count = int(written.sum())
        assert bool(written[:count].all()) and count <= expected
        if sure and not bad and self.engine.stats()["evictions"] == evictions:
            assert count == expected
        self.check_pages(prompt, tag, slots, before, written)

    @rule(fail_in=st.integers(0, 6))
    def remote_will_fail(self, fail_in):
        self.remote.fail_in = fail_in

    # subtle: no precondition on what is there, which depends on how far the writer's thread has got
    @rule(index=PICK)
    def remote_forgets(self, index):
        for key in sorted(self.remote.items)[index % 8 :][:1]:
            del self.remote.items[key]

    @rule(index=PICK, length=st.integers(0, 700))
    def remote_holds_something_else(self, index, length):
        for key in sorted(self.remote.items)[index % 8 :][:1]:
            self.remote.items[key] = (RemoteMeta(length, 4, 6, (length, 0, 0, 0)), b"\xee" * length)

    @rule()
    def unpin(self):
        self.engine.lookup_unpin("a")

    @rule()
    def clear(self):
        self.engine.clear()

    @invariant()
    def nothing_is_left_in_use(self):
        """But what is pinned: no failure leaks a use, or memory."""
        pinned = self.engine.stats()["pinned_chunks"]
        assert wait_for(lambda: self.engine.stats()["in_use"] == pinned)  # the outbox's, too

    def teardown(self):
        super().teardown()
        remote_server.BACKOFF_SEC = getattr(self, "backoff", remote_server.BACKOFF_SEC)


# --------------------------------------------------------------------------------------------------
# TCP: a real server, two raw connections, a dict

TCP_KEYS = st.sampled_from([b"", b"a", b"toy@1@0@abc@half", b"\xff\x00z", b" x", b"k" * 150])
INT32 = st.integers(-(2**31), 2**31 - 1)
FIELDS = st.tuples(
    INT32, INT32, INT32, st.tuples(INT32, INT32, INT32, INT32)
)  # fmt, dtype, location, shape
CUTS = st.lists(st.integers(0, 5000), max_size=4)
OTHERS = INT32.filter(lambda number: number not in [*ClientCommand])
MAX_PAYLOAD = 4000


def request(
    command: int, key: bytes = b"", length: int = 0, fields=(1, 2, 0, (0, 0, 0, 0))
) -> bytes:
    fmt, dtype, location, shape = fields
    return REQUEST.pack(command, length, fmt, dtype, location, *shape, key.ljust(150))


class Wire:
    """One raw connection."""

    def __init__(self, port: int):
        self.sock = socket.create_connection(("127.0.0.1", port), 10)

    def send(self, data: bytes, cuts=()) -> None:
        """Sends data, cut into pieces at these places."""
        places = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
        for start, end in zip(places, places[1:], strict=False):
            self.sock.sendall(data[start:end])

    def receive(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count and (piece := self.sock.recv(count - len(data))):
            data += piece
        return bytes(data)

    def reply(self):
        """The nine integers of a reply, and its payload."""
        header = REPLY.unpack(self.receive(REPLY.size))
        return header, self.receive(header[1])

    def sync(self) -> None:
        """Returns when the server has done all that was sent."""
        self.send(request(ClientCommand.HEALTH))
        assert self.reply() == ((200, 0, 1, 2, 0, 0, 0, 0, 0), b"")

    def close(self, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.sock.close()


class Faults(logging.Handler):
    """Collects what the server logs as its own fault."""

    def __init__(self):
        super().__init__(logging.ERROR)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage() + str(record.exc_info))


@contextlib.contextmanager
def serving(max_bytes: int, **options):
    """A server on a free port; at the end its threads are gone, and it has logged no fault of its
    own."""
    faults, before = Faults(), set(threading.enumerate())
    logging.getLogger("lmcache").addHandler(faults)
    server = LMCacheServer("127.0.0.1", 0, max_bytes=max_bytes, **options)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join(5)
        logging.getLogger("lmcache").removeHandler(faults)
    assert not faults.texts
    assert not [
        left
        for left in set(threading.enumerate()) - before
        if left.name == "client" or left is thread
    ]


class TcpMachine(Machine):
    OPERATIONS = st.one_of(
        st.tuples(st.just("put"), TCP_KEYS, FIELDS, st.integers(0, MAX_PAYLOAD)),
        st.tuples(st.sampled_from(["get", "get", "exist"]), TCP_KEYS),
        st.tuples(st.sampled_from(["health", "delete", "clear"]), TCP_KEYS),
        st.tuples(st.just("unknown"), OTHERS),
    )

    @initialize(tight=st.booleans(), shared=st.booleans())
    def start(self, tight, shared):
        self.stack = contextlib.ExitStack()
        self.budget = 8 * 4096 if tight else 1 << 20
        folder = self.stack.enter_context(tempfile.TemporaryDirectory()) if shared else None
        self.server = self.stack.enter_context(serving(self.budget, folder=folder))
        self.memory = None
        if shared:
            self.memory = os.open(self.server.store.arena, os.O_RDWR)
            self.stack.callback(os.close, self.memory)
        self.wires = [None, None]
        self.halves = [None, None]  # of each wire: (key, value, the bytes still to send)
        self.model = {}  # key -> (fields, payload)
        self.seen = {}  # key -> evictions counted when it was last known to be there
        self.made = 0

    def wire(self, index) -> Wire:
        if self.wires[index] is None:
            self.wires[index] = Wire(self.server.port)
        return self.wires[index]

    def drop(self, index, reset=False):
        if self.wires[index] is not None:
            self.wires[index].close(reset)
        self.wires[index] = self.halves[index] = None

    def value(self, fields, length):
        self.made += 1
        return fields, random.Random(self.made).randbytes(length)

    def set(self, key, value):
        key = key.rstrip(b" ")
        self.model[key], self.seen[key] = value, self.server.stats()["evictions"]

    def found(self, key, there: bool) -> bool:
        """Whether the server has the key, which it may only have lost to an eviction."""
        key = key.rstrip(b" ")
        if there:
            assert key in self.model, f"{key!r} came from nowhere"
            self.seen[key] = self.server.stats()["evictions"]
        elif key in self.model:
            assert self.server.stats()["evictions"] > self.seen[key], f"{key!r} is lost"
            del self.model[key]
        return there

    def check_get(self, key, reply):
        header, payload = reply
        if self.found(key, header[0] == 200):
            (fmt, dtype, location, shape), data = self.model[key.rstrip(b" ")]
            assert header == (200, len(data), fmt, dtype, *shape, location) and payload == data
        else:
            assert header == REPLY.unpack(MISS) and payload == b""

    @staticmethod
    def put_bytes(key, value):
        fields, data = value
        return request(ClientCommand.PUT, key, len(data), fields) + data

    @rule(
        index=st.integers(0, 1), operations=st.lists(OPERATIONS, min_size=1, max_size=20), cuts=CUTS
    )
    def burst(self, index, operations, cuts):
        """Pipelined requests, cut anywhere; the replies come in their order."""
        if self.halves[index] is not None:
            return
        wire, data, expected = self.wire(index), b"", []
        for name, *arguments in operations:
            if name == "put":
                value = self.value(arguments[1], arguments[2])
                data += self.put_bytes(arguments[0], value)
                expected.append((name, arguments[0], value))
            elif name == "unknown":
                data += request(arguments[0])
                expected.append((name, b"", None))
            else:
                command = {
                    "get": ClientCommand.GET,
                    "exist": ClientCommand.EXIST,
                    "health": ClientCommand.HEALTH,
                    "delete": ClientCommand.DELETE,
                    "clear": ClientCommand.CLEAR,
                }[name]
                data += request(command, arguments[0])
                expected.append((name, arguments[0], None))
        wire.send(data, cuts)
        for name, key, value in expected:
            if name == "put":
                self.model[key.rstrip(b" ")], self.seen[key.rstrip(b" ")] = (
                    value,
                    0,
                )  # may be evicted within the burst
            elif name == "get":
                self.check_get(key, wire.reply())
            else:
                header, payload = wire.reply()
                assert payload == b"" and header[1:] == (0, 1, 2, 0, 0, 0, 0, 0)
                there = header[0] == 200
                assert there == {"health": True, "clear": True, "unknown": False}.get(name, there)
                if name in ("exist", "delete"):
                    self.found(key, there)
                if name == "delete":
                    self.model.pop(key.rstrip(b" "), None)
                if name == "clear":
                    self.model.clear()
        wire.sync()

    @rule(
        index=st.integers(0, 1),
        key=TCP_KEYS,
        fields=FIELDS,
        length=st.integers(0, MAX_PAYLOAD),
        at=PICK,
    )
    def begin_put(self, index, key, fields, length, at):
        """Some bytes of a PUT; the other connection goes on meanwhile."""
        if self.halves[index] is None:
            data = self.put_bytes(key, value := self.value(fields, length))
            at %= len(data)
            self.wire(index).send(data[:at])
            self.halves[index] = (key, value, data[at:])

    @rule(index=st.integers(0, 1), cuts=CUTS)
    def finish_put(self, index, cuts):
        if self.halves[index] is not None:
            key, value, rest = self.halves[index]
            self.wire(index).send(rest, cuts)
            self.wire(index).sync()
            self.halves[index] = None
            self.set(key, value)

    @rule(index=st.integers(0, 1), reset=st.booleans())
    def leave(self, index, reset):
        """In the middle of a PUT, maybe: then it never was."""
        self.drop(index, reset)

    @rule(index=st.integers(0, 1), key=TCP_KEYS, length=st.integers(-(2**31), -1))
    def negative_length(self, index, key, length):
        if self.halves[index] is None:
            self.wire(index).send(request(ClientCommand.PUT, key, length))
            assert self.wire(index).receive(1) == b""
            self.drop(index)

    @rule(index=st.integers(0, 1), key=TCP_KEYS, more=st.integers(1, 100_000), cuts=CUTS)
    def too_large(self, index, key, more, cuts):
        if self.halves[index] is None:
            self.wire(index).send(
                self.put_bytes(key, ((1, 2, 0, (0, 0, 0, 0)), bytes(self.budget + more))), cuts
            )
            self.wire(index).sync()

    @rule(index=st.integers(0, 1))
    def list_keys(self, index):
        if self.halves[index] is None:
            self.wire(index).send(request(ClientCommand.LIST))
            header, payload = self.wire(index).reply()
            listed = payload.split(b"\n") if payload else []
            assert header[0] == 200 and len(set(listed)) == len(listed)
            for key in {*listed, *self.model}:  # subtle: the empty key alone lists as nothing
                self.found(
                    key, key in listed or (key == b"" and not listed and self.has_the_empty_key())
                )

    def has_the_empty_key(self):
        return self.server.stats()["chunks"] == 1

    @rule(index=st.integers(0, 1), key=TCP_KEYS)
    def delete(self, index, key):
        if self.halves[index] is None:
            self.wire(index).send(request(ClientCommand.DELETE, key))
            header, payload = self.wire(index).reply()
            assert payload == b"" and header in (REPLY.unpack(MISS), REPLY.unpack(FOUND))
            if self.found(key, header[0] == 200):
                del self.model[key.rstrip(b" ")]

    @rule(index=st.integers(0, 1), keys=st.lists(TCP_KEYS, max_size=5), cuts=CUTS)
    def prefix(self, index, keys, cuts):
        if self.halves[index] is None:
            names = b"".join(bytes(36) + key.ljust(150) for key in keys)
            self.wire(index).send(request(ClientCommand.PREFIX, b"", len(names)) + names, cuts)
            header, payload = self.wire(index).reply()
            assert header[0] == 200 and payload == b"" and 0 <= header[4] <= len(keys)
            for number, key in enumerate(keys[: header[4] + 1]):
                self.found(key, number < header[4])

    @rule(index=st.integers(0, 1), key=TCP_KEYS, leaves=st.booleans())
    def hold(self, index, key, leaves):
        """It is in the memory where the server says, as a GET has it."""
        if self.halves[index] is not None:
            return
        wire = self.wire(index)
        wire.send(request(ClientCommand.HOLD, key))
        header = REPLY.unpack(wire.receive(REPLY.size))
        if self.found(key, header[0] == 200):
            (offset,) = struct.unpack("<q", wire.receive(8))
            if self.memory is not None:
                data = os.pread(self.memory, header[1], offset)
                self.check_get(key, (header, data))
        if leaves:
            self.drop(index)
        else:
            wire.send(request(ClientCommand.LETGO))
            assert wire.reply() == (REPLY.unpack(FOUND), b"")

    @rule(
        index=st.integers(0, 1),
        key=TCP_KEYS,
        fields=FIELDS,
        length=st.integers(-1, MAX_PAYLOAD),
        leaves=st.booleans(),
    )
    def reserve(self, index, key, fields, length, leaves):
        """It is there when the client has let go of it; if it leaves, it never was."""
        if self.halves[index] is not None:
            return
        wire, value = self.wire(index), self.value(fields, max(0, length))
        wire.send(request(ClientCommand.RESERVE, key, length, fields))
        header = wire.receive(REPLY.size)
        if header != MISS:
            fmt, dtype, location, shape = fields
            assert REPLY.unpack(header) == (200, length, fmt, dtype, *shape, location)
            (offset,) = struct.unpack("<q", wire.receive(8))
            os.pwrite(self.memory, value[1], offset)
        if leaves:
            self.drop(index)
        else:
            wire.send(request(ClientCommand.LETGO))
            assert wire.reply() == (REPLY.unpack(FOUND), b"")
            if header != MISS:
                self.set(key, value)

    @rule(index=st.integers(0, 1), length=st.integers(-(2**31), 2**31 - 1))
    def no_prefix(self, index, length):
        if self.halves[index] is None and not (0 <= length <= 16 << 20 and length % 186 == 0):
            self.wire(index).send(request(ClientCommand.PREFIX, b"", length))
            assert self.wire(index).receive(1) == b""
            self.drop(index)

    @rule(index=st.integers(0, 1))
    def clear(self, index):
        """What is half received comes whole later all the same."""
        if self.halves[index] is None:
            self.wire(index).send(request(ClientCommand.CLEAR))
            assert self.wire(index).reply() == (REPLY.unpack(FOUND), b"")
            self.model.clear()

    @invariant()
    def is_bounded(self):
        stats = self.server.stats()
        assert stats["bytes_used"] <= stats["max_bytes"] == self.budget
        assert stats["clients"] <= 2 or wait_for(lambda: self.server.stats()["clients"] <= 2)

    def teardown(self):
        if not hasattr(self, "stack"):
            return
        with self.stack:
            self.drop(0, reset=True)
            self.drop(1)
            with contextlib.closing(
                Wire(self.server.port)
            ) as wire:  # a fresh one finds all that is left
                wire.sync()  # subtle: now those that came before it have been accepted
                for key in list(self.model):
                    wire.send(request(ClientCommand.GET, key))
                    self.check_get(key, wire.reply())
            assert wait_for(lambda: self.server.stats()["clients"] == 0)
            assert wait_for(lambda: self.server.stats()["in_use"] == 0)
            with RemoteClient(f"lm://127.0.0.1:{self.server.port}") as client:
                client.clear()
            assert self.server.stats()["bytes_used"] == 0


@pytest.mark.parametrize("reset", [False, True])
def test_disconnect_at_every_byte(reset):
    """Of a PUT's header and payload, over a value that is there: it stays, and the next connection
    is served."""
    old, new = b"old" * 20, b"new" * 21
    data = request(ClientCommand.PUT, b"key", len(new)) + new
    with serving(1 << 20) as server:
        with contextlib.closing(Wire(server.port)) as wire:
            wire.send(request(ClientCommand.PUT, b"key", len(old)) + old)
            wire.sync()
        for at in range(len(data)):
            broken = Wire(server.port)
            broken.send(data[:at])
            broken.close(reset)
            with contextlib.closing(Wire(server.port)) as wire:
                wire.send(request(ClientCommand.GET, b"key"))
                assert wire.reply()[1] == old
        assert wait_for(lambda: server.stats()["clients"] == 0)
        assert server.stats()["bytes_used"] == 64 and server.stats()["chunks"] == 1


def test_disconnect_at_every_byte_of_a_reply():
    """Of a GET's: the chunk is let go of, and the next connection is served."""
    with serving(1 << 20) as server:
        payload = random.Random(0).randbytes(100_000)
        with contextlib.closing(Wire(server.port)) as wire:
            wire.send(request(ClientCommand.PUT, b"key", len(payload)) + payload)
            wire.sync()
        for at in [*range(REPLY.size + 3), 1000, 99_999]:
            broken = Wire(server.port)
            broken.send(
                request(ClientCommand.GET, b"key") * 50
            )  # 5 MB: the server is still at it when we leave
            broken.receive(at)
            broken.close(reset=True)
        with contextlib.closing(Wire(server.port)) as wire:
            wire.send(request(ClientCommand.GET, b"key"))
            assert wire.reply()[1] == payload
        assert wait_for(lambda: server.stats()["clients"] == 0)
        assert server.store.remove(b"key") and server.stats()["bytes_used"] == 0


def test_replies_do_not_wait_for_the_payload_of_a_put():
    with serving(1 << 20) as server, contextlib.closing(Wire(server.port)) as wire:
        wire.send(
            request(ClientCommand.EXIST, b"key") + request(ClientCommand.PUT, b"key", 10) + b"01234"
        )
        assert wire.reply()[0][0] == 400
        wire.send(b"56789" + request(ClientCommand.GET, b"key"))
        assert wire.reply()[1] == b"0123456789"


HEADERS = st.builds(
    lambda command, length, fields, key: request(command, key, length, fields),
    # CLEAR and DELETE do what they say, see TestTcp: here what is stored is to stay.
    st.one_of(st.integers(0, 7), INT32).filter(lambda command: command not in (101, 102)),
    st.one_of(st.integers(-1, 300), INT32),
    FIELDS,
    st.binary(max_size=150),
)


def test_random_bytes_to_the_server():
    """Whatever comes in, the next connection is served, and what is stored is intact."""
    with serving(1 << 20) as server:
        with contextlib.closing(Wire(server.port)) as wire:
            wire.send(request(ClientCommand.PUT, b"kept", 5) + b"bytes")
            wire.sync()

        @scaled(100, 4000)
        @given(
            st.lists(st.one_of(HEADERS, st.binary(max_size=400)), max_size=6), CUTS, st.booleans()
        )
        def run(parts, cuts, reset):
            wire = Wire(server.port)
            with contextlib.suppress(ConnectionError):  # it may have closed after a negative length
                wire.send(b"".join(parts), cuts)
            wire.close(reset)
            with contextlib.closing(Wire(server.port)) as wire:
                wire.send(request(ClientCommand.GET, b"kept"))
                assert wire.reply()[1] == b"bytes"
            assert server.stats()["bytes_used"] <= 1 << 20

        run()
        assert wait_for(lambda: server.stats()["clients"] == 0)


REPLIES = st.builds(
    REPLY.pack,
    st.sampled_from([200, 200, 400, 0]),
    st.one_of(st.integers(-1, 300), st.integers(-(2**31), 2**20)),
    *[st.integers(0, 300)] * 7,
)


def test_random_bytes_to_the_client():
    """A server that answers anything, and leaves: an error or a miss, in time, and a miss for the
    engine over it."""
    listener = socket.create_server(("127.0.0.1", 0))
    answer, stop = [b""], []

    def answer_one(sock):
        with sock, contextlib.suppress(OSError):
            sock.recv(10_000)
            sock.sendall(answer[0])
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(10_000):  # no reset: it would take the answer with it
                pass

    def serve():
        while not stop:  # a thread a connection: the engine's asker and writer have their own
            sock, _ = listener.accept()
            threading.Thread(target=answer_one, args=(sock,), daemon=True).start()

    thread = threading.Thread(target=serve)
    thread.start()
    url = f"lm://127.0.0.1:{listener.getsockname()[1]}"
    pages = [torch.zeros(2, BLOCKS, BLOCK, HEADS, DIM) for _ in range(LAYERS)]
    config = LMCacheEngineConfig(chunk_size=CHUNK, max_local_cpu_size=1e-4)
    with (
        RemoteClient(url, 5.0, 0) as client,
        LMCacheEngine(config, METADATA, remote=client) as engine,
    ):
        engine.register_kv_caches(pages, "2BNHD")

        @scaled(60, 3000)
        @given(st.lists(st.one_of(REPLIES, st.binary(max_size=300)), max_size=4).map(b"".join))
        def run(data):
            answer[0] = data
            for ask in (
                client.list_keys,
                client.stats,
                client.flush,
                client.health,
                lambda: client.get("k"),
            ):
                with contextlib.suppress(OSError, ValueError):
                    ask()
            assert engine.lookup(list(range(8))) in (0, 4, 8)
            engine.retrieve(list(range(8)), slot_mapping=list(range(8)))
            engine.clear()
            assert engine.stats()["bytes_used"] == 0

        try:
            run()
        finally:
            stop.append(True)
            socket.create_connection(listener.getsockname()).close()
    thread.join(5)
    listener.close()
    assert not thread.is_alive()


# --------------------------------------------------------------------------------------------------
# ZMQ: random frames, one reply each, and then a valid one

HASHES = st.lists(
    st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=9, max_size=40)), max_size=4
)
PACKED = st.one_of(
    st.binary(max_size=60),
    HASHES.map(msgspec.msgpack.encode),
    st.lists(st.integers(-3, 9), max_size=4).map(msgspec.msgpack.encode),
    st.recursive(st.one_of(st.none(), st.booleans(), st.floats(), st.text(),
                           st.integers(-(2**63), 2**64 - 1)),
                 lambda inner: st.one_of(st.lists(inner),
                                         st.dictionaries(st.text(max_size=9), inner)),
                 max_leaves=9).map(msgspec.msgpack.encode),
)  # fmt: skip
CONFIGS = st.sampled_from(
    [b"", b"{}", b"[]", b"nonsense", b'{"lmcache.tag.a": "b"}', b'{"lmcache.tag.a": "@"}', b"\xff"]
)
CONFIGS = st.one_of(CONFIGS, st.just(b"[" * 10_000))


@contextlib.contextmanager
def zmq_setting(monkeypatch, tmp_path, make_server):
    """An engine that holds 2 chunks, its server on a socket of its own, and a DEALER that can send
    anything."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path))
    config = LMCacheEngineConfig(chunk_size=CHUNK, max_local_cpu_size=1e-4)
    with LMCacheEngine(config, METADATA) as engine, zmq.Context() as context:
        engine.register_kv_caches(
            [torch.rand(2, BLOCKS, BLOCK, HEADS, DIM) for _ in range(LAYERS)], "2BNHD"
        )
        engine.store(hashes=[1, b"two" * 4], offsets=[4, 4], slot_mapping=list(range(8)))
        with make_server(engine) as server, context.socket(zmq.DEALER) as dealer:
            dealer.set(zmq.LINGER, 0)
            dealer.set(zmq.RCVTIMEO, 10_000)
            dealer.connect(f"ipc://{server.path}")
            yield engine, dealer


def test_random_frames_to_the_lookup_server(monkeypatch, tmp_path):
    valid = [
        msgspec.msgpack.encode([1, b"two" * 4, 3]),
        msgspec.msgpack.encode([4, 4, 4]),
        b"valid",
        b"",
    ]
    with zmq_setting(
        monkeypatch, tmp_path, lambda engine: LMCacheLookupServer(engine, METADATA)
    ) as (engine, dealer):

        @scaled(150, 8000)
        @given(
            st.one_of(
                st.lists(st.binary(max_size=50), min_size=1, max_size=6),
                st.tuples(
                    PACKED, PACKED, st.one_of(st.just(b"id"), st.binary(max_size=9)), CONFIGS
                ),
                st.tuples(HASHES.map(msgspec.msgpack.encode), PACKED, st.just(b"id"), CONFIGS),
            ),
            st.lists(st.binary(min_size=1, max_size=9), max_size=2),
        )
        def run(frames, envelope):
            for body, hits in ((frames, None), (valid, 8)):
                dealer.send_multipart([*envelope, b"", *body])
                *returned, delimiter, reply = dealer.recv_multipart()
                assert (returned, delimiter, len(reply)) == (envelope, b"", 4)
                assert hits is None or int.from_bytes(reply, "big") == hits
            engine.chunks.clear()
            assert engine.stats()["pins"] == engine.stats()["in_use"] == 0
            engine.store(hashes=[1, b"two" * 4], offsets=[4, 4], slot_mapping=list(range(8)))

        run()


def test_random_frames_to_the_offload_server(monkeypatch, tmp_path):
    fields = st.fixed_dictionaries(
        {}, optional={name: st.one_of(st.lists(st.integers(-3, 40), max_size=4), st.none(),
                                      st.text())
                      for name in ("hashes", "slot_mapping", "offsets", "more")})  # fmt: skip
    valid = msgspec.msgpack.encode({"hashes": [1], "slot_mapping": [0, 1, 2, 3], "offsets": [4]})
    with zmq_setting(monkeypatch, tmp_path, lambda engine: ZMQOffloadServer(engine, 0)) as (
        engine,
        dealer,
    ):

        @scaled(150, 8000)
        @given(
            st.one_of(
                st.lists(st.one_of(PACKED, st.binary(max_size=50)), min_size=1, max_size=3),
                st.tuples(fields.map(msgspec.msgpack.encode)),
            )
        )
        def run(frames):
            before = set(engine.chunks.keys())
            dealer.send_multipart([b"", *frames])
            delimiter, reply = dealer.recv_multipart()
            success = msgspec.msgpack.decode(reply)["success"]
            assert delimiter == b"" and type(success) is bool
            after = set(engine.chunks.keys())
            if success:
                sent = msgspec.msgpack.decode(frames[0])
                assert after == before | set(sent["hashes"]) and sum(sent["offsets"]) == len(
                    sent["slot_mapping"]
                )
            else:
                assert after == before
            for key in after - {1, b"two" * 4}:
                engine.chunks.remove(key)
            dealer.send_multipart([b"", valid])
            assert dealer.recv_multipart() == [b"", msgspec.msgpack.encode({"success": True})]

        run()


# --------------------------------------------------------------------------------------------------
# What these machines, and reading for them, have found


def test_the_port_is_free_when_close_returns():
    with serving(1 << 20) as server:
        Wire(server.port).close()
        server.close()
        LMCacheServer("127.0.0.1", server.port, max_bytes=1 << 20).close()


def test_a_put_in_pieces_does_not_begin_again():
    """Its first piece is gone by then: what is sent again would stand at the head of another
    payload, or too short."""
    pieces = (bytes([number]) * (8 << 20) for number in range(2))
    again = []

    def serve():
        broken, _ = listener.accept()
        broken.recv(186, socket.MSG_WAITALL)  # who are you?
        broken.sendall(FOUND)
        for _ in range(9):
            broken.recv(1 << 20, socket.MSG_WAITALL)
        broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        broken.close()
        with listener.accept()[0] as sock:
            again.append(sock.recv(1))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        with RemoteClient(f"lm://127.0.0.1:{listener.getsockname()[1]}") as client:
            with pytest.raises(OSError, match="in pieces"):
                client.put_many([("key", RemoteMeta(16 << 20, 1, 2, (0, 0, 0, 0)), pieces)])
            thread.join()
    assert again == [b""]


def test_the_client_allocates_nothing_on_the_word_of_a_header():
    for ask in (RemoteClient.list_keys, lambda client: client.get("key")):
        with silent_server(REPLY.pack(200, 2**31 - 1, 1, 2, 0, 0, 0, 0, 0)) as port:
            tracemalloc.start()
            with RemoteClient(f"lm://127.0.0.1:{port}", 0.2) as client, pytest.raises(TimeoutError):
                ask(client)
            assert tracemalloc.get_traced_memory()[1] < 64 << 20
            tracemalloc.stop()


def test_a_masked_retrieve_does_not_bring_the_tail_before_its_head():
    with new_engine(3) as engine:
        put_prompt(engine, prompt := [*range(8)])
        engine.retrieve(prompt, torch.arange(8) >= 4, slot_mapping=[*range(8)])
        put_prompt(engine, [9] * 8)
        assert engine.lookup(prompt) == 4


def test_a_masked_store_does_not_evict_its_own_head():
    with new_engine(3) as engine:
        put_prompt(engine, [*range(4)])
        put_prompt(engine, [9] * 8)
        put_prompt(engine, prompt := [*range(8)], mask=torch.arange(8) >= 4)
        assert engine.lookup(prompt) == 8


def test_a_lookup_that_finds_nothing_leaves_no_pin():
    with new_engine() as engine:
        assert engine.lookup([1] * 8, lookup_id="id", pin=True) == 0
        assert engine.stats()["pins"] == 0


# --------------------------------------------------------------------------------------------------


def test_case(machine, short, long):
    case = machine.TestCase
    case.settings = settings(scaled(short, long), deadline=None)
    return case


test_case.__test__ = False  # type: ignore[attr-defined]
TestArena = test_case(ArenaMachine, 200, 4000)
TestChunkStore = test_case(ChunkStoreMachine, 300, 5000)
TestEngine = test_case(EngineMachine, 150, 3000)
TestEngineWithRemote = test_case(EngineWithRemoteMachine, 60, 1000)
TestTcp = test_case(TcpMachine, 100, 2000)
