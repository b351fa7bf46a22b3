"""The TCP server and its client: the bytes on the wire, what is kept and what goes, and peers that
misbehave."""

import contextlib
import logging
import math
import os
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import client_of, connected, read, request, running_server, silent_server, wait_for

from engine import CacheEngineKey, ChunkStore, MemoryFormat, RemoteMeta
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

PUT, GET, EXIST, LIST, HEALTH, STATS = ClientCommand
MIB = 1 << 20
KEY = "m@1@0@abc@bfloat16"


@pytest.fixture
def server():
    with running_server(stall_timeout_sec=0.3) as running:
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
    assert message.serialize() == wanted and len(wanted) == ClientMetaMessage.packlength() == 186
    assert ClientMetaMessage.deserialize(wanted) == ClientMetaMessage(
        1, KEY.encode(), 64, 1, 3, (2, 1, 4, 4)
    )
    assert (
        numbers.split()[0] in ClientMetaMessage.__doc__
        and b"m@1@0@abc@b".hex() in ClientMetaMessage.__doc__
    )


def test_a_reply_header_by_hand():
    """The location comes after the shape here, and before it in a request."""
    message = ServerMetaMessage(200, 64, 1, 3, (2, 1, 4, 5), 2)
    wanted = struct.pack("<9i", 200, 64, 1, 3, 2, 1, 4, 5, 2)
    assert message.serialize() == wanted and ServerMetaMessage.deserialize(wanted) == message
    assert ServerMetaMessage.packlength() == len(wanted) == 36
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
        sock.sendall(request(command, KEY))
        assert read(sock, 36) == MISS
    assert get(sock, KEY)[1] == b"abc"


def test_a_reservation_that_raises_leaves_the_stream_in_step(server, sock, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.store, "reserve", lambda _: 1 // 0)
        sock.sendall(request(PUT, KEY, 3) + b"abc" + request(EXIST, KEY))
        assert read(sock, 36) == MISS
    sock.sendall(request(PUT, KEY, 3) + b"abc")
    assert get(sock, KEY)[1] == b"abc"


def test_health_with_any_key(sock):
    """PS#1057: LMCache's server ends the connection of a blank one."""
    for key in (b"", b"any@1@0@0@half", b"\xff"):
        sock.sendall(request(HEALTH, key))
        assert read(sock, 36) == FOUND


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
    stats = client.stats()
    assert stats["evictions"] == 97 and stats["rejected"] == 1


@pytest.mark.parametrize("length", [3 * MIB, 2**31 - 1])
def test_who_announces_and_sends_nothing_evicts_nobody(server, client, sock, length):
    client.put(KEY, bytes(3 * MIB))
    client.flush()
    sock.sendall(request(PUT, b"other", length))
    assert wait_for(lambda: server.stats()["clients"] == 1)  # stalled, and gone
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


def test_the_value_being_replaced_is_the_last_to_go_for_its_successor(server, client, sock):
    for key in "abcd":
        client.put(key, bytes(MIB))
    client.flush()
    sock.sendall(request(PUT, b"a", MIB) + b"x")
    assert wait_for(lambda: server.stats()["evictions"] == 1)
    assert client.exists_many("abcd") == [True, False, True, True]


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
    assert wait_for(lambda: server.stats()["clients"] == 1)
    assert client.exists(KEY) == bool(before)
    assert before is None or client.get(KEY)[1] == before
    assert server.stats()["bytes_used"] == (64 if before else 0)


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
        assert all(chunk.refs == 0 for chunk in large.store._chunks.values())
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
        assert wait_for(lambda: server.stats()["clients"] == 1)
    assert "Traceback" not in caplog.text


def test_max_clients(caplog):
    """Further ones are closed at once, with a log line, and served when there is room."""
    with running_server(max_clients=2) as server, connected(server.port) as one:
        with connected(server.port) as two, connected(server.port) as three:
            for sock in (one, two):
                sock.sendall(request(HEALTH))
                assert read(sock, 36) == FOUND
            assert read(three, 1) == b""
            assert "max_clients" in caplog.text and server.stats()["refused_clients"] == 1
        assert wait_for(lambda: server.stats()["clients"] == 1)
        assert served(server)


def test_no_more_threads(server, caplog, monkeypatch):
    start = threading.Thread.start
    with monkeypatch.context() as patch:
        patch.setattr(
            threading.Thread,
            "start",
            lambda self: 1 // 0 if self.name != "client" else fail_to_start(),
        )
        with connected(server.port) as sock:
            assert read(sock, 1) == b""
    assert threading.Thread.start is start and served(server) and "can't start" in caplog.text


def fail_to_start():
    raise RuntimeError("can't start new thread")


def test_the_log_is_not_flooded(server, caplog):
    with connected(server.port) as sock:
        sock.sendall(request(77, KEY) * 1000)
        assert read(sock, 36000) == MISS * 1000
    assert 1 <= sum("unknown command" in record.message for record in caplog.records) <= 5


# -- addresses


@pytest.mark.parametrize("host, url", [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]"),
                                       ("localhost", "localhost"),
                                       ("0.0.0.0", "127.0.0.1"), ("", "127.0.0.1")])  # fmt: skip
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
    def fail(self, size):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(ChunkStore, "_allocate", fail)
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


def test_a_broken_connection_is_made_again(server):
    """And flush tells of puts that may be lost: once, and also where health() came between."""
    with client_of(server) as client:
        client.put(KEY, b"x")
        drop_clients(server)
        client.put(KEY, b"y")
        assert client.get(KEY)[1] == b"y" and client.health()
        with pytest.raises(ConnectionError, match="1 puts"):
            client.flush()
        client.flush()
        client.put(KEY, b"z")
        client.flush()  # confirmed
        drop_clients(server)
        assert client.get(KEY)[1] == b"z"
        client.flush()


def drop_clients(server):
    assert wait_for(lambda: server.stats()["clients"])
    for sock in list(server._clients):
        sock.shutdown(socket.SHUT_RDWR)
    assert wait_for(lambda: not server.stats()["clients"])


def test_a_put_that_is_sent_again_is_not_lost(server, monkeypatch):
    """The connection breaks under the first try; the second arrives, and flush is content."""
    with client_of(server) as client:
        client.flush()
        tries = iter([ConnectionResetError("broken"), None])
        real = client._connected

        def connected_once(deadline):
            if error := next(tries, None):
                raise error
            return real(deadline)

        monkeypatch.setattr(client, "_connected", connected_once)
        client.put(KEY, b"x")
        client.flush()
        assert client.get(KEY)[1] == b"x"


def test_a_put_in_pieces_is_never_sent_again_from_its_middle(server, monkeypatch):
    """The first piece's memory is used again by then: the stream would go out of step, or hold
    wrong bytes."""
    with client_of(server) as client:

        def pieces():
            yield b"1" * 100
            drop_clients(server)
            yield from [b"2" * 100_000] * 50

        meta = RemoteMeta(100 + 5_000_000, 4, 6, (0, 0, 0, 0))
        with pytest.raises(OSError):
            client.put_many([(KEY, meta, pieces())])
        assert not client.exists(KEY)
        client.put(KEY, b"whole")
        assert client.get(KEY)[1] == b"whole"


@pytest.mark.parametrize("times", [1, 2])
def test_get_many_goes_on_where_the_connection_broke(server, times):
    """Each chunk is filled whole and once."""
    with client_of(server) as client:
        for n in range(40):
            client.put(f"{n}", bytes([n]) * 1000)
        filled, breaks = [], [10, 20][:times]

        def fill(index, meta, receive):
            data = bytearray(meta.length)
            receive(memoryview(data)[:10])
            if index in breaks:
                breaks.remove(index)
                client._sock.close()
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

    with silent_server() as port:
        client = RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=20)
        if act == "connect":
            monkeypatch.setattr(socket, "create_connection", slow_connect)

        def call():
            with pytest.raises(OSError):
                client.put(KEY, bytes(64 * MIB)) if act == "put" else client.get(KEY)

        thread = threading.Thread(target=call)
        thread.start()
        assert entered.wait(5) if act == "connect" else wait_for(lambda: client._sock is not None)
        began = time.monotonic()
        client.close()
        client.close()
        gate.set()
        thread.join(5)
        assert time.monotonic() - began < 3.0 and not thread.is_alive() and client._sock is None
        with pytest.raises(ConnectionError, match="closed"):
            client.get(KEY)


def test_waiting_behind_anothers_call_ends_in_time():
    with silent_server() as port, RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=0.5) as client:
        with ThreadPoolExecutor(4) as pool:
            began = time.monotonic()
            for future in [pool.submit(client.get, KEY) for _ in range(4)]:
                with pytest.raises(TimeoutError):
                    future.result()
            assert time.monotonic() - began < 1.5


@pytest.mark.parametrize("more", [dict(timeout_sec=0), dict(retries=-1)])
def test_client_settings_that_cannot_be(more):
    with pytest.raises(ValueError):
        RemoteClient("lm://h:1", **more)


def test_loggers_are_quiet_by_default():
    """No handler is set up at import: that is the application's."""
    assert not logging.getLogger("lmcache.remote_server").handlers
