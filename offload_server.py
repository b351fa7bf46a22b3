"""offload_server.py - "store these slots of your pages": a scheduler asks the worker that owns the paged KV cache.

It follows LMCache 0.3.14 (v1/offload_server/zmq_server.py); either end can be LMCache's.

    $ python offload_server.py      # a worker with a toy paged cache, and a client in another process

    ZMQOffloadClient  --REQ, ipc://...offload...port+rank-->  REP  ZMQOffloadServer -> engine.store(hashes=...)

Request: a msgpack map {hashes: [int], slot_mapping: [int], offsets: [int]}, offsets the tokens in each chunk,
slot_mapping one slot for each of their sum(offsets) tokens. Reply: a msgpack map {success: bool}.

Not here: who decides what to offload, and when the pages may be used again (not before the reply).
"""

import contextlib
import logging
import multiprocessing
import os
import socket
import stat
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq

from engine import (
    ChunkedTokenDatabase,
    LMCacheEngine,
    LMCacheEngineConfig,
    LMCacheMetadata,
    RareLog,
    Service,
    check_hashes,
    locked,
    make_rpc_folder,
    rpc_path,
)

logger = logging.getLogger("lmcache.offload_server")

MAX_MESSAGE_BYTES = 64 << 20  # 6 million slots; a larger frame ends its sender's connection
POLL_MS = 100  # how soon a thread that waits for a message sees that it is to stop


class OffloadMsg(msgspec.Struct):
    """The request (LMCache offload_server/message.py)."""

    hashes: list[int]  # one a chunk
    slot_mapping: list[int]  # one a token
    offsets: list[int]  # tokens in each chunk


class OffloadRetMsg(msgspec.Struct):
    """The reply."""

    success: bool


def offload_path(engine_id: str | None, tp_rank: int) -> str:
    """The socket file of a rank's offload server. Its port: LMCACHE_OFFLOAD_RPC_PORT of the environment, else 100."""
    text = os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", "100")
    try:
        return rpc_path(engine_id or "default", "offload", int(text), tp_rank)
    except ValueError as error:
        raise ValueError(f"LMCACHE_OFFLOAD_RPC_PORT {text!r} must be an int") from error


def bind_ipc(server: zmq.Socket, path: str) -> None:
    """Binds to a socket file of our own: OSError where a server is alive on it; a stale one is taken over.

    (lookup.py has its twin: each module can be lifted out with engine.py alone.)
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


class ZMQOffloadServer:
    """Stores what it is asked to, in a thread of its own. Every request gets exactly one reply.

    OSError where another server is alive on the same path, or the folder is somebody else's.
    """

    def __init__(self, lmcache_engine: LMCacheEngine, tp_rank: int):
        self.engine = lmcache_engine
        self.path = offload_path(lmcache_engine.metadata.engine_id, tp_rank)
        self._log = RareLog(logger)
        self._decode = msgspec.msgpack.Decoder(OffloadMsg).decode
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.REP)
        self._socket.set(zmq.LINGER, 0)
        self._socket.set(zmq.RCVTIMEO, POLL_MS)
        self._socket.set(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            bind_ipc(self._socket, self.path)
            self._service = Service("offload-server", self._step, self._finish)
        except BaseException:
            self._context.destroy()
            raise

    def _step(self) -> None:
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return
        success = False
        try:
            if len(frames) != 1:
                raise ValueError(f"{len(frames)} frames, a request has one")
            message = self._decode(frames[0])
        except Exception as error:
            self._log("malformed", "offload request refused: %s", error)
        else:
            success = self.offload(message.hashes, message.slot_mapping, message.offsets)
        self._socket.send(msgspec.msgpack.encode(OffloadRetMsg(success)))

    def offload(self, hashes: Sequence[Any], slot_mapping: Sequence[int], offsets: Sequence[int]) -> bool:
        """Stores chunks out of the paged cache: all of them, those already there included, or none and False.

        hashes: one a chunk; offsets: the tokens in each; slot_mapping: one slot a token, sum(offsets) of them.
        """
        try:
            check_hashes(hashes, offsets)
            if len(slot_mapping) != sum(offsets):
                raise ValueError(f"{len(slot_mapping)} slots for {sum(offsets)} tokens")
            self.engine.store(hashes=hashes, slot_mapping=slot_mapping, offsets=offsets)
        except Exception as error:
            self._log(type(error).__name__, "offload refused: %r", error)
            return False
        return True

    def _finish(self) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self.path)  # first, so that nobody finds a server that is about to go
        self._socket.close()
        self._context.term()

    def close(self) -> None:
        """Ends the thread and takes the socket file away. Idempotent."""
        self._service.close()

    def __enter__(self) -> "ZMQOffloadServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ZMQOffloadClient:
    """Asks a rank's offload server. timeout_ms is for one request. Safe to share between threads."""

    def __init__(self, engine_id: str | None, tp_rank: int, timeout_ms: int = 10_000):
        if timeout_ms < 1:
            raise ValueError(f"timeout_ms {timeout_ms} must be 1 or more")
        self.path, self.timeout_ms = offload_path(engine_id, tp_rank), timeout_ms
        self._log = RareLog(logger)
        self._context = zmq.Context()
        self._socket: zmq.Socket | None = None  # used by whoever holds the lock
        self._lock = threading.Lock()
        self._closed = False

    def offload(self, hashes: Sequence[Any], slot_mapping: Sequence[int], offsets: Sequence[int]) -> bool:
        """True when all of it is stored; False, and a warning, where the server refuses or gives no answer in time."""
        try:
            request = msgspec.msgpack.encode(OffloadMsg([*hashes], [*slot_mapping], [*offsets]))
        except (TypeError, OverflowError) as error:
            raise ValueError(f"hashes, slots and offsets must be ints of at most 64 bits: {error}") from error
        deadline = time.monotonic() + self.timeout_ms / 1000
        if not self._lock.acquire(timeout=self.timeout_ms / 1000):
            self._log("busy", "offload timed out behind another thread's")
            return False
        try:
            reply = self._ask(request, deadline)
            return msgspec.msgpack.decode(reply, type=OffloadRetMsg).success
        except (zmq.ZMQError, TimeoutError, msgspec.MsgspecError) as error:
            self._log("failed", "no answer from %s: %s", self.path, error)
            self._disconnect()  # a late reply comes to a socket that is gone
            return False
        finally:
            self._lock.release()

    def _ask(self, request: bytes, deadline: float) -> bytes:
        if self._socket is None and not self._closed:
            self._socket = self._context.socket(zmq.REQ)
            self._socket.set(zmq.LINGER, 0)
            self._socket.set(zmq.RCVTIMEO, POLL_MS)
            self._socket.connect(f"ipc://{self.path}")
        if self._socket is not None:
            self._socket.send(request)
        while self._socket is not None and not self._closed and time.monotonic() < deadline:
            with contextlib.suppress(zmq.Again):
                return self._socket.recv()
        raise TimeoutError("this client is closed" if self._closed else f"within {self.timeout_ms} ms")

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def close(self) -> None:
        """Returns within 0.1 s; a request in flight answers False. Idempotent."""
        self._closed = True
        with self._lock:
            self._disconnect()
            self._context.term()

    def __enter__(self) -> "ZMQOffloadClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# ---------------------------------------------------------------------------------------------------------------------
# The demo


def _demo_worker(ready: Any, stop: Any) -> None:
    """A worker process that owns a toy paged cache, an engine and its offload server."""
    metadata = LMCacheMetadata("toy", 1, 1, 0, 0, torch.float32, (2, 2, 256, 2, 8), engine_id="demo")
    with LMCacheEngine(LMCacheEngineConfig(max_local_cpu_size=0.1), metadata) as engine:
        engine.register_kv_caches([torch.randn(2, 128, 16, 2, 8) for _ in range(2)], "2BNHD")
        with ZMQOffloadServer(engine, 0) as server:
            print(f"worker: 2,048 slots of KV, listens on {server.path}", flush=True)
            ready.release()
            stop.wait()
            stats = engine.stats()
            print(f"worker: holds {stats['chunks']} chunks, {stats['bytes_used']:,} bytes", flush=True)


def main() -> None:
    """A client asks a worker in another process to offload 4 chunks, the same again, and a slot that is not there."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        spawn = multiprocessing.get_context("spawn")
        ready, stop = spawn.Semaphore(0), spawn.Event()
        worker = spawn.Process(target=_demo_worker, args=(ready, stop), daemon=True)
        worker.start()
        if not ready.acquire(timeout=60):
            raise SystemExit("the worker did not start")
        spans = ChunkedTokenDatabase(LMCacheEngineConfig()).process_tokens(list(range(1024)))
        hashes, lengths = [span[2] for span in spans], [end - start for start, end, _ in spans]
        with ZMQOffloadClient("demo", 0) as client:
            for name, slots in (
                ("4 chunks of 256 tokens", list(range(1024))),
                ("the same again", list(range(1024))),
                ("a slot of 2048, which is not there", [*range(1023), 2048]),
            ):
                began = time.perf_counter()
                success = client.offload(hashes, slots, lengths)
                print(f"client: {name}: success {success}, {1000 * (time.perf_counter() - began):.2f} ms", flush=True)
        stop.set()
        worker.join()


if __name__ == "__main__":
    main()
