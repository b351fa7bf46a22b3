"""TCP, both ways: LMCache 0.3.14's client on our server, our client on its server, and every header
byte for byte."""

import socket
import struct
import threading
from contextlib import ExitStack
from itertools import product

import lmcache_peer as theirs
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import DTYPE_TO_INT, DTYPE_TO_TEXT, MAX_KEY_BYTES, CacheEngineKey, RemoteMeta
from remote_server import (
    REPLY,
    REQUEST,
    ClientMetaMessage,
    LMCacheServer,
    RemoteClient,
    ServerMetaMessage,
)

pytestmark = pytest.mark.interop

FORMATS = list(theirs.MemoryFormat)
DTYPES = [dtype for dtype in theirs.DTYPE_TO_INT if dtype is not None]
# What their client can allocate: [K, L, T, H*D] and both layer-wise formats, filled up to 4 axes.
SHAPES = {
    theirs.MemoryFormat.KV_2LTD: [
        (2, 3, 8, 16),
        (2, 3, 5, 16),
        (2, 1, 1, 16),
    ],  # whole, partial, one token
    theirs.MemoryFormat.KV_T2D: [(8, 2, 16, 1), (5, 2, 16, 1)],
    theirs.MemoryFormat.KV_2TD: [(2, 8, 16, 1), (2, 5, 16, 1)],
    theirs.MemoryFormat.KV_MLA_FMT: [
        (1, 3, 8, 72),
        (1, 3, 5, 72),
    ],  # D = 64 + 8, as with DeepSeek's 512 + 64
}
METADATA = theirs.LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (3, 2, 8, 2, 8), chunk_size=8)


def key(number, cls=theirs.CacheEngineKey):
    return cls("org/model", 2, 1, number, torch.bfloat16)


def payload(nbytes, seed=0):
    return (
        torch.randint(
            0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
        )
        .numpy()
        .tobytes()
    )


@pytest.fixture
def our_port():
    with LMCacheServer("127.0.0.1", 0, max_bytes=8 << 20) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        yield server.port
        server.close()
        thread.join()


@pytest.fixture(scope="module")
def their_port():
    with theirs.server_process() as port:
        yield port


# --------------------------------------------------------------------------------------------------
# Headers and keys, byte for byte

int32 = st.integers(-(2**31), 2**31 - 1)
text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="@\n"), max_size=20)
names = text.filter(lambda name: "%" not in name)
hashes = st.integers(-(2**63), 2**64 - 1) | st.binary(min_size=9, max_size=32)


@st.composite
def keys(draw):
    """The same key of ours and of theirs, such that its text fits and nothing of it is lost in the
    padding."""
    configs = draw(
        st.none()
        | st.dictionaries(names.map("lmcache.tag.{}".format), text | st.integers(), max_size=3)
    )
    configs = configs and configs | {"max_tokens": 7}  # not a tag
    facts = (
        draw(text),
        draw(st.integers(1, 64)),
        draw(st.integers(0, 63)),
        draw(hashes),
        draw(st.sampled_from([*DTYPE_TO_TEXT])),
    )
    layer_id = draw(st.none() | st.integers(0, 999))
    layer = {} if layer_id is None else {"layer_id": layer_id}
    cls = theirs.CacheEngineKey if layer_id is None else theirs.LayerCacheEngineKey
    peer = cls(*facts, request_configs=configs, **layer)
    line = peer.to_string()
    if line != line.strip() or len(line.encode()) > MAX_KEY_BYTES:
        facts, configs = ("m", *facts[1:]), None
        peer = cls(*facts, **layer)
    return CacheEngineKey(*facts, request_configs=configs, **layer), peer


@given(keys())
def test_key_text_is_theirs(pair):
    ours, peer = pair
    line = peer.to_string()
    assert ours.to_string() == line
    assert CacheEngineKey.from_string(line).to_string() == line
    if isinstance(
        ours.chunk_hash, int
    ):  # they read a `bytes` hash as an int: its leading zeros are lost
        assert theirs.parse_cache_key(ours.to_string()).to_string() == line
        assert (
            CacheEngineKey.from_string(line).chunk_hash == theirs.parse_cache_key(line).chunk_hash
        )


@given(
    keys(),
    st.sampled_from(theirs.ClientCommand),
    int32,
    st.sampled_from(FORMATS),
    st.sampled_from([*theirs.DTYPE_TO_INT]),
    st.sampled_from([*theirs.INT_TO_LOCATION]),
    st.tuples(int32, int32, int32, int32),
)
def test_request_header_is_theirs(pair, command, length, fmt, dtype, location, shape):
    ours_key, their_key = pair
    peer = theirs.ClientMetaMessage(
        command, their_key, length, fmt, dtype, torch.Size(shape), theirs.INT_TO_LOCATION[location]
    )
    ours = ClientMetaMessage(
        command, ours_key, length, fmt.value, DTYPE_TO_INT[dtype], shape, location
    )
    raw = peer.serialize()
    assert ours.serialize() == raw
    assert REQUEST.size == theirs.ClientMetaMessage.packlength() == len(raw)
    back = ClientMetaMessage.deserialize(raw)
    assert back.serialize() == raw
    assert (back.command, back.key.decode(), back.shape) == (command, their_key.to_string(), shape)
    if isinstance(ours_key.chunk_hash, int):
        assert theirs.ClientMetaMessage.deserialize(ours.serialize()).serialize() == raw


@given(
    st.sampled_from(theirs.ServerReturnCode),
    int32,
    st.sampled_from(FORMATS),
    st.sampled_from([*theirs.DTYPE_TO_INT]),
    st.tuples(int32, int32, int32, int32),
    st.sampled_from([*theirs.INT_TO_LOCATION]),
)
def test_reply_header_is_theirs(code, length, fmt, dtype, shape, location):
    peer = theirs.ServerMetaMessage(
        code, length, fmt, dtype, torch.Size(shape), theirs.INT_TO_LOCATION[location]
    )
    ours = ServerMetaMessage(code, length, fmt.value, DTYPE_TO_INT[dtype], shape, location)
    assert ours.serialize() == peer.serialize()
    assert ServerMetaMessage.deserialize(peer.serialize()) == ours
    assert theirs.ServerMetaMessage.deserialize(ours.serialize()) == peer
    assert REPLY.size == theirs.ServerMetaMessage.packlength()


def test_dtype_numbers_are_theirs():
    assert theirs.DTYPE_TO_INT == DTYPE_TO_INT


# --------------------------------------------------------------------------------------------------
# Their client, our server


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("fmt", SHAPES, ids=str)
def test_their_client_on_our_server(our_port, fmt, dtype):
    with theirs.connector(our_port, METADATA) as client:
        for number, shape in enumerate(SHAPES[fmt]):
            data = payload(torch.Size(shape).numel() * dtype.itemsize, number)
            assert not client.exists(key(number)) and not client.exists_sync(key(number))
            assert client.get(key(number)) is None
            client.put(key(number), data, shape, dtype, fmt)
            assert client.exists(key(number)) and client.exists_sync(key(number))
            assert client.get(key(number)) == (shape, dtype, fmt, data)
        assert client.get(key(0))[3] == payload(
            torch.Size(SHAPES[fmt][0]).numel() * dtype.itemsize, 0
        )


def test_their_client_puts_bytes_without_a_dtype(our_port):
    with theirs.connector(our_port, METADATA) as client:
        client.put(key(1), b"a picture", (9, 0, 0, 0), None, theirs.MemoryFormat.BINARY_BUFFER)
        assert client.get(key(1)) == (
            (9, 0, 0, 0),
            None,
            theirs.MemoryFormat.BINARY_BUFFER,
            b"a picture",
        )


@pytest.mark.parametrize("connections", [2, 4])
def test_their_clients_at_once(our_port, connections):
    shape, dtype, fmt = (2, 3, 8, 16), torch.float32, theirs.MemoryFormat.KV_2LTD
    chunks = {number: payload(3072, number) for number in range(10 * connections)}
    wrong = []

    def work(client, rank):
        mine = range(10 * rank, 10 * rank + 10)
        for number in mine:
            client.put(key(number), chunks[number], shape, dtype, fmt)
        wrong.extend(
            number
            for number in mine
            if client.get(key(number)) != (shape, dtype, fmt, chunks[number])
        )

    with ExitStack() as stack:
        clients = [
            stack.enter_context(theirs.connector(our_port, METADATA)) for _ in range(connections)
        ]
        threads = [
            threading.Thread(target=work, args=pair)
            for pair in zip(clients, range(connections), strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        for client in clients:  # each sees what the others wrote
            assert all(client.exists_sync(key(number)) for number in chunks)
            assert [client.get(key(number))[3] for number in chunks] == [*chunks.values()]


def test_their_layer_and_tag_keys_on_our_server(our_port):
    base = theirs.CacheEngineKey("m", 1, 0, -0xABC, torch.float16, {"lmcache.tag.user": "ann"})
    their_keys = [base, *base.split_layers(3), base.with_new_worker_id(1)]
    with (
        theirs.connector(our_port, METADATA) as client,
        RemoteClient(f"lm://127.0.0.1:{our_port}") as ours,
    ):
        for number, their_key in enumerate(their_keys):
            client.put(
                their_key,
                bytes([number]) * 64,
                (2, 1, 1, 16),
                torch.float16,
                theirs.MemoryFormat.KV_2LTD,
            )
        assert [client.get(their_key)[3][0] for their_key in their_keys] == [0, 1, 2, 3, 4]
        assert sorted(ours.list_keys()) == sorted(their_key.to_string() for their_key in their_keys)


@pytest.mark.parametrize("dtype", [0, 1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("fmt", [0, 1, 2, 3, 4, 5, 6, 7, 8])
def test_formats_pass_as_they_came(our_port, fmt, dtype):
    """Every number of the protocol, those too that their client never sends: float16's other number
    1, a format it cannot allocate, and EC_TD 7 and HS_TD 8, which came with LMCache 0.5.6."""
    known = theirs.MemoryFormat(min(fmt, 6))
    header = bytearray(
        theirs.ClientMetaMessage(
            theirs.ClientCommand.PUT, key(9), 3, known, None, torch.Size([16, 2, 64, 0])
        ).serialize()
    )
    struct.pack_into("<ii", header, 8, fmt, dtype)
    ask = theirs.ClientMetaMessage(
        theirs.ClientCommand.GET, key(9), 0, known, None, torch.Size([0, 0, 0, 0])
    ).serialize()
    with socket.create_connection(("127.0.0.1", our_port)) as sock, sock.makefile("rb") as replies:
        sock.sendall(header + b"abc" + ask)
        assert struct.unpack("<9i", replies.read(36)) == (200, 3, fmt, dtype, 16, 2, 64, 0, 0)
        assert replies.read(3) == b"abc"
    with RemoteClient(f"lm://127.0.0.1:{our_port}") as client:
        assert client.get(key(9).to_string()) == (RemoteMeta(3, fmt, dtype, (16, 2, 64, 0)), b"abc")


@pytest.mark.parametrize("command", ["EXIST", "HEALTH", "GET"])
def test_replies_without_payload_are_theirs(our_port, command):
    """To one who asks for what is not there, or for our health, the 36 bytes are those that they
    would send."""
    ask = theirs.ClientMetaMessage(
        theirs.ClientCommand[command], key(7), 0, FORMATS[1], torch.float16, torch.Size([0] * 4)
    )
    code = theirs.ServerReturnCode.SUCCESS if command == "HEALTH" else theirs.ServerReturnCode.FAIL
    reply = theirs.ServerMetaMessage(
        code, 0, FORMATS[1], torch.float16, torch.Size([0] * 4)
    ).serialize()
    with socket.create_connection(("127.0.0.1", our_port)) as sock, sock.makefile("rb") as replies:
        sock.sendall(ask.serialize() * 2)
        assert replies.read(72) == reply * 2


# --------------------------------------------------------------------------------------------------
# Our client, their server


def test_our_client_on_their_server(their_port):
    items = []  # every format and dtype; whole chunks, partial ones and MLA's
    for fmt, dtype in product(range(7), [0, 2, 3, 4, 5, 6, 7, 8]):
        shape = ((2, 3, 8, 16), (2, 3, 5, 16), (1, 3, 8, 72))[len(items) % 3]
        data = payload(192 + 4 * len(items), len(items))
        ours = CacheEngineKey("org/model", 4, 3, -len(items) - 1, torch.float16)
        items.append((ours, RemoteMeta(len(data), fmt, dtype, shape), [data]))
    keys = [item[0] for item in items]
    with RemoteClient(f"lm://127.0.0.1:{their_port}") as client:
        assert client.health()
        assert client.exists_many(keys) == [False] * len(keys) and client.get(keys[0]) is None
        client.put_many(items)
        client.flush()
        assert client.exists_many(keys) == [True] * len(keys) and client.exists(keys[-1])
        stream = client._connected()
        assert client.leading([*keys, "no@1@0@0@half", *keys]) == len(keys)
        assert client._connected() is stream  # their server was asked nothing that it does not know
        got = {}

        def fill(index, meta, receive):
            data = bytearray(meta.length)
            receive(memoryview(data))
            got[index] = (meta, data)

        missing = CacheEngineKey("another", 1, 0, 1, torch.float16)
        client.get_many([missing, *keys], fill)
        assert got == {
            index: (meta, *pieces) for index, (_, meta, pieces) in enumerate(items, start=1)
        }


def test_our_client_puts_a_tensor_on_their_server(their_port):
    chunk = torch.randn(2, 4, 64, 256).bfloat16()  # [2, L, T, H*D], 256 KiB
    configs = {"lmcache.tag.user": "ann"}
    for ours in (
        CacheEngineKey("tensor", 1, 0, 0xABC, torch.bfloat16),
        CacheEngineKey("tensor", 1, 0, 0xABC, torch.bfloat16, configs),
        CacheEngineKey("tensor", 1, 0, 0xABC, torch.bfloat16, configs, layer_id=3),
    ):
        with (
            RemoteClient(f"lm://127.0.0.1:{their_port}") as client,
            theirs.connector(their_port, METADATA) as peer,
        ):
            assert not client.exists(ours)
            client.put(ours, chunk)
            meta, data = client.get(ours)
            assert meta == (chunk.nbytes, 1, 3, tuple(chunk.shape))
            assert torch.equal(
                torch.frombuffer(data, dtype=torch.bfloat16).view(chunk.shape), chunk
            )
            found = peer.get(theirs.parse_cache_key(ours.to_string()))
            assert found == (tuple(chunk.shape), torch.bfloat16, theirs.MemoryFormat.KV_2LTD, data)


def test_their_server_never_answers_list(their_port):
    with RemoteClient(f"lm://127.0.0.1:{their_port}", timeout_sec=0.3, retries=0) as client:
        with pytest.raises(TimeoutError):
            client.list_keys()
        assert client.health()  # over a new connection
