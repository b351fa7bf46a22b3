"""The lookup server and its client: one answer to every request, in time, and never another's."""

import contextlib
import fcntl
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
import zmq
from toys import (
    ROOT,
    config,
    metadata,
    new_engine,
    put_prompt,
    range_of,
    silent_path,
    threads_named,
    wait_for,
)

import lookup
from engine import locked, make_rpc_folder
from lookup import LMCacheLookupClient, LMCacheLookupServer, lookup_path
from offload_server import ZMQOffloadClient, ZMQOffloadServer, offload_path

PROMPT = list(range(100, 116))
pack = msgspec.msgpack.encode
pytestmark = pytest.mark.usefixtures("ipc_folder")


class FakeEngine:
    """Answers with `answer(number of this lookup)`, a number or an exception, and remembers what it
    was asked."""

    def __init__(self, answer=lambda number: 4, **changes):
        self.config, self.answer, self.asked = config(**changes), answer, []

    def lookup(self, **arguments):
        self.asked.append(arguments)
        result = self.answer(len(self.asked))
        if isinstance(result, BaseException):
            raise result
        return result


def client_for(world_size=1, timeout_ms=5000, **changes):
    ranks = changes.pop("ranks", None)
    changes = (
        dict(world_size=world_size, kv_shape=(2, 1 if changes.get("use_mla") else 2, 4, 2, 4))
        | changes
    )
    return LMCacheLookupClient(
        config(lookup_timeout_ms=timeout_ms, lookup_server_worker_ids=ranks), metadata(**changes)
    )


@contextlib.contextmanager
def servers(*engines, **changes):
    """A lookup server for each rank."""
    with contextlib.ExitStack() as stack:
        metas = [
            metadata(world_size=len(engines), worker_id=rank, **changes)
            for rank in range(len(engines))
        ]
        yield [
            stack.enter_context(LMCacheLookupServer(*pair))
            for pair in zip(engines, metas, strict=True)
        ]


@contextlib.contextmanager
def raw(path, kind=zmq.REQ):
    """A bare ZMQ socket, as another implementation would have it."""
    with zmq.Context() as context, context.socket(kind) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVTIMEO, 5000)
        sock.connect(f"ipc://{path}")
        yield sock


def request(tokens=PROMPT, lookup_id=b"id", configs=b""):
    with new_engine() as engine:
        spans = engine.token_database.process_tokens(tokens)
    return [pack([span[2] for span in spans]), pack([4] * len(spans)), lookup_id, configs]


# -- what is asked and answered


def test_a_lookup():
    """The answer is the engine's, pinned under the id, and remembered; a prompt of no full chunk is
    no question."""
    with new_engine() as engine, servers(engine), client_for() as client:
        put_prompt(engine, PROMPT)
        assert client.lookup_cache("a") == -1
        assert client.lookup([*PROMPT, 1], "a") == 16
        assert client.lookup(PROMPT[:8] + [0] * 8, "b") == 8
        assert client.lookup([0] * 16, "c") == 0
        assert [client.lookup_cache(name) for name in "abc"] == [16, 8, 0]
        assert engine.stats()["pinned_chunks"] == 6
        client.clear_lookup_status("a")
        client.clear_lookup_status("never")
        assert client.lookup_cache("a") == -1 and client.supports_producer_reuse()


@pytest.mark.parametrize("tokens", [[], [1] * 3, torch.tensor([], dtype=torch.int64)])
def test_a_prompt_without_a_full_chunk_is_answered_without_asking(tokens):
    """LM#2061: 0, nothing pinned, and nobody need be there."""
    with client_for() as client:
        began = time.monotonic()
        assert client.lookup(tokens, "id") == 0
        assert time.monotonic() - began < 0.5


def test_the_frames():
    """[hashes, lengths, id, configs as JSON or nothing], and 4 bytes big-endian back."""
    engine = FakeEngine(lambda number: 0x01020304)
    with servers(engine) as (server,), raw(server.path) as sock:
        sock.send_multipart(
            [
                pack([-1, 2**64 - 1, b"\0" * 32]),
                pack([4, 4, 2]),
                "ü".encode(),
                b'{"lmcache.tag.a": "b"}',
            ]
        )
        assert sock.recv_multipart() == [b"\1\2\3\4"]
    configs = {"lmcache.tag.a": "b"}
    wanted = dict(
        hashes=[-1, 2**64 - 1, bytes(32)],
        offsets=[4, 4, 2],
        lookup_id="ü",
        pin=True,
        request_configs=configs,
    )
    assert engine.asked == [wanted]


@pytest.mark.parametrize(
    "tokens", [PROMPT, tuple(PROMPT), torch.tensor(PROMPT)], ids=["list", "tuple", "tensor"]
)
def test_blending_sends_tokens(tokens):
    engine = FakeEngine(lambda number: 5, enable_blending=True)
    with servers(engine):
        extra = {"blend_special_token_ids": [9]}
        with LMCacheLookupClient(
            config(enable_blending=True, extra_config=extra), metadata()
        ) as client:
            assert client.lookup(tokens, "id", {"a": 1}) == 5
            assert client.lookup([], "id") == 0
            for bad in ([1.5], ["a"], [None], torch.ones(2)):
                with pytest.raises(ValueError):
                    client.lookup(bad, "id")
    assert engine.asked == [dict(tokens=PROMPT, lookup_id="id", pin=True, request_configs={"a": 1})]


def test_tags_travel():
    with new_engine() as engine, servers(engine), client_for() as client:
        put_prompt(engine, PROMPT, request_configs={"lmcache.tag.user": "ann"})
        assert client.lookup(PROMPT, "a", {"lmcache.tag.user": "ann"}) == 16
        assert (
            client.lookup(PROMPT, "b", {"lmcache.tag.user": "bob"})
            == client.lookup(PROMPT, "c")
            == 0
        )


@pytest.mark.parametrize(
    "hashes", [[bytes(range(32)), bytes(32)], [-1, -(2**63)], [2**63, 2**64 - 1]]
)
def test_hashes_of_every_kind(hashes):
    """LM#2997, VA#13602: the same as asking the engine directly."""
    with new_engine() as engine, servers(engine), client_for() as client:
        engine.store(hashes=hashes, offsets=[4, 4], slot_mapping=range_of(0, 8))
        client.token_database.process_tokens = lambda _: [(0, 4, hashes[0]), (4, 8, hashes[1])]  # type: ignore
        assert client.lookup([], "id") == engine.lookup(hashes=hashes, offsets=[4, 4]) == 8
        client.token_database.process_tokens = lambda _: [(0, 4, 2**64)]  # type: ignore
        with pytest.raises(ValueError, match="hashes"):
            client.lookup([], "id")


@pytest.mark.parametrize("arguments", [("abcd", "id"), ([1.5] * 4, "id"), (PROMPT, 5),
                                       (PROMPT, "\ud800"),
                                       (PROMPT, "id", {"a": object()})], ids=str)  # fmt: skip
def test_what_is_no_question_is_refused_before_it_is_sent(arguments):
    engine = FakeEngine()
    with servers(engine), client_for() as client:
        with pytest.raises(ValueError):
            client.lookup(*arguments)
        assert client.lookup(PROMPT, "id") == 4 and len(engine.asked) == 1


def test_the_envelope_comes_back_as_it_was():
    """A DEALER, and one behind a proxy; and one that sends no delimiter at all is answered too."""
    with servers(FakeEngine()) as (server,), raw(server.path, zmq.DEALER) as sock:
        for envelope in ([b""], [b"hop", b"way", b""]):
            sock.send_multipart([*envelope, *request()])
            assert sock.recv_multipart() == [*envelope, b"\0\0\0\4"]
        sock.send_multipart([b"no delimiter"])
        assert sock.recv_multipart()[-1] == bytes(4)


# -- bad requests, bad engines

BAD = {
    "one frame": [b"x"], "nothing": [b""], "five frames": [b"1", b"2", b"3", b"4", b"5"],
    "byte 0xc1": [b"\xc1", pack([4]), b"id", b""],
    "an id that is not UTF-8": [pack([1]), pack([4]), b"\xff", b""],
    "broken JSON": [pack([1]), pack([4]), b"id", b"{"],
    "JSON of another kind": [pack([1]), pack([4]), b"id", b"[7]"],
    "deep JSON": [pack([1]), pack([4]), b"id", b"[" * 100_000],
    "deep": [b"\x91" * 100_000, pack([4]), b"id", b""],
    "other lengths": [pack([1, 2]), pack([4]), b"id", b""],
    "a length of 0": [pack([1]), pack([0]), b"id", b""],
    "floats": [pack([1.5]), pack([4]), b"id", b""], "a map": [pack({}), pack([4]), b"id", b""],
    "cut off": [pack([1, 2])[:-1], pack([4, 4]), b"id", b""],
    "a huge list announced": [b"\xdd\xff\xff\xff\xff", pack([4]), b"id", b""],
    "no id": [pack([1]), pack([4])], "empty hash": [pack([b""]), pack([4]), b"id", b""],
    "a digest of 8 bytes": [pack([bytes(8)]), pack([4]), b"id", b""],
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_answered_0_and_the_next_is_right(name, caplog):
    """LM#4765, LM#4985, VA#14147: exactly one reply each, nothing pinned, and the thread lives."""
    with new_engine() as engine, servers(engine) as (server,), raw(server.path) as sock:
        put_prompt(engine, PROMPT)
        for frames, hits in ((BAD[name], 0), (request(), 16)) * 2:
            sock.send_multipart(frames)
            assert sock.recv_multipart() == [hits.to_bytes(4, "big")]
        assert "lookup-server refused a request" in caplog.text
        engine.lookup_unpin("id")
        assert engine.stats()["pins"] == 0


@pytest.mark.parametrize(
    "result",
    [KeyError("k"), MemoryError(), zmq.ZMQError(zmq.EFSM), zmq.Again(), TimeoutError(), -1, 2**32,
     None, 1.5, "4"],
    ids=repr,
)  # fmt: skip
def test_an_engine_that_fails_is_0_and_the_next_is_right(result):
    """A result that is not in 0..2**32-1 too; each of these kills LMCache's thread for good."""
    with servers(FakeEngine(lambda number: result if number % 2 else 8)), client_for() as client:
        assert [client.lookup(PROMPT, "id") for _ in range(4)] == [0, 8, 0, 8]


def test_the_log_is_not_flooded(caplog):
    with servers(FakeEngine(lambda number: KeyError("k"))), client_for() as client:
        for _ in range(100):
            client.lookup(PROMPT, "id")
    assert 1 <= len(caplog.records) <= 4


def test_a_hundred_clients_that_leave():
    """LM#2432."""
    with new_engine() as engine, servers(engine) as (server,), client_for() as client:
        put_prompt(engine, PROMPT)
        frames = request()
        with zmq.Context() as context:
            for _ in range(100):
                with context.socket(zmq.REQ) as sock:
                    sock.set(zmq.LINGER, 100)
                    sock.connect(f"ipc://{server.path}")
                    sock.send_multipart(frames)
        assert client.lookup(PROMPT, "id") == 16


# -- ranks


def test_the_smallest_answer_counts(caplog):
    """LM#1467, LM#1379: 512 and 256 answer 256, with a warning; after unpin no rank holds a pin."""
    with new_engine(200) as one, new_engine(200) as two, servers(one, two), client_for(2) as client:
        put_prompt(one, tokens := list(range(256)))
        put_prompt(two, tokens[:128])
        assert client.lookup(tokens, "id") == 128
        assert "[256, 128]" in caplog.text
        for engine in (one, two):
            assert engine.stats()["pinned_chunks"] > 0
            engine.lookup_unpin("id")
            assert engine.stats()["pins"] == 0


def test_one_rank_is_silent(caplog):
    """One deadline for all ranks together, not one each."""
    with new_engine() as engine:
        put_prompt(engine, PROMPT)
        with servers(engine), client_for(4, timeout_ms=300) as client:
            began = time.monotonic()
            assert client.lookup(PROMPT, "id") == 0 and client.lookup_cache("id") == -1
            assert 0.2 < time.monotonic() - began < 0.8 and "no server at" in caplog.text
            engine.lookup_unpin("id")
            assert engine.stats()["pins"] == 0


def test_mla_asks_rank_0_alone():
    """LM#919, LM#1619: tp=4, a server on rank 0 only: its count, without a wait. Or the ranks that
    the config says."""
    with servers(FakeEngine(lambda number: 12)), client_for(4, use_mla=True) as client:
        began = time.monotonic()
        assert client.lookup(PROMPT, "id") == 12 and time.monotonic() - began < 1.0
    with servers(*[FakeEngine(lambda number, rank=rank: 4 * rank) for rank in range(4)]):
        for ranks, hits in ((None, 0), ([], 0), ([1, 3], 4), ([3], 12)):
            with client_for(4, ranks=ranks) as client:
                assert client.lookup(PROMPT, "id") == hits


def test_engine_ids_and_services_have_paths_of_their_own():
    """LM#1165, LM#1122: engine A is full and B empty; lookup beside offload."""
    with new_engine() as full, new_engine(meta=dict(engine_id="b")) as empty:
        put_prompt(full, PROMPT)
        with (
            servers(full),
            servers(empty, engine_id="b"),
            client_for() as a,
            client_for(engine_id="b") as b,
        ):
            with ZMQOffloadServer(full, 0), ZMQOffloadServer(empty, 0):
                assert (a.lookup(PROMPT, "id"), b.lookup(PROMPT, "id")) == (16, 0)


@pytest.mark.parametrize("length", [60, 120])
def test_both_ends_meet_on_a_long_path(length, tmp_path, monkeypatch):
    """LM#3529: a base folder of 120 characters and a UUID."""
    folder = f"/tmp/{uuid.uuid4().hex}".ljust(length, "x")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", folder)
    engine_id = str(uuid.uuid4())
    with (
        servers(FakeEngine(), engine_id=engine_id) as (server,),
        client_for(engine_id=engine_id) as client,
    ):
        assert client.lookup(PROMPT, "id") == 4
    assert not os.path.exists(server.path)
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(folder)


# -- time


def test_a_late_reply_is_never_anothers():
    """LM#1929, LM#2020, LM#3766: the handler sleeps past the timeout once: 0, then the true
    count."""
    slow = threading.Event()

    def answer(number):
        if number == 1:
            slow.wait(5)
            return 111
        return 8

    with servers(FakeEngine(answer)), client_for(timeout_ms=200) as client:
        assert client.lookup(PROMPT, "x") == 0 and client.lookup_cache("x") == -1
        slow.set()
        assert client.lookup(PROMPT, "x") == 8 and client.lookup(PROMPT, "y") == 8


def test_who_has_given_up_leaves_no_pin():
    """The server is busy; three clients time out, one with its request at work, two in line. What
    another client asks for at last stays pinned."""
    gate, entered = threading.Event(), threading.Event()
    with new_engine() as engine, contextlib.ExitStack() as stack:
        put_prompt(engine, PROMPT)
        find = engine.lookup
        engine.lookup = lambda **more: entered.set() or gate.wait(5) and find(**more)  # type: ignore
        stack.enter_context(servers(engine))
        clients = [stack.enter_context(client_for(timeout_ms=200)) for _ in range(3)]
        pool = stack.enter_context(ThreadPoolExecutor(3))
        calls = [pool.submit(clients[0].lookup, PROMPT, "0")]
        assert entered.wait(5)
        calls += [pool.submit(clients[number].lookup, PROMPT, f"{number}") for number in (1, 2)]
        assert [call.result(5) for call in calls] == [0, 0, 0]
        gate.set()
        with client_for() as patient:
            assert patient.lookup(PROMPT, "patient") == 16  # answered after the others
        assert wait_for(lambda: engine.stats()["pins"] == 1)
        engine.lookup_unpin("patient")
        assert engine.stats()["pins"] == engine.stats()["in_use"] == 0
        assert engine.stats()["lookups"] > 1


def test_who_asks_again_after_a_timeout_keeps_its_pin():
    """Under the same id: what the first one left is let go of before the second is answered."""
    gate = threading.Event()
    with new_engine() as engine:
        put_prompt(engine, PROMPT)
        find = engine.lookup
        engine.lookup = lambda **more: gate.wait(5) and find(**more)  # type: ignore
        with servers(engine), client_for(timeout_ms=300) as client:
            assert client.lookup(PROMPT, "id") == 0
            gate.set()
            assert wait_for(lambda: client.lookup(PROMPT, "id") == 16)
            assert engine.stats()["pinned_chunks"] == 4


def test_asking_twice_pins_once():
    """LM#3766, LM#4525: the same count, and one unpin releases all."""
    with new_engine() as engine, servers(engine), client_for() as client:
        put_prompt(engine, PROMPT)
        assert client.lookup(PROMPT, "y") == client.lookup(PROMPT, "y") == 16
        engine.lookup_unpin("y")
        assert engine.stats()["pinned_chunks"] == 0


def test_a_lookup_that_fails_forgets_the_earlier_answer():
    engine = FakeEngine(lambda number: time.sleep(0.3) if number == 2 else 8)
    with servers(engine), client_for(timeout_ms=150) as client:
        assert client.lookup(PROMPT, "x") == client.lookup_cache("x") == 8
        assert client.lookup(PROMPT, "x") == 0 and client.lookup_cache("x") == -1
        assert wait_for(lambda: client.lookup(PROMPT, "x") == 8)


@pytest.mark.parametrize("reply", [[b""], [b"\0\0\0"], [b"\0\0\0\0\4"], [b"\0\0", b"\0\0\0"]])
def test_a_reply_that_is_none(reply, tmp_path):
    """From a server that is not ours: 0, and the next one is asked afresh."""
    path = lookup_path(metadata(), 0)
    os.makedirs(os.path.dirname(path))
    with (
        zmq.Context() as context,
        context.socket(zmq.REP) as rep,
        client_for(timeout_ms=2000) as client,
    ):
        rep.bind(f"ipc://{path}")

        def serve():
            for answer in (reply, [b"\0\0\0\4"]):
                rep.recv_multipart()
                rep.send_multipart(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert client.lookup(PROMPT, "id") == 0 and client.lookup(PROMPT, "id") == 4
        thread.join()
    os.unlink(path)  # libzmq does not


def test_one_client_in_8_threads():
    """Each thread gets its own answers; LMCache crashes the process with two."""

    class Echo(FakeEngine):
        def lookup(self, **arguments):
            return int(arguments["lookup_id"])

    with servers(Echo(), Echo()), client_for(2, timeout_ms=20_000) as client:

        def work(seed):
            return all(
                client.lookup(PROMPT, f"{number}") == number
                for number in range(seed * 1000, seed * 1000 + 100)
            )

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))


def test_the_memory_of_answers_is_bounded(monkeypatch):
    """The oldest are forgotten."""
    monkeypatch.setattr(lookup, "MAX_STATUS", 3)
    with servers(FakeEngine()), client_for() as client:
        for name in "abcde":
            client.lookup(PROMPT, name)
        assert [client.lookup_cache(name) for name in "abcde"] == [-1, -1, 4, 4, 4]


# -- beginning and end


@pytest.mark.parametrize("ask", [False, True], ids=["unused", "after a lookup"])
@pytest.mark.parametrize("there", [False, True], ids=["no server", "server"])
def test_closing_a_client(ask, there, caplog):
    """LM#5088, LM#2293: with no server, while idle, twice, and with a socket of somebody else's
    alive."""
    with contextlib.ExitStack() as stack, zmq.Context.instance().socket(zmq.REQ):
        if there:
            stack.enter_context(servers(FakeEngine()))
        client = client_for(timeout_ms=100)
        if ask:
            assert client.lookup(PROMPT, "id") == (4 if there else 0)
        began = time.monotonic()
        client.close()
        client.close()
        assert time.monotonic() - began < 0.5 and len(caplog.records) <= 1
        assert client.lookup(PROMPT, "id") == 0
    zmq.Context.instance().term()


def test_closing_while_a_lookup_is_in_flight():
    """Three that were asked and are not answered, and one that waits for a server to come."""
    with silent_path(lookup_path(metadata(), 0)) as server, ThreadPoolExecutor(4) as pool:
        with client_for(timeout_ms=20_000) as client, client_for(engine_id="b") as other:
            calls = [pool.submit(client.lookup, PROMPT, f"{number}") for number in range(3)]
            for _ in calls:
                server.recv_multipart()
            calls.append(pool.submit(other.lookup, PROMPT, "id"))
            began = time.monotonic()
            client.close()
            other.close()
            assert [call.result(5) for call in calls] == [0] * 4
            assert time.monotonic() - began < 1.0


def test_closing_a_server():
    """Twice, from two threads, while it works: the thread ends, and the path is gone."""
    entered, gate = threading.Event(), threading.Event()
    with (
        servers(FakeEngine(lambda number: entered.set() or gate.wait(5) and 4)) as (server,),
        client_for() as client,
    ):
        with ThreadPoolExecutor(3) as pool:
            call = pool.submit(client.lookup, PROMPT, "id")
            assert entered.wait(5)
            closes = [pool.submit(server.close) for _ in range(2)]
            gate.set()
            assert call.result(5) in (0, 4)
            for close in closes:
                close.result(5)
        server.close()
        assert not threads_named("lookup-server") and not os.path.exists(server.path)


def test_closing_an_idle_server_is_quick_and_quiet(caplog):
    with servers(FakeEngine()) as (server,):
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 0.5 and not caplog.records


def test_an_error_inside_with_closes_both():
    with pytest.raises(KeyError), servers(FakeEngine()) as (server,), client_for() as client:
        client.lookup(PROMPT, "id")
        raise KeyError
    assert not os.path.exists(server.path)


@pytest.mark.parametrize("Server", [LMCacheLookupServer, ZMQOffloadServer])
class TestTheSocketFile:
    def start(self, Server, engine):
        return (
            Server(engine, engine.metadata) if Server is LMCacheLookupServer else Server(engine, 0)
        )

    def test_a_living_server_keeps_its_path(self, Server):
        """LMCache's second server takes it without a word."""
        with new_engine() as engine, self.start(Server, engine) as first:
            for _ in range(2):
                with pytest.raises(OSError, match=f"alive on {first.path}"):
                    self.start(Server, engine)
            assert os.path.exists(first.path)

    def test_a_dead_servers_path_is_taken_over(self, Server):
        with new_engine() as engine:
            with self.start(Server, engine) as first:
                path = first.path
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(path)
            assert os.path.exists(path)
            with self.start(Server, engine):
                with pytest.raises(OSError):
                    self.start(Server, engine)
            assert not os.path.exists(path)

    def test_of_many_that_start_at_once_one_wins(self, Server):
        with new_engine() as engine, ThreadPoolExecutor(8) as pool:
            began = threading.Barrier(8)

            def start(_):
                began.wait()
                try:
                    return self.start(Server, engine)
                except OSError:
                    return None

            for _ in range(5):
                made = [server for server in pool.map(start, range(8)) if server]
                for server in made:
                    server.close()
                assert len(made) == 1

    def test_who_comes_second_waits_until_the_first_has_bound(self, Server, ipc_folder):
        with new_engine() as engine, ThreadPoolExecutor(1) as pool:
            make_rpc_folder(str(ipc_folder / "socket"))
            with locked(str(ipc_folder)):
                start = pool.submit(self.start, Server, engine)
                with pytest.raises(TimeoutError):
                    start.result(0.2)
            start.result(5).close()

    @pytest.mark.parametrize(
        "what", ["file", "folder is a file", "no folder may be made", "folder of another"]
    )
    def test_a_path_that_cannot_be(self, Server, what, ipc_folder, monkeypatch):
        """V#2179: the error names the path."""
        with new_engine() as engine:
            path = Path(
                lookup_path(engine.metadata, 0)
                if Server is LMCacheLookupServer
                else offload_path("toy", 0)
            )
            if what == "file":
                ipc_folder.mkdir()
                path.write_text("precious")
            elif what == "folder is a file":
                ipc_folder.write_text("precious")
            elif what == "folder of another":
                if os.getuid() != 0:
                    pytest.skip("needs root to give a folder away")
                ipc_folder.mkdir()
                os.chown(ipc_folder, 12345, 12345)
            else:
                monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/proc/no/such")
            with pytest.raises(
                OSError, match="/proc/no" if what.startswith("no") else str(ipc_folder)
            ):
                self.start(Server, engine)
            for written in (path, ipc_folder):
                assert not written.is_file() or written.read_text() == "precious"

    def test_a_folder_that_vanishes_under_a_server(self, Server, ipc_folder):
        with new_engine() as engine, self.start(Server, engine) as server:
            os.unlink(server.path)
            ipc_folder.rmdir()
        assert not threads_named("lookup-server") + threads_named("offload-server")

    def test_the_folder_is_ours_alone(self, Server, ipc_folder):
        with new_engine() as engine, self.start(Server, engine):
            assert ipc_folder.stat().st_mode & 0o777 == 0o700

    def test_no_thread_can_start(self, Server, monkeypatch):
        def fail(self):
            raise RuntimeError("can't start new thread")

        with new_engine() as engine:
            with monkeypatch.context() as patch:
                patch.setattr(threading.Thread, "start", fail)
                with pytest.raises(RuntimeError):
                    self.start(Server, engine)
            with self.start(Server, engine):
                pass


# -- strangers on the same host

STRANGER = 12345
as_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root to give a file away")


def give_away(path):
    os.chown(path, STRANGER, STRANGER, follow_symlinks=False)


def client_and_question(what):
    if what == "lookup":
        return client_for(timeout_ms=3000), lambda client: client.lookup(PROMPT, "id")
    good = dict(hashes=[1], slot_mapping=range_of(0, 4), offsets=[4])
    return ZMQOffloadClient("toy", 0, 3000), lambda client: client.offload(**good)


@contextlib.contextmanager
def both_servers():
    with new_engine() as engine, servers(engine) as (server,), ZMQOffloadServer(engine, 0) as other:
        put_prompt(engine, PROMPT)
        yield {"lookup": server.path, "offload": other.path}


@as_root
@pytest.mark.parametrize("what", ["lookup", "offload"])
@pytest.mark.parametrize(
    "how", ["folder", "socket", "socket in a sticky folder", "link to the folder", "0777", "0770"]
)
@pytest.mark.parametrize("used", [False, True], ids=["new client", "used client"])
def test_a_client_asks_no_stranger(what, how, used, ipc_folder, tmp_path, monkeypatch, caplog):
    """It says no, at once, and names the path. Each of these would let somebody else put a socket
    in the place of ours."""
    link = tmp_path / "link"
    link.symlink_to(ipc_folder)
    if how.startswith("link"):
        ipc_folder.mkdir(mode=0o700)
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(link))
    if how.endswith("sticky folder"):
        ipc_folder.mkdir(mode=0o1777)
        ipc_folder.chmod(0o1777)
    with both_servers() as paths:
        client, ask = client_and_question(what)
        with client:
            if used:
                assert ask(client)
            if how == "folder":
                give_away(ipc_folder)
            elif how.startswith("socket"):
                give_away(paths[what])
            elif how.startswith("link"):
                give_away(link)
            else:
                os.chown(ipc_folder, 0, STRANGER)
                ipc_folder.chmod(int(how, 8))
            began = time.monotonic()
            assert not ask(client) and time.monotonic() - began < 1.0
            assert str(link if how.startswith("link") else ipc_folder) in caplog.text
            give_away_again = ipc_folder if not how.startswith("link") else link
            os.chown(give_away_again, 0, 0, follow_symlinks=False)
            os.chown(paths[what], 0, 0)
            ipc_folder.chmod(0o700)
            assert ask(client)  # all is well again


@as_root
@pytest.mark.parametrize("mode, good", [(0o1777, True), (0o700, True), (0o755, True),
                                        (0o775, False), (0o777, False)])  # fmt: skip
@pytest.mark.parametrize("Server", [LMCacheLookupServer, ZMQOffloadServer])
def test_a_server_keeps_out_of_folders_that_others_may_write(Server, mode, good, ipc_folder):
    """But for a sticky one of root's, as /tmp is."""
    ipc_folder.mkdir()
    os.chown(ipc_folder, 0, STRANGER)
    ipc_folder.chmod(mode)
    with new_engine() as engine, contextlib.ExitStack() as stack:
        start = TestTheSocketFile().start
        if good:
            stack.enter_context(start(Server, engine))
            assert [*ipc_folder.iterdir()]
        else:
            with pytest.raises(PermissionError, match=str(ipc_folder)):
                start(Server, engine)
            assert not [*ipc_folder.iterdir()]


@pytest.mark.parametrize("Server", [LMCacheLookupServer, ZMQOffloadServer])
def test_a_lock_that_a_stranger_keeps_is_an_error_and_no_hang(Server, ipc_folder):
    make_rpc_folder(str(ipc_folder / "socket"))
    number = os.open(ipc_folder, os.O_RDONLY)
    with new_engine() as engine:
        fcntl.flock(number, fcntl.LOCK_EX)
        began = time.monotonic()
        with pytest.raises(OSError, match=f"{ipc_folder} is locked"):
            TestTheSocketFile().start(Server, engine)
        assert 1.5 < time.monotonic() - began < 4.0
        os.close(number)
        TestTheSocketFile().start(Server, engine).close()


# -- a worker that is killed

WORKER = """
import sys, torch
sys.path[:0] = ["tests"]
from toys import metadata, new_engine, put_prompt, range_of
from lookup import LMCacheLookupServer
with new_engine() as engine, LMCacheLookupServer(engine, metadata()):
    put_prompt(engine, list(range(100, 116)))
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_worker_killed_under_a_waiting_client(ipc_folder):
    """0 in time; and the true count as soon as another worker is there, on the same path."""
    with client_for(timeout_ms=500) as client:
        for number in range(2):
            with subprocess.Popen(
                [sys.executable, "-c", WORKER],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            ) as worker:
                assert worker.stdout.readline() == "ready\n"
                assert wait_for(lambda: client.lookup(PROMPT, "id") == 16, 10)
                worker.kill()
                worker.wait()
            began = time.monotonic()
            assert client.lookup(PROMPT, f"{number}") == 0 and time.monotonic() - began < 1.0
    for path in ipc_folder.iterdir():  # what SIGKILL left
        path.unlink()


FORK = """
import os, signal, sys
sys.path[:0] = [".", "tests"]
from test_lookup import PROMPT, FakeEngine, client_for, servers
from toys import new_engine, range_of
from offload_server import ZMQOffloadClient, ZMQOffloadServer

class Echo(FakeEngine):
    def lookup(self, **arguments):
        return int(arguments["lookup_id"])

def check(lookups, offloads, first):
    for number in range(first, first + 40):
        assert lookups.lookup(PROMPT, str(number)) == number
        good = offloads.offload([number], range_of(0, 4), [4])
        bad = offloads.offload([number], [-1] * 4, [4])
        assert good and not bad, (number, good, bad)

signal.alarm(40)
with servers(Echo()), client_for() as used, client_for() as unused, new_engine(128) as engine:
    with ZMQOffloadServer(engine, 0), ZMQOffloadClient("toy", 0) as offloads:
        check(used, offloads, 0)
        child = os.fork()
        signal.alarm(40)  # whoever hangs is killed by it, the child too
        if not child:
            try:
                check(used, offloads, 1000)
                check(unused, offloads, 2000)
                with client_for() as its_own:
                    assert its_own.lookup(PROMPT, "5") == 5
                os._exit(0)
            finally:
                os._exit(1)
        check(used, offloads, 3000)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_clients_used_before_a_fork_unused_and_made_after_it():
    """Lookup and offload, parent and child at once: each gets its own answers, and in time."""
    subprocess.run([sys.executable, "-c", FORK], cwd=ROOT, check=True, timeout=60)


def test_clients_and_servers_share_one_io_thread():
    def threads():
        return len(os.listdir("/proc/self/task"))

    with servers(FakeEngine()), client_for() as client:
        assert client.lookup(PROMPT, "id") == 4
        before = threads()
        with client_for() as other:
            assert other.lookup(PROMPT, "id") == 4 and threads() == before
