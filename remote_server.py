"""remote_server.py - a TCP cache server that keeps KV chunks for any number of engines, and its client.

It speaks the protocol of LMCache 0.3.14 (v1/server, v1/protocol.py, `lm://host:port`), so either end can be LMCache's.

    $ python remote_server.py 0.0.0.0 8080 cuda --max-gib 20    # serve; chunks live on `cpu`, `cuda` or `cuda:N`
    $ python remote_server.py --stats 127.0.0.1 8080            # ask it; exit status 0 if it is well
    $ python remote_server.py --demo                            # a server and a client, put, get, evict

One thread a connection, one persistent connection a client, one request after another (they may be pipelined):

    client                                   server
    header 186 bytes, PUT + payload    ->    (no reply)
    header 186 bytes, GET              ->    header 36 bytes + payload, or FAIL
    header 186 bytes, EXIST or HEALTH  ->    header 36 bytes
    header 186 bytes, LIST or STATS    ->    header 36 bytes + newline-joined keys, or JSON

Not here: replication, persistence, the chunk store itself (engine.ChunkStore: memory, LRU, the budget).
"""

import argparse
import contextlib
import json
import logging
import os
import re
import signal
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any
from urllib.parse import urlsplit

import torch

from engine import DTYPE_TO_INT, MAX_KEY_BYTES, CacheEngineKey, ChunkStore, MemoryFormat, RareLog, RemoteMeta, bytes_of

logger = logging.getLogger("lmcache.remote_server")

# ---------------------------------------------------------------------------------------------------------------------
# The protocol: two fixed headers, little-endian, no padding


class ClientCommand(IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5
    STATS = 100  # ours alone; LMCache's server does not know it


class ServerReturnCode(IntEnum):
    SUCCESS = 200
    FAIL = 400


REQUEST = struct.Struct(f"<9i{MAX_KEY_BYTES}s")  # command, length, fmt, dtype, location, s0..s3, key: 9 * 4 + 150 = 186
REPLY = struct.Struct("<9i")  # code, length, fmt, dtype, s0..s3, location: 36. The location is last here, and 5th there

Shape = tuple[int, ...]  # exactly 4 ints, 0 where the KV has fewer axes


def _check_shape(shape: Shape) -> None:
    if len(shape) != 4:
        raise ValueError(f"shape {[*shape]} must have 4 axes; fill up with 0")


@dataclass
class ClientMetaMessage:
    """A request header (LMCache protocol.py). fmt, dtype and location are the protocol's integers, passed as they are.

    A PUT of 64 bytes, KV_2LTD, bfloat16, no location, shape [2, 1, 4, 4], key "m@1@0@abc@bfloat16":

    01000000 40000000 01000000 03000000 00000000 02000000 01000000 04000000 04000000 6d40314030406162634062... 20 20 20
    command  length   fmt      dtype    location s0       s1       s2       s3       key, padded with spaces to 150
    """

    command: int
    key: CacheEngineKey | str | bytes
    length: int = 0  # payload bytes
    fmt: int = MemoryFormat.KV_2LTD
    dtype: int = 2
    shape: Shape = (0, 0, 0, 0)
    location: int = 0

    def serialize(self) -> bytes:
        _check_shape(self.shape)
        key = self.key.to_string() if isinstance(self.key, CacheEngineKey) else self.key
        raw = key.encode() if isinstance(key, str) else key
        if len(raw) > MAX_KEY_BYTES or raw.endswith(b" "):
            raise ValueError(f"key {key!r} has {len(raw)} bytes; allowed: {MAX_KEY_BYTES}, and no space at the end")
        numbers = (self.command, self.length, self.fmt, self.dtype, self.location, *self.shape)
        try:
            return REQUEST.pack(*numbers, raw.ljust(MAX_KEY_BYTES))
        except struct.error as error:
            raise ValueError(f"command, length, fmt, dtype, location, shape {numbers}: {error}") from error

    @staticmethod
    def deserialize(header: bytes) -> "ClientMetaMessage":
        command, length, fmt, dtype, location, s0, s1, s2, s3, key = REQUEST.unpack(header)
        return ClientMetaMessage(command, key.rstrip(b" "), length, fmt, dtype, (s0, s1, s2, s3), location)

    @staticmethod
    def packlength() -> int:
        return REQUEST.size


@dataclass
class ServerMetaMessage:
    """A reply header (LMCache protocol.py). A miss is (FAIL, 0, 1, 2, (0, 0, 0, 0), 0)."""

    code: int
    length: int = 0
    fmt: int = MemoryFormat.KV_2LTD
    dtype: int = 2
    shape: Shape = (0, 0, 0, 0)
    location: int = 0

    def serialize(self) -> bytes:
        _check_shape(self.shape)
        return REPLY.pack(self.code, self.length, self.fmt, self.dtype, *self.shape, self.location)

    @staticmethod
    def deserialize(header: bytes) -> "ServerMetaMessage":
        code, length, fmt, dtype, s0, s1, s2, s3, location = REPLY.unpack(header)
        return ServerMetaMessage(code, length, fmt, dtype, (s0, s1, s2, s3), location)

    @staticmethod
    def packlength() -> int:
        return REPLY.size


MISS = ServerMetaMessage(ServerReturnCode.FAIL).serialize()
FOUND = ServerMetaMessage(ServerReturnCode.SUCCESS).serialize()

# ---------------------------------------------------------------------------------------------------------------------
# Bytes through a socket, on both sides


def recv_exact(sock: socket.socket, view: memoryview, deadline: float | None = None) -> None:
    """Fills view. ConnectionError where the peer closes, TimeoutError where it stalls or the deadline passes.

    deadline: of time.monotonic(), for all of it; without one, the socket's own timeout holds for each piece.
    """
    while view:
        if deadline is not None:
            sock.settimeout(_left(deadline))
        try:
            count = sock.recv_into(view)
        except BlockingIOError as error:  # SO_RCVTIMEO ran out
            raise TimeoutError("peer stalled in the middle of a message") from error
        if count == 0:
            raise ConnectionError("peer closed in the middle of a message")
        view = view[count:]


def recv_bytes(receive: Callable[[memoryview], Any], length: int) -> bytearray:
    """The next `length` bytes, in memory taken as they come: no 2 GiB on the word of a header."""
    data = bytearray(min(length, 16 << 20))
    receive(memoryview(data))
    while len(data) < length:
        more = bytearray(min(length - len(data), len(data)))
        receive(memoryview(more))
        data += more
    return data


def send_all(
    sock: socket.socket, header: bytes | memoryview, payload: memoryview | bytes = b"", deadline: float | None = None
) -> None:
    """Sends header and payload, in one piece where it can: a header alone waits for a delayed ACK at the other end."""
    if deadline is not None:
        sock.settimeout(_left(deadline))
    try:
        if not payload or isinstance(sock, ssl.SSLSocket):  # which has no sendmsg
            sock.sendall(header)
            sock.sendall(payload)
            return
        sent = sock.sendmsg((header, payload))
        if sent == len(header) + len(payload):
            return
        if sent < len(header):
            sock.sendall(header[sent:])
        payload = memoryview(payload)[max(0, sent - len(header)) :]
        while payload:
            if deadline is not None:
                sock.settimeout(_left(deadline))
            payload = payload[sock.send(payload) :]
    except BlockingIOError as error:  # SO_SNDTIMEO ran out
        raise TimeoutError("peer does not read") from error


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("deadline passed")
    return left


def tls_context(cert: str, key: str, ca: str, server_side: bool) -> ssl.SSLContext:
    """Mutual TLS: we show cert, signed by ca, and so must the peer. PEM files. ValueError where one cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # a client with bytes to read between requests knows that something is wrong
    try:
        context.load_cert_chain(cert, key)
        context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"TLS files {cert}, {key}, {ca}: {error}") from error
    return context


# ---------------------------------------------------------------------------------------------------------------------
# The server

PUT, GET, EXIST, HEALTH = 1, 2, 3, 5  # ClientCommand as plain ints: an enum costs a tenth of a small request
SUCCESS, REQUEST_BYTES = 200, REQUEST.size
BATCH = 16  # requests read in one go: a burst of EXIST costs few system calls, and a PUT copies at most 3 KiB twice
MAX_DRAIN = 1 << 16  # bytes read at once of a payload that nobody wants
FIRST_WARM_BYTES = 256 << 20  # touched before the first client, so that it finds it fast


class LMCacheServer:
    """A TCP cache server (LMCache v1/server/__main__.py). Port 0 picks a free one; `port` says which.

    max_bytes: of chunks, least recently used evicted first. A chunk of over max_bytes, or one for which there is no
        room beside those in use, is refused: read off the stream and dropped.
    max_clients: further ones are closed at once.
    stall_timeout_sec: for a peer that stops in the middle of a request or does not read its reply; between requests a
        client may stay idle for ever.
    tls: an ssl context with a client certificate required, see tls_context.
    """

    def __init__(
        self,
        host: str,
        port: int,
        device: str = "cpu",
        max_bytes: int = 5 << 30,
        max_clients: int = 1024,
        stall_timeout_sec: float = 30.0,
        tls: ssl.SSLContext | None = None,
    ):
        if max_clients < 1 or not 1e-3 <= stall_timeout_sec <= 1e6:
            raise ValueError(
                f"max_clients {max_clients} must be positive, stall_timeout_sec {stall_timeout_sec} 0.001..1e6"
            )
        self.max_clients, self.stall_timeout_sec, self.tls = max_clients, stall_timeout_sec, tls
        with contextlib.ExitStack() as undo:  # where one fails, those before it are closed
            self._listener = undo.enter_context(_listen(host, port))
            self._spare_file = undo.enter_context(open(os.devnull))  # see _refuse_for_lack_of_files
            self.store = ChunkStore(device, max_bytes, warm_bytes=max_bytes)  # it is there to be filled
            undo.pop_all()
        self.store.warm(FIRST_WARM_BYTES)
        self.host, self.port = self._listener.getsockname()[:2]
        self._clients: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()  # of _clients
        self._closed = False
        self._log = RareLog(logger)
        self.refused_clients = 0

    # -- one connection

    def receive_all(self, client_socket: socket.socket, n: int) -> bytearray | None:
        """The next n bytes, or None where the client closes first."""
        data = bytearray(n)
        try:
            recv_exact(client_socket, memoryview(data))
        except ConnectionError:
            return None
        return data

    def handle_client(self, client_socket: socket.socket) -> None:
        """Answers one client's requests until it leaves, stalls in the middle of one, or the server closes."""
        peer = _peer(client_socket)
        try:
            with self._prepare(client_socket) as sock:
                if isinstance(sock, ssl.SSLSocket):
                    sock.do_handshake()  # here, in the client's own thread, where a slow one stalls nobody else
                self._serve(sock)
        except (TimeoutError, BlockingIOError, ssl.SSLError) as error:
            self._log("stalled", "client %s dropped: %s", peer, error)
        except OSError as error:
            if not self._closed:
                self._log("left", "client %s left: %s", peer, error)
        except Exception:
            self._log("ours", "client %s dropped: a fault of ours", peer, traceback=True)
        finally:
            client_socket.close()

    def _prepare(self, sock: socket.socket) -> socket.socket:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self.tls is None:  # the kernel's own timeouts: no poll() before each recv()
            stall = struct.pack("ll", int(self.stall_timeout_sec), int(self.stall_timeout_sec % 1 * 1e6))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, stall)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, stall)
            return sock
        sock.settimeout(self.stall_timeout_sec)
        secure = self.tls.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        with self._lock:  # wrapping detached the old socket: close() must find the new one
            self._clients[secure] = self._clients.pop(sock, threading.current_thread())
        return secure

    def _serve(self, sock: socket.socket) -> None:
        buffer = bytearray(REQUEST.size * BATCH)
        view, have = memoryview(buffer), 0
        while not self._closed:
            try:
                count = sock.recv_into(view[have:] if have else view)
            except (BlockingIOError, TimeoutError) as error:
                if have == 0:
                    continue  # idle between requests
                raise TimeoutError(f"stalled after {have} bytes of a request header") from error
            if count == 0:
                return
            have, at, replies = have + count, 0, b""
            while have - at >= REQUEST_BYTES:
                command, length, fmt, dtype, location, s0, s1, s2, s3, key = REQUEST.unpack_from(buffer, at)
                at += REQUEST_BYTES
                key = key.rstrip(b" ")
                if command == EXIST:
                    try:  # here, not in a function around it: that call would cost a tenth of the request
                        there = self.store.contains(key)
                    except Exception as error:
                        there = False
                        self._store_failed(error)
                    replies += FOUND if there else MISS
                elif command == PUT:
                    if replies:  # no answer waits for a payload that may be slow to come
                        sock.sendall(replies)
                        replies = b""
                    early = view[at : min(have, at + max(length, 0))]  # of the payload, already read
                    at += len(early)
                    header = REPLY.pack(SUCCESS, length, fmt, dtype, s0, s1, s2, s3, location)
                    if not self._put(sock, key, header, length, early):
                        return
                elif command == HEALTH:
                    replies += FOUND
                else:
                    if replies:
                        sock.sendall(replies)
                        replies = b""
                    self._answer(sock, command, key)
            if replies:
                sock.sendall(replies)
            if at < have:
                view[: have - at] = view[at:have]
            have -= at

    def _put(self, sock: socket.socket, key: bytes, header: bytes, length: int, early: memoryview) -> bool:
        """Receives a payload and makes it visible when its last byte is there. False: the stream is out of step."""
        if length < 0:
            self._log("length", "client %s announces %d bytes: connection closed", _peer(sock), length)
            return False
        if self.tls is None:
            # LMCache's client sends header and payload in two; its kernel holds the second back until our ACK.
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)
            if not early and length and not sock.recv(1, socket.MSG_PEEK):  # subtle: nobody is evicted on the word
                raise ConnectionError("client closed after a PUT header")  # of a header; wait for its first byte
        elif not early and length:
            first = bytearray(1)
            recv_exact(sock, memoryview(first))
            early = memoryview(first)

        def receive(view: memoryview) -> None:
            nonlocal early
            count = min(len(early), len(view))
            view[:count] = early[:count]
            early = early[count:]
            recv_exact(sock, view[count:])

        try:
            self.store.contains(key)  # subtle: touches the old value, so that it is the last to be evicted for the new
            chunk = self.store.reserve(length)
        except Exception as error:
            chunk = None
            self._store_failed(error)
        if chunk is None:
            self._log("refused", "PUT of %d bytes refused, the budget is %d", length, self.store.max_bytes)
            scratch = memoryview(bytearray(min(length, MAX_DRAIN)))
            for start in range(0, length, MAX_DRAIN):
                receive(scratch[: length - start])
            return True
        chunk.meta = header
        try:
            self.store.fill(chunk, receive)
        except BaseException:
            self.store.abandon(chunk)
            raise
        self.store.release([self.store.commit(key, chunk)])
        return True

    def _store_failed(self, error: Exception) -> None:
        """A fault of the store is a miss or a refusal, and the client is served on."""
        self._log("store", "the store failed: %r", error)

    def _answer(self, sock: socket.socket, command: int, key: bytes) -> None:
        if command == GET:
            try:
                chunk = self.store.acquire(key)
            except Exception as error:
                chunk = None
                self._store_failed(error)
            if chunk is None:
                sock.sendall(MISS)
                return
            header = chunk.meta
            try:
                for piece in self.store.pieces(chunk):
                    send_all(sock, header, piece)
                    header = b""
                if header:  # no pieces: an empty payload on a GPU
                    sock.sendall(header)
            except RuntimeError as error:  # the device fails
                if not header:
                    raise
                self._store_failed(error)
                sock.sendall(MISS)
            finally:
                self.store.release([chunk])
        elif command in (ClientCommand.LIST, ClientCommand.STATS):
            listing = command == ClientCommand.LIST
            body = b"\n".join(self.store.keys()) if listing else json.dumps(self.stats()).encode()
            send_all(sock, ServerMetaMessage(ServerReturnCode.SUCCESS, len(body)).serialize(), body)
        else:
            self._log("command", "client %s sends unknown command %d: FAIL", _peer(sock), command)
            sock.sendall(MISS)

    # -- all connections

    def run(self) -> None:
        """Accepts clients until close()."""
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed:
                    return
                self._refuse_for_lack_of_files(error)
                continue
            with self._lock:
                refusal = self._start_client(sock)
            if refusal:
                self.refused_clients += 1
                self._log("refused client", "client %s refused: %s", _peer(sock), refusal)
                sock.close()

    def _start_client(self, sock: socket.socket) -> str:
        """Starts a client's thread; the reason where it cannot. Under the lock: close() joins only what has started."""
        if self._closed:
            return "the server closes"
        if len(self._clients) >= self.max_clients:
            return f"{self.max_clients} are connected, max_clients"
        thread = threading.Thread(target=self._run_client, args=(sock,), daemon=True, name="client")
        self._clients[sock] = thread
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            del self._clients[sock]
            return str(error)
        return ""

    def _run_client(self, sock: socket.socket) -> None:
        try:
            self.handle_client(sock)
        finally:
            self._forget(threading.current_thread())

    def _forget(self, thread: threading.Thread) -> None:
        with self._lock:
            self._clients = {sock: other for sock, other in self._clients.items() if other is not thread}

    def _refuse_for_lack_of_files(self, error: OSError) -> None:
        """No file descriptor is left for a new client: the spare one accepts it, to close it, so that it knows."""
        self.refused_clients += 1
        self._log("files", "client refused: %s", error)
        self._spare_file.close()
        with contextlib.suppress(OSError):
            self._listener.accept()[0].close()
        try:
            self._spare_file = open(os.devnull)  # noqa: SIM115
        except OSError:
            time.sleep(0.05)  # something else took the spare one: no busy loop

    def stats(self) -> dict[str, int]:
        """The store's figures, and connected and refused clients."""
        return self.store.stats() | {"clients": len(self._clients), "refused_clients": self.refused_clients}

    def close(self) -> None:
        """Ends every connection, what is half received is dropped, and gives up memory and port. Idempotent."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # subtle: else an accept() under way holds the port for 0.2 s
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
        for sock in clients:
            with contextlib.suppress(
                OSError
            ):  # subtle: SSLSocket.shutdown would make its reader take it for a plain one
                socket.socket.shutdown(sock, socket.SHUT_RDWR)
        deadline = time.monotonic() + 1.5
        for thread in clients.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._spare_file.close()
        self.store.close()

    def __enter__(self) -> "LMCacheServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port < 1 << 16:  # getaddrinfo would take it modulo that
        raise ValueError(f"cannot listen on port {port}: allowed are 0..65535, 0 picks a free one")
    try:
        family, _, _, _, address = socket.getaddrinfo(host or None, port, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)[
            0
        ]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, OverflowError) as error:
        raise ValueError(f"cannot listen on {host!r} port {port}: {error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for TIME_WAIT
        listener.bind(address)
        listener.listen(128)
        listener.settimeout(0.2)  # how soon run() sees close()
    except (OSError, OverflowError) as error:
        listener.close()
        raise OSError(f"cannot listen on {host!r} port {port}: {error}") from error
    return listener


def _peer(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
        return f"{host}:{port}"
    except OSError:
        return "(gone)"


# ---------------------------------------------------------------------------------------------------------------------
# The client

WINDOW = 64  # requests under way at once: 64 * 186 bytes fit in any socket buffer, so neither end waits for the other
ANY_KEY = b"any@1@0@0@half"  # where a request needs none: LMCache's server ends a connection whose key it cannot read

Fill = Callable[[int, RemoteMeta, Callable[[memoryview], Any]], None]
PutItem = tuple[CacheEngineKey | str | bytes, RemoteMeta, Iterable[memoryview | bytes]]  # key, meta, payload in pieces


class RemoteClient:
    """A client of LMCacheServer, or of LMCache's own, at `lm://host:port` (`lms://` with TLS, see tls_context).

    One connection, made at the first request and made again when it breaks, `retries` times a request; then it is a
    ConnectionError. timeout_sec is for one request, all retries together, or for one batch; then TimeoutError. Both
    are OSErrors. Safe to share between threads, one request at a time.
    """

    def __init__(self, url: str, timeout_sec: float = 5.0, retries: int = 2, tls: ssl.SSLContext | None = None):
        parts = urlsplit(url)
        try:
            self.host, self.port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from error
        if parts.scheme not in ("lm", "lms") or not self.host or not self.port or parts.path not in ("", "/"):
            raise ValueError(f"url {url!r} must be lm://host:port or lms://host:port, an IPv6 host in [ ]")
        if (parts.scheme == "lms") != (tls is not None):
            raise ValueError(f"url {url!r}: lms:// needs a tls context, and only lms:// takes one")
        if timeout_sec <= 0 or retries < 0:
            raise ValueError(f"timeout_sec {timeout_sec} must be above 0 and retries {retries} not below")
        self.timeout_sec, self.retries, self.tls = timeout_sec, retries, tls
        self._sock: socket.socket | None = None
        self._lock = threading.Lock()
        self._unconfirmed = 0  # puts that no reply came after
        self._lost = 0  # of them, those whose connection broke
        self._closed = False

    # -- requests

    def put(self, key: CacheEngineKey | str | bytes, data: Any, meta: RemoteMeta | None = None) -> None:
        """Stores data, a CPU tensor or any buffer of bytes. meta: how it is laid out; by default what a tensor tells.

        There is no reply: flush() tells whether it arrived.
        """
        if isinstance(data, torch.Tensor):
            data = data.detach().contiguous().cpu()
            if data.dtype not in DTYPE_TO_INT:
                raise ValueError(f"{data.dtype} has no number on the wire; allowed: {list(DTYPE_TO_INT)[1:]}")
            shape = (*data.shape, 0, 0, 0, 0)[: max(4, data.dim())]
            meta = meta or RemoteMeta(data.nbytes, MemoryFormat.KV_2LTD, DTYPE_TO_INT[data.dtype], shape)
            payload = bytes_of(data)
        else:
            payload = memoryview(data).cast("B")
            meta = meta or RemoteMeta(len(payload), MemoryFormat.BINARY, 6, (len(payload), 0, 0, 0))
        if meta.length != len(payload):
            raise ValueError(f"meta says {meta.length} bytes, data has {len(payload)}")
        self.put_many([(key, meta, [payload])])

    def put_many(self, items: Iterable[PutItem]) -> None:
        """Stores many, one after another; what is sent when the connection breaks may be lost, see flush()."""
        for key, meta, pieces in items:
            self._put(_request(ClientCommand.PUT, key, meta), iter(pieces))

    def _put(self, header: bytes, pieces: Iterator[memoryview | bytes]) -> None:
        first, gone = next(pieces, b""), False  # gone: the first piece is not there any more, see ChunkStore.pieces

        def send(sock: socket.socket, deadline: float) -> None:
            nonlocal gone
            if gone:
                raise OSError("the connection broke in the middle of a put in pieces: it cannot begin again")
            send_all(sock, header, first, deadline)
            for piece in pieces:
                gone = True
                send_all(sock, piece, b"", deadline)
            self._unconfirmed += 1

        self._call(send)

    def get(self, key: CacheEngineKey | str | bytes) -> tuple[RemoteMeta, bytearray] | None:
        """The chunk under key and what is known of it, or None."""
        found: list[tuple[RemoteMeta, bytearray]] = []

        def fill(_: int, meta: RemoteMeta, receive: Callable[[memoryview], Any]) -> None:
            found[:] = [(meta, recv_bytes(receive, meta.length))]

        self.get_many([key], fill)
        return found[0] if found else None

    def get_many(self, keys: Sequence[CacheEngineKey | str | bytes], fill: Fill) -> None:
        """Asks for many at once. For each that is there, in order, fill(index, meta, receive) is called; it may call
        receive(view), once or often, to take the next len(view) bytes of the payload. What it leaves is skipped."""

        def take(sock: socket.socket, index: int, reply: ServerMetaMessage, deadline: float) -> None:
            if reply.code != ServerReturnCode.SUCCESS:
                return
            left = reply.length

            def receive(view: memoryview) -> None:
                nonlocal left
                if len(view) > left:
                    raise ValueError(f"{len(view)} bytes asked for, {left} are left of this chunk")
                recv_exact(sock, view, deadline)
                left -= len(view)

            fill(index, RemoteMeta(reply.length, reply.fmt, reply.dtype, reply.shape), receive)
            scratch = memoryview(bytearray(min(left, MAX_DRAIN)))
            while left:
                receive(scratch[:left])

        self._pipeline(ClientCommand.GET, keys, take)

    def exists(self, key: CacheEngineKey | str | bytes) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys: Sequence[CacheEngineKey | str | bytes]) -> list[bool]:
        found = [False] * len(keys)

        def take(_: socket.socket, index: int, reply: ServerMetaMessage, deadline: float) -> None:
            found[index] = reply.code == ServerReturnCode.SUCCESS

        self._pipeline(ClientCommand.EXIST, keys, take)
        return found

    def list_keys(self) -> list[str]:
        """Every key on the server, the least recently used first. LMCache's own never answers: TimeoutError."""
        body = self._body(ClientCommand.LIST)
        return body.decode(errors="backslashreplace").split("\n") if body else []

    def stats(self) -> dict[str, int]:
        """The server's figures, see LMCacheServer.stats; a ValueError from a server that has none."""
        return json.loads(self._body(ClientCommand.STATS))

    def health(self) -> bool:
        """True where a server answers; False, and no exception, where none does."""
        try:
            self._ping()
        except OSError:
            return False
        return True

    def flush(self) -> None:
        """Returns when the server has taken every put so far; ConnectionError where some of them may be lost."""
        self._ping()
        with self._lock:
            lost, self._lost = self._lost, 0
        if lost:
            raise ConnectionError(f"the connection broke with {lost} puts under way: they may be lost")

    def close(self) -> None:
        """Ends the connection; a call in flight fails. Idempotent."""
        self._closed = True
        sock = self._sock
        if sock is not None:
            with contextlib.suppress(
                OSError
            ):  # subtle: SSLSocket.shutdown would make its reader take it for a plain one
                socket.socket.shutdown(sock, socket.SHUT_RDWR)  # wakes whoever waits for a reply
        if self._lock.acquire(timeout=1.0):  # else a call is about to connect: it sees that we are closed
            self._disconnect()
            self._lock.release()

    def __enter__(self) -> "RemoteClient":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- one connection

    def _ping(self) -> None:
        self._pipeline(ClientCommand.HEALTH, [ANY_KEY], lambda *_: None)

    def _body(self, command: ClientCommand) -> bytes:
        body = bytearray()

        def take(sock: socket.socket, _: int, reply: ServerMetaMessage, deadline: float) -> None:
            body[:] = recv_bytes(lambda view: recv_exact(sock, view, deadline), reply.length)

        self._pipeline(command, [ANY_KEY], take)
        return bytes(body)

    def _pipeline(self, command: ClientCommand, keys: Sequence, take: Callable[..., None]) -> None:
        """Sends a request for each key, WINDOW at a time, and hands each reply to take. Begins again where it broke."""
        headers = [_request(command, key) for key in keys]
        done = 0

        def exchange(sock: socket.socket, deadline: float) -> None:
            nonlocal done
            header, sent = bytearray(REPLY.size), done
            while done < len(headers):
                if sent < len(headers) and sent - done <= WINDOW // 2:
                    more = headers[sent : done + WINDOW]
                    send_all(sock, b"".join(more), b"", deadline)
                    sent += len(more)
                recv_exact(sock, memoryview(header), deadline)
                self._unconfirmed = 0
                take(sock, done, ServerMetaMessage.deserialize(bytes(header)), deadline)
                done += 1

        if headers:
            self._call(exchange)

    def _call(self, exchange: Callable[[socket.socket, float], None]) -> None:
        deadline = time.monotonic() + self.timeout_sec
        if not self._lock.acquire(timeout=self.timeout_sec):
            raise TimeoutError(f"{self.host}:{self.port}: another request was under way for {self.timeout_sec} s")
        try:
            for attempt in range(self.retries + 1):
                if self._closed:
                    raise ConnectionError("this client is closed")
                try:
                    exchange(self._connected(deadline), deadline)
                    return
                except (ConnectionError, ssl.SSLError) as error:
                    self._disconnect()
                    if attempt == self.retries or self._closed:
                        raise ConnectionError(f"{self.host}:{self.port}: {error}") from error
                    time.sleep(min(0.02 * 4**attempt, max(0.0, deadline - time.monotonic())))
        except BaseException:
            self._disconnect()  # half an exchange: the stream is out of step
            raise
        finally:
            if self._closed:
                self._disconnect()
            self._lock.release()

    def _connected(self, deadline: float) -> socket.socket:
        """The connection, made anew where the server has closed it."""
        if self._sock is not None:
            self._sock.settimeout(0)
            try:
                socket.socket.recv(self._sock, 1, socket.MSG_PEEK)  # of the bare socket, also with TLS
                self._disconnect()  # closed, or bytes that nobody asked for
            except BlockingIOError:
                pass
            except OSError:
                self._disconnect()
        if self._sock is None:
            try:
                sock = socket.create_connection((self.host, self.port), _left(deadline))
            except TimeoutError:
                raise
            except OSError as error:  # a name that cannot be resolved, a network that is not there
                raise ConnectionError(str(error)) from error
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._sock = self.tls.wrap_socket(sock, server_hostname=self.host) if self.tls else sock
            except OSError as error:
                sock.close()
                raise ConnectionError(f"TLS handshake: {error}") from error
            if self._closed:
                raise ConnectionError("this client is closed")
        return self._sock

    def _disconnect(self) -> None:
        self._lost, self._unconfirmed = self._lost + self._unconfirmed, 0
        if self._sock is not None:
            self._sock.close()
            self._sock = None


def _request(command: int, key: CacheEngineKey | str | bytes, meta: RemoteMeta | None = None) -> bytes:
    length, fmt, dtype, shape = meta or (0, MemoryFormat.KV_2LTD, 2, (0, 0, 0, 0))
    return ClientMetaMessage(command, key, length, fmt, dtype, shape).serialize()


# ---------------------------------------------------------------------------------------------------------------------
# The script


def demo() -> int:
    """A server and a client in one process: put, get, a miss, many at once, eviction."""
    with LMCacheServer("127.0.0.1", 0, max_bytes=4 << 20) as server:
        threading.Thread(target=server.run, daemon=True).start()
        with RemoteClient(f"lm://127.0.0.1:{server.port}") as client:
            keys = [f"toy@1@0@{number:x}@bfloat16" for number in range(1, 7)]
            chunks = [torch.randn(2, 8, 256, 128).to(torch.bfloat16) for _ in keys]  # [2, L, T, H*D], 1 MiB each
            client.put(keys[0], chunks[0])
            meta, data = client.get(keys[0]) or (None, b"")
            same = torch.equal(torch.frombuffer(data, dtype=torch.bfloat16).view(chunks[0].shape), chunks[0])
            print(f"put, get   {meta}: equal {same}")
            print(f"a miss     {client.get('toy@1@0@ff@bfloat16')}")
            for key, chunk in zip(keys, chunks, strict=True):
                client.put(key, chunk)
            print(f"evict      6 chunks of 1 MiB into a budget of 4 MiB: {client.exists_many(keys)}")
            print(f"stats      {client.stats()}")
    return 0 if same else 1


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="A TCP cache server for KV chunks, LMCache's protocol.")
    parser.add_argument("host", help="address to listen on, or with --stats to ask; e.g. 127.0.0.1, 0.0.0.0, ::1")
    parser.add_argument("port", type=int, help="0 picks a free one")
    parser.add_argument("device", nargs="?", default="cpu", help="where chunks live: cpu (default), cuda, cuda:N")
    parser.add_argument("--max-gib", type=float, default=5.0, help="GiB of chunks, fractions too (default %(default)s)")
    parser.add_argument("--max-clients", type=int, default=1024, help="connections at once (default %(default)s)")
    parser.add_argument("--stall-sec", type=float, default=30.0, help="for half a request (default %(default)s)")
    parser.add_argument("--stats", action="store_true", help="print a running server's figures; exit 0 if it is well")
    for name in ("cert", "key", "ca"):
        parser.add_argument(f"--tls-{name}", metavar="PEM", help="all three: mutual TLS, lms://")
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--demo"]:
        return demo()
    args = parser.parse_args(argv)
    files = [args.tls_cert, args.tls_key, args.tls_ca]
    if any(files) and not all(files):
        parser.error("--tls-cert, --tls-key and --tls-ca go together")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        tls = tls_context(files[0], files[1], files[2], not args.stats) if all(files) else None
        if args.stats:
            return _print_stats(args.host, args.port, tls)
        if not args.max_gib > 0 or args.max_gib > 2**20:
            raise ValueError(f"--max-gib {args.max_gib} must be above 0, and at most {2**20}")
        server = LMCacheServer(
            args.host, args.port, args.device, int(args.max_gib * 2**30), args.max_clients, args.stall_sec, tls
        )
    except (ValueError, OSError, MemoryError) as error:
        parser.error(str(error))
    with server:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: _stop(server))
        where = f"[{server.host}]" if ":" in server.host else server.host
        scheme = "lms" if tls else "lm"
        logger.info("listening on %s://%s:%d, device %s, budget %d bytes", scheme, where, server.port,
                    server.store.device, server.store.max_bytes)  # fmt: skip
        if tls is None and not re.fullmatch(r"127\..*|::1", server.host):
            logger.warning("no TLS: anyone who reaches this port can read and write the cache")
        server.run()
    logger.info("stopped")
    return 0


def _stop(server: LMCacheServer) -> None:
    threading.Thread(target=server.close, name="stop").start()  # not in the signal handler: it may hold the lock


def _print_stats(host: str, port: int, tls: ssl.SSLContext | None) -> int:
    url = f"{'lms' if tls else 'lm'}://{f'[{host}]' if ':' in host else host}:{port}"
    try:
        with RemoteClient(url, timeout_sec=2.0, tls=tls) as client:
            for name, value in client.stats().items():
                print(f"{name:16} {value}")
        return 0
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
