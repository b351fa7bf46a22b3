"""Small things that the tests share: a toy model, its paged cache, an engine, a server in a thread
or in a process."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import zmq

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata, make_rpc_folder
from remote_server import ClientMetaMessage, LMCacheServer, RemoteClient

ROOT = Path(__file__).resolve().parent.parent
L, K, H, D = 2, 2, 2, 4
CHUNK, B, N = 4, 64, 4  # tokens in a chunk; blocks, slots in a block
CHUNK_BYTES = K * L * CHUNK * H * D * 4  # float32: 512


def metadata(**changes: Any) -> LMCacheMetadata:
    fields: dict[str, Any] = dict(
        model_name="toy", world_size=1, local_world_size=1, worker_id=0, local_worker_id=0
    )
    fields |= dict(kv_dtype=torch.float32, kv_shape=(L, K, CHUNK, H, D), engine_id="toy") | changes
    return LMCacheMetadata(**fields)


def config(chunks: int = 64, **changes: Any) -> LMCacheEngineConfig:
    """Chunks of 4 tokens, and room for so many of them."""
    return LMCacheEngineConfig(
        **{"chunk_size": CHUNK, "max_local_cpu_size": chunks * CHUNK_BYTES / 2**30} | changes
    )


def new_pages() -> list[torch.Tensor]:
    return [torch.randn(2, B, N, H, D) for _ in range(L)]  # L of [2, B, N, H, D]


@contextlib.contextmanager
def new_engine(
    chunks: int = 64, remote: Any = None, meta: dict[str, Any] | None = None, **changes: Any
) -> Iterator[LMCacheEngine]:
    """An engine with a paged cache of 256 slots, which it also keeps as `engine.pages` for the
    tests."""
    with LMCacheEngine(config(chunks, **changes), metadata(**meta or {}), remote=remote) as engine:
        engine.pages = new_pages()  # type: ignore[attr-defined]
        engine.register_kv_caches(engine.pages, "2BNHD")  # type: ignore[attr-defined]
        yield engine


def kv(pages: list[torch.Tensor], slots: Any) -> torch.Tensor:
    """The KV at some slots, [K, L, T, H*D]."""
    rows = [
        [layer[kv].reshape(-1, H * D)[list(slots)] for layer in pages] for kv in range(K)
    ]  # [K][L] of [T, H*D]
    return torch.stack([torch.stack(layers) for layers in rows])


def put_prompt(engine: LMCacheEngine, tokens: list[int], first_slot: int = 0, **more: Any) -> int:
    return engine.store(tokens, slot_mapping=range_of(first_slot, len(tokens)), **more)


def range_of(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


def wait_for(condition: Callable[[], Any], timeout_sec: float = 5.0) -> bool:
    """True as soon as condition() is, False where it is not in time."""
    deadline = time.monotonic() + timeout_sec
    while not (done := condition()) and time.monotonic() < deadline:
        time.sleep(0.002)
    return bool(done)


@contextlib.contextmanager
def silent_path(path: str) -> Iterator[zmq.Socket]:
    """The ROUTER of somebody who takes requests and never answers."""
    make_rpc_folder(path)
    with zmq.Context() as context, context.socket(zmq.ROUTER) as sock:
        sock.set(zmq.LINGER, 0)
        sock.set(zmq.RCVTIMEO, 5000)
        sock.bind(f"ipc://{path}")
        yield sock
    os.unlink(path)  # libzmq does not


def threads_named(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


# -- a server in a thread


@contextlib.contextmanager
def running_server(
    host: str = "127.0.0.1", max_bytes: int = 4 << 20, **more: Any
) -> Iterator[LMCacheServer]:
    with LMCacheServer(host, more.pop("port", 0), max_bytes=max_bytes, **more) as server:
        thread = threading.Thread(target=server.run, name="accept")
        thread.start()
        try:
            yield server
        finally:
            server.close()
            thread.join()


def client_of(server: LMCacheServer, **more: Any) -> RemoteClient:
    return RemoteClient(f"lm://127.0.0.1:{server.port}", **more)


@contextlib.contextmanager
def connected(port: int) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), 5.0) as sock:
        sock.settimeout(5.0)
        yield sock


def request(command: int, key: bytes | str = b"", length: int = 0, **more: Any) -> bytes:
    return ClientMetaMessage(command, key, length, **more).serialize()


def read(sock: socket.socket, count: int) -> bytes:
    """count bytes, or fewer where the peer closes."""
    data = b""
    with contextlib.suppress(ConnectionResetError):
        while len(data) < count and (more := sock.recv(count - len(data))):
            data += more
    return data


# -- a server in a process


class ServerProcess:
    """`python remote_server.py 127.0.0.1 PORT ...`; it is up when __init__ returns. log: what it
    has written so far."""

    def __init__(
        self,
        *more: str,
        host: str = "127.0.0.1",
        port: int = 0,
        before: Callable[[], None] | None = None,
    ):
        command = [
            sys.executable,
            "remote_server.py",
            host,
            str(port),
            "cpu",
            "--max-gib",
            "0.05",
            *more,
        ]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stderr=subprocess.PIPE, text=True, preexec_fn=before
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        assert wait_for(lambda: "listening on" in self.log or self.process.poll() is not None, 60)
        self.port = int(self.log.split("listening on ")[1].split(",")[0].rsplit(":", 1)[1])

    def _read(self) -> None:
        self.lines.extend(iter(self.process.stderr.readline, ""))  # type: ignore[union-attr]

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def stops_in_time(self, number: int) -> bool:
        """Whether it has stopped within 2 s of a signal, and then exits with 0 (Python's own end is
        not counted)."""
        self.process.send_signal(number)
        return wait_for(lambda: "stopped" in self.log, 2.0) and self.process.wait(30) == 0

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Sends a signal and waits; the exit status."""
        self.process.send_signal(number)  # none where it has ended
        status = self.process.wait(30)
        self._reader.join()
        self.process.stderr.close()  # type: ignore[union-attr]
        return status

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        if not self.process.stderr.closed:  # type: ignore[union-attr]
            self.stop(signal.SIGKILL)


@contextlib.contextmanager
def silent_server(reply: bytes = b"") -> Iterator[int]:
    """The port of something that accepts, reads, sends `reply` once a connection, and then nothing,
    for ever."""
    ended = threading.Event()
    clients: list[socket.socket] = []

    def serve() -> None:
        while not ended.is_set():
            with contextlib.suppress(TimeoutError):
                sock, _ = listener.accept()
                clients.append(sock)
                sock.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.02)
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            ended.set()
            thread.join()
            for sock in clients:
                sock.close()
