"""lookup.py - how many tokens of a prompt are cached? A client in the scheduler asks the engine of every worker.

It follows LMCache 0.3.14 (lookup_client/lmcache_lookup_client.py); either end can be LMCache's.

    $ python lookup.py      # two workers that hold different amounts, and a scheduler that asks both

    scheduler process                                              worker process, one a rank
    LMCacheLookupClient  --REQ, ipc://...lookup...port+rank-->  ROUTER  LMCacheLookupServer -> engine.lookup(pin=True)
                         <--4 bytes, big-endian: hit tokens---

Request frames (hashes): [msgpack list of chunk hashes, msgpack list of chunk lengths, lookup_id, JSON configs or b""].
Request frames (blending): [msgpack list of token ids, lookup_id, JSON configs or b""].

Not here: unpinning over the wire (there is no such message: the worker calls engine.lookup_unpin(lookup_id) when the
request has its KV, and a pin that is forgotten times out).
"""

import contextlib
import functools
import json
import logging
import multiprocessing
import os
import socket
import stat
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq

from engine import (
    LMCacheEngine,
    LMCacheEngineConfig,
    LMCacheMetadata,
    RareLog,
    Service,
    Tokens,
    int_tuple,
    locked,
    make_rpc_folder,
    make_token_database,
    rpc_path,
)

logger = logging.getLogger("lmcache.lookup")

MAX_MESSAGE_BYTES = 64 << 20  # 8 million token ids; a larger frame ends its sender's connection
POLL_MS = 100  # how soon a thread that waits for a message sees that it is to stop
MAX_STATUS = 4096  # lookups remembered for lookup_cache()


@functools.cache
def context_of(process_id: int) -> zmq.Context:
    """One for all clients and servers of a process, never terminated; a forked process gets its own.

    Where scheduler and worker are one process (vLLM without tensor parallelism), both ends of the socket then have one
    I/O thread: two thread switches less a lookup, 30 of 180 us. It is not zmq.Context.instance(), whose owner may
    terminate it and would wait for our sockets.
    """
    return zmq.Context()


def lookup_path(metadata: LMCacheMetadata, rank: int) -> str:
    """The socket file of a rank's lookup server. Its port: kv_connector_extra_config["lmcache_rpc_port"], else 0."""
    port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
    if not metadata.engine_id:
        raise ValueError(
            f"metadata.engine_id {metadata.engine_id!r}: lookup needs one, it is part of the socket's name"
        )
    if not isinstance(port, (int, str)):
        raise ValueError(f"lmcache_rpc_port {port!r} must be an int or a str")
    return rpc_path(metadata.engine_id, "lookup", port, rank)


def bind_ipc(server: zmq.Socket, path: str) -> None:
    """Binds to a socket file of our own: OSError where a server is alive on it; a stale one is taken over.

    (offload_server.py has its twin: each module can be lifted out with engine.py alone.)
    """
    make_rpc_folder(path)
    with locked(os.path.dirname(path)):
        with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise FileExistsError(f"{path} is there and is not a socket")
            try:
                probe.settimeout(1.0)
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)  # stale: its server is gone
            else:  # subtle: libzmq itself would take the path from the living server and say nothing
                raise OSError(f"a server is alive on {path}")
        try:
            server.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise OSError(f"cannot bind {path}: {error}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The server, in each worker


class LMCacheLookupServer:
    """Answers lookups from an engine, in a thread of its own. Every request gets exactly one reply, a bad one 0.

    OSError where another server is alive on the same path, or the folder is somebody else's.
    """

    def __init__(self, lmcache_engine: LMCacheEngine, metadata: LMCacheMetadata):
        self.engine = lmcache_engine
        self.blending = lmcache_engine.config.enable_blending
        self.path = lookup_path(metadata, metadata.worker_id)
        self._log = RareLog(logger)
        self._hashes = msgspec.msgpack.Decoder(list[int | bytes])
        self._ints = msgspec.msgpack.Decoder(list[int])
        self._socket = context_of(os.getpid()).socket(zmq.ROUTER)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVTIMEO, POLL_MS)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            bind_ipc(self._socket, self.path)
            self._service = Service("lookup-server", self._step, self._finish)
        except BaseException:
            self._socket.close()
            raise

    def _step(self) -> None:
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return
        # The envelope: our peer's identity, those of proxies between, and the empty delimiter; it goes back as it came.
        end = frames.index(b"", 1) + 1 if b"" in frames[1:] else None
        envelope, body = (frames[:end], frames[end:]) if end else ([frames[0], b""], [])
        self._socket.send_multipart([*envelope, self._answer(body)])

    def _answer(self, body: list[bytes]) -> bytes:
        try:
            *request, raw_id, raw_configs = body
            lookup_id, configs = raw_id.decode(), json.loads(raw_configs) if raw_configs else None
            if self.blending:
                (tokens,) = request
                arguments: dict[str, Any] = {"tokens": self._ints.decode(tokens)}
            else:
                hashes, offsets = request
                arguments = {"hashes": self._hashes.decode(hashes), "offsets": self._ints.decode(offsets)}
            hits = self.engine.lookup(**arguments, lookup_id=lookup_id, pin=True, request_configs=configs)
            return hits.to_bytes(4, "big")
        except Exception as error:  # whatever it is, our peer waits for an answer
            self._log(type(error).__name__, "lookup answered 0: %r", error)
            return bytes(4)

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # first, so that nobody finds a server that is about to go
        self._socket.close()

    def close(self) -> None:
        """Ends the thread and takes the socket file away. Idempotent."""
        self._service.close()

    def __enter__(self) -> "LMCacheLookupServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# The client, in the scheduler


class LMCacheLookupClient:
    """Asks the lookup server of every rank; the smallest answer counts, for KV is of use only where all have it.

    config.lookup_timeout_ms is for a whole lookup, all ranks together; whatever fails is 0 hits and a warning. Safe to
    share between threads.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata):
        self.config = config
        self.ranks = config.get_lookup_server_worker_ids(metadata.use_mla, metadata.world_size)
        self.paths = [lookup_path(metadata, rank) for rank in self.ranks]
        self.token_database = None if config.enable_blending else make_token_database(config, metadata)
        self._encode = msgspec.msgpack.Encoder().encode
        self._log = RareLog(logger)
        self._sockets: list[zmq.Socket] = []  # one a rank; used by whoever holds the lock
        self._lock = threading.Lock()
        self._status: OrderedDict[str, int] = OrderedDict()  # lookup_id -> hit tokens
        self._closed = False

    def lookup(self, token_ids: Tokens, lookup_id: str, request_configs: dict[str, Any] | None = None) -> int:
        """How many leading tokens of the prompt every rank has, pinned there under lookup_id.

        ValueError for what is not a prompt (see engine.TokenDatabase), a lookup_id or request_configs.
        """
        deadline = time.monotonic() + self.config.lookup_timeout_ms / 1000
        frames = self._frames(token_ids, lookup_id, request_configs)
        self._status.pop(lookup_id, None)
        if not frames:
            return 0
        counts = self._ask(frames, deadline)
        if len(counts) < len(self.ranks):
            return 0
        hits = min(counts)
        if hits != max(counts):
            self._log("differ", "ranks %s have %s hit tokens: the smallest counts", self.ranks, counts)
        self._status[lookup_id] = hits
        while len(self._status) > MAX_STATUS:
            with contextlib.suppress(KeyError):  # another thread was faster
                self._status.popitem(last=False)
        return hits

    def lookup_cache(self, lookup_id: str) -> int:
        """The answer to an earlier lookup, or -1."""
        return self._status.get(lookup_id, -1)

    def clear_lookup_status(self, lookup_id: str) -> None:
        self._status.pop(lookup_id, None)

    def supports_producer_reuse(self) -> bool:
        return True

    def _frames(self, token_ids: Tokens, lookup_id: str, configs: dict[str, Any] | None) -> list[bytes]:
        """The request, or nothing where there is nothing to ask."""
        if not isinstance(lookup_id, str):
            raise ValueError(f"lookup_id {lookup_id!r} must be a str")
        try:
            tail = [lookup_id.encode(), json.dumps(configs).encode() if configs else b""]
        except TypeError as error:
            raise ValueError(f"request_configs {configs!r} must be JSON: {error}") from error
        if self.token_database is None:
            ids = int_tuple(token_ids)
            return [self._encode(ids), *tail] if ids else []
        spans = self.token_database.process_tokens(token_ids)
        hashes, lengths = [span[2] for span in spans], [end - start for start, end, _ in spans]
        try:
            return [self._encode(hashes), self._encode(lengths), *tail] if spans else []
        except (TypeError, OverflowError) as error:  # of a token database of the user's own
            raise ValueError(f"chunk hashes must be ints of at most 64 bits or bytes: {error}") from error

    def _ask(self, frames: Sequence[bytes], deadline: float) -> list[int]:
        """Every rank's answer; fewer where one did not come in time."""
        counts: list[int] = []
        if not self._lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            self._log("busy", "lookup timed out behind another thread's")
            return counts
        try:
            if self._closed:
                return counts
            if not self._sockets:
                self._connect()
            for sock in self._sockets:
                sock.send_multipart(frames)
            for sock in self._sockets:
                counts.append(self._receive(sock, deadline))
        except (zmq.ZMQError, OSError) as error:
            self._log("failed", "rank %s gave no answer: %s; 0 hits", self.ranks[len(counts)], error)
            self._disconnect()  # a late reply comes to a socket that is gone, never to the next lookup
        finally:
            self._lock.release()
        return counts

    def _receive(self, sock: zmq.Socket, deadline: float) -> int:
        while time.monotonic() < deadline and not self._closed:
            try:
                frame = sock.recv(copy=False)
            except zmq.Again:
                continue
            if frame.more or len(frame.bytes) != 4:
                raise OSError(f"a reply of {len(frame.bytes)} bytes{', and more' * frame.more}, not of 4")
            return int.from_bytes(frame.bytes, "big")
        raise TimeoutError(f"within {self.config.lookup_timeout_ms} ms")

    def _connect(self) -> None:
        for path in self.paths:
            sock = context_of(os.getpid()).socket(zmq.REQ)
            self._sockets.append(sock)
            sock.set(zmq.LINGER, 0)
            sock.set(zmq.SNDTIMEO, 0)
            sock.set(zmq.RCVTIMEO, min(self.config.lookup_timeout_ms, POLL_MS))
            sock.set(zmq.RECONNECT_IVL, 20)  # ms
            sock.set(zmq.RECONNECT_IVL_MAX, 500)
            sock.connect(f"ipc://{path}")

    def _disconnect(self) -> None:
        while self._sockets:
            self._sockets.pop().close()

    def close(self) -> None:
        """Returns within 0.1 s; a lookup in flight answers 0. Idempotent."""
        self._closed = True
        with self._lock:
            self._disconnect()

    def __enter__(self) -> "LMCacheLookupClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# The demo


def _demo_metadata(rank: int) -> LMCacheMetadata:
    return LMCacheMetadata("toy", 2, 2, rank, rank, torch.float32, (2, 2, 256, 2, 8), engine_id="demo")


def _demo_worker(rank: int, num_tokens: int, ready: Any, stop: Any) -> None:
    """A worker process: an engine that holds the first num_tokens tokens of the prompt, and its lookup server."""
    metadata = _demo_metadata(rank)
    with LMCacheEngine(LMCacheEngineConfig(max_local_cpu_size=0.1), metadata) as engine:
        engine.register_kv_caches([torch.randn(2, 128, 16, 2, 8) for _ in range(2)], "2BNHD")
        engine.store(list(range(num_tokens)), slot_mapping=list(range(num_tokens)))
        with LMCacheLookupServer(engine, metadata) as server:
            print(f"worker {rank}: holds {num_tokens} tokens, listens on {server.path}", flush=True)
            ready.release()
            stop.wait()
            print(f"worker {rank}: {engine.stats()['pinned_chunks']} chunks pinned by lookups", flush=True)


def main() -> None:
    """Two workers with 1,024 and 512 tokens of a prompt of 1,500; the scheduler asks both."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        spawn = multiprocessing.get_context("spawn")
        ready, stop = spawn.Semaphore(0), spawn.Event()
        workers = [
            spawn.Process(target=_demo_worker, args=(rank, num_tokens, ready, stop), daemon=True)
            for rank, num_tokens in enumerate((1024, 512))
        ]
        for worker in workers:
            worker.start()
        for _ in workers:
            if not ready.acquire(timeout=60):
                raise SystemExit("a worker did not start")
        with LMCacheLookupClient(LMCacheEngineConfig(), _demo_metadata(0)) as client:
            prompt = list(range(1500))
            for name, tokens in (("the prompt", prompt), ("another", prompt[::-1]), ("a short one", prompt[:100])):
                began = time.perf_counter()
                hits = client.lookup(tokens, name)
                took_ms = 1000 * (time.perf_counter() - began)
                print(f"scheduler: {name}, {len(tokens)} tokens: {hits} hit on every rank, {took_ms:.2f} ms")
        stop.set()
        for worker in workers:
            worker.join()


if __name__ == "__main__":
    main()
