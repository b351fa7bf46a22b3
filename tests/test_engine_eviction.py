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

    def added(self, key):
        pass

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
        self.idle, self.kept = [], []  # keys; (key, clock when it was kept)
        self.held = {}  # key -> "fresh" or "proven"
        self.counted = {}  # key -> clock at the last use that counted
        self.gone = []  # (key, clock when it was evicted)
        self.clock, self.rounded, self.share = 0, 0, 0.1

    def adapt(self, lead):
        self.share = max(0.1, min(0.97, self.share + 2 * lead / len(self.held)))

    def added(self, key):
        self.clock += 1
        if self.clock % 8 == 0:
            self.rounded = self.clock
        remembered = [when for name, when in self.gone if name == key]
        self.gone = [(name, when) for name, when in self.gone if name != key]
        self.held[key] = "proven" if remembered else "fresh"
        self.counted[key] = self.clock
        if remembered and self.clock - remembered[0] <= len(self.kept):
            self.adapt(-1)  # LRU, whose room has place for what is kept here, had it still

    def take(self, keys):
        if keys and self.clock - self.counted[keys[-1]] > len(self.held) / 8:
            for key in keys:
                self.held[key], self.counted[key] = "proven", self.clock
        for key in keys:
            if key in self.idle:
                self.idle.remove(key)
            else:
                self.clock += 1
                (when,) = [when for name, when in self.kept if name == key]
                self.kept.remove((key, when))
                self.adapt(1 if self.clock - when > len(self.kept) else 0)

    def used(self, keys):
        self.idle += keys

    def removed(self, key, evicted):
        self.idle = [name for name in self.idle if name != key]
        self.kept = [(name, when) for name, when in self.kept if name != key]
        del self.held[key], self.counted[key]
        if evicted:
            self.gone.append((key, self.rounded))
            if len(self.gone) > 5 * len(self.held):
                self.gone = self.gone[len(self.held) :]

    def victims(self):
        while self.idle and self.held[self.idle[0]] == "proven":
            self.kept.append((self.idle.pop(0), self.clock))
        kept, gone = [key for key, _ in self.kept], []
        for key in [None, *self.idle, None]:  # whose turn comes, one after another
            while len(kept) > int(self.share * len(self.held)):
                gone.append(kept.pop(0))
            if key is not None:
                (kept if self.held[key] == "proven" else gone).append(key)
        return gone + kept


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
        crowd = max(0, len(present) + len(missing) - room)
        for victim in model.victims()[:crowd] if crowd else ():
            model.removed(victim, evicted=True)
            present.remove(victim)
        for block in missing[: room - len(present)]:
            model.added(block)
            present.append(block)
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
    """What a store may say to its policy: takes of idle keys, uses of others, removals of any.
    With each, the keys that were held before and are idle after."""
    idle, taken, said = set(), set(), []
    keys = st.integers(0, 30)
    for _ in range(draw(st.integers(1, 40))):
        what = draw(st.sampled_from(["take", "used", "evict", "delete"]))
        some, held = draw(st.lists(keys, unique=True, max_size=12)), idle | taken
        if what == "take":
            some = [key for key in some if key in idle]
            idle, taken = idle - set(some), taken | set(some)
        elif what == "used":
            some = [key for key in some if key not in idle]
            idle, taken = idle | set(some), taken - set(some)
        else:  # what is in use may be deleted, and is never evicted
            some = [key for key in some if key in idle or (what == "delete" and key in taken)]
            idle, taken = idle - set(some), taken - set(some)
        said.append((what, some, held, set(idle)))
    return said


def tell(policy, what, keys, held):
    for key in keys if what == "used" else ():
        if key not in held:
            policy.added(key)
    if what in ("take", "used"):
        getattr(policy, what)(list(keys))
    for key in keys if what in ("evict", "delete") else ():
        policy.removed(key, evicted=what == "evict")


@pytest.mark.parametrize("name", POLICY_NAMES)
@settings(max_examples=200, deadline=None)
@given(said=steps())
def test_every_idle_key_is_a_victim_once_and_the_model_agrees_on_the_order(name, said):
    policy, model = POLICIES[name](), PLAIN[name]()
    for what, keys, held, idle in said:
        tell(policy, what, keys, held)
        tell(model, what, keys, held)
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
        tell(policy, "used", blocks[::-1], set(blocks) - set(missing))
        order = list(policy.victims())
        for other in range(6):
            of_one = [block for block in order if block // 1_000 == other]
            assert of_one == sorted(of_one, reverse=True)


def new(policy, *keys):
    tell(policy, "used", keys, ())


def use(policy, *keys):
    policy.take(keys)
    policy.used(keys[::-1])


def last(policy, count):
    return list(policy.victims())[-count:]


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_a_removed_key_is_as_new(name):
    """Deleted, not evicted: nothing of it is remembered, so that it goes as if it were new."""
    policy = POLICIES[name]()
    new(policy, *range(100))
    use(policy, 7)
    policy.removed(7, evicted=False)
    assert 7 not in list(policy.victims())
    new(policy, "other")
    new(policy, 7)
    assert last(policy, 2) == ["other", 7]
    policy.take([7])
    policy.removed(7, evicted=False)  # in use, and gone all the same
    assert 7 not in list(policy.victims())


def test_a_request_is_one_use():
    """Stored, looked up and retrieved within one request: no proof, as a later request is."""
    policy = POLICIES["slru"]()
    new(policy, *range(1_000))
    new(policy, "now")
    for _ in range(2):
        use(policy, "now")
    new(policy, "next")
    assert last(policy, 2) == ["now", "next"]
    new(policy, *range(1_000, 1_300))
    use(policy, "now")
    new(policy, "last")
    assert last(policy, 2) == ["last", "now"]


def test_a_long_prompt_stored_step_by_step_is_one_use_too():
    """Each step looks up what those before it have stored."""
    policy, room = POLICIES["slru"](), 1_000
    new(policy, *range(room))
    for start in range(2_000, 2_100, 10):
        use(policy, *range(2_000, start))
        new(policy, *reversed(range(start, start + 10)))
    new(policy, "next")
    assert last(policy, 1) == ["next"]


def test_who_uses_a_tail_after_a_long_time_proves_its_head():
    policy = POLICIES["slru"]()
    new(policy, "tail", "head")
    new(policy, *range(100))
    use(policy, "head")
    new(policy, *range(100, 105))
    use(policy, "head", "tail")
    new(policy, "last")
    assert last(policy, 3) == ["last", "tail", "head"]


def test_a_name_is_remembered_after_its_eviction_and_no_longer_than_that():
    policy = POLICIES["slru"]()
    new(policy, *range(100))
    policy.removed(0, evicted=True)
    new(policy, *range(100, 140))
    new(policy, 0)
    new(policy, "last")
    assert last(policy, 2) == ["last", 0]  # it came again: proven
    for key in list(policy.victims()):
        policy.removed(key, evicted=True)
    for key in range(1_000, 3_000):
        new(policy, key)
        if key >= 1_100:
            policy.removed(next(policy.victims()), evicted=True)
    new(policy, 50)
    new(policy, "last")
    assert last(policy, 1) == ["last"]  # 50 was forgotten long since


def test_a_remembered_name_is_small():
    """100 bytes, as docs/BENCH.md says: five rooms of them are little beside the chunks."""
    policy, room = POLICIES["slru"](), 1_000
    keys = [f"model@1@0@{number:016x}@bfloat16".encode() for number in range(7 * room)]
    new(policy, *keys[:room])
    for key in keys[room:]:
        policy.removed(next(policy.victims()), evicted=True)
        new(policy, key)
    gone = policy._gone  # what tracemalloc counts cannot be told from the queues of what is here
    size = sum(
        map(sys.getsizeof, [gone, *gone, *{id(when): when for when in gone.values()}.values()])
    )
    assert 3 * room < len(gone) <= 5 * room
    assert size < 100 * len(gone)
