"""The offload server and its client: all of a request is stored, or nothing of it; always one
reply, always in time."""

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch
import zmq
from toys import (
    CHUNK_BYTES,
    metadata,
    new_engine,
    put_prompt,
    range_of,
    silent_path,
    threads_named,
    wait_for,
)

from engine import LMCacheEngine, PagedKVCache
from offload_server import (
    OffloadMsg,
    OffloadRetMsg,
    ZMQOffloadClient,
    ZMQOffloadServer,
    offload_path,
)

pack, unpack = msgspec.msgpack.encode, msgspec.msgpack.decode
pytestmark = pytest.mark.usefixtures("ipc_folder")
GOOD = dict(hashes=[1, 2], slot_mapping=range_of(0, 6), offsets=[4, 2])


@pytest.fixture
def engine():
    with new_engine() as made:
        yield made


@pytest.fixture
def client(engine):
    with ZMQOffloadServer(engine, 0), ZMQOffloadClient("toy", 0) as made:
        yield made


@contextlib.contextmanager
def raw_server(engine):
    """A bare REQ socket to a server, as another implementation would have it."""
    with (
        ZMQOffloadServer(engine, 0) as server,
        zmq.Context() as context,
        context.socket(zmq.REQ) as sock,
    ):
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVTIMEO, 5000)
        sock.connect(f"ipc://{server.path}")
        yield sock


def ask(sock, *frames):
    sock.send_multipart(frames)
    (reply,) = sock.recv_multipart()
    return unpack(reply)


def test_the_messages():
    """A msgpack map each; extra keys are ignored, as LMCache's carry a type tag or not."""
    assert unpack(pack(OffloadMsg(**GOOD))) == GOOD and unpack(pack(OffloadRetMsg(True))) == {
        "success": True
    }
    assert unpack(pack(GOOD | {"extra": 1}), type=OffloadMsg) == OffloadMsg(**GOOD)


def test_an_offload(engine, client):
    """offsets are lengths, slot_mapping one slot a token; the same again is true and copies
    nothing."""
    spans = engine.token_database.process_tokens(range_of(0, 16))
    hashes, slots = [span[2] for span in spans], range_of(64, 16)
    assert client.offload(hashes, slots, [4] * 4) and client.offload(hashes, slots, [4] * 4)
    assert engine.lookup(range_of(0, 16)) == 16
    engine.retrieve(range_of(0, 16), slot_mapping=range_of(0, 16))
    assert torch.equal(engine.pages[1][:, 0:4], engine.pages[1][:, 16:20])
    assert engine.stats()["stored_tokens"] == 16


def test_one_that_is_there_and_one_that_is_new(engine, client):
    """MC#2827: true, and one chunk more."""
    assert client.offload([1], range_of(0, 4), [4])
    assert client.offload([1, 2], range_of(0, 8), [4, 4])
    assert engine.stats()["chunks"] == 2


@pytest.mark.parametrize(
    "hashes",
    [[-1, -(2**63)], [2**63, 2**64 - 1], [bytes(range(32)), bytes(32)], [bytes(9), 5]],
    ids=["negative", "from 2**63", "digests", "of both kinds"],
)
def test_hashes_of_every_kind(engine, client, hashes):
    """LM#2998, LM#2999: 32-byte digests, too."""
    assert client.offload(hashes, range_of(0, 8), [4, 4])
    assert engine.lookup(hashes=hashes, offsets=[4, 4]) == 8


def test_sha256_cbor_by_client(monkeypatch):
    """LM#2998, LM#2999: what a client offloads is found by its tokens."""
    pytest.importorskip("cbor2")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    with new_engine(pre_caching_hash_algorithm="sha256_cbor") as engine:
        with ZMQOffloadServer(engine, 0), ZMQOffloadClient("toy", 0) as client:
            spans = engine.token_database.process_tokens(range_of(0, 16))
            assert client.offload([span[2] for span in spans], range_of(0, 16), [4] * 4)
            assert engine.lookup(range_of(0, 16)) == 16


def test_what_goes_over_the_wire():
    """LMCache's three fields as they are, and a deadline, which it ignores."""
    with silent_path(offload_path("toy", 0)) as server, ThreadPoolExecutor(1) as pool:
        with ZMQOffloadClient("toy", 0, timeout_ms=200) as client:
            began = time.monotonic()
            call = pool.submit(client.offload, **GOOD)
            *_, message = server.recv_multipart()
            assert not call.result(5)
    message = unpack(message)
    assert began < message.pop("deadline") - 0.2 < time.monotonic() and message == GOOD


def test_all_empty(engine, client):
    """V#28950, V#55503: true, and nothing stored."""
    assert client.offload([], [], []) and engine.stats()["chunks"] == 0


REFUSED = {
    "2 hashes and 3 offsets": dict(offsets=[4, 1, 1]), "1 offset": dict(offsets=[6]),
    "no offsets": dict(offsets=[]),
    "a negative slot": dict(slot_mapping=[0, 1, 2, 3, 4, -1]),
    "too far a slot": dict(slot_mapping=[256, 1, 2, 3, 4, 5]),
    "a huge slot": dict(slot_mapping=[2**63, 1, 2, 3, 4, 5]),
    "more tokens than slots": dict(slot_mapping=range_of(0, 5)),
    "fewer tokens than slots": dict(slot_mapping=range_of(0, 7)),
    "an offset of 0": dict(offsets=[6, 0]),
    "a negative offset": dict(offsets=[8, -2]), "a huge offset": dict(offsets=[2**63, 2]),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused_and_nothing_is_stored(engine, client, name, caplog):
    """V#28950, V#55503. The reason is logged."""
    assert not client.offload(**GOOD | REFUSED[name])
    assert engine.stats()["bytes_used"] == 0 and "refused" in caplog.text
    assert client.offload(**GOOD)


MALFORMED = {
    "byte 0xc1": [b"\xc1"], "two frames": [pack(GOOD), b""], "empty": [b""], "a list": [pack([1])],
    "nil": [pack(None)],
    "a key less": [pack({"hashes": [], "offsets": []})],
    "floats": [pack(GOOD | {"hashes": [1.5, 2]})],
    "bytes": [pack(GOOD | {"hashes": [b"1", b"2"]})], "cut off": [pack(GOOD)[:-1]],
    "a bool": [pack(GOOD | {"offsets": True})],
    "deep": [b"\x91" * 100_000], "a huge list announced": [b"\x83\xa6hashes\xdd\xff\xff\xff\xff"],
}  # fmt: skip


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_request_is_answered_false_and_the_next_is_right(engine, name, caplog):
    """LM#4985, LM#4986."""
    with raw_server(engine) as sock:
        for frames, success in ((MALFORMED[name], False), ([pack(GOOD)], True)) * 2:
            assert ask(sock, *frames) == {"success": success}
    assert "offload-server refused a request" in caplog.text


@pytest.mark.parametrize(
    "fault",
    [KeyError("k"), MemoryError(), zmq.ZMQError(zmq.EFSM), zmq.Again(), ValueError("v")],
    ids=repr,
)
def test_an_engine_that_raises_is_false_and_the_next_is_right(engine, fault, monkeypatch):
    """LM#4985, LM#4986: LMCache sends no reply, and its thread ends."""

    def fail(**_):
        raise fault

    with raw_server(engine) as sock:
        for _ in range(2):
            with monkeypatch.context() as patch:
                patch.setattr(engine, "store", fail)
                assert ask(sock, pack(GOOD)) == {"success": False}
            assert ask(sock, pack(GOOD)) == {"success": True}


def test_what_the_engine_cannot_take_is_false(monkeypatch):
    """No room, all pinned, a copy that fails, no paged cache, a closed engine: nothing of it is
    stored."""
    with new_engine(4) as engine, ZMQOffloadServer(engine, 0) as server:
        put_prompt(engine, range_of(0, 16))
        engine.lookup(range_of(0, 16), lookup_id="id", pin=True)
        assert not server.offload([1], range_of(0, 4), [4])
        engine.lookup_unpin("id")
        assert not server.offload([1, 2, 3, 4, 5], range_of(0, 20), [4] * 5)
        with monkeypatch.context() as patch:
            patch.setattr(PagedKVCache, "gather", lambda *_: 1 // 0)
            assert not server.offload([1], range_of(0, 4), [4])
        assert engine.lookup(hashes=[1], offsets=[4]) == 0
        assert engine.stats()["bytes_used"] == engine.stats()["chunks"] * CHUNK_BYTES
        assert server.offload([1], range_of(0, 4), [4])
        engine.close()
        assert not server.offload([2], range_of(0, 4), [4])
    with LMCacheEngine(engine.config, metadata()) as bare, ZMQOffloadServer(bare, 0) as server:
        assert not server.offload([1], range_of(0, 4), [4])


@pytest.mark.parametrize(
    "arguments", [([1], 5, [4]), (7, [1], [1]), (None, None, None), ("a", "b", "c")]
)
def test_called_directly_it_does_not_raise_either(engine, arguments):
    with ZMQOffloadServer(engine, 0) as server:
        assert not server.offload(*arguments)


@pytest.mark.parametrize(
    "arguments", [([2**64], [1], [1]), ([object()], [1], [1]), ([1], [1], [2**65])]
)
def test_what_cannot_be_sent_is_refused_at_the_client(client, arguments):
    with pytest.raises(ValueError):
        client.offload(*arguments)


def test_a_refusal_is_logged_by_the_client_too(engine, client, caplog):
    assert not client.offload([1, 2], [0, 1, 2, 3, 4, -1], [4, 2])
    texts = [record.getMessage() for record in caplog.records]
    assert any("slot -1 (padding)" in text for text in texts)  # the server's
    assert any("2 chunks refused" in text for text in texts)  # the client's


# -- time


@pytest.mark.parametrize("place", ["in line", "at work"])
def test_what_its_client_has_given_up_is_not_stored_later(place, engine, monkeypatch):
    """The pages are another's by then: nothing of them goes under the first one's hashes."""
    entered, gate, store = threading.Event(), threading.Event(), engine.store
    monkeypatch.setattr(
        engine, "store", lambda **more: entered.set() or gate.wait(5) and store(**more)
    )
    with ZMQOffloadServer(engine, 0), ThreadPoolExecutor(1) as pool:
        with (
            ZMQOffloadClient("toy", 0, timeout_ms=200) as hasty,
            ZMQOffloadClient("toy", 0) as patient,
        ):
            if place == "in line":
                call = pool.submit(patient.offload, [1], range_of(0, 4), [4])
                assert entered.wait(5)
            assert not hasty.offload([2, 3], range_of(0, 8), [4, 4])
            gate.set()
            if place == "in line":
                assert call.result(5)
            assert patient.offload([4], range_of(0, 4), [4])  # answered after the hasty one's
            assert engine.lookup(hashes=[2], offsets=[4]) == 0
            assert engine.lookup(hashes=[3], offsets=[4]) == 0
            assert engine.stats()["chunks"] == (2 if place == "in line" else 1)
            assert hasty.offload([2, 3], range_of(0, 8), [4, 4])


def test_a_copy_that_takes_longer_than_the_client_waits(engine, monkeypatch):
    """Late by the time it is done: not stored."""
    gather = PagedKVCache.gather

    def slow(*arguments):
        gather(*arguments)
        time.sleep(0.4)

    with ZMQOffloadServer(engine, 0), ZMQOffloadClient("toy", 0, timeout_ms=200) as client:
        with monkeypatch.context() as patch:
            patch.setattr(PagedKVCache, "gather", slow)
            assert not client.offload([1], range_of(0, 4), [4])
        assert wait_for(lambda: client.offload([2], range_of(0, 4), [4]))
        assert engine.lookup(hashes=[1], offsets=[4]) == 0 and engine.stats()["in_use"] == 0


def test_no_server_and_closing():
    """False in time; close at once, twice."""
    with ZMQOffloadClient("toy", 0, timeout_ms=200) as client:
        began = time.monotonic()
        assert not client.offload(**GOOD)
        client.close()
        client.close()
        assert not client.offload(**GOOD) and time.monotonic() - began < 1.0
    with pytest.raises(ValueError, match="timeout_ms"):
        ZMQOffloadClient("toy", 0, timeout_ms=0)


def test_a_late_reply_is_never_anothers(engine, monkeypatch):
    gate, store = threading.Event(), engine.store
    monkeypatch.setattr(engine, "store", lambda **more: gate.wait(5) and store(**more))
    with ZMQOffloadServer(engine, 0), ZMQOffloadClient("toy", 0, timeout_ms=300) as client:
        assert not client.offload(**GOOD)
        gate.set()
        assert not client.offload([1], [0], [4]) and client.offload([1], range_of(0, 4), [4])


def test_one_client_in_8_threads(engine, client):
    def work(seed):
        return [client.offload([seed], range_of(0, 4), [4 + round_ % 2]) for round_ in range(20)]

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(work, range(8))) == [[True, False] * 10] * 8


def test_closing_while_a_request_is_in_flight():
    with silent_path(offload_path("toy", 0)) as server, ThreadPoolExecutor(2) as pool:
        with ZMQOffloadClient("toy", 0, timeout_ms=20_000) as client:
            calls = [pool.submit(client.offload, **GOOD) for _ in range(2)]
            for _ in calls:
                server.recv_multipart()
            began = time.monotonic()
            client.close()
            assert [call.result(5) for call in calls] == [False, False]
            assert time.monotonic() - began < 1.0


def test_closing_a_server_while_it_works(engine, monkeypatch):
    """LMCache's close aborts the process in most runs."""
    entered, gate, store = threading.Event(), threading.Event(), engine.store
    monkeypatch.setattr(
        engine, "store", lambda **more: entered.set() or gate.wait(5) and store(**more)
    )
    with (
        ZMQOffloadServer(engine, 0) as server,
        ZMQOffloadClient("toy", 0) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        call = pool.submit(client.offload, **GOOD)
        assert entered.wait(5)
        closes = [pool.submit(server.close) for _ in range(2)]
        gate.set()
        for close in closes:
            close.result(5)
        client.close()
        call.result(5)
        server.close()
        assert not threads_named("offload-server")
    assert engine.lookup(hashes=[1, 2], offsets=[4, 2]) == 6


def test_clients_that_leave(engine):
    with ZMQOffloadServer(engine, 0) as server, zmq.Context() as context:
        for _ in range(50):
            with context.socket(zmq.REQ) as sock:
                sock.set(zmq.LINGER, 100)
                sock.connect(f"ipc://{server.path}")
                sock.send(pack(GOOD))
        with ZMQOffloadClient("toy", 0) as client:
            assert client.offload([9], range_of(0, 4), [4])
