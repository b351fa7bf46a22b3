"""Offload, both ways: LMCache 0.3.14's message on our server and engine, our client on its server
and engine."""

import os

import lmcache_peer as theirs
import msgspec
import pytest
import torch
import zmq
from hypothesis import given
from hypothesis import strategies as st

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from offload_server import (
    OffloadMsg,
    OffloadRetMsg,
    ZMQOffloadClient,
    ZMQOffloadServer,
    offload_path,
)

pytestmark = pytest.mark.interop

HASHES, SLOTS, LENGTHS = [-(2**63), 2**64 - 1, 7], [9, 8, 7, 6, 0, 1, 2, 3, 31, 30, 29], [4, 4, 3]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.delenv(
        "VLLM_RPC_BASE_PATH", raising=False
    )  # without vLLM LMCache knows only /tmp/vllm_rpc


@pytest.fixture
def facts():
    return theirs.world(ranks=2)[1]


ints = st.lists(st.integers(-(2**63), 2**64 - 1), max_size=50)


@given(ints, ints, st.lists(st.integers(1, 2**31), max_size=50), st.booleans())
def test_messages_are_theirs(hashes, slots, lengths, success):
    raw = msgspec.msgpack.encode(theirs.OffloadMsg(hashes, slots, lengths))
    assert msgspec.msgpack.encode(OffloadMsg(hashes, slots, lengths)) == raw
    assert msgspec.msgpack.decode(raw, type=OffloadMsg) == OffloadMsg(hashes, slots, lengths)
    reply = msgspec.msgpack.encode(theirs.OffloadRetMsg(success))
    assert msgspec.msgpack.encode(OffloadRetMsg(success)) == reply
    assert msgspec.msgpack.decode(reply, type=OffloadRetMsg).success is success


@pytest.mark.parametrize("port", [None, "100", "7000"])
@pytest.mark.parametrize("engine_id", [None, "an id"])
def test_path_is_theirs(port, engine_id, monkeypatch):
    monkeypatch.delenv("LMCACHE_OFFLOAD_RPC_PORT", raising=False)
    if port:
        monkeypatch.setenv("LMCACHE_OFFLOAD_RPC_PORT", port)
    for rank in (0, 3):
        path = theirs.rpc_path(
            engine_id or "default",
            "offload",
            int(os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", 100)),
            rank,
        )
        assert offload_path(engine_id, rank) == path


def test_their_message_on_our_server(facts):
    """There is no client in LMCache: whoever asks sends its OffloadMsg through a REQ socket."""
    config, kv = (
        LMCacheEngineConfig(chunk_size=theirs.CHUNK, max_local_cpu_size=0.01),
        theirs.pages(facts),
    )
    with LMCacheEngine(config, LMCacheMetadata(**facts)) as engine, zmq.Context() as context:
        engine.register_kv_caches(kv, "2BNHD")
        with ZMQOffloadServer(engine, 1) as server, context.socket(zmq.REQ) as sock:
            sock.set(zmq.LINGER, 0)
            sock.set(zmq.RCVTIMEO, 10_000)
            sock.connect(f"ipc://{server.path}")

            def ask(hashes, slots, lengths, **more):
                message = msgspec.to_builtins(theirs.OffloadMsg(hashes, slots, lengths)) | more
                sock.send(msgspec.msgpack.encode(message))
                return msgspec.msgpack.decode(sock.recv(), type=theirs.OffloadRetMsg).success

            assert not ask(HASHES, SLOTS[:-1], LENGTHS)  # a slot is missing
            assert not ask(HASHES, [32, *SLOTS[1:]], LENGTHS)  # a slot that is not there
            assert engine.lookup(hashes=HASHES, offsets=LENGTHS) == 0
            assert ask(HASHES, SLOTS, LENGTHS)
            assert ask(HASHES, SLOTS, LENGTHS, request_id="a later version's")
            assert ask([], [], [])
        assert engine.lookup(hashes=HASHES, offsets=LENGTHS) == 11
        back = [torch.zeros_like(layer) for layer in kv]
        assert engine.retrieve(
            hashes=HASHES, offsets=LENGTHS, slot_mapping=SLOTS, kvcaches=back
        ).all()
        assert torch.equal(theirs.at(back, SLOTS), theirs.at(kv, SLOTS))


def test_our_client_on_their_server(facts):
    kv = theirs.pages(facts)
    with theirs.engine(
        theirs.config(chunk_size=theirs.CHUNK), theirs.LMCacheMetadata(**facts), kv
    ) as engine:
        path = offload_path(facts["engine_id"], 1)
        with (
            theirs.offload_server(engine, 1, path),
            ZMQOffloadClient(facts["engine_id"], 1) as client,
        ):
            assert client.offload(HASHES, SLOTS, LENGTHS)
            assert client.offload(HASHES[:1], SLOTS[:4], LENGTHS[:1])
            assert client.offload([], [], [])
        assert engine.lookup(hashes=HASHES, offsets=LENGTHS) == 11
        keys = [
            key
            for _, _, key in engine.token_database.process_tokens(hashes=HASHES, offsets=LENGTHS)
        ]
        chunks = [
            chunk.tensor.view(torch.uint8)
            for chunk in engine.storage_manager.batched_get(keys, "LocalCPUBackend")
        ]
        assert torch.equal(torch.cat(chunks, dim=2), theirs.at(kv, SLOTS))  # [2, L, T, H*D bytes]
