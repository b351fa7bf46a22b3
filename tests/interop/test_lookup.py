"""Lookup, both ways: LMCache 0.3.14's client asks our servers and engines, our client asks its
servers and engines."""

import contextlib
import json
import os
import threading
from types import SimpleNamespace

import lmcache_peer as theirs
import msgspec
import pytest
import torch
import zmq

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, make_rpc_folder
from lookup import LMCacheLookupClient, LMCacheLookupServer, lookup_path

pytestmark = pytest.mark.interop

CHUNK, SEPARATOR = theirs.CHUNK, [901, 902]
PROMPT = list(range(100, 118))  # 4 chunks and 2 tokens more
SEGMENTS = [1, 2, 3, *SEPARATOR, 4, 5, *SEPARATOR, 6, 7, 8, 9]  # 3, 2 and 4 tokens
TAGS = {"lmcache.tag.user": "ann", "max_tokens": 7}


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(
        "VLLM_RPC_BASE_PATH", raising=False
    )  # without vLLM LMCache knows only /tmp/vllm_rpc
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # sha256_cbor needs one
    tokenizer = SimpleNamespace(encode=lambda text: [1, *SEPARATOR])  # LMCache drops the first
    monkeypatch.setattr(
        theirs.token_database.AutoTokenizer, "from_pretrained", lambda name: tokenizer
    )


@pytest.fixture(params=[1, 2, 4], ids="{}-ranks".format)
def world(request):
    return theirs.world(request.param)


def our_config(blending=False, **fields):
    extra = {"blend_special_token_ids": SEPARATOR} if blending else None
    return LMCacheEngineConfig(
        chunk_size=CHUNK,
        max_local_cpu_size=0.01,
        enable_blending=blending,
        extra_config=extra,
        **fields,
    )


def their_config(blending=False):
    return theirs.config(chunk_size=CHUNK, enable_blending=blending)


@contextlib.contextmanager
def our_ranks(world, blending=False):
    """An engine of ours and its lookup server for each rank."""
    with contextlib.ExitStack() as stack:
        engines = []
        for facts in world:
            metadata = LMCacheMetadata(**facts)
            engine = stack.enter_context(LMCacheEngine(our_config(blending), metadata))
            engine.register_kv_caches(theirs.pages(facts), theirs.layout(facts))
            stack.enter_context(LMCacheLookupServer(engine, metadata))
            engines.append(engine)
        yield engines


@contextlib.contextmanager
def their_ranks(world, blending=False):
    """A real LMCacheEngine and its lookup server for each rank."""
    with contextlib.ExitStack() as stack:
        metadata = [theirs.LMCacheMetadata(**facts) for facts in world]
        engines = [
            stack.enter_context(theirs.engine(their_config(blending), meta, theirs.pages(facts)))
            for meta, facts in zip(metadata, world, strict=True)
        ]
        stack.enter_context(theirs.lookup_servers(zip(engines, metadata, strict=True)))
        yield engines


def our_client(facts, **fields):
    return LMCacheLookupClient(our_config(**fields), LMCacheMetadata(**facts))


def their_client(facts, **fields):
    return theirs.lookup_client(their_config(**fields), theirs.LMCacheMetadata(**facts))


@contextlib.contextmanager
def raw_socket(kind, facts):
    """A REQ socket at the lookup server of a rank, or a ROUTER in its place."""
    path = lookup_path(LMCacheMetadata(**facts), facts["worker_id"])
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVTIMEO, 10_000)
        if kind == zmq.REQ:
            sock.connect(f"ipc://{path}")
            yield sock
            return
        make_rpc_folder(path)
        sock.bind(f"ipc://{path}")
        try:
            yield sock
        finally:
            os.unlink(path)


def store(engine, hashes, lengths, configs=None):
    slots = list(range(sum(lengths)))
    engine.store(hashes=hashes, offsets=lengths, slot_mapping=slots, request_configs=configs)


# --------------------------------------------------------------------------------------------------
# Chunked: hashes go over the wire


def ask(client, ranks):
    """What any client must answer where rank r has 4 - r chunks of the prompt, and 1 of it under
    TAGS."""
    expected = CHUNK * (5 - ranks)
    assert client.lookup(PROMPT, "a") == expected == client.lookup_cache("a")
    assert client.lookup(torch.tensor(PROMPT), "b") == expected
    assert client.lookup(PROMPT, "tagged", TAGS) == CHUNK
    assert client.lookup(PROMPT, "other", {"lmcache.tag.user": "bob"}) == 0
    assert client.lookup(PROMPT, "no tag", {"max_tokens": 7}) == expected
    assert client.lookup(PROMPT[:4] + [7] * 12, "diverges") == CHUNK
    assert client.lookup(PROMPT[::-1], "miss") == 0 == client.lookup_cache("miss")
    assert client.lookup(PROMPT[:3], "short") == 0 and client.lookup_cache("short") == -1
    client.clear_lookup_status("a")
    assert client.lookup_cache("a") == -1
    assert client.supports_producer_reuse()


@pytest.mark.parametrize("hashing", [int, bytes], ids=["ints", "bytes"])
def test_their_client_asks_ours(world, hashing, monkeypatch):
    with our_ranks(world) as engines, their_client(world[0]) as client:
        if hashing is bytes:
            theirs.hash_with_sha256_cbor(client.token_database, monkeypatch)
        hashes, lengths = theirs.spans(client.token_database, PROMPT)
        assert {type(value) for value in hashes} == {hashing}
        for rank, engine in enumerate(engines):
            store(engine, hashes[: 4 - rank], lengths[: 4 - rank])
            store(engine, hashes[:1], lengths[:1], TAGS)
        ask(client, len(world))
        for rank, engine in enumerate(engines):
            assert engine.stats()["pinned_chunks"] == 3 * (4 - rank) + 2
            for lookup_id in ("a", "b", "tagged", "no tag", "diverges"):
                engine.lookup_unpin(lookup_id)
            assert engine.stats()["pinned_chunks"] == 0


@pytest.mark.parametrize("hashing", [int, bytes], ids=["ints", "bytes"])
def test_our_client_asks_theirs(world, hashing):
    algorithm = "sha256" if hashing is int else "sha256_cbor"
    with (
        their_ranks(world) as engines,
        our_client(world[0], pre_caching_hash_algorithm=algorithm) as client,
    ):
        hashes, lengths = theirs.spans(client.token_database, PROMPT)
        assert {type(value) for value in hashes} == {hashing}
        for rank, engine in enumerate(engines):
            store(engine, hashes[: 4 - rank], lengths[: 4 - rank])
            store(engine, hashes[:1], lengths[:1], TAGS)
        ask(client, len(world))
        for engine in engines:
            assert {*engine.lookup_pins} == {"a", "b", "tagged", "no tag", "diverges"}


def test_tokens_alone_are_enough(monkeypatch):
    """Our client and their engine, given the same tokens, hash them to the same: with sha256_cbor
    on both sides."""
    world = theirs.world(1)
    with (
        their_ranks(world) as (engine,),
        our_client(world[0], pre_caching_hash_algorithm="sha256_cbor") as client,
    ):
        theirs.hash_with_sha256_cbor(engine.token_database, monkeypatch)
        engine.store(PROMPT, slot_mapping=torch.arange(len(PROMPT)))
        assert client.lookup(PROMPT, "a") == 16


NUMBERS = {
    "ints": [-(2**63), -1, 0, 2**63, 2**64 - 1],
    # of 9 bytes or more: shorter ones have the key text of an int, and our server refuses them
    "bytes": [b"\x00" * 8 + b"\x01", b"\xff" * 32, b"\xc1" * 9, b"\x01" * 16],
}


@pytest.mark.parametrize("hashes", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("ranks", [our_ranks, their_ranks])
def test_any_hash_list(ranks, hashes):
    """Signed and unsigned ints of up to 64 bits, and bytes, sent to either server."""
    world = theirs.world(1)
    with ranks(world) as (engine,), raw_socket(zmq.REQ, world[0]) as sock:
        store(engine, hashes, [CHUNK] * len(hashes))
        for count in (0, 1, len(hashes)):
            asked = [*hashes[:count], 12345], [CHUNK] * (count + 1)
            sock.send_multipart([*map(msgspec.msgpack.encode, asked), b"id", b""])
            assert sock.recv() == (CHUNK * count).to_bytes(4, "big")


@pytest.mark.parametrize("client_of, ranks", [(their_client, our_ranks), (our_client, their_ranks)])
def test_mla_asks_rank_0_alone(client_of, ranks):
    world = theirs.world(4, mla=True)
    with ranks(world[:1]) as (engine,), client_of(world[0]) as client:
        store(engine, *theirs.spans(client.token_database, PROMPT))
        assert client.lookup(PROMPT, "a") == 16


# --------------------------------------------------------------------------------------------------
# Blending: tokens go over the wire


@pytest.mark.parametrize("client_of, ranks", [(their_client, our_ranks), (our_client, their_ranks)])
def test_blending(world, client_of, ranks):
    with ranks(world, blending=True) as engines, client_of(world[0], blending=True) as client:
        for engine in engines:
            engine.store(SEGMENTS, slot_mapping=torch.arange(len(SEGMENTS)))
        assert client.lookup(SEGMENTS, "all") == len(SEGMENTS) == client.lookup_cache("all")
        assert client.lookup([*SEGMENTS[:3], *SEPARATOR, 7, 7, 7], "first") == 3
        assert client.lookup([*SEGMENTS[5:7], *SEPARATOR, *SEGMENTS[:3]], "any order") == 7
        assert client.lookup([7, *SEGMENTS[1:]], "miss") == 0
        assert client.lookup(SEGMENTS, "tagged", TAGS) == 0


# --------------------------------------------------------------------------------------------------
# Paths and frames


@pytest.mark.parametrize("port", [0, 7, "text"])
@pytest.mark.parametrize("rank", [0, 3])
def test_path_is_theirs(port, rank):
    facts = theirs.world(4)[rank] | {"kv_connector_extra_config": {"lmcache_rpc_port": port}}
    assert lookup_path(LMCacheMetadata(**facts), rank) == theirs.rpc_path(
        facts["engine_id"], "lookup", port, rank
    )


@pytest.mark.parametrize("configs", [None, {}, TAGS], ids=["none", "empty", "tags"])
@pytest.mark.parametrize("blending", [False, True], ids=["chunked", "blending"])
def test_requests_are_theirs(blending, configs, monkeypatch):
    """Both clients send the same frames to every rank, byte by byte, and read the reply alike."""
    world = theirs.world(2)
    requests = []
    with contextlib.ExitStack() as stack:
        routers = [stack.enter_context(raw_socket(zmq.ROUTER, facts)) for facts in world]
        ours = our_client(world[0], blending=blending, pre_caching_hash_algorithm="sha256_cbor")
        peer = their_client(world[0], blending=blending)
        for client in stack.enter_context(ours), stack.enter_context(peer):
            if client is not ours:
                theirs.hash_with_sha256_cbor(client.token_database, monkeypatch)
            answers = []
            asking = threading.Thread(
                target=lambda: answers.append(client.lookup(PROMPT, "an id", configs))
            )
            asking.start()
            for rank, router in enumerate(routers):
                identity, *frames = router.recv_multipart()
                requests.append(frames)
                router.send_multipart([identity, b"", (0x01020304 + rank).to_bytes(4, "big")])
            asking.join()
            assert answers == [0x01020304]
    assert requests == requests[:1] * 4
    assert requests[0][0] == b"" and requests[0][-1] == (
        json.dumps(TAGS).encode() if configs else b""
    )
