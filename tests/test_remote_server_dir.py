"""A server with --dir: its chunks outlive it, and clients on its host read them where they are."""

import contextlib
import fcntl
import hashlib
import os
import random
import shutil
import signal
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from tempfile import TemporaryDirectory

import pytest
import torch
from proxies import Proxy
from toys import (
    CHUNK_BYTES,
    ServerProcess,
    client_of,
    connected,
    kv,
    new_engine,
    put_prompt,
    range_of,
    read,
    request,
    running_server,
    wait_for,
)

import remote_server
from lookup import RemoteMeta, locked
from remote_server import FOUND, MISS, ClientCommand, LMCacheServer, RemoteClient

GET, EXIST, HOLD, LETGO, RESERVE = (
    ClientCommand[name] for name in ("GET", "EXIST", "HOLD", "LETGO", "RESERVE")
)
PROMPT = list(range(100, 116))  # 4 chunks
KIB = 1 << 10


@pytest.fixture
def server(tmp_path):
    with running_server(folder=tmp_path, stall_timeout_sec=0.5) as running:
        yield running


@pytest.fixture
def client(server):
    with client_of(server) as made:
        yield made


def value(rng, most=20_000):
    """Bytes that are their own digest."""
    body = rng.randbytes(rng.randrange(most))
    return hashlib.sha256(body).digest() + body


def is_whole(data):
    data = bytes(data)
    return hashlib.sha256(data[32:]).digest() == data[:32]


def as_bytes(tensor):
    return bytes(tensor.tolist())


# -- over a restart


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_was_put_is_there_after_a_restart(tmp_path, number):
    values = {f"toy@1@0@{index:x}@half": value(random.Random(index)) for index in range(50)}
    with ServerProcess("--dir", str(tmp_path), "--eviction", "lru") as server:
        with RemoteClient(f"lm://127.0.0.1:{server.port}") as client:
            for key, data in values.items():
                client.put(key, data)
            client.flush()
            order = client.list_keys()
        server.stop(number)
    with ServerProcess("--dir", str(tmp_path), "--eviction", "lru") as server:
        with RemoteClient(f"lm://127.0.0.1:{server.port}") as client:
            assert client.list_keys() == order
            for key, data in values.items():
                meta, found = client.get(key)
                assert found == data and meta.fmt == 4 and meta.shape == (len(data), 0, 0, 0)


@pytest.mark.parametrize(
    "more, text",
    [
        (["cuda"], "cuda"),
        (["--max-gib", "1000000"], "no room for 1073741824000000 bytes in"),
        (["--dir", "/proc/nothing"], "/proc/nothing"),
        (["--dir", "/dev/null"], "/dev/null"),
    ],
)
def test_a_folder_that_cannot_be_is_an_error_of_one_line(tmp_path, more, text, capsys):
    with pytest.raises(SystemExit):
        remote_server.main(["--dir", str(tmp_path), "127.0.0.1", "0", *more])
    assert text in capsys.readouterr().err.splitlines()[-1]


def serve(port, folder, max_bytes):
    """A process that does nothing but serve: its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        LMCacheServer("127.0.0.1", port, max_bytes=max_bytes, folder=folder).run()
    finally:
        os._exit(1)


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@pytest.mark.parametrize("tight", [False, True])
def test_killed_two_hundred_times(tmp_path, tight, monkeypatch):
    """At random points, under puts and gets, by wire and in place. No byte is wrong; with room for
    all, what was confirmed is there, unless it was being overwritten."""
    rng, port, sure = random.Random(7), free_port(), {}
    budget = (256 if tight else 4096) * KIB
    reads = lost = 0
    for attempt in range(200):
        pid = serve(port, tmp_path, budget)
        client = RemoteClient(f"lm://127.0.0.1:{port}", timeout_sec=5.0, retries=5)
        assert wait_for(client.health, 20)
        listed = set(client.list_keys())
        lost += len(sure.keys() - listed)
        assert tight or not sure.keys() - listed, attempt
        for key in rng.sample(sorted(listed), min(10, len(listed))):
            assert is_whole(client.get(key)[1])
        threading.Timer(rng.uniform(0.0, 0.03), os.kill, (pid, signal.SIGKILL)).start()
        client.retries = 0
        with contextlib.suppress(OSError):
            while True:
                key = f"{rng.randrange(100)}"
                if rng.random() < 0.5:
                    sure.pop(key, None)  # in doubt until it is confirmed
                    monkeypatch.setattr(remote_server, "IN_PLACE_BYTES", rng.choice([0, 1 << 30]))
                    client.put(key, value(rng))
                    client.flush()
                    sure[key] = True
                else:
                    (found,) = client.hold_many([key])
                    if found:
                        data = as_bytes(found[1])
                        client.let_go()
                        assert is_whole(data)
                        reads += 1
        client.close()
        assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    assert reads > 100 and (lost > 0) == tight


# -- in place


def test_holding_by_hand(server, client, sock=None):
    """The header of the GET, then the chunk's offset in the file."""
    client.put("a", b"a" * 100)
    client.put("b", b"b" * 1000)
    client.flush()
    with connected(server.port) as sock:
        sock.sendall(b"".join(request(HOLD, key) for key in ("b", "none", "a")))
        sock.sendall(request(EXIST, "a") + request(GET, "b"))
        first, miss, second = read(sock, 44), read(sock, 36), read(sock, 44)
        assert read(sock, 36) == FOUND and read(sock, 36 + 1000) == first[:36] + b"b" * 1000
        assert miss == MISS and server.stats()["in_use"] == 2
        with open(server.store.arena, "rb") as file:
            for reply, data in ((first, b"b" * 1000), (second, b"a" * 100)):
                file.seek(*struct.unpack("<q", reply[36:]))
                assert file.read(len(data)) == data
        sock.sendall(request(LETGO) * 2)
        assert read(sock, 72) == FOUND * 2 and server.stats()["in_use"] == 0


def test_what_is_held_stays_as_it_is(server, client):
    data = {f"{number}": bytes([number]) * 50_000 for number in range(5)}
    for key, text in data.items():
        client.put(key, text)
    client.flush()
    held = client.hold_many(["3", "none", "4"])
    assert held[1] is None and [found[0].length for found in (held[0], held[2])] == [50_000] * 2
    with client_of(server) as other:
        for number in range(200):  # over it, and more than there is room for
            other.put(f"{number % 150}", bytes([255]) * 50_000)
        other.delete("4")
        other.clear()
        other.flush()
    assert as_bytes(held[0][1]) == data["3"] and as_bytes(held[2][1]) == data["4"]
    client.let_go()
    client.let_go()  # of nothing
    assert client.hold_many(["3"]) == [None] and server.stats()["in_use"] == 0


def test_a_server_that_was_killed_has_not_let_go(tmp_path):
    """And another in its place, in the same memory, has not either."""
    port = free_port()
    pid = serve(port, tmp_path, 1 << 20)
    with RemoteClient(f"lm://127.0.0.1:{port}") as client:
        assert wait_for(client.health, 20)
        client.put("a", b"old")
        client.flush()
        ((_, view),) = client.hold_many(["a"])
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with running_server(port=port, folder=tmp_path, max_bytes=1 << 20) as server:
            with client_of(server) as other:
                other.put("a", b"new")
                other.flush()
            assert len(view) == 3
            with pytest.raises(OSError, match="does not count"):
                client.let_go()
            ((_, view),) = client.hold_many(["a"])
            assert as_bytes(view) == b"new"
            client.let_go()
    del view


def test_who_holds_and_is_silent_is_dropped_at_the_stall_timeout(server, client):
    client.put("a", b"a")
    client.flush()
    with connected(server.port) as sock:
        sock.sendall(request(HOLD, "a"))
        assert len(read(sock, 44)) == 44 and server.stats()["in_use"] == 1
        assert read(sock, 1) == b""
    assert wait_for(lambda: server.stats()["in_use"] == 0)
    with connected(server.port) as sock:  # and who is not silent, too
        began = time.monotonic()
        sock.sendall(request(HOLD, "a"))
        read(sock, 44)
        with contextlib.suppress(OSError):
            while time.monotonic() < began + 5:
                sock.sendall(request(ClientCommand.HEALTH))
                if not read(sock, 36):
                    break
                time.sleep(0.01)
        assert time.monotonic() < began + 3
    assert wait_for(lambda: server.stats()["in_use"] == 0)
    client.hold_many(["a"])
    time.sleep(0.7)
    with pytest.raises(OSError, match="does not count"):
        client.let_go()


@pytest.mark.parametrize("how", ["close", "reset", "kill"])
def test_who_leaves_holds_nothing(server, client, how):
    client.put("a", b"a")
    client.flush()
    if how == "kill":
        ready, done = os.pipe()
        if not (pid := os.fork()):
            client.hold_many(["a"])
            os.write(done, b"x")
            time.sleep(60)
        os.read(ready, 1)
        assert server.stats()["in_use"] == 1
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)
    else:
        with connected(server.port) as sock:
            sock.sendall(request(HOLD, "a"))
            read(sock, 44)
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert wait_for(lambda: server.stats()["in_use"] == 0)


def test_a_client_holds_an_eighth_or_one_chunk(server, client):
    """Of 4 MiB; and what it may not hold, it gets when it has let go."""
    for number in range(8):
        client.put(f"{number}", bytes(100 * KIB))
    client.put("large", bytes(2048 * KIB))
    client.flush()
    keys = [f"{number}" for number in range(8)]
    client.hold_many(keys[:1])
    held = client.hold_many(keys)
    assert [found is not None for found in held] == [True] * 5 + [False] * 3
    assert server.stats()["in_use"] == 5
    client.let_go()
    assert [found is not None for found in client.hold_many(["large", "1"])] == [True, False]
    client.let_go()


# -- writing in place


def items_of(data):
    """For put_many(), in two pieces each."""
    for key, text in data.items():
        meta = RemoteMeta(len(text), 1, 3, (2, 1, 4, len(text) // 16))
        yield key, meta, [text[: len(text) // 3], text[len(text) // 3 :]]


@pytest.fixture
def always(monkeypatch):
    """Small ones are written in place, too."""
    monkeypatch.setattr(remote_server, "IN_PLACE_BYTES", 0)


def test_writing_by_hand(server, client):
    """RESERVE has the header of the PUT; the chunk is there when LETGO is answered, not before."""
    client.put("a", b"old")
    client.flush()
    with connected(server.port) as sock, open(server.store.arena, "r+b") as file:
        for key, data in (("a", b"new" * 100), ("b", b"b")):
            more = dict(fmt=4, dtype=6, shape=(len(data), 0, 0, 0), location=7)
            sock.sendall(request(RESERVE, key, len(data), **more))
            reply = read(sock, 44)
            file.seek(*struct.unpack("<q", reply[36:]))
            file.write(data)
        file.flush()
        assert client.get("a")[1] == b"old" and not client.exists("b")
        sock.sendall(request(LETGO) + request(GET, "b"))
        assert read(sock, 72) == FOUND + reply[:36] and read(sock, 1) == b"b"
    assert client.get("a") == (RemoteMeta(300, 4, 6, (300, 0, 0, 0)), bytearray(b"new" * 100))
    assert wait_for(lambda: server.stats()["in_use"] == 0) and server.stats()["chunks"] == 2


@pytest.mark.parametrize("length", [-1, 600 * KIB, 5 << 20, 2**31 - 1])
def test_what_may_not_be_reserved(server, length):
    """Less than nothing, and more than an eighth of the store's 4 MiB."""
    with connected(server.port) as sock:
        sock.sendall(request(RESERVE, "a", length) + request(EXIST, "a"))
        assert read(sock, 72) == MISS + MISS
    assert server.stats()["bytes_used"] == 0


def test_a_server_without_a_folder_reserves_nothing():
    with running_server() as server, connected(server.port) as sock:
        sock.sendall(request(RESERVE, "a", 10) + request(LETGO))
        assert read(sock, 72) == MISS + FOUND


def test_a_clients_chunks_do_not_pass_through_its_connection(server, always):
    data = {f"{number}": bytes([number]) * (20 * KIB + number) for number in range(70)}
    with Proxy(server.port) as wire, RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
        client.put_many(items_of(dict(islice(data.items(), 20))))
        client.flush()
        assert wire.moved < 30_000
        client.put_many(items_of(data))  # 1.4 MiB: no more than an eighth of 4 MiB at once in place
        client.flush()
        assert 600 * KIB < wire.moved < 1100 * KIB
        for key, text in data.items():
            meta, found = client.get(key)
            assert found == text and meta.dtype == 3 and meta.shape == (2, 1, 4, len(text) // 16)
        client.hold_many(["3"])
        client.put("3", b"new" * 1000)  # LETGO would end the holding, too
        client.let_go()
        assert client.get("3")[1] == b"new" * 1000
        client.put_many(items_of({"": b"", "x": b"x"}))
        client.put("tensor", torch.arange(1000.0))
        assert client.get("")[1] == b"" and client.get("x")[1] == b"x"
        assert client.get("tensor")[0].length == 4000
    stats = server.stats()
    assert (stats["in_use"], stats["rejected"]) == (0, 0)


def test_one_large_chunk_is_written_in_place():
    """And of less than 1 MiB the bytes go by wire: that is as quick."""
    with (
        TemporaryDirectory() as folder,
        running_server(folder=folder, max_bytes=32 << 20) as server,
    ):
        with Proxy(server.port) as wire, RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
            client.put("large", bytes(1 << 20))
            client.flush()
            assert wire.moved < 3000
            client.put("small", bytes(1 << 16))
            client.flush()
            assert wire.moved > 1 << 16
            assert client.get("large")[1] == bytes(1 << 20)


@pytest.mark.parametrize("how", ["close", "reset", "kill"])
def test_who_leaves_before_it_is_done_leaves_nothing(server, client, how, monkeypatch, always):
    client.put("a", b"old" * 100)
    client.flush()
    before = server.stats()["bytes_used"]
    if how == "kill":

        def pieces():
            yield b"new"
            os.write(done, b"x")
            time.sleep(60)

        ready, done = os.pipe()
        if not (pid := os.fork()):
            client.put_many([("a", RemoteMeta(300, 1, 3, (0, 0, 0, 0)), pieces())])
            os._exit(1)
        os.read(ready, 1)
        assert server.stats()["bytes_used"] > before
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(done)
    else:
        with connected(server.port) as sock:
            sock.sendall(request(RESERVE, "a", 300))
            assert len(read(sock, 44)) == 44
            if how == "reset":
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert wait_for(lambda: server.stats()["bytes_used"] == before)
    assert server.stats()["in_use"] == 0 and client.get("a")[1] == b"old" * 100


@pytest.mark.parametrize("gone", [False, True])
def test_who_may_still_be_writing_keeps_its_memory(server, client, gone):
    """Its connection has ended, at the stall timeout: what it reserved is given to nobody, but
    others put meanwhile; and an eighth is all that such ones have. gone: the file's name is."""
    with locked(server.store.arena, how=fcntl.LOCK_SH):
        if gone:
            shutil.rmtree(os.path.dirname(os.path.realpath(server.store.arena)))
        with connected(server.port) as sock:
            sock.sendall(request(RESERVE, "a", 300 * KIB))
            assert len(read(sock, 44)) == 44 and read(sock, 1) == b""
        with connected(server.port) as sock:
            sock.sendall(request(RESERVE, "a", 300 * KIB))
            assert read(sock, 36) == MISS
        data = {f"{number}": random.Random(number).randbytes(300 * KIB) for number in range(20)}
        for key, text in data.items():
            client.put(key, text)
        client.flush()
        assert server.stats()["in_use"] == 1
        assert client.get("19")[1] == data["19"]
    assert wait_for(lambda: server.stats()["in_use"] == 0)
    with connected(server.port) as sock:
        sock.sendall(request(RESERVE, "a", 300 * KIB))
        assert len(read(sock, 44)) == 44


def test_a_slow_writers_chunk_is_a_miss(server, client, always):
    """It took longer than the stall timeout."""

    def pieces():
        yield b"a"
        time.sleep(1.0)
        yield b"b"

    with pytest.raises(OSError, match="in place"):
        client.put_many([("a", RemoteMeta(2, 1, 3, (0, 0, 0, 0)), pieces())])
    assert not client.exists("a") and wait_for(lambda: server.stats()["bytes_used"] == 0)


def test_a_fault_of_the_pieces_leaves_nothing(server, client, always):
    def pieces():
        yield b"a"
        raise LookupError("no more")

    with pytest.raises(LookupError):
        client.put_many([("a", RemoteMeta(2, 1, 3, (0, 0, 0, 0)), pieces())])
    assert not client.exists("a") and wait_for(lambda: server.stats()["bytes_used"] == 0)


def test_a_server_starts_anew_where_somebody_still_writes(tmp_path, caplog):
    """A client of the server before it, that was stopped in the middle, say."""
    with running_server(folder=tmp_path) as server, client_of(server) as client:
        client.put("a", b"a")
        client.flush()
    (closed,) = tmp_path.glob("*-closed/arena")
    with locked(closed, how=fcntl.LOCK_SH) as number:
        with running_server(folder=tmp_path) as server, client_of(server) as client:
            assert os.stat(server.store.arena).st_ino != os.fstat(number).st_ino
            assert "is removed" in caplog.text and not client.exists("a")
            client.put("a", b"new")
            assert client.get("a")[1] == b"new"


def test_an_engine_stores_in_the_servers_memory(server, always):
    with Proxy(server.port) as wire, RemoteClient(f"lm://127.0.0.1:{wire.port}") as client:
        with new_engine(remote=client, chunks=400) as engine:
            tokens, slots = list(range(256)), range(256)
            put_prompt(engine, tokens)
            assert engine.flush() and server.stats()["chunks"] == 64
            assert wire.moved < 40_000  # with the chunks it would be 60,000
            before = kv(engine.pages, slots)
            engine.clear()
            for layer in engine.pages:
                layer.zero_()
            assert engine.retrieve(tokens, slot_mapping=slots).all()
            assert torch.equal(kv(engine.pages, slots), before)
        assert wait_for(lambda: server.stats()["in_use"] == 0)


@pytest.mark.parametrize(
    "why", ["another host", "another file", "no file", "no right", "no folder"]
)
def test_without_its_memory_all_goes_over_tcp(tmp_path, why, monkeypatch):
    with running_server(folder=None if why == "no folder" else tmp_path) as server:
        arena = os.path.realpath(server.store.arena)
        if why == "another host":
            os.rename(os.path.dirname(arena), tmp_path / "another boot")
        elif why == "another file":
            os.rename(arena, arena + "x")
            open(arena, "wb").close()
        elif why == "no file":
            os.rename(arena, arena + "x")
        elif why == "no right":
            monkeypatch.setattr(remote_server, "open", refuse, raising=False)
        with client_of(server) as client, new_engine(remote=client) as engine:
            client.put("a", b"a")
            assert client.hold_many(["a"]) is None and client.get("a")[1] == b"a"
            put_prompt(engine, PROMPT)
            assert engine.flush()
            engine.clear()
            assert int(engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).sum()) == 16
            assert torch.equal(kv(engine.pages, range(16)), kv(engine.pages, range_of(128, 16)))
            assert engine.stats()["chunks"] == 4


def refuse(path, *_):
    raise PermissionError(path)


# -- an engine on the server's host


def stored(engine):
    put_prompt(engine, PROMPT)
    assert engine.flush()
    engine.clear()


def test_an_engine_scatters_from_the_servers_memory(server, client):
    """And keeps no copy of its own."""
    with new_engine(remote=client) as engine:
        stored(engine)
        assert engine.lookup(PROMPT) == 16
        for _ in range(3):
            for layer in engine.pages:
                layer.view(2, -1, 2, 4)[:, 128:] = 0
            assert engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).all()
            assert torch.equal(kv(engine.pages, range(16)), kv(engine.pages, range_of(128, 16)))
        stats = engine.stats()
        assert (stats["bytes_used"], stats["in_use"], stats["faults"]) == (0, 0, 0)
        assert wait_for(lambda: server.stats()["in_use"] == 0)


def test_what_is_here_and_what_is_there_in_one_prompt(server, client):
    """More chunks than a client may hold at once, and the second half of them is here."""
    with new_engine(remote=client, chunks=400) as engine:
        tokens, slots = list(range(256)), range(256)
        put_prompt(engine, tokens)
        assert engine.flush()
        keys = [key for _, _, key in engine.token_database.process_tokens(tokens)]
        for key in keys[::2]:
            engine.chunks.remove(key)
        before = kv(engine.pages, slots)
        for layer in engine.pages:
            layer.zero_()
        assert engine.retrieve(tokens, slot_mapping=slots).all()
        assert torch.equal(kv(engine.pages, slots), before)
        assert engine.stats()["bytes_used"] == 32 * CHUNK_BYTES


def test_what_a_killed_server_had_is_a_miss(tmp_path, monkeypatch):
    """Though the pages are written: whoever trusts the mask computes them anew."""
    port = free_port()
    pid = serve(port, tmp_path, 1 << 20)
    with RemoteClient(f"lm://127.0.0.1:{port}", retries=0) as client:
        assert wait_for(client.health, 20)
        with new_engine(remote=client) as engine:
            stored(engine)
            move = engine._move

            def killed_meanwhile(*arguments):
                move(*arguments)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

            monkeypatch.setattr(engine, "_move", killed_meanwhile)
            assert not engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).any()
            stats = engine.stats()
            assert (stats["in_use"], stats["remote_errors"] > 0, stats["faults"]) == (0, True, 0)


def test_a_fault_in_the_scatter_lets_go(server, client, monkeypatch):
    with new_engine(remote=client) as engine:
        stored(engine)
        with monkeypatch.context() as patch:
            patch.setattr(engine, "_move", lambda *_: 1 // 0)
            assert not engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).any()
        assert engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).all()
        assert wait_for(lambda: server.stats()["in_use"] == 0)


def test_another_chunk_under_the_name_is_a_miss(server, client):
    with new_engine(remote=client) as engine:
        stored(engine)
        client.put(client.list_keys()[0], b"short")  # the tail
        client.flush()
        assert int(engine.retrieve(PROMPT, slot_mapping=range_of(128, 16)).sum()) == 12


def test_two_processes_read_in_place_while_a_third_overwrites_and_evicts(tmp_path, always):
    """In place, too, where there is room. Every byte is checked."""
    with running_server(folder=tmp_path, max_bytes=512 * KIB) as server:

        def reader(seed):
            rng, reads, deadline = random.Random(seed), 0, time.monotonic() + 2.0
            with client_of(server) as client:
                while time.monotonic() < deadline:
                    held = client.hold_many([f"{rng.randrange(30)}" for _ in range(4)])
                    found = [as_bytes(each[1]) for each in held if each]
                    client.let_go()
                    if not all(map(is_whole, found)):
                        return -1
                    reads += len(found)
            return reads

        def in_a_process(seed):
            read_end, write_end = os.pipe()
            if not (pid := os.fork()):
                os.write(write_end, struct.pack("q", reader(seed)))
                os._exit(0)
            (reads,) = struct.unpack("q", os.read(read_end, 8))
            os.waitpid(pid, 0)
            os.close(read_end)
            os.close(write_end)
            return reads

        stop = threading.Event()

        def write():
            rng = random.Random(0)
            with client_of(server) as client:
                while not stop.is_set():
                    data = {f"{rng.randrange(30)}": value(rng, 60_000) for _ in range(4)}
                    client.put_many(items_of(data))

        with ThreadPoolExecutor(3) as pool:
            writer = pool.submit(write)
            readers = [pool.submit(in_a_process, seed) for seed in (1, 2)]
            counts = [each.result(30) for each in readers]
            stop.set()
            writer.result(10)
        assert min(counts) > 20, counts
        assert server.stats()["evictions"] > 50
        assert wait_for(lambda: server.stats()["in_use"] == 0)
