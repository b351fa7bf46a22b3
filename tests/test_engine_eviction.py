"""Eviction: the store's hits against plain models, and what every policy promises."""

import random
import sys
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine import POLICIES, ChunkStore

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "bench"))

import eviction

POLICY_NAMES = sorted(POLICIES)
META = 512  # any value that equals itself

# -------------------------------------------------------------------------------------------------
# Plain models: lists, searched from the front; of the idle keys, the first goes first


class PlainLRU:
    def __init__(self):
        self.idle = []

    def take(self, keys):
        for key in keys:
            self.idle.remove(key)

    def used(self, keys):
        self.idle += keys

    def removed(self, key, evicted):
        if key in self.idle:
            self.idle.remove(key)

    def victims(self):
        return list(self.idle)


class PlainSLRU:
    def __init__(self):
        self.fresh, self.proven = [], []  # idle
        self.in_use = {}  # key -> "fresh" or "proven"
        self.recent, self.older = [], []  # (key, count of uses after its last call)
        self.count, self.share = 0, 0.1

    def held(self):
        return self.fresh + self.proven + list(self.in_use)

    def take(self, keys):
        for key in keys:
            self.in_use[key] = "fresh" if key in self.fresh else "proven"
            (self.fresh if key in self.fresh else self.proven).remove(key)

    def used(self, keys):
        room, began, any_proven = len(self.held()), self.count, False
        hits_of_ours, hits_of_lru = 0, 0
        self.count += len(keys)
        for key in keys:
            standing = self.in_use.pop(key, None)
            in_recent = [entry for entry in self.recent if entry[0] == key]
            in_older = [entry for entry in self.older if entry[0] == key]
            self.recent = [entry for entry in self.recent if entry[0] != key]
            self.older = [entry for entry in self.older if entry[0] != key]
            hits_of_ours += standing is not None
            hits_of_lru += in_recent != []
            for _, last in in_recent + in_older:
                if began - last > room / 16:
                    any_proven = True
            if standing == "proven":
                any_proven = True
            (self.proven if any_proven else self.fresh).append(key)
            self.recent.append((key, self.count))
        room = len(self.held())
        self.share += 2 * (hits_of_ours - hits_of_lru) / max(room, 1)
        self.share = max(0.1, min(0.97, self.share))
        while len(self.proven) > int(self.share * room):
            self.fresh.append(self.proven.pop(0))
        if len(self.recent) > room * 17 // 16:
            while len(self.recent) > room * 15 // 16:
                self.older.append(self.recent.pop(0))
        if len(self.older) > 5 * room:
            self.older = self.older[-4 * room :]

    def removed(self, key, evicted):
        for place in (self.fresh, self.proven, self.in_use):
            if key in place:
                place.remove(key) if place is not self.in_use else place.pop(key)
        if not evicted:
            self.recent = [entry for entry in self.recent if entry[0] != key]
            self.older = [entry for entry in self.older if entry[0] != key]

    def victims(self):
        return self.fresh + self.proven


PLAIN = {"lru": PlainLRU, "slru": PlainSLRU}


def hits_of_model(model, room, requests):
    """A list of who is there; a request takes what there is, makes room, and lets go of all."""
    present, hits = [], []
    for blocks in requests:
        found = [block for block in blocks if block in present]
        missing = [block for block in blocks if block not in present]
        leading = 0
        while leading < len(blocks) and blocks[leading] in present:
            leading += 1
        model.take(found)
        while missing and len(present) + len(missing) > room and model.victims():
            victim = model.victims()[0]
            model.removed(victim, evicted=True)
            present.remove(victim)
        present += missing[: room - len(present)]
        model.used([block for block in reversed(blocks) if block in present])
        hits.append(leading)
    return hits


def hits_of_store(name, room, requests):
    hits = []
    with ChunkStore("cpu", room * 64, name, warm_bytes=0) as store:
        for blocks in requests:
            here = store.acquire_each(blocks, [META] * len(blocks))
            missing = [index for index, chunk in enumerate(here) if chunk is None]
            hits.append(missing[0] if missing else len(blocks))
            new = store.reserve_many([64] * len(missing))
            for index, chunk in zip(missing, new, strict=False):
                chunk.meta = META
                here[index] = store.commit(blocks[index], chunk, keep=True)
            store.release(filter(None, here))
    return hits


def traffic(count=1_000, seed=7):
    """Chats, popular prompts and one-off floods, turn by turn: every policy has something to do."""
    rng = random.Random(seed)
    talk = eviction.chats(count, rng, live=12)
    for turn in range(count):
        kind = rng.random()
        if kind < 0.4:
            yield next(talk)
        elif kind < 0.7:
            yield eviction.prompt(10**6 + int(40 * rng.random() ** 2), 5)
        else:
            yield eviction.prompt(10**7 + turn, 9)


@pytest.mark.parametrize("room", [120, 250])
@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_thousand_requests_hit_what_the_plain_model_says(name, room):
    requests = list(traffic())
    expected = hits_of_model(PLAIN[name](), room, requests)
    assert 0 < sum(expected) < sum(map(len, requests))
    assert hits_of_store(name, room, requests) == expected


def test_slru_hits_more_than_lru_in_a_flood():
    requests = list(traffic())
    lru, slru = (sum(hits_of_store(name, 120, requests)) for name in ("lru", "slru"))
    assert slru > 1.1 * lru


# -------------------------------------------------------------------------------------------------
# What every policy promises, whatever the keys


@st.composite
def steps(draw):
    """What a store may say to its policy: takes of idle keys, uses of others, removals of any."""
    idle, taken, said = set(), set(), []
    keys = st.integers(0, 30)
    for _ in range(draw(st.integers(1, 40))):
        what = draw(st.sampled_from(["take", "used", "evict", "delete"]))
        some = draw(st.lists(keys, unique=True, max_size=12))
        if what == "take":
            some = [key for key in some if key in idle]
            idle, taken = idle - set(some), taken | set(some)
        elif what == "used":
            some = [key for key in some if key not in idle]
            idle, taken = idle | set(some), taken - set(some)
        else:  # what is in use may be deleted, and is never evicted
            some = [key for key in some if key in idle or (what == "delete" and key in taken)]
            idle, taken = idle - set(some), taken - set(some)
        said.append((what, some, set(idle)))
    return said


def tell(policy, what, keys):
    if what in ("take", "used"):
        getattr(policy, what)(list(keys))
    for key in keys if what in ("evict", "delete") else ():
        policy.removed(key, evicted=what == "evict")


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=200, deadline=None)
@given(said=steps())
def test_every_idle_key_is_a_victim_once_and_the_model_agrees_on_the_order(name, said):
    policy, model = POLICIES[name](), PLAIN[name]()
    for what, keys, idle in said:
        tell(policy, what, keys)
        tell(model, what, keys) if what != "used" else model.used(list(keys))
        victims = list(policy.victims())
        assert sorted(victims) == sorted(idle)
        assert victims == model.victims()


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 9)), max_size=60))
def test_no_head_goes_before_its_tail(name, prompts):
    """Prompts of six documents, cut off anywhere; each is whole when it is used: its tail first."""
    policy, room, present = POLICIES[name](), 20, set()
    for document, length in prompts:
        blocks = eviction.prompt(document, length)
        policy.take([block for block in blocks if block in present])
        missing = [block for block in blocks if block not in present]
        crowd = max(0, len(present) + len(missing) - room)
        for victim in list(islice(policy.victims(), crowd)):
            policy.removed(victim, evicted=True)
            present.remove(victim)
        present.update(missing)
        policy.used(blocks[::-1])
        order = list(policy.victims())
        for other in range(6):
            of_one = [block for block in order if block // 1_000 == other]
            assert of_one == sorted(of_one, reverse=True)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_removed_key_is_as_new(name):
    """Deleted, not evicted: nothing of it is remembered, so that it goes as if it were new."""
    policy = POLICIES[name]()
    policy.used(range(100))
    policy.take([7])
    policy.used([7])
    policy.removed(7, evicted=False)
    assert 7 not in list(policy.victims())
    policy.used(["other"])
    policy.used([7])
    assert list(policy.victims())[-2:] == ["other", 7]
    policy.take([7])
    policy.removed(7, evicted=False)  # in use, and gone all the same
    assert 7 not in list(policy.victims())


def test_a_request_is_one_use():
    """Stored, looked up and retrieved within one request: no proof, as a later request is."""
    policy = POLICIES["slru"]()
    policy.used(range(1_000))
    policy.used(["now"])
    for _ in range(2):
        policy.take(["now"])
        policy.used(["now"])
    policy.used(["next"])
    assert list(policy.victims())[-2:] == ["now", "next"]
    policy.used(range(1_000, 1_100))
    policy.take(["now"])
    policy.used(["now"])
    policy.used(["last"])
    assert list(policy.victims())[-2:] == ["last", "now"]


def test_a_prompt_longer_than_the_window_is_one_use_too():
    policy = POLICIES["slru"]()
    policy.used(range(1_000))
    for _ in range(2):
        policy.take(range(500, 900))
        policy.used(range(500, 900))
    policy.used(["next"])
    assert list(policy.victims())[-401:] == [*range(500, 900), "next"]


def test_a_name_is_remembered_after_its_eviction_and_no_longer_than_that():
    policy = POLICIES["slru"]()
    policy.used(range(100))
    policy.removed(0, evicted=True)
    policy.used(range(100, 110))
    policy.used([0])
    policy.used(["last"])
    assert list(policy.victims())[-2:] == ["last", 0]  # it came again: proven
    for key in list(policy.victims()):
        policy.removed(key, evicted=True)
    for key in range(1_000, 3_000):
        policy.used([key])
        if key >= 1_100:
            policy.removed(next(policy.victims()), evicted=True)
    policy.used([50])
    policy.used(["last"])
    assert list(policy.victims())[-1] == "last"  # 50 was forgotten long since
