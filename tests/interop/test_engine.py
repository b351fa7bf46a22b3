"""Engines, both ways: what LMCache 0.3.14's engine stores at a remote server ours retrieves, and
the reverse."""

import contextlib
import threading

import lmcache_peer as theirs
import pytest
import torch

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from remote_server import LMCacheServer, RemoteClient

pytestmark = pytest.mark.interop

PROMPT = list(range(100, 114))  # 3 whole chunks and one of 2 tokens
SLOTS = torch.tensor(
    [9, 8, 11, 10, 0, 1, 2, 3, 31, 17, 5, 29, 20, 21]
)  # one whole block among them
ELSEWHERE = SLOTS.flip(0)
TAGS = {"lmcache.tag.user": "ann", "max_tokens": 7}
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.uint8,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]
CASES = [(1, "kv", dtype) for dtype in DTYPES]
CASES += [(ranks, kind, torch.bfloat16) for ranks, kind in ((2, "kv"), (1, "mla"), (2, "mla"))]
CASES += [(1, "mla", torch.float8_e4m3fn)]


@pytest.fixture(scope="module")
def their_port():
    with theirs.server_process() as port:
        yield port


@pytest.fixture(params=["our-server", "their-server"])
def port(request, their_port):
    if request.param == "their-server":
        yield their_port
    else:
        with LMCacheServer("127.0.0.1", 0, max_bytes=1 << 20) as server:
            thread = threading.Thread(target=server.run)
            thread.start()
            yield server.port
            server.close()
            thread.join()


@pytest.fixture(
    params=CASES, ids=lambda case: f"{case[0]}-rank-{case[1]}-{case[2]}".replace("torch.", "")
)
def facts(request):
    ranks, kind, dtype = request.param
    return theirs.world(ranks, kind == "mla", dtype)[
        0 if kind == "mla" else -1
    ]  # with MLA rank 0 stores for all


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # sha256_cbor needs one


@contextlib.contextmanager
def our_engine(port, facts, **fields):
    config = LMCacheEngineConfig(
        chunk_size=theirs.CHUNK, max_local_cpu_size=0.01, save_unfull_chunk=True, **fields
    )
    with (
        RemoteClient(f"lm://127.0.0.1:{port}") as client,
        LMCacheEngine(config, LMCacheMetadata(**facts), remote=client) as engine,
    ):
        engine.register_kv_caches(theirs.pages(facts), theirs.layout(facts))
        yield engine


def their_engine(port, facts):
    url = f"lm://127.0.0.1:{port}"
    config = theirs.config(chunk_size=theirs.CHUNK, save_unfull_chunk=True, remote_url=url)
    return theirs.engine(config, theirs.LMCacheMetadata(**facts), theirs.pages(facts))


def last_key(engine, hashes, lengths):
    return [*engine.token_database.process_tokens(hashes=hashes, offsets=lengths)][-1][2]


def test_they_store_and_we_retrieve(port, facts):
    kv, back = theirs.pages(facts), theirs.pages(facts)
    with their_engine(port, facts) as peer, our_engine(port, facts) as ours:
        hashes, lengths = theirs.spans(peer.token_database, PROMPT)
        assert lengths == [4, 4, 4, 2]
        assert ours.lookup(hashes=hashes, offsets=lengths) == 0
        peer.store(PROMPT, kvcaches=kv, slot_mapping=SLOTS)
        assert peer.flush(last_key(peer, hashes, lengths))
        assert ours.lookup(hashes=hashes, offsets=lengths) == 14
        assert ours.retrieve(
            hashes=hashes, offsets=lengths, kvcaches=back, slot_mapping=ELSEWHERE
        ).all()
    assert torch.equal(theirs.at(back, ELSEWHERE), theirs.at(kv, SLOTS))


def test_we_store_and_they_retrieve(port, facts):
    kv, back = theirs.pages(facts), theirs.pages(facts)
    with their_engine(port, facts) as peer, our_engine(port, facts) as ours:
        hashes, lengths = theirs.spans(peer.token_database, PROMPT)
        assert peer.lookup(PROMPT) == 0
        assert ours.store(hashes=hashes, offsets=lengths, kvcaches=kv, slot_mapping=SLOTS) == 14
        assert ours.flush()
        assert peer.lookup(PROMPT) == 14
        assert peer.retrieve(PROMPT, kvcaches=back, slot_mapping=ELSEWHERE).all()
    assert torch.equal(theirs.at(back, ELSEWHERE), theirs.at(kv, SLOTS))


@pytest.mark.parametrize("facts", [CASES[1], CASES[-1]], ids=["kv", "mla"], indirect=True)
def test_tokens_alone_are_enough(port, facts, monkeypatch):
    """Both hash with sha256_cbor, so that a prompt and its tags are all that the two engines need
    to share."""
    kv, back = theirs.pages(facts), theirs.pages(facts)
    with (
        their_engine(port, facts) as peer,
        our_engine(port, facts, pre_caching_hash_algorithm="sha256_cbor") as ours,
    ):
        theirs.hash_with_sha256_cbor(peer.token_database, monkeypatch)
        ours.store(PROMPT, kvcaches=kv, slot_mapping=SLOTS, request_configs=TAGS)
        assert ours.flush()
        assert peer.lookup(PROMPT) == 0 and peer.lookup(PROMPT, request_configs=TAGS) == 14
        assert peer.retrieve(
            PROMPT, kvcaches=back, slot_mapping=ELSEWHERE, request_configs=TAGS
        ).all()
        assert torch.equal(theirs.at(back, ELSEWHERE), theirs.at(kv, SLOTS))

        other = PROMPT[:8] + [7, 7, 7, 7]  # two chunks of it are there, under the tags alone
        peer.store(other, kvcaches=kv, slot_mapping=SLOTS[:12])
        hashes, lengths = theirs.spans(peer.token_database, other)
        assert peer.flush(last_key(peer, hashes, lengths))
        assert ours.lookup(other, request_configs=TAGS) == 8 and ours.lookup(other) == 12
        assert ours.retrieve(other, kvcaches=back, slot_mapping=SLOTS[:12]).all()
        assert torch.equal(theirs.at(back, SLOTS[:12]), theirs.at(kv, SLOTS[:12]))


@pytest.mark.parametrize("port", ["our-server"], indirect=True)
def test_what_we_write_is_what_they_would(port, facts):
    """Key text, format, dtype, shape and bytes of every chunk, KV_2LTD or KV_MLA_FMT."""
    kv = theirs.pages(facts)
    hashes, lengths = [5, -(2**63), 2**64 - 1, b"\x01" * 32], [4, 4, 4, 2]
    with our_engine(port, facts) as engine, RemoteClient(f"lm://127.0.0.1:{port}") as client:
        engine.store(
            hashes=hashes, offsets=lengths, kvcaches=kv, slot_mapping=SLOTS, request_configs=TAGS
        )
        assert engine.flush()
        database = theirs.token_database.ChunkedTokenDatabase(
            theirs.config(chunk_size=theirs.CHUNK), theirs.LMCacheMetadata(**facts)
        )
        keys = {}
        for start, end, key in database.process_tokens(
            hashes=hashes, offsets=lengths, request_configs=TAGS
        ):
            keys[key.to_string()] = (start, end)
        assert {*client.list_keys()} == {*keys}
        fmt = theirs.MemoryFormat.KV_MLA_FMT if facts["use_mla"] else theirs.MemoryFormat.KV_2LTD
        for text, (start, end) in keys.items():
            meta, data = client.get(text)
            chunk = theirs.at(kv, SLOTS[start:end])  # [K, L, T, H*D bytes]
            shape = (*chunk.shape[:3], 16)
            assert meta == (chunk.numel(), fmt.value, theirs.DTYPE_TO_INT[facts["kv_dtype"]], shape)
            assert data == chunk.numpy().tobytes()
