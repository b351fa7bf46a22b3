"""Faults from outside: servers killed, silent or out of files, full disks: nobody hangs, no wrong
byte is served."""

import contextlib
import mmap
import resource
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from toys import (
    CHUNK_BYTES,
    ServerProcess,
    client_of,
    connected,
    kv,
    metadata,
    new_engine,
    put_prompt,
    range_of,
    read,
    request,
    running_server,
    silent_server,
    wait_for,
)

from engine import LMCacheEngine, LMCacheEngineConfig
from lookup import LMCacheLookupClient, LMCacheLookupServer
from offload_server import ZMQOffloadClient, ZMQOffloadServer
from remote_server import FOUND, REPLY, ClientCommand, RemoteClient

PUT, GET, EXIST, LIST, HEALTH, STATS, CLEAR, DELETE = [*ClientCommand][:8]
KEY = "m@1@0@abc@half"
PROMPT = range_of(100, 16)


def client_at(port, **more):
    return RemoteClient(f"lm://127.0.0.1:{port}", **more)


# -- signals


def test_sigterm_with_idle_clients():
    """LM#4197: exit 0 within 2 s, and the port is free again."""
    with ServerProcess() as server, contextlib.ExitStack() as stack:
        for _ in range(3):
            sock = stack.enter_context(connected(server.port))
            sock.sendall(request(HEALTH))
            assert read(sock, 36) == FOUND
        assert server.stops_in_time(signal.SIGTERM) and "Traceback" not in server.log
        with running_server(port=server.port):
            pass


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_under_load(number):
    """4 clients put and get, one has sent half a put: exit 0 within 2 s, and clients get errors and
    no wrong byte."""
    with ServerProcess() as server, connected(server.port) as half, ThreadPoolExecutor(4) as pool:
        half.sendall(request(PUT, KEY, 1000) + bytes(500))
        began = threading.Barrier(5)

        def work(seed):
            data = bytes([seed]) * 1_000_000
            with client_at(server.port, retries=0) as client, contextlib.suppress(OSError):
                client.put(f"{seed}", data)
                began.wait(20)
                while True:
                    client.put(f"{seed}", data)
                    found = client.get(f"{seed}")
                    assert found is None or found[1] == data

        futures = [pool.submit(work, seed) for seed in range(4)]
        began.wait(20)
        assert server.stops_in_time(number)
        for future in futures:
            future.result(10)
        assert "Traceback" not in server.log


def test_sigkill_and_restart():
    """LM#3565, LM#5149: it is back within a second of listening; the first GET misses, the last
    equals."""
    with ServerProcess() as server, client_at(server.port) as client:
        client.put(KEY, b"before")
        client.flush()
        server.stop(signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ConnectionError):
            client.get(KEY)
        assert not client.health() and time.monotonic() - began < 2.0
        with ServerProcess(port=server.port) as again:
            assert again.port == server.port
            assert client.get(KEY) is None
            client.put(KEY, b"after")
            client.flush()
            assert client.get(KEY)[1] == b"after"


def grows(engine, counter):
    before = engine.stats()[counter]
    return wait_for(lambda: engine.stats()[counter] > before, 10)


def test_a_remote_killed_and_restarted_under_stores_lookups_and_retrieves():
    """One engine stores, two look up and retrieve; whatever comes back is right, a dead remote is a
    miss, and later the remote is used again. The counters say so."""
    pages = [torch.randn(2, 64, 4, 2, 4) for _ in range(2)]
    wanted, stop = kv(pages, range(16)), threading.Event()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(ServerProcess())
        clients = [stack.enter_context(client_at(server.port, timeout_sec=1.0)) for _ in range(3)]
        writer, *readers = [
            stack.enter_context(new_engine(12, remote=client)) for client in clients
        ]
        writer.register_kv_caches(pages, "2BNHD")

        def write():
            first = 0
            while not stop.is_set():  # always the same KV, under a few prompts
                first = (first + 16) % 320
                writer.store(range_of(first, 16), slot_mapping=range_of(0, 16))

        def look_up_and_retrieve(engine):
            first = longest = came = 0
            while not stop.is_set():
                first = (first + 16) % 320
                began = time.monotonic()
                hits = engine.lookup(range_of(first, 16), lookup_id="id", pin=True)
                written = engine.retrieve(range_of(first, 16), slot_mapping=range_of(64, 16))
                longest = max(longest, time.monotonic() - began)
                count = int(written.sum())
                assert hits in (0, 4, 8, 12, 16) and written[:count].all()
                assert torch.equal(
                    kv(engine.pages, range_of(64, 16))[:, :, :count], wanted[:, :, :count]
                )
                engine.lookup_unpin("id")
                engine.chunks.clear()
                came += count
            return longest, came

        pool = stack.enter_context(ThreadPoolExecutor(3))
        futures = [
            pool.submit(write),
            *(pool.submit(look_up_and_retrieve, engine) for engine in readers),
        ]
        try:
            for _ in range(2):
                assert all(grows(engine, "retrieved_tokens") for engine in readers)
                server.stop(signal.SIGKILL)
                assert all(grows(engine, "remote_errors") for engine in readers)
                server = stack.enter_context(ServerProcess(port=server.port))
            assert all(grows(engine, "retrieved_tokens") for engine in readers)
        finally:
            stop.set()
        for future in futures[1:]:
            longest, came = future.result(10)
            assert longest < 5.0 and came > 0
        assert writer.stats()["faults"] == 0 and writer.stats()["remote_errors"] > 0
        for engine in (writer, *readers):
            assert wait_for(
                lambda: engine.stats()["bytes_used"] == engine.stats()["chunks"] * CHUNK_BYTES
            )


# -- a remote that does not answer


@pytest.mark.parametrize(
    "reply", [b"", FOUND[:18], REPLY.pack(200, CHUNK_BYTES, 1, 4, 2, 2, 4, 8, 0) + bytes(100)],
    ids=["accepts and never answers", "half a header", "half a payload"],
)  # fmt: skip
def test_a_remote_that_does_not_answer(reply, caplog):
    """A miss within the client's timeout, then it is left alone for a second; what is here is
    served all the while."""
    with (
        silent_server(reply) as port,
        client_at(port, timeout_sec=0.3) as client,
        new_engine(remote=client) as engine,
    ):
        began = time.monotonic()
        assert int(engine.retrieve(PROMPT, slot_mapping=range_of(0, 16)).sum()) == 0
        assert time.monotonic() - began < 1.0
        began = time.monotonic()
        assert engine.lookup(PROMPT) == 0
        assert put_prompt(engine, PROMPT) == 16
        assert (
            engine.lookup(PROMPT)
            == int(engine.retrieve(PROMPT, slot_mapping=range_of(64, 16)).sum())
            == 16
        )
        assert time.monotonic() - began < 0.5
        assert wait_for(lambda: engine.stats()["remote_dropped"] == 4)
        stats = engine.stats()
        assert (
            stats["remote_errors"] == 1
            and stats["remote_skipped"] >= 1
            and "remote failed" in caplog.text
        )
        assert stats["bytes_used"] == stats["chunks"] * CHUNK_BYTES


def test_a_scheduler_over_a_worker_whose_remote_hangs(ipc_folder):
    """The lookup client's own deadline holds; and its next lookup is answered by what the worker
    has."""
    with (
        silent_server() as port,
        client_at(port, timeout_sec=0.6) as remote,
        new_engine(remote=remote) as engine,
    ):
        config = LMCacheEngineConfig(chunk_size=4, lookup_timeout_ms=200)
        with (
            LMCacheLookupServer(engine, metadata()),
            LMCacheLookupClient(config, metadata()) as client,
        ):
            began = time.monotonic()
            assert client.lookup(PROMPT, "id") == 0 and time.monotonic() - began < 0.5
            assert wait_for(lambda: engine.stats()["remote_errors"] == 1)
            put_prompt(engine, PROMPT)
            assert client.lookup(PROMPT, "id") == 16


def test_closing_an_engine_whose_remote_hangs():
    """close() waits no longer than it is told; what was not sent is counted."""
    with (
        silent_server() as port,
        client_at(port, timeout_sec=20) as remote,
        new_engine(remote=remote) as engine,
    ):
        put_prompt(engine, PROMPT)
        threading.Timer(0.5, remote.close).start()
        began = time.monotonic()
        engine.close(timeout_sec=0.2)
        assert time.monotonic() - began < 3.0


# -- no more files, no more memory, no more disk


def test_file_descriptors_exhausted():
    """With a log line, the longest idle goes for a newcomer; the others are served."""
    limit = 40

    def lower():
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))

    with ServerProcess(before=lower) as server, client_at(server.port) as first:
        first.put(KEY, b"x")
        with contextlib.ExitStack() as stack:
            many = [stack.enter_context(connected(server.port)) for _ in range(limit)]
            assert wait_for(lambda: "Too many open files" in server.log)
            for sock in reversed(many):
                with contextlib.suppress(OSError):
                    sock.sendall(request(HEALTH))
            answers = [read(sock, 36) for sock in many]
            assert answers.count(FOUND) >= 20 and answers[-1] == FOUND
            assert first.get(KEY)[1] == b"x"
        assert wait_for(lambda: first.stats()["clients"] == 1)
        with client_at(server.port) as late:
            assert late.get(KEY)[1] == b"x"
        assert 1 <= server.log.count("Too many open files") <= 10
        assert "Traceback" not in server.log and server.stop() == 0


def test_no_descriptors_for_a_lookup_or_an_offload(ipc_folder, monkeypatch):
    """0 and False, with a warning; afterwards all is well."""
    with (
        new_engine() as engine,
        LMCacheLookupServer(engine, metadata()),
        ZMQOffloadServer(engine, 0),
    ):
        put_prompt(engine, PROMPT)
        config = LMCacheEngineConfig(chunk_size=4, lookup_timeout_ms=300)
        with (
            LMCacheLookupClient(config, metadata()) as client,
            ZMQOffloadClient("toy", 0, 300) as offloader,
        ):
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
            try:
                found, stored = (
                    client.lookup(PROMPT, "id"),
                    offloader.offload([1], range_of(0, 4), [4]),
                )
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            assert (found, stored) == (0, False)
            assert client.lookup(PROMPT, "id") == 16 and offloader.offload([1], range_of(0, 4), [4])


def test_no_memory_for_an_engine(monkeypatch):
    def fail(*_, **__):
        raise OSError("out of memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(MemoryError, match="no room for a chunk store"):
        LMCacheEngine(LMCacheEngineConfig(chunk_size=4), metadata())


@pytest.mark.parametrize("Server", [LMCacheLookupServer, ZMQOffloadServer])
def test_a_full_disk_under_the_socket_file(Server, tmp_path, monkeypatch):
    """The error names the path."""
    folder = tmp_path / "full"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "nr_inodes=1", "none", str(folder)]
    if subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a file system")
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(folder))
    try:
        with new_engine() as engine, pytest.raises(OSError, match=str(folder)):
            Server(engine, metadata() if Server is LMCacheLookupServer else 0)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


# -- load


def test_mixed_work_of_many_clients():
    """16 clients put, get, overwrite, look and leave in the middle, at twice the budget; every
    payload is one of its key's, and the memory is accounted for at the end."""
    began, size = time.monotonic(), 20_000
    with running_server(max_bytes=40 * size) as server:

        def work(seed):
            checked = 0
            while time.monotonic() - began < 3.0:
                with client_of(server, timeout_sec=20) as client:
                    for _ in range(20):
                        seed = (seed * 1103515245 + 12345) % 2**31
                        number, act = seed // 7 % 80, seed // 101 % 8
                        if act < 4:
                            client.put(f"{number}", bytes([number, seed % 251]) * (size // 2))
                        elif act < 7 and (found := client.get(f"{number}")):
                            assert found[1] == bytes([number, found[1][1]]) * (size // 2)
                            checked += 1
                        elif act == 7:
                            client.exists_many([f"{other}" for other in range(80)])
                with connected(server.port) as sock:  # and leave
                    sock.sendall(request(PUT, f"{number}", size) + bytes(seed % size))
            return checked

        with ThreadPoolExecutor(16) as pool:
            assert sum(pool.map(work, range(1, 17))) > 100
        with client_of(server) as client:
            assert client.health()  # a fresh one: all before it have been accepted
        assert wait_for(lambda: server.stats()["clients"] == 0)
        stats = server.stats()
        assert stats["bytes_used"] <= 40 * size and stats["in_use"] == 0 < stats["evictions"]
        with client_of(server) as client:  # all of the memory is some key's
            sizes = [client.get(key)[0].length for key in client.list_keys()]
            assert server.stats()["bytes_used"] == sum(-(-nbytes // 64) * 64 for nbytes in sizes)


def test_memory_after_churn_is_where_it_was():
    """Short: at twice the capacity, the process grows by less than a chunk's worth between two
    rounds."""
    with running_server(max_bytes=4 << 20) as server, client_of(server) as client:

        def churn():
            for number in range(200):
                client.put(f"{number % 8}", bytes(1 << 20))
                client.get(f"{(number * 3) % 8}")
            with open("/proc/self/statm") as statm:
                return int(statm.read().split()[1]) * resource.getpagesize()

        churn()
        before = churn()
        assert churn() - before < 8 << 20
