"""The TCP server and its client: the bytes on the wire, what is kept and what goes, and peers that
misbehave."""

import contextlib
import gc
import logging
import math
import mmap
import os
import socket
import struct
import subprocess
import sys
import threading
import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from proxies import Proxy
from toys import ROOT, client_of, connected, read, request, running_server, silent_server, wait_for

import remote_server
from engine import CacheEngineKey, MemoryFormat, RemoteMeta
from remote_server import (
    FOUND,
    MISS,
    REPLY,
    ClientCommand,
    ClientMetaMessage,
    LMCacheServer,
    RemoteClient,
    ServerMetaMessage,
)

PUT, GET, EXIST, LIST, HEALTH, STATS, CLEAR, DELETE, PREFIX = [*ClientCommand][:9]
MIB = 1 << 20
KEY = "m@1@0@abc@bfloat16"


@pytest.fixture
def server():
    with running_server(stall_timeout_sec=1.0) as running:
        yield running


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made


@pytest.fixture
def sock(server):
    with connected(server.port) as made:
        yield made


def get(sock, key):
    """The reply header of a raw GET and its payload, or None."""
    sock.sendall(request(GET, key))
    header = ServerMetaMessage.deserialize(read(sock, 36))
    return (header, read(sock, header.length)) if header.code == 200 else None


def served(server):
    """Whether a fresh connection is served."""
    with client_of(server) as client:
        client.put("served?", b"yes")
        return client.get("served?")[1] == b"yes"


# -- the bytes


def test_a_put_header_by_hand():
    """64 bytes, KV_2LTD, bfloat16, no location, [2, 1, 4, 4]; the same hex as in
    ClientMetaMessage's docstring."""
    numbers = "01000000 40000000 01000000 03000000 00000000 02000000 01000000 04000000 04000000"
    wanted = bytes.fromhex(numbers) + b"m@1@0@abc@bfloat16".ljust(150)
    message = ClientMetaMessage(PUT, KEY, 64, MemoryFormat.KV_2LTD, 3, (2, 1, 4, 4))
    assert message.serialize() == wanted and len(wanted) == 186
    assert ClientMetaMessage.deserialize(wanted) == ClientMetaMessage(
        1, KEY.encode(), 64, 1, 3, (2, 1, 4, 4)
    )
    assert (
        numbers.split()[0] in ClientMetaMessage.__doc__
        and b"m@1@".hex() in ClientMetaMessage.__doc__
    )


def test_a_reply_header_by_hand():
    """The location comes after the shape here, and before it in a request."""
    message = ServerMetaMessage(200, 64, 1, 3, (2, 1, 4, 5), 2)
    wanted = struct.pack("<9i", 200, 64, 1, 3, 2, 1, 4, 5, 2)
    assert message.serialize() == wanted and ServerMetaMessage.deserialize(wanted) == message
    assert len(wanted) == 36
    assert struct.pack("<9i", 400, 0, 1, 2, 0, 0, 0, 0, 0) == MISS and FOUND[4:] == MISS[4:]


NUMBER = st.integers(-(2**31), 2**31 - 1)


@given(NUMBER, st.binary(max_size=150), NUMBER, NUMBER, NUMBER, st.tuples(*[NUMBER] * 4), NUMBER)
def test_headers_come_back_as_they_were(command, key, length, fmt, dtype, shape, location):
    message = ClientMetaMessage(command, key.rstrip(b" "), length, fmt, dtype, shape, location)
    assert ClientMetaMessage.deserialize(message.serialize()) == message
    reply = ServerMetaMessage(command, length, fmt, dtype, shape, location)
    assert ServerMetaMessage.deserialize(reply.serialize()) == reply


@pytest.mark.parametrize(
    "changes",
    [dict(key="x" * 151), dict(key="é" * 76), dict(key="x "), dict(shape=(1, 2, 3)),
     dict(shape=(1, 2, 3, 4, 5)),
     dict(length=2**31), dict(fmt=-(2**31) - 1), dict(key=CacheEngineKey("a@b", 1, 0, 1,
                                                                         torch.half))],
    ids=lambda changes: str(changes)[:30],
)  # fmt: skip
def test_what_fits_no_header_is_refused_before_anything_is_sent(changes):
    """LM#2752: a 5-D shape is a ValueError at the client, and so is a key of 151 bytes or 2 GiB at
    once."""
    with pytest.raises(ValueError):
        ClientMetaMessage(**{"command": PUT, "key": "k"} | changes).serialize()


@given(st.binary(max_size=300), st.binary(max_size=150), st.tuples(*[NUMBER] * 7))
def test_put_and_get_any_bytes_under_any_key(sock, payload, key, numbers):
    """LM#2752: fmt, dtype, location and shape come back as the integers they were."""
    fmt, dtype, location, *shape = numbers
    key, numbers = (
        key.rstrip(b" "),
        {"fmt": fmt, "dtype": dtype, "location": location, "shape": (*shape,)},
    )
    sock.sendall(request(PUT, key, len(payload), **numbers) + payload)
    assert get(sock, key) == (ServerMetaMessage(200, len(payload), **numbers), payload)


@pytest.mark.parametrize("shape", [(16, 2, 64, 0), (1024, 0, 0, 0)])
def test_shapes(client, shape):
    """LM#2752."""
    client.put(KEY, bytes(64), RemoteMeta(64, 2, 3, shape))
    assert client.get(KEY) == (RemoteMeta(64, 2, 3, shape), bytearray(64))


@pytest.mark.parametrize(
    "dtype", [torch.half, torch.bfloat16, torch.float, torch.double, torch.uint8, torch.float8_e5m2]
)
def test_tensors(client, dtype):
    tensor = torch.randn(2, 3, 4, 5).to(dtype)
    client.put(KEY, tensor)
    meta, data = client.get(KEY)
    assert meta.shape == (2, 3, 4, 5) and torch.frombuffer(data, dtype=dtype).view(meta.shape).view(
        torch.uint8
    ).equal(tensor.view(torch.uint8))


@pytest.mark.parametrize("data, meta", [(torch.zeros(1, 2, 3, 4, 5), None),
                                        (torch.zeros(2).int(), None),
                                        (b"12", RemoteMeta(3, 4, 6, (3, 0, 0, 0)))])  # fmt: skip
def test_puts_that_cannot_be(client, data, meta):
    with pytest.raises(ValueError):
        client.put(KEY, data, meta)
    assert client.list_keys() == []


def test_key_objects_and_layers_and_negative_hashes(client):
    """LM#2135: @0 to @3 are four payloads."""
    keys = [CacheEngineKey("m", 1, 0, -0xABC, torch.half, layer_id=layer) for layer in range(4)]
    for number, key in enumerate(keys):
        client.put(key, bytes([number] * 10))
    assert [client.get(key.to_string())[1] for key in keys] == [
        bytes([number] * 10) for number in range(4)
    ]


@pytest.mark.parametrize("key", [b"garbage", b"\xff\xfe\x00\n@", b""])
def test_a_key_is_opaque_bytes(sock, key):
    """LM#1790: and a valid PUT and GET after it, on the same socket."""
    for name in (key, KEY.encode()):
        sock.sendall(request(PUT, name, 3) + b"abc")
        assert get(sock, name)[1] == b"abc"


# -- commands


def test_misses_are_36_bytes_and_at_once(sock):
    """LM#512, LM#651."""
    began = time.monotonic()
    sock.sendall(request(GET, b"none") + request(EXIST, b"none") + request(HEALTH))
    assert read(sock, 108) == MISS + MISS + FOUND
    assert time.monotonic() - began < 0.2


@pytest.mark.parametrize("command, name", [(GET, "acquire"), (EXIST, "contains"), (GET, "pieces")])
def test_a_store_that_raises_is_a_miss_and_the_connection_serves_on(
    server, sock, command, name, monkeypatch
):
    """LM#512, LM#651."""

    def fail(*_):
        raise RuntimeError("CUDA error")

    sock.sendall(request(PUT, KEY, 3) + b"abc" + request(EXIST, KEY))
    assert read(sock, 36) == FOUND
    with monkeypatch.context() as patch:
        patch.setattr(server.store, name, fail)
        with connected(server.port) as other:
            other.sendall(request(command, KEY) + request(HEALTH))
            assert read(other, 72) == MISS + FOUND
    assert get(sock, KEY)[1] == b"abc"


def test_a_reservation_that_raises_leaves_the_stream_in_step(server, sock, monkeypatch):
    with monkeypatch.context() as patch:
        for name in ("reserve", "reserve_hole"):
            patch.setattr(server.store, name, lambda _: 1 // 0)
        sock.sendall(request(PUT, KEY, 3) + b"abc" + request(EXIST, KEY))
        assert read(sock, 36) == MISS
    sock.sendall(request(PUT, KEY, 3) + b"abc")
    assert get(sock, KEY)[1] == b"abc"


def test_health_with_any_key(sock):
    """PS#1057: LMCache's server ends the connection of a blank one."""
    for key in (b"", b"any@1@0@0@half", b"\xff"):
        sock.sendall(request(HEALTH, key))
        assert read(sock, 36) == FOUND


def test_a_prefix_by_hand(server, client, sock):
    """The keys where a header has them, 186 bytes each; the answer is the shape's first number."""
    keys = [b"a", b"", b"\xff\n \x00", b"k" * 150]
    for key in keys:
        client.put(key, b"x")
    client.flush()
    for asked, count in ((keys, 4), (keys[:2] + [b"none"] + keys, 2), ([b"none"], 0), ([], 0)):
        names = b"".join(bytes(36) + key.ljust(150) for key in asked)
        data = request(PREFIX, b"any", len(names)) + names + request(EXIST, keys[0])
        for part in (data[:1], data[1:200], data[200:]):
            sock.sendall(part)
        assert read(sock, 72) == struct.pack("<9i", 200, 0, 1, 2, count, 0, 0, 0, 0) + FOUND
    assert server.store.stats()["in_use"] == 0


@pytest.mark.parametrize("length", [-1, -186, 150, 185, 187, 186 * 90_201, 2**31 - 1])
def test_a_prefix_of_a_length_that_cannot_be_ends_the_connection(server, sock, length):
    sock.sendall(request(PREFIX, b"any", length))
    assert read(sock, 1) == b"" and served(server)


def test_half_a_prefix_is_dropped_at_the_stall_timeout(server, sock):
    sock.sendall(request(PREFIX, b"any", 372) + b"a")
    assert read(sock, 1) == b"" and served(server)


def test_a_prefix_of_a_store_that_raises_is_none(server, sock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "touch", lambda _: 1 // 0)
        sock.sendall(request(PREFIX, b"any", 186) + bytes(36) + b"a".ljust(150) + request(HEALTH))
        assert read(sock, 72) == FOUND * 2


@pytest.mark.parametrize("is_ours", [True, False], ids=["ours", "another's, or an older one"])
@pytest.mark.parametrize("most", [16 << 20, 300])
def test_leading_ones(server, client, is_ours, most, monkeypatch):
    """In one question to a server that knows it, else, and where they are too many for one, key by
    key; the head is the last to go either way."""
    if not is_ours:
        monkeypatch.setattr(server, "hello", FOUND)
    keys = [f"{number}" for number in range(100)]
    for key in keys:
        client.put(key, b"x")
    client.flush()
    monkeypatch.setattr(remote_server, "MAX_PREFIX_BYTES", most)
    asked = []
    pipeline = client._pipeline  # who asks key by key
    monkeypatch.setattr(client, "_pipeline", lambda *a: asked.append(a[0]) or pipeline(*a))
    assert client.leading(keys[:50] + ["none"] + keys[50:]) == 50
    assert (asked == []) == (is_ours and most > 300)
    assert client.leading(["none"] + keys) == client.leading([]) == 0
    assert client.leading(keys) == 100 and client.list_keys() == keys[::-1]
    with pytest.raises(ValueError, match="150 bytes fit"):
        client.leading(["fits", "x" * 151])


def test_who_the_server_is_is_asked_of_each_connection(monkeypatch):
    """In its place may come another, which does not know the question."""
    with contextlib.ExitStack() as stack:
        with running_server() as server:
            client = stack.enter_context(client_of(server))
            client.put("a", b"x")
            assert client.leading(["a", "b"]) == 1
        with running_server(port=server.port) as server:
            server.hello = FOUND
            monkeypatch.setattr(client, "exists_many", lambda keys: [True] * len(keys))
            assert client.leading(["a", "b"]) == 2  # those of exists_many


def test_list_and_stats(client):
    assert client.list_keys() == []
    for key in "abc":
        client.put(key, b"x")
    client.exists("a")
    assert client.list_keys() == ["b", "c", "a"]  # the least recently used first
    stats = client.stats()
    assert (stats["chunks"], stats["bytes_used"], stats["clients"], stats["max_bytes"]) == (
        3,
        192,
        1,
        4 * MIB,
    )


def test_clear_and_delete(client):
    """LM#1660, LM#1692."""
    for key in ("a", "b", "c@1", "\n", "d"):
        client.put(key, key.encode() * 10)
    assert client.delete("b") and not client.delete("b") and not client.delete("none")
    assert client.delete("\n") and client.list_keys() == ["a", "c@1", "d"]
    assert client.get("a")[1] == b"a" * 10 and client.get("b") is None
    client.clear()
    client.clear()
    assert client.list_keys() == [] and client.stats()["bytes_used"] == 0
    client.put("b", b"again")
    assert client.get("b")[1] == b"again"


def test_clear_and_delete_of_what_is_being_read():
    """Its reader gets all of it; then the memory is free."""
    with running_server(max_bytes=80 * MIB) as server, client_of(server) as client:
        for end in (client.clear, lambda: client.delete(KEY)):
            client.put(KEY, b"r" * (64 * MIB))
            client.flush()
            with connected(server.port) as sock:
                sock.sendall(request(GET, KEY))
                assert read(sock, 36)[:4] == FOUND[:4]
                end()
                assert not client.exists(KEY) and server.stats()["in_use"] == 1
                data = bytearray(64 * MIB)
                view = memoryview(data)
                while len(view):
                    view = view[sock.recv_into(view) :]
                assert data == b"r" * (64 * MIB)
            assert wait_for(lambda: server.stats()["bytes_used"] == 0)


@pytest.mark.parametrize("ask", [RemoteClient.list_keys, RemoteClient.stats, RemoteClient.clear])
def test_a_server_that_answers_fail(ask):
    """An error, and not an empty list: LMCache's server knows neither."""
    with silent_server(MISS) as port, RemoteClient(f"lm://127.0.0.1:{port}") as client:
        with pytest.raises(ValueError, match="FAIL"):
            ask(client)


def quick_puts(server, count):
    """So many keys of 100 characters, in few packets."""
    with connected(server.port) as sock:
        for start in range(0, count, 500):
            numbers = range(start, min(start + 500, count))
            sock.sendall(b"".join(request(PUT, f"{number:0100}", 1) + b"x" for number in numbers))
        sock.sendall(request(HEALTH))
        assert read(sock, 36) == FOUND


def test_a_list_of_many_keys_costs_others_neither_memory_nor_time():
    """200,000 keys are 20 MB of text: eight who ask for it at once, and read slowly, hold no copy
    each, and EXIST is answered meanwhile. All eight are served in the end."""
    count = 200_000
    with running_server(max_bytes=64 * count) as server, contextlib.ExitStack() as stack:
        quick_puts(server, count)
        client = stack.enter_context(client_of(server))
        assert client.stats()["chunks"] == count
        tracemalloc.start()
        stack.callback(tracemalloc.stop)
        asking = [stack.enter_context(connected(server.port)) for _ in range(8)]
        for sock in asking:
            sock.sendall(request(LIST))
        took = []
        for number in range(50):
            began = time.monotonic()
            assert client.exists(f"{number:0100}")
            took.append(time.monotonic() - began)
        assert sorted(took)[25] < 0.05
        lengths = [drain_list(sock, count) for sock in asking]
        assert lengths == [101 * count - 1] * 8
        peak = tracemalloc.get_traced_memory()[1]
        assert peak < 16 << 20, f"{peak >> 20} MiB; one copy of the text alone is 20"


def drain_list(sock, count):
    sock.settimeout(30)
    header = ServerMetaMessage.deserialize(read(sock, 36))
    left, scratch = header.length, memoryview(bytearray(1 << 16))
    while left:
        got = sock.recv_into(scratch[:left])
        assert got
        left -= got
    return header.length


def test_eight_lists_at_once():
    with running_server(max_bytes=64 * 20_000) as server:
        quick_puts(server, 20_000)

        def ask(_):
            with client_of(server, timeout_sec=30) as client:
                return client.list_keys()

        with ThreadPoolExecutor(8) as pool:
            for keys in pool.map(ask, range(8)):
                assert len(set(keys)) == len(keys) == 20_000


def test_a_list_under_which_keys_come_and_go():
    """Every line of it is a key that was there, whole."""
    with running_server(max_bytes=64 * 5000) as server, client_of(server) as client:
        quick_puts(server, 4000)
        stop = threading.Event()

        def churn():
            with client_of(server) as other:
                number = 0
                while not stop.is_set():
                    other.put(f"{number % 8000:0100}", b"x")
                    number += 1

        with ThreadPoolExecutor(1) as pool:
            future = pool.submit(churn)
            try:
                for _ in range(20):
                    keys = client.list_keys()
                    assert len(set(keys)) == len(keys) >= 4000
                    assert all(len(key) == 100 and int(key) < 8000 for key in keys)
            finally:
                stop.set()
            future.result()


@pytest.mark.parametrize("command", [0, 6, 99, -1, 2**31 - 1])
def test_an_unknown_command_fails_and_the_connection_serves_on(sock, command):
    """LMCache's server ends the handler with a traceback."""
    sock.sendall(request(command, KEY) + request(HEALTH))
    assert read(sock, 72) == MISS + FOUND


def test_pipelined_requests_are_answered_in_order(sock):
    """All of them in one segment, payloads between headers."""
    parts = [
        request(PUT, f"{n}", n) + bytes([n]) * n + request(EXIST, f"{n}") + request(GET, f"{n}")
        for n in range(50)
    ]
    sock.sendall(b"".join(parts))
    for n in range(50):
        assert read(sock, 36) == FOUND
        assert (
            ServerMetaMessage.deserialize(read(sock, 36)).length == n
            and read(sock, n) == bytes([n]) * n
        )


def test_a_reply_does_not_wait_for_a_payload_that_is_slow_to_come(sock):
    sock.sendall(request(EXIST, KEY) + request(PUT, KEY, 10) + b"12345")
    assert read(sock, 36) == MISS
    sock.sendall(b"67890")
    assert get(sock, KEY)[1] == b"1234567890"


@pytest.mark.parametrize("size", [0, 1, 186, 187, 65536, 3 * MIB])
def test_payloads_of_every_size_cut_anywhere(server, sock, size):
    payload = bytes(os.urandom(size))
    stream = request(PUT, KEY, size) + payload
    for cut in {1, 100, 186, 186 + size // 2, len(stream) - 1}:
        sock.sendall(stream[:cut])
        assert wait_for(lambda: True)
        sock.sendall(stream[cut:])
        assert get(sock, KEY)[1] == payload


def test_many_at_once(client):
    """More than one window, with holes; what is left unread is skipped."""
    for n in range(0, 200, 3):
        client.put(f"{n}", bytes([n]) * (n + 1))
    keys = [f"{n}" for n in range(200)]
    assert client.exists_many(keys) == [n % 3 == 0 for n in range(200)]
    got = {}

    def fill(index, meta, receive):
        data = bytearray(meta.length // 2 if index % 2 else meta.length)
        receive(memoryview(data))
        got[index] = data

    client.get_many(keys, fill)
    assert got == {n: bytes([n]) * ((n + 1) // 2 if n % 2 else n + 1) for n in range(0, 200, 3)}
    assert client.exists_many([]) == [] and client.get_many([], fill) is None


# -- the budget


def test_the_budget_holds(server, client):
    """LM#900, LM#458, PS#923: 4 MiB, 100 puts of 1 MiB, then one of 5 MiB."""
    for n in range(100):
        client.put(f"{n}", bytes([n]) * MIB)
        assert server.stats()["bytes_used"] <= 4 * MIB
    client.put("large", bytes(5 * MIB))
    client.put("after", b"in step")
    assert (
        client.list_keys() == ["97", "98", "99", "after"] and client.get("after")[1] == b"in step"
    )
    assert client.get("99")[1] == bytes([99]) * MIB
    assert client.stats()["evictions"] == 97


def test_a_refused_put_is_counted(server, client):
    """Of over the budget."""
    client.put("large", bytes(5 * MIB))
    assert not client.exists("large") and client.stats()["rejected"] == 1


@pytest.mark.parametrize("length", [3 * MIB, 2**31 - 1])
def test_who_announces_and_sends_nothing_evicts_nobody(server, client, sock, length):
    client.put(KEY, bytes(3 * MIB))
    client.flush()
    sock.sendall(request(PUT, b"other", length))
    assert read(sock, 1) == b""  # stalled, and gone
    assert client.exists(KEY) and server.stats()["bytes_used"] == 3 * MIB


def test_a_huge_announcement_allocates_nothing(server, sock):
    """2 GiB announced and begun: refused, drained, and dropped when it stalls."""
    sock.sendall(request(PUT, KEY, 2**31 - 1) + bytes(100_000))
    assert read(sock, 1) == b"" and server.stats()["bytes_used"] == 0 and served(server)


def test_a_negative_length_ends_the_connection(server, sock, caplog):
    """LMCache stores it and reads it back as a hit of zeros. What was asked before is answered."""
    sock.sendall(request(EXIST, KEY) + request(PUT, KEY, -5) + request(EXIST, KEY))
    assert read(sock, 72) == MISS
    assert "announces -5 bytes" in caplog.text and server.stats()["chunks"] == 0 and served(server)


def test_the_value_being_replaced_stays_until_the_new_one_is_whole(server, client, sock):
    """It needs room for both: another goes, and never the old one for its own successor."""
    for key in "abcd":
        client.put(key, key.encode() * MIB)
    client.flush()
    sock.sendall(request(PUT, b"a", MIB) + b"x" * (MIB - 1))
    assert wait_for(lambda: server.stats()["evictions"] == 1)
    assert client.exists_many("abcd") == [True, False, True, True]
    assert client.get("a")[1] == b"a" * MIB
    sock.sendall(b"x" + request(HEALTH))
    assert read(sock, 36) == FOUND and client.get("a")[1] == b"x" * MIB
    assert client.exists_many("cd") == [True, True]


def slow_reader(stack, server, key):
    """Asks for a chunk and reads the first bytes of it: it is in use from now on."""
    sock = stack.enter_context(connected(server.port))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # the kernel reads no more for it
    sock.sendall(request(GET, key))
    assert read(sock, 36)[:4] == FOUND[:4]


def test_a_refusal_evicts_nobody():
    """16 chunks of 4 units, one of them, in the middle, in use: a PUT of 40 units finds no room on
    either side of it, and is not told so at the others' cost."""
    unit = 4 * MIB  # a chunk is more than the kernel takes on its way
    with running_server(max_bytes=64 * unit) as server, client_of(server) as client:
        for number in range(16):
            client.put(f"{number}", bytes([number]) * (4 * unit))
        client.flush()
        with contextlib.ExitStack() as stack:
            slow_reader(stack, server, b"8")
            assert server.stats()["in_use"] == 1
            client.put("large", bytes(40 * unit))
            client.put("after", b"in step")
            assert client.get("after")[1] == b"in step" and not client.exists("large")
            left = client.exists_many([f"{number}" for number in range(16)])
            assert left.count(False) <= 1  # for "after", which came when it was full
        assert client.get("8")[1] == bytes([8]) * (4 * unit)


def test_a_larger_one_evicts_about_its_own_size():
    """In whatever order its chunks are used."""
    with running_server(max_bytes=256 << 10) as server, client_of(server) as client:
        keys = [f"{number}" for number in range(256)]
        for key in keys:
            client.put(key, bytes(1024))
        for step in range(256):  # 101 is coprime: neighbours in time are none in memory
            client.exists(keys[step * 101 % 256])
        client.put("large", bytes(16 << 10))
        assert client.exists("large") and server.stats()["evictions"] <= 32


def test_187_bytes_do_not_empty_a_server():
    """A PUT of all the budget is announced, a byte of it sent, and its client gone."""
    with running_server(max_bytes=64 << 16) as server, client_of(server) as client:
        for number in range(64):
            client.put(f"{number}", bytes(1 << 16))
        client.flush()
        with connected(server.port) as sock:
            sock.sendall(request(PUT, b"large", 64 << 16) + b"x")
            assert wait_for(lambda: server.stats()["clients"] == 2)
        assert wait_for(lambda: server.stats()["clients"] == 1)
        stats = server.stats()
        assert stats["chunks"] >= 63 and stats["in_use"] == 0


def trickle(sock, stop, pause_sec=0.05):
    """Sends a byte now and then until it is dropped; whether it was."""
    while not stop.wait(pause_sec):
        try:
            sock.sendall(b"x")
        except OSError:
            return True
    return False


def test_puts_that_trickle_are_dropped_by_their_pace(caplog):
    """Each byte comes long before the stall timeout. Together they hold at most half of the budget,
    others store what fits in the rest of the half, and a minimum pace ends them."""
    stop, size = threading.Event(), MIB - 2000
    with running_server(stall_timeout_sec=0.4) as server, client_of(server) as client:
        with contextlib.ExitStack() as stack, ThreadPoolExecutor(4) as pool:
            socks = [stack.enter_context(connected(server.port)) for _ in range(4)]
            for number, sock in enumerate(socks):
                sock.sendall(request(PUT, f"slow {number}", size) + b"x" * 100)
            assert wait_for(lambda: server.stats()["clients"] == 4)
            assert server.stats()["bytes_used"] <= 4 * MIB // 2
            futures = [pool.submit(trickle, sock, stop) for sock in socks]
            client.put("meanwhile", bytes(3000))
            assert client.exists("meanwhile")
            began = time.monotonic()
            try:
                assert wait_for(lambda: server.stats()["clients"] == 1, 5.0)
            finally:
                stop.set()
            assert time.monotonic() - began < 2.0
            for future in futures:
                future.result()
        assert client.list_keys() == ["meanwhile"]
        assert server.stats()["in_use"] == 0 and "dropped" in caplog.text


def test_others_store_meanwhile():
    """Two PUTs that announce a quarter of the budget each and stand still: a third is stored."""
    with running_server() as server, client_of(server) as client, contextlib.ExitStack() as stack:
        for number in range(2):
            sock = stack.enter_context(connected(server.port))
            sock.sendall(request(PUT, f"slow {number}", MIB) + b"x" * 100)
        assert wait_for(lambda: server.stats()["clients"] == 2)
        client.put("meanwhile", b"x")
        assert client.exists("meanwhile")


def test_a_put_that_is_refused_keeps_nobody_out(server, client, sock):
    """187 bytes: the header of a PUT of 2 GiB, and one of its bytes."""
    sock.sendall(request(PUT, b"large", 2**31 - 1) + b"x")
    assert wait_for(lambda: server.stats()["clients"] == 1)
    client.put(KEY, b"x")
    assert client.exists(KEY)


def test_unfinished_puts_hold_at_most_half_of_the_budget():
    """Eight of a fifth each: two are under way, the others are refused, and read off."""
    with running_server(max_bytes=5 * MIB) as server, contextlib.ExitStack() as stack:
        socks = [stack.enter_context(connected(server.port)) for _ in range(8)]
        for number, sock in enumerate(socks):
            sock.sendall(request(PUT, f"{number}", MIB) + bytes(MIB // 2))
        assert wait_for(lambda: server.stats()["in_use"] == 2)
        assert wait_for(lambda: server.stats()["rejected"] == 6)  # the others have been seen, too
        with client_of(server) as client:
            assert client.stats()["bytes_used"] == 2 * MIB
            client.put("small", b"x" * 1000)  # 2 MiB and 1,000 bytes are still under a half
            assert client.exists("small")
            for number, sock in enumerate(socks):
                sock.sendall(bytes(MIB // 2) + request(EXIST, f"{number}"))
                read(sock, 36)
            assert len(client.list_keys()) == 3 and client.stats()["in_use"] == 0


def test_one_put_of_nearly_the_whole_budget():
    with running_server() as server, client_of(server) as client:
        client.put("a", bytes(MIB))
        client.put("b", bytes(4 * MIB - 64))
        assert client.list_keys() == ["b"]


def test_readers_that_trickle_are_dropped_by_their_pace(caplog):
    """A few bytes now and then are no progress."""
    with running_server(max_bytes=80 * MIB, stall_timeout_sec=0.4) as server:
        with client_of(server) as client, connected(server.port) as sock:
            client.put(KEY, bytes(64 * MIB))
            client.flush()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request(GET, KEY))
            assert wait_for(lambda: server.stats()["clients"] == 2)
            deadline = time.monotonic() + 20
            while server.stats()["clients"] == 2 and time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    sock.recv(2048)
                time.sleep(0.02)  # this is what is tested
            assert time.monotonic() < deadline and server.stats()["in_use"] == 0
            assert "dropped" in caplog.text and client.exists(KEY)


@pytest.mark.parametrize("sent", [0, 1, MIB // 2, MIB - 1])
def test_a_put_that_breaks_off_keeps_the_old_bytes_where_it_is_nearly_full(sent):
    with running_server() as server, client_of(server) as client:
        for key in "abcd":
            client.put(key, key.encode() * (MIB - 64))
        client.flush()
        with connected(server.port) as sock:
            sock.sendall(request(PUT, b"a", MIB) + bytes(sent))
            assert wait_for(lambda: server.stats()["clients"] == 2)
        assert wait_for(lambda: server.stats()["clients"] == 1)
        assert client.get("a")[1] == b"a" * (MIB - 64)
        assert client.exists_many("abcd").count(True) >= 2 and client.stats()["in_use"] == 0


def test_an_overwrite_without_room_for_both_is_refused_and_keeps_the_old():
    with running_server() as server, client_of(server) as client:
        client.put(KEY, b"o" * (3 * MIB))
        client.put(KEY, b"n" * (3 * MIB))
        assert client.get(KEY)[1] == b"o" * (3 * MIB)


def test_two_writers_and_a_reader_on_one_key(server):
    """Each read is wholly one version."""
    stop = threading.Event()

    def write(number):
        with client_of(server) as client:
            while not stop.is_set():
                client.put(KEY, bytes([number]) * 300_000)

    with ThreadPoolExecutor(2) as pool, client_of(server) as client:
        futures = [pool.submit(write, number) for number in (1, 2)]
        assert wait_for(lambda: client.exists(KEY))
        seen = {bytes(client.get(KEY)[1]) for _ in range(100)}
        stop.set()
        for future in futures:
            future.result()
    assert seen <= {bytes([1]) * 300_000, bytes([2]) * 300_000}


# -- clients that misbehave


@pytest.mark.parametrize("before", [None, b"old value"])
@pytest.mark.parametrize("sent", [0, 1, 400, 999])
def test_leaving_in_the_middle_of_a_put(server, client, before, sent):
    """LM#5149: the new key does not exist; the old bytes are intact. LMCache stores None over a
    good value."""
    client.flush()
    if before:
        client.put(KEY, before)
        client.flush()
    with connected(server.port) as sock:
        sock.sendall(request(PUT, KEY, 1000) + bytes(sent))
        assert wait_for(lambda: server.stats()["clients"] == 2)
    assert wait_for(lambda: server.stats()["clients"] == 1)
    assert client.exists(KEY) == bool(before)
    assert before is None or client.get(KEY)[1] == before
    assert wait_for(lambda: server.stats()["bytes_used"] == (64 if before else 0))


@pytest.mark.parametrize(
    "sent", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f", b"x", bytes(185)]
)
def test_half_a_header_is_dropped_at_the_stall_timeout(server, sock, sent, caplog):
    """PS#1057, LM#4213: HTTP, a ZMQ greeting. No traceback; others are served meanwhile."""
    sock.sendall(sent)
    assert served(server)
    assert read(sock, 1) == b""
    assert wait_for(lambda: "stalled" in caplog.text) and "Traceback" not in caplog.text


def test_idle_between_requests_is_fine_for_ever(server, sock):
    sock.sendall(request(HEALTH))
    assert read(sock, 36) == FOUND
    time.sleep(3 * server.stall_timeout_sec)  # not readiness: this is what is tested
    sock.sendall(request(HEALTH))
    assert read(sock, 36) == FOUND


def test_who_does_not_read_is_dropped(server, client, caplog):
    """LM#4213: leave in the middle of a large GET, or stay and never read it."""
    with (
        running_server(max_bytes=80 * MIB, stall_timeout_sec=0.3) as large,
        client_of(large) as writer,
    ):
        writer.put(KEY, bytes(64 * MIB))
        writer.flush()
        with connected(large.port) as stays:
            stays.sendall(request(GET, KEY))
            with connected(large.port) as leaves:
                leaves.sendall(request(GET, KEY))
                read(leaves, 1000)
            assert writer.exists(KEY)
            assert wait_for(lambda: large.stats()["clients"] == 1)
        assert large.stats()["in_use"] == 0
    assert "Traceback" not in caplog.text


def test_a_thousand_connects_and_closes(server, caplog):
    """LM#4213, InfiniStore#179: threads and file descriptors back at the baseline (see conftest);
    others are served."""
    with client_of(server) as client:
        client.put(KEY, b"value")
        for n in range(1000):
            with connected(server.port):
                pass
            if n % 100 == 0:
                assert client.get(KEY)[1] == b"value"
        assert served(server)  # a fresh one: all before it have been accepted
        assert wait_for(lambda: server.stats()["clients"] == 1)
    assert "Traceback" not in caplog.text


def busy(sock):
    """In the middle of a PUT: it is not idle."""
    sock.sendall(request(HEALTH) + request(PUT, KEY, 100) + bytes(99))
    assert read(sock, 36) == FOUND


def test_max_clients(caplog):
    """Where none is idle, further ones are closed at once, with a log line, and served when there
    is room."""
    with running_server(max_clients=2) as server, connected(server.port) as one:
        busy(one)
        with connected(server.port) as two:
            busy(two)
            with connected(server.port) as three:
                assert read(three, 1) == b""
            assert "max_clients" in caplog.text and server.stats()["refused_clients"] == 1
        assert wait_for(lambda: server.stats()["clients"] == 1)
        assert served(server)
        one.sendall(b"x" + request(EXIST, KEY))
        assert read(one, 36) == FOUND


def test_the_longest_idle_client_goes_for_a_newcomer(caplog):
    """CH#103336: 20 clients that sleep, or have lost power, do not keep out the 21st; it is the one
    that has been idle the longest, not the oldest, who goes."""
    with running_server(max_clients=20) as server, contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connected(server.port)) for _ in range(20)]
        for sock in [*idle, idle[0]]:  # the second is the one that was used the longest ago
            sock.sendall(request(HEALTH))
            assert read(sock, 36) == FOUND
            time.sleep(0.01)  # its thread waits for more, and knows since when
        assert server.stats()["clients"] == 20
        with client_of(server) as newcomer:
            assert newcomer.stats()["clients"] == 20
            assert read(idle[1], 1) == b"" and "idle" in caplog.text
            for sock in [idle[0], *idle[2:]]:
                sock.sendall(request(HEALTH))
                assert read(sock, 36) == FOUND
        assert server.stats()["refused_clients"] == 0


def test_a_sleeping_client_that_was_dropped_comes_back():
    """Its next request is served over a new connection; where the other was at work just then, its
    put may be lost, and flush() says so."""

    def stored(client, key, data):
        with contextlib.suppress(ConnectionError):
            client.put(key, data)
            client.flush()
            return True

    with (
        running_server(max_clients=1) as server,
        client_of(server) as one,
        client_of(server) as two,
    ):
        for number in range(5):
            assert wait_for(lambda: stored(one, f"{number}", b"1"))
            assert wait_for(lambda: stored(two, f"{number}", b"2"))
            assert one.get(f"{number}")[1] == b"2"


def test_keep_alive_is_on_at_both_ends(monkeypatch):
    """A peer that lost power is found out, by kernels alone. Seen from outside: getsockopt of every
    socket of this process."""
    with running_server() as server, client_of(server) as client:
        client.flush()
        ends = [
            sock
            for sock in gc.get_objects()
            if type(sock) is socket.socket
            and sock.fileno() >= 0
            and connected_to(sock, server.port)
        ]
        assert len(ends) == 2
        for sock in ends:
            assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
            seconds = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
            interval = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
            assert seconds + 9 * interval < 60


def connected_to(sock, port):
    with contextlib.suppress(OSError):
        return port in (sock.getpeername()[1], sock.getsockname()[1])
    return False


def test_no_more_threads(server, caplog, monkeypatch):
    """A client whose thread cannot start is refused, and the next one is served."""
    start = threading.Thread.start
    with monkeypatch.context() as patch, connected(server.port) as before:
        before.sendall(request(HEALTH))
        assert read(before, 36) == FOUND
        patch.setattr(threading.Thread, "start", fail_to_start)
        with connected(server.port) as sock:
            assert read(sock, 1) == b""
        before.sendall(request(HEALTH))
        assert read(before, 36) == FOUND
    assert threading.Thread.start is start and served(server) and "can't start" in caplog.text
    assert server.stats()["refused_clients"] == 1


def fail_to_start(_):
    raise RuntimeError("can't start new thread")


def test_the_log_is_not_flooded(server, caplog):
    with connected(server.port) as sock:
        sock.sendall(request(77, KEY) * 1000)
        assert read(sock, 36000) == MISS * 1000
    assert 1 <= sum("unknown command" in record.message for record in caplog.records) <= 5


# -- addresses


@pytest.mark.parametrize("host, url", [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"),
                                       ("localhost", "localhost"),
                                       ("0.0.0.0", "127.0.0.1"),
                                       pytest.param("", "127.0.0.1")],
)  # fmt: skip
def test_addresses(host, url):
    """LM#2262: IPv6."""
    with running_server(host) as server, RemoteClient(f"lm://{url}:{server.port}") as client:
        client.put(KEY, b"x")
        assert client.get(KEY)[1] == b"x"


def test_a_port_that_is_taken(server):
    with pytest.raises(OSError, match=str(server.port)):
        LMCacheServer("127.0.0.1", server.port, max_bytes=MIB)


@pytest.mark.parametrize(
    "host, port",
    [("no.such.host.invalid", 0), ("1.2.3.4", 0), ("127.0.0.1", 70000), ("127.0.0.1", -1)],
)
def test_addresses_that_cannot_be(host, port):
    with pytest.raises((OSError, ValueError), match="cannot listen"):
        LMCacheServer(host, port, max_bytes=MIB)


@pytest.mark.parametrize(
    "more",
    [{"max_clients": 0}, {"device": "tpu"}, {"max_bytes": 0}]
    + [{"stall_timeout_sec": seconds} for seconds in (0, math.nan, math.inf)],
    ids=str,
)
def test_settings_that_cannot_be(more):
    with pytest.raises(ValueError):
        LMCacheServer("127.0.0.1", 0, **{"max_bytes": MIB} | more)


def test_no_room_for_the_store(monkeypatch):
    def fail(*_, **__):
        raise OSError("out of memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(MemoryError, match="out of memory"):
        LMCacheServer("127.0.0.1", 0, max_bytes=MIB)


@pytest.mark.parametrize("url", ["", "lm://", "lm://host", "lm://:1", "http://h:1", "lm://h:1/x",
                                 "lm://h:x", "lm://h:0",
                                 "lms://h:1", "lm://h:99999", "lm://[::1:5"])  # fmt: skip
def test_urls_that_cannot_be(url):
    with pytest.raises(ValueError):
        RemoteClient(url)


# -- closing


def test_close_twice_while_puts_are_in_flight_and_from_two_threads():
    with running_server() as server, connected(server.port) as half, connected(server.port) as idle:
        half.sendall(request(PUT, KEY, 1000) + bytes(500))
        idle.sendall(request(PUT, b"whole", 3) + b"abc" + request(HEALTH))
        assert read(idle, 36) == FOUND
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            for future in [pool.submit(server.close) for _ in range(3)]:
                future.result()
        server.close()
        assert time.monotonic() - began < 1.5
        assert read(half, 1) == read(idle, 1) == b""
        assert (
            server.stats()["chunks"]
            == server.stats()["bytes_used"]
            == server.stats()["clients"]
            == 0
        )


def test_close_under_load():
    """Clients that put and get meanwhile see errors, none of them anything else, and no wrong
    byte."""
    with running_server() as server:
        began = threading.Barrier(5)

        def work(number):
            payload = bytes([number]) * 200_000
            with client_of(server, retries=0) as client, contextlib.suppress(OSError):
                client.put(f"{number}", payload)
                began.wait(10)
                while True:
                    client.put(f"{number}", payload)
                    found = client.get(f"{number}")
                    assert found is None or found[1] == payload

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(work, number) for number in range(4)]
            began.wait(10)
            server.close()
            for future in futures:
                future.result(10)


def test_the_port_is_free_again_at_once():
    with running_server() as server, client_of(server) as client:
        client.put(KEY, b"x")
        client.flush()
        port = server.port
        server.close()
        with running_server(port=port), RemoteClient(f"lm://127.0.0.1:{port}") as other:
            assert not other.exists(KEY)


def test_an_error_inside_with_closes_all():
    with pytest.raises(KeyError), running_server() as server, client_of(server) as client:
        client.put(KEY, b"x")
        raise KeyError


# -- the client's side of faults


def test_no_server():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    began = time.monotonic()
    with RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=2.0) as client:
        for act in (
            client.list_keys,
            client.flush,
            lambda: client.get(KEY),
            lambda: client.put(KEY, b"x"),
        ):
            with pytest.raises(ConnectionError):
                act()
        assert not client.health()
    assert time.monotonic() - began < 2.0


@pytest.mark.parametrize("reply", [b"", bytes(10), REPLY.pack(200, 1000, 1, 2, 0, 0, 0, 0,
                                                              0) + bytes(10)],
                         ids=["nothing", "half a header", "half a payload"])  # fmt: skip
def test_a_server_that_accepts_and_does_not_answer(reply):
    """A TimeoutError in time, and the next request begins on a fresh connection."""
    with (
        silent_server(reply) as port,
        RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=0.3) as client,
    ):
        for _ in range(2):
            began = time.monotonic()
            with pytest.raises(TimeoutError):
                client.get(KEY)
            assert time.monotonic() - began < 1.0
        assert not client.health() or len(reply) > 36


def test_a_server_that_does_not_read():
    with silent_server() as port, RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=0.3) as client:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            client.put(KEY, bytes(64 * MIB))
        assert time.monotonic() - began < 1.0


@pytest.mark.parametrize("length", [-1, -(2**31)])
def test_a_negative_length_in_a_reply(length):
    with silent_server(REPLY.pack(200, length, 1, 2, 0, 0, 0, 0, 0)) as port:
        with RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=0.3) as client:
            for act in (lambda: client.get(KEY), client.list_keys):
                with pytest.raises((ValueError, OSError)):
                    act()


@pytest.fixture
def wire(server):
    with Proxy(server.port) as made:
        yield made


def cut(wire, server):
    assert wait_for(lambda: server.stats()["clients"])
    wire.cut()
    assert wait_for(lambda: not server.stats()["clients"])


def test_a_broken_connection_is_made_again(server, wire):
    """And flush tells of puts that may be lost: once, and also where health() came between."""
    with RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
        client.put(KEY, b"x")
        cut(wire, server)
        client.put(KEY, b"y")
        assert client.get(KEY)[1] == b"y" and client.health()
        with pytest.raises(ConnectionError, match="1 puts"):
            client.flush()
        client.flush()
        client.put(KEY, b"z")
        client.flush()  # confirmed
        cut(wire, server)
        assert client.get(KEY)[1] == b"z"
        client.flush()


def test_a_put_that_is_sent_again_is_not_lost(server, wire, monkeypatch):
    """The connection breaks under the first try; the second arrives, and flush is content."""
    connect, faults = socket.create_connection, [ConnectionResetError("broken")]

    def connect_or_fail(*arguments, **named):
        if faults:
            raise faults.pop()
        return connect(*arguments, **named)

    with RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
        client.flush()
        cut(wire, server)
        with monkeypatch.context() as patch:
            patch.setattr(socket, "create_connection", connect_or_fail)
            client.put(KEY, b"x")
        client.flush()
        assert client.get(KEY)[1] == b"x" and not faults


def test_a_put_in_pieces_is_never_sent_again_from_its_middle(server, wire):
    """The first piece's memory is used again by then: the stream would go out of step, or hold
    wrong bytes."""
    with RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:

        def pieces():
            yield b"1" * 100
            cut(wire, server)
            yield from [b"2" * 100_000] * 50

        meta = RemoteMeta(100 + 5_000_000, 4, 6, (0, 0, 0, 0))
        with pytest.raises(OSError):
            client.put_many([(KEY, meta, pieces())])
        assert not client.exists(KEY)
        client.put(KEY, b"whole")
        assert client.get(KEY)[1] == b"whole"


@pytest.mark.parametrize("times", [1, 2])
def test_get_many_goes_on_where_the_connection_broke(wire, times):
    """Each chunk is filled whole and once."""
    with RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
        for n in range(40):
            client.put(f"{n}", bytes([n]) * 1000)
        filled, breaks = [], [10, 20][:times]

        def fill(index, meta, receive):
            data = bytearray(meta.length)
            receive(memoryview(data)[:10])
            if index in breaks:
                breaks.remove(index)
                wire.cut()
                raise ConnectionResetError("broken")
            receive(memoryview(data)[10:])
            filled.append((index, bytes(data)))

        client.get_many([f"{n}" for n in range(40)], fill)
        assert filled == [(n, bytes([n]) * 1000) for n in range(40)]


def test_a_fill_that_raises_leaves_the_client_usable(client):
    client.put(KEY, bytes(100_000))
    with pytest.raises(ZeroDivisionError):
        client.get_many([KEY], lambda *_: 1 // 0)
    with pytest.raises(ValueError, match="are left"):
        client.get_many(
            [KEY], lambda _index, _meta, receive: receive(memoryview(bytearray(100_001)))
        )
    assert client.get(KEY)[1] == bytes(100_000)


def test_one_client_in_many_threads(server):
    with client_of(server, timeout_sec=30) as client, ThreadPoolExecutor(8) as pool:

        def work(number):
            for round_ in range(50):
                client.put(f"{number}", bytes([number, round_]) * 500)
                assert client.get(f"{number}")[1] == bytes([number, round_]) * 500

        list(pool.map(work, range(8)))


@pytest.mark.parametrize("act", ["get", "put", "connect"])
def test_close_while_a_call_is_in_flight(act, monkeypatch):
    """The call fails at once, close returns at once, and no connection is left (see conftest)."""
    entered, gate = threading.Event(), threading.Event()
    connect = socket.create_connection

    def slow_connect(*arguments):
        entered.set()
        gate.wait(5)
        return connect(*arguments)

    with silent_server() as port, Proxy(port) as wire:
        client = RemoteClient(f"lm://127.0.0.1:{wire.port}", timeout_sec=20)
        if act == "connect":
            monkeypatch.setattr(socket, "create_connection", slow_connect)

        def call():
            with pytest.raises(OSError):
                client.put(KEY, bytes(64 * MIB)) if act == "put" else client.get(KEY)

        thread = threading.Thread(target=call)
        thread.start()
        assert entered.wait(5) if act == "connect" else wait_for(lambda: wire.accepted)
        began = time.monotonic()
        client.close()
        client.close()
        gate.set()
        thread.join(5)
        assert time.monotonic() - began < 3.0 and not thread.is_alive()
        with pytest.raises(ConnectionError, match="closed"):
            client.get(KEY)


def test_nobody_waits_behind_anothers_call():
    """Each thread has a connection of its own: four that hang take as long as one."""
    with silent_server() as port, RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=0.5) as client:
        with ThreadPoolExecutor(4) as pool:
            began = time.monotonic()
            for future in [pool.submit(client.get, KEY) for _ in range(4)]:
                with pytest.raises(TimeoutError):
                    future.result()
            assert time.monotonic() - began < 1.5


# -- a deadline is for progress


CHUNKS = {f"{number}": bytes([number]) * (32 << 10) for number in range(16)}


def put_chunks(client):
    client.put_many(
        (key, RemoteMeta(len(data), 4, 6, (0, 0, 0, 0)), [data]) for key, data in CHUNKS.items()
    )
    client.flush()


def test_a_slow_wire_is_no_fault(server):
    """LM#1639, LM#4517: 16 chunks of 32 KiB at 400 KB/s take 1.3 s; a second is for a server that
    does not go on."""
    with client_of(server) as near, Proxy(server.port, 400_000) as wire:
        put_chunks(near)
        with RemoteClient(f"lm://127.0.0.1:{wire.port}", timeout_sec=1.0, retries=0) as client:
            began, got = time.monotonic(), {}

            def fill(index, meta, receive):
                got[f"{index}"] = data = bytearray(meta.length)
                receive(memoryview(data))

            client.get_many([*CHUNKS], fill)
            assert got == CHUNKS and time.monotonic() - began > 1.0


def test_three_threads_on_a_slow_wire_each_get_all(server):
    """Nobody's wait for another is the remote's fault: 8 chunks of 32 KiB for each of three at
    400 KB/s for all of them."""
    with client_of(server) as near, Proxy(server.port, 400_000) as wire:
        for number in range(8):
            near.put(f"{number}", bytes([number]) * (32 << 10))
        near.flush()
        with RemoteClient(f"lm://127.0.0.1:{wire.port}", timeout_sec=1.0, retries=0) as client:

            def work(_):
                return [bytes(client.get(f"{number}")[1]) for number in range(8)]

            began = time.monotonic()
            with ThreadPoolExecutor(3) as pool:
                for got in pool.map(work, range(3)):
                    assert got == [bytes([number]) * (32 << 10) for number in range(8)]
            assert time.monotonic() - began > 1.0
            assert wire.accepted == 3


def test_a_lookup_beside_bulk_puts_is_quick(server):
    """It has a connection of its own: it does not stand behind another thread's 2 MiB."""
    with Proxy(server.port) as wire:
        with RemoteClient(f"lm://127.0.0.1:{wire.port}", timeout_sec=5.0) as client:
            client.put(KEY, b"x")
            client.flush()
            began, ended = threading.Event(), threading.Event()

            def bulk():
                def pieces():
                    began.set()
                    for _ in range(32):
                        ended.wait(0.02)
                        yield bytes(1 << 16)

                client.put_many([("bulk", RemoteMeta(2 << 20, 4, 6, (0, 0, 0, 0)), pieces())])
                client.flush()

            with ThreadPoolExecutor(1) as pool:
                future, took = pool.submit(bulk), []
                assert began.wait(5)
                for _ in range(10):
                    start = time.monotonic()
                    assert client.exists(KEY) and not future.done()
                    took.append(time.monotonic() - start)
                ended.set()
                future.result(10)
            assert sorted(took)[5] < 0.05 and client.exists("bulk")


def test_a_server_that_trickles_is_a_timeout():
    """A byte each 0.05 s never stalls, and is no progress either."""
    stop = threading.Event()

    def serve():
        sock = listener.accept()[0]
        with sock, contextlib.suppress(OSError):
            sock.sendall(REPLY.pack(200, 100_000, 4, 6, 0, 0, 0, 0, 0))
            while not stop.wait(0.05):
                sock.sendall(b"x")

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        pool.submit(serve)
        url = f"lm://127.0.0.1:{listener.getsockname()[1]}"
        with RemoteClient(url, timeout_sec=0.4, retries=0) as client:
            began = time.monotonic()
            try:
                with pytest.raises(TimeoutError):
                    client.get(KEY)
            finally:
                stop.set()
            assert time.monotonic() - began < 1.5


# -- what was put, and who hears of it


def test_flush_is_each_threads_own(server, wire):
    """One whose puts may be lost hears of it; one who has put nothing does not."""
    with RemoteClient(f"lm://127.0.0.1:{wire.port}") as client, ThreadPoolExecutor(1) as pool:
        pool.submit(client.flush).result()
        client.put(KEY, b"x")
        assert wait_for(lambda: server.stats()["chunks"] == 1)
        cut(wire, server)
        pool.submit(client.flush).result()
        with pytest.raises(ConnectionError, match="1 puts"):
            client.flush()
        client.flush()


FORK = """
import os, sys
from remote_server import RemoteClient

client = RemoteClient(f"lm://127.0.0.1:{sys.argv[1]}", timeout_sec=10.0)
client.put("both", b"b" * 1000)
client.flush()
child = os.fork()
name = "child" if child == 0 else "parent"
for round_ in range(300):
    data = f"{name} {round_} ".encode() * 50
    client.put(name, data)
    if round_ % 30 == 0:
        client.flush()
    assert client.get(name)[1] == data, "another's bytes"
    assert client.get("both")[1] == b"b" * 1000, "another's bytes"
    assert client.exists_many([name, "none", "both"]) == [True, False, True]
client.flush()
if child == 0:
    sys.stdout.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
print("well")
"""


def test_after_a_fork_each_process_has_its_own_connection(server):
    """RP#234, RP#496: 300 rounds of gets on both sides, over one client: own bytes."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK, f"{server.port}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 0 and run.stdout == "well\n", run.stderr


def test_a_thread_that_ends_closes_its_connection(server):
    """Its place at the server is free: 50 threads one after another are not 50 clients."""
    with client_of(server) as client:
        for number in range(50):
            thread = threading.Thread(target=client.put, args=(f"{number}", b"x"))
            thread.start()
            thread.join()
        client.flush()
        assert wait_for(lambda: server.stats()["clients"] == 1)


@pytest.mark.parametrize("more", [dict(timeout_sec=0), dict(retries=-1)])
def test_client_settings_that_cannot_be(more):
    with pytest.raises(ValueError):
        RemoteClient("lm://h:1", **more)


def test_loggers_are_quiet_by_default():
    """No handler is set up at import: that is the application's."""
    assert not logging.getLogger("lmcache.remote_server").handlers
