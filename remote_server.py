"""remote_server.py - a TCP cache server that keeps KV chunks for any number of engines, its client,
and what an engine keeps of a remote below its own store.

It speaks LMCache 0.3.14's protocol (v1/server, v1/protocol.py); either end can be LMCache's.

    $ python remote_server.py 0.0.0.0 8080 cuda --max-gib 20    # chunks on cpu, cuda or cuda:N
    $ python remote_server.py 127.0.0.1 8080 --dir /dev/shm/kv  # in a file: shared, and kept
    $ python remote_server.py --stats 127.0.0.1 8080            # exit status 0 if it is well
    $ python remote_server.py --demo                            # put, get, evict

    client                                   server
    header 186 bytes, PUT + payload    ->    (no reply)
    header 186 bytes, GET              ->    header 36 bytes + payload, or FAIL
    header 186 bytes, EXIST or HEALTH  ->    header 36 bytes
    header 186 bytes, LIST or STATS    ->    header 36 bytes + newline-joined keys, or JSON
    header 186 bytes, PREFIX + n * 186 ->    header 36 bytes, how many leading ones are there
    header 186 bytes, HOLD             ->    header 36 bytes + 8, where it is in memory, or FAIL
    header 186 bytes, RESERVE          ->    the same, for what the client is to write there
    header 186 bytes, LETGO            ->    header 36 bytes: held no more, and what it wrote is PUT

| thread | socket | what wakes it |
|---|---|---|
| run()'s | the listener | a client; close() |
| one a client, in the server | its connection | a request; close(); its place is needed |
| that calls a RemoteClient | a connection of its own | the reply; close() |
| remote-writer, remote-asker | a connection each | the outbox; a question, time to try again |

Not here: replication, the chunk store itself (engine.ChunkStore).
"""

import argparse
import fcntl
import json
import logging
import mmap
import os
import queue
import re
import select
import signal
import socket
import ssl
import struct
import sys
import threading
import weakref
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from itertools import islice, takewhile
from math import inf
from pathlib import Path
from time import monotonic, sleep
from urllib.parse import urlsplit

import torch

from engine import ChunkStore, aligned
from lookup import (
    DTYPE_TO_INT, MAX_KEY_BYTES, POLICIES, CacheEngineKey, Closing, LMCacheEngineConfig,
    MemoryFormat, PerThread, RareLog, RemoteMeta, Service, bytes_of, locked,
)  # fmt: skip

logger = logging.getLogger("lmcache.remote_server")

# --------------------------------------------------------------------------------------------------
# The protocol: two fixed headers, little-endian, no padding


class ClientCommand(IntEnum):
    PUT = 1
    GET = 2
    EXIST = 3
    LIST = 4
    HEALTH = 5
    STATS = 100  # from here on ours alone; LMCache's server does not know them
    CLEAR = 101
    DELETE = 102
    PREFIX = 103
    HOLD = 104
    LETGO = 105
    RESERVE = 106


class ServerReturnCode(IntEnum):
    SUCCESS = 200
    FAIL = 400


REQUEST = struct.Struct(f"<9i{MAX_KEY_BYTES}s")  # 9 * 4 + 150 = 186, see ClientMetaMessage
REPLY = struct.Struct("<9i")  # 36. The location is last here, and 5th in a request


def padded(key):
    """A key as the wire has it: 150 bytes, with spaces at the end."""
    key = key.to_string() if isinstance(key, CacheEngineKey) else key
    raw = key.encode() if isinstance(key, str) else key
    if len(raw) > MAX_KEY_BYTES or raw.endswith(b" "):
        raise ValueError(f"key {raw!r}: {MAX_KEY_BYTES} bytes fit, and no space at the end")
    return raw.ljust(MAX_KEY_BYTES)


def _pack(form, *fields):
    try:
        return form.pack(*fields)
    except struct.error as error:
        raise ValueError(f"header {fields}, 4 of them a shape's axes or 0: {error}") from error


@dataclass
class ClientMetaMessage:
    """A request header (LMCache protocol.py). fmt, dtype, location: the protocol's integers.

    A PUT of 64 bytes, KV_2LTD, bfloat16, no location, shape [2, 1, 4, 4], "m@1@0@abc@bfloat16":

    01000000 40000000 01000000 03000000 00000000 02000000 01000000 04000000 04000000 6d403140...
    command  length   fmt      dtype    location s0       s1       s2       s3       key, padded
                                                                       with spaces to 150 bytes
    The GET of it differs in its numbers only:

    02000000 00000000 01000000 02000000 00000000 00000000 00000000 00000000 00000000 6d403140...
    """

    command: int
    key: CacheEngineKey | str | bytes
    length: int = 0  # payload bytes
    fmt: int = MemoryFormat.KV_2LTD
    dtype: int = 2
    shape: tuple[int, ...] = (0, 0, 0, 0)  # exactly 4, 0 where the KV has fewer axes
    location: int = 0

    def serialize(self) -> bytes:
        layout = self.fmt, self.dtype, self.location, *self.shape
        return _pack(REQUEST, self.command, self.length, *layout, padded(self.key))

    @staticmethod
    def deserialize(header: bytes) -> "ClientMetaMessage":
        command, length, fmt, dtype, location, *shape, key = REQUEST.unpack(header)
        return ClientMetaMessage(command, key.rstrip(b" "), length, fmt, dtype, (*shape,), location)


@dataclass
class ServerMetaMessage:
    """A reply header (LMCache protocol.py). A miss is (FAIL, 0, 1, 2, (0, 0, 0, 0), 0). To the GET:

    c8000000 40000000 01000000 03000000 02000000 01000000 04000000 04000000 00000000
    code     length   fmt      dtype    s0       s1       s2       s3       location
    """

    code: int
    length: int = 0
    fmt: int = MemoryFormat.KV_2LTD
    dtype: int = 2
    shape: tuple[int, ...] = (0, 0, 0, 0)  # exactly 4, 0 where the KV has fewer axes
    location: int = 0

    def serialize(self) -> bytes:
        layout = self.fmt, self.dtype, *self.shape, self.location
        return _pack(REPLY, self.code, self.length, *layout)

    @staticmethod
    def deserialize(header: bytes) -> "ServerMetaMessage":
        code, length, fmt, dtype, *shape, location = REPLY.unpack(header)
        return ServerMetaMessage(code, length, fmt, dtype, (*shape,), location)


# As plain ints: an enum costs a tenth of a small request
(PUT, GET, EXIST, LIST, HEALTH, STATS, CLEAR, DELETE,
 PREFIX, HOLD, LETGO, RESERVE) = map(int, ClientCommand)  # fmt: skip
SUCCESS, FAIL = map(int, ServerReturnCode)

MISS = ServerMetaMessage(FAIL).serialize()
FOUND = ServerMetaMessage(SUCCESS).serialize()
ANY_KEY = b"any@1@0@0@half"  # LMCache's server ends a connection whose key it cannot read, or
HELLO = b"hello@1@0@0@half"  # whose command is ours: a HEALTH of this key tells who it is
OFFSET = struct.Struct("<q")

# --------------------------------------------------------------------------------------------------
# One connection, the same at both ends

MIN_BYTES_PER_SEC = 64 << 10  # the pace below which a peer is dropped
BATCH = 16  # headers read in one go: a burst costs few calls, and a PUT copies at most 3 KiB twice
MAX_DRAIN = 1 << 16  # bytes read at once of a payload that nobody wants


class Stream:
    """A socket, plain or TLS, with a buffer for what comes, and with patience: for one message a
    peer has timeout_sec, and a second more for every 64 KiB of it that have moved; one that stalls
    or trickles is a TimeoutError, one that leaves in the middle a ConnectionError."""

    def __init__(self, sock, timeout_sec, peer=""):
        self.sock, self.timeout_sec, self.peer = sock, timeout_sec, peer
        self.buffer = bytearray(REQUEST.size * BATCH)
        self._view = memoryview(self.buffer)
        # buffer[at:have] was read and is not consumed; left: bytes of a payload that are to come
        self.at = self.have = self.left = 0
        self.deadline, self.pid = inf, os.getpid()
        self.level, self.about = None, b""  # of a client's, see Caller._hello
        self.begin()

    def prepare(self, tls, **how):
        """Sets the socket's options, and speaks TLS from here on."""
        sock = self.sock
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)  # a peer that lost power is
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 3)  # gone 20 + 9 * 3 s later
        if tls is not None:
            sock.settimeout(self.timeout_sec)
            self.sock = tls.wrap_socket(sock, do_handshake_on_connect=False, **how)
            self.sock.do_handshake()
            return
        sock.settimeout(None)  # the kernel's own timeouts: no poll() before each recv()
        timeout = struct.pack("ll", int(self.timeout_sec), int(self.timeout_sec % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)

    def begin(self):
        """A message begins: patience anew."""
        self._began, self._moved = monotonic(), 0

    def _pace(self, count):
        self._moved += count
        patience = self.timeout_sec + self._moved / MIN_BYTES_PER_SEC
        if monotonic() > min(self._began + patience, self.deadline):
            raise TimeoutError(f"only {self._moved} bytes moved in {self.timeout_sec} s and more")

    def more(self, idle=False):
        """Reads on into the buffer; False where the peer has closed. idle: silence is no fault."""
        left = self.have - self.at
        if left:
            self._view[:left] = self._view[self.at : self.have]
        self.at, self.have = 0, left
        try:
            count = self.sock.recv_into(self._view[left:] if left else self._view)
        except (BlockingIOError, TimeoutError) as error:  # SO_RCVTIMEO ran out
            if idle and not left:
                return True
            raise TimeoutError(f"peer stalled after {left} bytes") from error
        if left:
            self._pace(count)
        else:
            self.begin()
        self.have += count
        return count > 0

    def read(self, view):
        """Fills view with what comes next of the payload."""
        if len(view) > self.left:
            raise ValueError(f"{len(view)} bytes asked for, {self.left} of this payload are left")
        self.left -= len(view)
        early = min(self.have - self.at, len(view))
        if early:
            view[:early] = self._view[self.at : self.at + early]
            self.at += early
            view = view[early:]
        while view:
            try:
                count = self.sock.recv_into(view)
            except BlockingIOError as error:
                raise TimeoutError("peer stalled in the middle of a message") from error
            if count == 0:
                raise ConnectionError("peer closed in the middle of a message")
            self._pace(count)
            view = view[count:]

    def skip(self):
        """Reads, for nobody, what is left of the payload."""
        scratch = memoryview(bytearray(min(self.left, MAX_DRAIN)))
        while self.left:
            self.read(scratch[: self.left])

    def write(self, header, payload=b""):
        """Sends both, in one piece where it can: a header alone waits for a delayed ACK."""
        self.begin()
        try:
            if payload and not isinstance(self.sock, ssl.SSLSocket):  # which has no sendmsg
                size, sent = len(header), self.sock.sendmsg((header, payload))
                if sent == size + len(payload):
                    return
                header, payload = header[sent:], memoryview(payload)[max(0, sent - size) :]
            for part in (header, payload):
                while part:
                    count = self.sock.send(part)
                    if count == len(part):
                        break
                    self._pace(count)
                    part = memoryview(part)[count:]
        except BlockingIOError as error:  # SO_SNDTIMEO ran out
            raise TimeoutError("peer does not read") from error

    def shut(self):
        """Ends it from another thread: whoever waits on it wakes."""
        with suppress(OSError):  # subtle: SSLSocket's own shutdown would make its reader
            if self.pid == os.getpid():  # take it for a plain one; before a fork it was another's
                socket.socket.shutdown(self.sock, socket.SHUT_RDWR)


def read_bytes(read, length):
    """The next `length` bytes, in memory taken as they come: no 2 GiB on a header's word."""
    data = bytearray()
    while len(data) < length:
        more = bytearray(min(length - len(data), max(len(data), 16 << 20)))
        read(memoryview(more))
        data = data + more if data else more
    return data


def tls_context(cert, key, ca, server_side):
    """Mutual TLS: we show cert, signed by ca, and so must the peer. PEM files; ValueError where one
    cannot be used or is missing. None where none of them is named."""
    files = cert, key, ca
    if not any(files):
        return None
    if not all(files):
        raise ValueError(f"TLS needs a certificate, a key and a CA, not {cert}, {key}, {ca}")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server_side else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.verify_mode = ssl.CERT_REQUIRED
    if server_side:
        context.num_tickets = 0  # bytes between requests tell a client that something is wrong
    try:
        context.load_cert_chain(cert, key)
        context.load_verify_locations(ca)
    except OSError as error:  # ssl.SSLError is one
        raise ValueError(f"TLS files {cert}, {key}, {ca}: {error}") from error
    return context


# --------------------------------------------------------------------------------------------------
# The server

REQUEST_BYTES = REQUEST.size
SHARE = 8  # an eighth of a payload must be here before others are evicted for it
LISTED_AT_ONCE = 1000  # keys
MAX_PREFIX_BYTES = 16 << 20  # of keys that one question has


class Session(Stream):
    """A client's requests, answered one after another."""

    def __init__(self, server, sock, peer):
        super().__init__(sock, server.stall_timeout_sec, peer)
        self.server, self.store = server, server.store
        self.held, self.made = [], []  # chunks in use; of them (key, chunk) that are reserved
        self.held_bytes = 0
        self.idle_since = monotonic()  # waits for a request since then

    def serve(self):
        server, buffer, contains = self.server, self.buffer, self.store.contains
        while not server.closed:
            self.idle_since = self.idle_since or monotonic()
            if self.held and monotonic() > self.deadline:
                raise TimeoutError(f"holds {len(self.held)} chunks in place, and does not let go")
            if not self.more(idle=not self.held):
                return
            self.idle_since = None
            replies = b""
            while self.have - self.at >= REQUEST_BYTES:
                command, length, *numbers, key = REQUEST.unpack_from(buffer, self.at)
                self.at += REQUEST_BYTES
                key = key.rstrip(b" ")
                if command == EXIST:
                    try:
                        there = contains(key)
                    except Exception as error:
                        there = self._failed(error)
                    replies += FOUND if there else MISS
                elif command == HEALTH:
                    replies += server.hello if key == HELLO else FOUND
                elif command == HOLD:
                    replies += self._hold(key)
                elif command == RESERVE:
                    replies += self._reserve(key, length, numbers)
                else:
                    if replies:  # no answer waits for a payload that may be slow to come
                        self.write(replies)
                        replies = b""
                    if command == PUT:
                        self._put(key, length, numbers)
                    elif command == GET:
                        self._get(key)
                    elif command == PREFIX:
                        self._prefix(length)
                    else:
                        self._answer(command, key)
            if replies:
                self.write(replies)

    def _failed(self, error):
        """A fault of the store is a miss or a refusal, and the client is served on."""
        if isinstance(error, OSError):  # of the connection
            raise error
        self.server.log("store", "the store failed: %r", error)

    def _put(self, key, length, numbers):
        if length < 0:  # there is no telling where the next request starts
            raise ConnectionError(f"announces {length} bytes: connection closed")
        if self.server.tls is None:  # LMCache's client sends header and payload in two; its kernel
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)  # holds one for an ACK
        if length and self.at == self.have and not self.more():
            raise ConnectionError("left after a PUT header")  # nobody was evicted on its word
        self.left = length
        try:
            self._take(key, length, reply_to(length, numbers))
        except Exception as error:
            self._failed(error)
        if self.left:
            self.server.log("refused", "PUT of %d bytes refused: %s", length, self.store.stats())
            self.skip()

    def _take(self, key, length, header):
        """Stores a payload, visible when its last byte is there; or leaves the rest of it unread.

        Subtle: nobody is evicted for what is only announced, an eighth must be here before."""
        store, chunk, old, early = self.store, None, None, memoryview(b"")
        if length <= store.max_bytes // SHARE:
            chunk = store.reserve_hole(length)
        if chunk is None:
            early = memoryview(bytearray(length // SHARE * (length <= store.max_bytes)))
            self.read(early)
            old = store.acquire(key, counted=False)  # stays until the new one is whole

        def receive(view):
            nonlocal early
            count = min(len(early), len(view))
            view[:count], early = early[:count], early[count:]
            self.read(view[count:])

        half = store.max_bytes // 2  # such ones together; a larger one, one at a time, needs more
        limit = half if length <= half else store.max_bytes
        admitted = self.server.admit(length, limit)
        store.counters["rejected"] += not admitted
        try:
            if admitted and (chunk := chunk or store.reserve(length)) is not None:
                chunk.meta = header
                store.fill(chunk, receive if early else self.read)
                store.commit(key, chunk)
        finally:
            if admitted:
                self.server.finished(length, limit)
            store.release([*filter(None, (chunk, old))])

    def _answer(self, command, key):
        if command == LIST:
            self._list()
        elif command == STATS:
            body = json.dumps(self.server.stats()).encode()
            self.write(ServerMetaMessage(SUCCESS, len(body)).serialize(), body)
        elif command == CLEAR:
            self.store.clear()
            self.write(FOUND)
        elif command == DELETE:
            self.write(FOUND if self.store.remove(key) else MISS)
        elif command == LETGO:
            for made in self.made:
                self.store.commit(*made)
            self.let_go()
            self.write(FOUND)
        else:
            self.server.log("command", "client %s: unknown command %d: FAIL", self.peer, command)
            self.write(MISS)

    def _get(self, key):
        header, chunk = MISS, None
        try:
            chunk = self.store.acquire(key)
            if chunk is not None:
                header = chunk.meta
                for piece in self.store.pieces(chunk):
                    self.write(header, piece)
                    header = b""
        except Exception as error:
            self._failed(error)
            if not header:  # half of it is sent
                raise
            header = MISS
        finally:
            if chunk is not None:
                self.store.release((chunk,))
        if header:
            self.write(header)

    def _prefix(self, length):
        """How many leading ones of these keys are there, as the first number of the shape. A key is
        where a request's is: whoever forwards requests by their size forwards these, too."""
        if not 0 <= length <= MAX_PREFIX_BYTES or length % REQUEST_BYTES:
            raise ConnectionError(f"announces {length} bytes of keys: connection closed")
        self.left = length
        keys = struct.iter_unpack(f"36x{MAX_KEY_BYTES}s", read_bytes(self.read, length))
        try:
            count = self.store.touch([key.rstrip(b" ") for (key,) in keys])
        except Exception as error:
            count = self._failed(error) or 0
        self.write(ServerMetaMessage(SUCCESS, shape=(count, 0, 0, 0)).serialize())

    def _hold(self, key):
        """A chunk's header, as of a GET, and its offset in the arena. Such chunks stay in use until
        LETGO or the stall timeout: of a client an eighth of the store at most, or one of them."""
        chunk = self.store.acquire(key)
        if chunk is None:
            return MISS
        if self.held and self.held_bytes + chunk.size > self.store.max_bytes // SHARE:
            self.store.release([chunk])
            return MISS
        return self._lend(chunk)

    def _reserve(self, key, length, numbers):
        """The same for a chunk that the client is to write: visible at LETGO. Such chunks of all
        clients are an eighth of the store at most."""
        store, size, limit = self.store, aligned(length), self.store.max_bytes // SHARE
        here = store.arena and not self.server.reaping
        if not here or length < 0 or not self.server.admit(size, limit):
            return MISS
        chunk = store.reserve(length)
        if chunk is None:
            self.server.finished(size, limit)
            return MISS
        chunk.meta = reply_to(length, numbers)
        self.made.append((key, chunk))
        return self._lend(chunk)

    def _lend(self, chunk):
        if not self.held:
            self.deadline = monotonic() + self.timeout_sec
        self.held.append(chunk)
        self.held_bytes += chunk.size
        return chunk.meta + OFFSET.pack(chunk.offset)

    def let_go(self):
        for _, chunk in self.made:
            self.server.finished(chunk.size, self.store.max_bytes // SHARE)
        self.store.release(self.held)
        self.held, self.made, self.held_bytes, self.deadline = [], [], 0, inf

    def _list(self):
        """A thousand keys at a time: nobody who lists holds a copy of them all."""
        keys = self.store.keys()
        length = sum(map(len, keys)) + max(len(keys) - 1, 0)
        self.write(ServerMetaMessage(SUCCESS, length).serialize())
        for first in range(0, len(keys), LISTED_AT_ONCE):
            part = b"\n".join(keys[first : first + LISTED_AT_ONCE])
            self.write(b"\n" * (first > 0) + part)


class LMCacheServer(Closing):
    """A TCP cache server (LMCache v1/server/__main__.py). Port 0 picks a free one; `port` says it.

    max_bytes: of chunks; eviction: which go first, see lookup.POLICIES. A chunk for which there is
        no room beside those in use is refused: read off the stream and dropped. So is an overwrite
        without room for both: the old one stays until the new one is whole.
    max_clients: where all places are taken, the client that has been idle the longest goes.
    stall_timeout_sec: for a peer that stops in the middle of a request or does not read its reply,
        see Stream; between requests a client may stay idle for ever.
    tls: an ssl context with a client certificate required, see tls_context.
    folder: keeps the chunks in files there, over a restart, see engine.Index; clients on this host
        read them in place, see RemoteClient.hold_many.
    """

    def __init__(self, host, port, device="cpu", max_bytes=5 << 30, max_clients=1024,
                 stall_timeout_sec=30.0, tls=None, eviction="slru", folder=None):  # fmt: skip
        if max_clients < 1 or not 1e-3 <= stall_timeout_sec <= 1e6:
            raise ValueError(
                f"max_clients {max_clients}, stall_timeout_sec {stall_timeout_sec}: "
                "allowed are 1 or more, 0.001..1e6"
            )
        self.max_clients, self.stall_timeout_sec, self.tls = max_clients, stall_timeout_sec, tls
        with ExitStack() as undo:  # where one fails, those before it are closed
            self._listener = undo.enter_context(_listen(host, port))
            self.store = ChunkStore(device, max_bytes, eviction, folder=folder)
            undo.pop_all()
        about = arena_of(os.path.realpath(self.store.arena)) if folder else b""
        level = (RESERVE, 0, 0, 0)  # the last command that it knows
        self.hello = ServerMetaMessage(SUCCESS, len(about), shape=level).serialize() + about
        self.host, self.port = self._listener.getsockname()[:2]
        self._clients = {}
        self._unfinished = Counter()  # limit -> bytes of payloads under way within it
        self._lock = threading.Lock()  # of both
        self.closed = False
        self.log = RareLog(logger)
        self.refused_clients = 0
        self._dead = deque()  # sessions that have ended, and have chunks reserved
        self.reaping, self._reap_at, self._pid = False, 0.0, os.getpid()
        self._reaper = Service("reaper", self._reap) if folder else None

    # -- all connections

    def handle_client(self, session):
        """Answers one client's requests until it leaves, stalls in one, or the server closes."""
        peer = session.peer
        try:
            session.prepare(self.tls, server_side=True)  # a slow handshake stalls this thread alone
            session.serve()
        except (TimeoutError, ssl.SSLError) as error:
            self.log("stalled", "client %s dropped, stalled: %s", peer, error)
        except OSError as error:
            if not self.closed:
                self.log("left", "client %s left: %s", peer, error)
        except Exception:
            self.log("ours", "client %s dropped: a fault of ours", peer, traceback=True)
        finally:
            session.sock.close()
            with self._lock:
                self._clients.pop(session, None)
            if session.made and not self.closed:
                self._dead.append(session)
            else:
                session.let_go()

    def _reap(self):
        """A thread's step. Subtle: a client whose connection has ended may still be writing, as
        long as it has the arena locked. To get that from all, nobody else may reserve then."""
        sleep(0.1)
        if self._dead and monotonic() > self._reap_at:
            self.reaping = True
            with suppress(OSError), locked(self.store.arena, 0.3):
                self._bury()
            self.reaping, self._reap_at = False, monotonic() + 1.0

    def _bury(self):
        while self._dead:
            self._dead.popleft().let_go()

    def admit(self, length, limit):
        """Whether so large a payload may be under way, until finished(), beside others within the
        same limit: bytes of them all."""
        with self._lock:
            admitted = self._unfinished[limit] + length <= limit
            self._unfinished[limit] += length * admitted
        return admitted

    def finished(self, length, limit):
        with self._lock:
            self._unfinished[limit] -= length

    def run(self):
        """Accepts clients until close()."""
        while not self.closed:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self.closed:
                    return
                self.log("files", "no client can be accepted: %s", error)
                with self._lock:
                    self._drop_idle()
                sleep(0.01)  # until its file is closed, or another
                continue
            session = Session(self, sock, f"{address[0]}:{address[1]}")
            if refusal := self._start_client(session):
                self.refused_clients += 1
                self.log("refused client", "client %s refused: %s", session.peer, refusal)
                sock.close()

    def _start_client(self, session):
        """Starts a client's thread; the reason where it cannot."""
        thread = threading.Thread(target=self.handle_client, args=(session,), daemon=True)
        with self._lock:  # close() joins only what has started
            if self.closed:
                return "the server closes"
            if len(self._clients) >= self.max_clients and not self._drop_idle():
                return f"{self.max_clients} are connected, max_clients, and none is idle"
            self._clients[session] = thread
            try:
                thread.start()
            except RuntimeError as error:  # no more threads
                del self._clients[session]
                return str(error)
        return ""

    def _drop_idle(self):
        """Ends the client that has been idle for the longest; False where none is."""
        waits = {session: session.idle_since or inf for session in self._clients}
        longest = min(waits, key=waits.__getitem__, default=None)
        if waits.get(longest, inf) == inf:
            return False
        self.log("idle", "client %s dropped: idle, and its place is needed", longest.peer)
        longest.shut()
        del self._clients[longest]
        return True

    def stats(self) -> dict[str, int]:
        """The store's figures, and connected and refused clients."""
        return self.store.stats() | {
            "clients": len(self._clients), "refused_clients": self.refused_clients
        }  # fmt: skip

    def close(self):
        """Ends every connection, gives up memory and port. Idempotent; nothing in a forked process,
        where they are another's."""
        if self._pid != os.getpid():
            return
        self.closed = True
        with suppress(OSError):
            # subtle: an accept() under way would hold the port
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = dict(self._clients)
        for session in clients:
            session.shut()
        deadline = monotonic() + 1.5
        for thread in clients.values():
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - monotonic()))
        if self._reaper:
            self._reaper.close()
        self._bury()
        self.store.close()


def reply_to(length, numbers):
    """The header of a GET's reply, from the PUT's."""
    fmt, dtype, location, *shape = numbers
    return REPLY.pack(SUCCESS, length, fmt, dtype, *shape, location)


def _listen(host, port):
    try:
        found = socket.getaddrinfo(host or None, 0, 0, socket.SOCK_STREAM, 0, socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        listener = socket.create_server((address[0], port), family=family, backlog=128)
    except (OSError, OverflowError) as error:
        raise OSError(f"cannot listen on {host!r} port {port}: {error}") from error
    listener.settimeout(0.2)  # how soon run() sees close()
    return listener


# --------------------------------------------------------------------------------------------------
# The client

WINDOW = 64  # requests under way: 64 * 186 bytes fit in any socket buffer, neither end waits
IN_PLACE_BYTES = 1 << 20  # of a chunk that is put in place: a smaller one is as quick by wire


class Connection(PerThread):
    """One thread's, of a RemoteClient."""

    stream = None
    unconfirmed = 0  # puts that no reply came after
    lost = 0  # of them, those whose connection broke
    holder = None  # the stream on which hold_many() asked


class Caller(Closing):
    """A connection a thread to one server, made at its first call and made again when it breaks."""

    def __init__(self, url, timeout_sec=5.0, retries=2, tls=None):
        parts = urlsplit(url)
        try:
            self.host, self.port = parts.hostname, parts.port
        except ValueError as error:
            raise ValueError(f"url {url!r}: {error}") from error
        good = parts.scheme in ("lm", "lms") and self.host and self.port
        if not good or parts.path.strip("/"):
            raise ValueError(f"url {url!r} must be lm://host:port or lms://host:port, IPv6 in [ ]")
        if (parts.scheme == "lms") != (tls is not None):
            raise ValueError(f"url {url!r}: lms:// needs a tls context, and only lms:// takes one")
        if timeout_sec <= 0 or retries < 0:
            raise ValueError(f"timeout_sec {timeout_sec}, retries {retries}: above 0, not below 0")
        self.timeout_sec, self.retries, self.tls = timeout_sec, retries, tls
        self._own = Connection()
        self._streams = set()  # of all threads, for close()
        self._arenas = {}  # what a server says of its memory -> (uint8 [size], its file)
        self._closed = False

    def close(self):
        """Ends all connections; calls in flight fail. Idempotent."""
        self._closed = True
        for found in tuple(self._streams):
            if (stream := found()) is not None:
                stream.shut()
        self._arenas = {}
        self._disconnect()  # this thread's; the others' close theirs when they see it, or end

    def _hello(self, stream):
        """Asks for the last command that the server knows, 0 of LMCache's, and for its memory."""
        if stream.level is None:
            stream.write(_request(HEALTH, HELLO))
            reply = self._reply(stream)
            about = bytes(read_bytes(stream.read, reply.length))
            stream.level, stream.about = reply.shape[0], about
        return stream

    def _arena(self, stream):
        """The server's memory, uint8 [size], and its file; None where we may not map it. One at a
        time, and none without a connection: who no longer needs it does not keep it."""
        about = self._hello(stream).about
        with suppress(OSError, ValueError):
            path = about[about.find(b"/") :].decode()
            if about not in self._arenas and arena_of(path) == about:
                with open(path, "r+b") as file:
                    memory, number = mmap.mmap(file.fileno(), 0), os.dup(file.fileno())
                weakref.finalize(memory, os.close, number)
                self._arenas = {about: (torch.frombuffer(memory, dtype=torch.uint8), number)}
        return self._arenas.get(about)

    def _reply(self, stream):
        while stream.have - stream.at < REPLY.size:
            if not stream.more():
                raise ConnectionError("server closed the connection")
        reply = ServerMetaMessage.deserialize(stream.buffer[stream.at : stream.at + REPLY.size])
        stream.at += REPLY.size
        self._own.unconfirmed = 0
        if reply.length < 0:
            raise ValueError(f"{self.host}:{self.port} announces {reply.length} bytes")
        stream.left = reply.length
        return reply

    def _call(self, exchange):
        try:
            for attempt in range(self.retries + 1):
                if self._closed:
                    raise ConnectionError("this client is closed")
                try:
                    stream = self._connected()
                    stream.begin()
                    return exchange(stream)
                except (ConnectionError, ssl.SSLError) as error:
                    self._disconnect()
                    if attempt == self.retries or self._closed:
                        raise ConnectionError(f"{self.host}:{self.port}: {error}") from error
                    sleep(0.02 * 4**attempt)
        except BaseException:
            self._disconnect()  # half an exchange: the stream is out of step
            raise

    def _connected(self):
        """This thread's connection, made anew where the server has closed it."""
        own = self._own
        if own.is_new():
            own.stream, own.unconfirmed, own.lost = None, 0, 0
        if own.stream is not None:
            waiting = select.poll()
            waiting.register(own.stream.sock, select.POLLIN)
            if waiting.poll(0):  # closed, or bytes that nobody asked for
                self._disconnect()
        if own.stream is None:
            try:
                sock = socket.create_connection((self.host, self.port), self.timeout_sec)
                own.stream = Stream(sock, self.timeout_sec)
                self._streams.add(weakref.ref(own.stream, self._streams.discard))
                own.stream.prepare(self.tls, server_hostname=self.host)
            except TimeoutError:
                raise
            except OSError as error:  # a name that is not known, a TLS handshake that fails
                raise ConnectionError(f"cannot connect: {error}") from error
            if self._closed:
                raise ConnectionError("this client is closed")
        return own.stream

    def _disconnect(self):
        own = self._own
        own.lost, own.unconfirmed = own.lost + own.unconfirmed, 0
        if own.stream is not None:
            own.stream.sock.close()
            own.stream, self._arenas = None, {}


class RemoteClient(Caller):
    """A client of LMCacheServer, or of LMCache's own, at `lm://host:port` (`lms://` with TLS, see
    tls_context).

    Each thread has a connection of its own, made at its first request and made again when it
    breaks, `retries` times a request; then it is a ConnectionError. timeout_sec is for a server
    that does not go on, see Stream: a TimeoutError. Both are OSErrors. To be shared between
    threads, and used after a fork; a PUT is seen by what the same thread asks later.
    """

    def put(self, key, data, meta=None):
        """Stores a tensor or a buffer; meta: how it is laid out. No reply: flush() tells of it."""
        if isinstance(data, torch.Tensor):
            data = data.detach().contiguous().cpu()
            if data.dtype not in DTYPE_TO_INT:
                raise ValueError(f"{data.dtype} has no number: {list(DTYPE_TO_INT)[1:]}")
            shape = (*data.shape, 0, 0, 0, 0)[: max(4, data.dim())]
            dtype = DTYPE_TO_INT[data.dtype]
            meta = meta or RemoteMeta(data.nbytes, MemoryFormat.KV_2LTD, dtype, shape)
            payload = bytes_of(data)
        else:
            payload = memoryview(data).cast("B")
            size = len(payload)
            meta = meta or RemoteMeta(size, MemoryFormat.BINARY, 6, (size, 0, 0, 0))
        if meta.length != len(payload):
            raise ValueError(f"meta says {meta.length} bytes, data has {len(payload)}")
        self.put_many([(key, meta, [payload])])

    def put_many(self, items):
        """Stores many, in the memory of a server on this host where it can; what is under way when
        the connection breaks may be lost, see flush()."""
        items = iter(items)
        while batch := [*islice(items, WINDOW)]:
            large = min(meta.length for _, meta, _ in batch) >= IN_PLACE_BYTES
            places = (large and self._place(batch)) or [None] * len(batch)
            for (key, meta, pieces), placed in zip(batch, places, strict=True):
                if not placed:
                    self._send_put(_request(PUT, key, meta), iter(pieces))

    def _place(self, batch):
        """Writes what it can of these items where the server is to have them; which ones."""

        def place(stream):
            mapped = self._arena(stream)
            if mapped is None or self._own.holder is not None:
                return None  # LETGO would end that, too
            arena, number = mapped
            # Subtle: for so long the server gives to nobody else what it reserves for us.
            with locked(f"/proc/self/fd/{number}", how=fcntl.LOCK_SH):
                stream.write(b"".join(_request(RESERVE, key, meta) for key, meta, _ in batch))
                places = [self._mapped(stream, arena) for _ in batch]
                for (_, _, pieces), found in zip(batch, places, strict=True):
                    view = bytes_of(found[1]) if found else b""
                    for piece in filter(len, pieces if found else ()):
                        view[: len(piece)], view = piece, view[len(piece) :]
                        sleep(0)  # that held the GIL; torch's copy leaves threads that spin
                try:
                    stream.write(_request(LETGO, ANY_KEY))
                    self._reply(stream)
                except ConnectionError as error:
                    raise OSError("the connection broke in a put in place") from error
            return places

        return self._call(place)

    def _send_put(self, header, pieces):
        first, gone = next(pieces, b""), False  # gone: the first piece is, see ChunkStore.pieces

        def send(stream):
            nonlocal gone
            if gone:
                raise OSError("the connection broke in a put in pieces: it cannot begin again")
            stream.write(header, first)
            for piece in pieces:
                gone = True
                stream.write(piece)
            self._own.unconfirmed += 1

        self._call(send)

    def get(self, key) -> tuple[RemoteMeta, bytearray] | None:
        """The chunk under key and what is known of it, or None."""
        found = []

        def fill(_, meta, receive):
            found[:] = [(meta, read_bytes(receive, meta.length))]

        self.get_many([key], fill)
        return found[0] if found else None

    def get_many(self, keys, fill):
        """For each that is there, in order, calls fill(index, meta, receive), which may call
        receive(view) to take the next len(view) bytes of the payload. What it leaves is skipped."""

        def take(stream, index, reply):
            if reply.code == SUCCESS:
                fill(
                    index,
                    RemoteMeta(reply.length, reply.fmt, reply.dtype, reply.shape),
                    stream.read,
                )
                stream.skip()

        self._pipeline(GET, keys, take)

    def exists(self, key) -> bool:
        return self.exists_many([key])[0]

    def exists_many(self, keys) -> list[bool]:
        return self._codes(EXIST, keys)

    def leading(self, keys) -> int:
        """How many leading ones of these are there, in one question to a server of ours."""
        names = b"".join(bytes(36) + padded(key) for key in keys)

        def ask(stream):
            if self._hello(stream).level < PREFIX or len(names) > MAX_PREFIX_BYTES:
                return None
            stream.write(_request(PREFIX, ANY_KEY, [len(names)]), names)
            return self._reply(stream).shape[0]

        count = self._call(ask)
        return count_leading(self.exists_many, keys) if count is None else count

    def hold_many(self, keys):
        """Chunks in the memory of a server on this host: for each key (meta, uint8 [length]), not a
        copy, or None; None for all where that memory cannot be mapped here, or for more than 64
        keys. What was read counts once let_go() has returned: subtle, a server that was killed
        meanwhile has not answered. What this thread held before, it lets go of."""

        def hold(stream):
            mapped = self._arena(stream)
            if mapped is None or len(keys) > WINDOW:
                return None
            stream.write(b"".join(_request(HOLD, key) for key in keys))
            found = [self._mapped(stream, mapped[0]) for _ in keys]
            self._own.holder = stream
            return found

        with suppress(OSError):  # it had ended: nobody needs it any more
            self.let_go()
        return self._call(hold)

    def _mapped(self, stream, arena):
        reply = self._reply(stream)
        if reply.code != SUCCESS:
            return None
        stream.left = OFFSET.size
        (at,) = OFFSET.unpack(read_bytes(stream.read, OFFSET.size))
        if not 0 <= at <= len(arena) - reply.length:
            raise ValueError(f"{self.host}:{self.port}: {reply.length} bytes at {at}")
        meta = RemoteMeta(reply.length, reply.fmt, reply.dtype, reply.shape)
        return meta, arena[at : at + reply.length]

    def let_go(self):
        """Ends the use of what this thread holds. OSError: it had ended before."""
        holder, self._own.holder = self._own.holder, None

        def let_go(stream):
            if stream is not holder:
                raise OSError("the connection broke: what was read in place does not count")
            stream.write(_request(LETGO, ANY_KEY))
            self._reply(stream)

        if holder is not None:
            self._call(let_go)

    def delete(self, key) -> bool:
        """Removes one key; False where it is not there."""
        return self._codes(DELETE, [key])[0]

    def clear(self):
        """Removes every key."""
        self._body(CLEAR)

    def list_keys(self) -> list[str]:
        """Every key on the server, those first that go first. LMCache's own never answers."""
        body = self._body(LIST)
        return body.decode(errors="backslashreplace").split("\n") if body else []

    def stats(self) -> dict[str, int]:
        """The server's figures, see LMCacheServer.stats; a ValueError from one that has none."""
        return json.loads(self._body(STATS))

    def health(self) -> bool:
        """True where a server answers; False, and no exception, where none does."""
        try:
            self._ping()
        except OSError:
            return False
        return True

    def flush(self):
        """When the server has taken what this thread has put; ConnectionError: some may be lost."""
        try:
            self._ping()
        finally:  # whatever it raises tells of them, too
            lost, self._own.lost = self._own.lost, 0
        if lost:
            raise ConnectionError(f"the connection broke with {lost} puts under way: maybe lost")

    def _ping(self):
        self._pipeline(HEALTH, [ANY_KEY], lambda *_: None)

    def _codes(self, command, keys):
        codes = []
        self._pipeline(command, keys, lambda _, __, reply: codes.append(reply.code == SUCCESS))
        return codes

    def _body(self, command):
        body = bytearray()

        def take(stream, _, reply):
            if reply.code != SUCCESS:
                raise ValueError(
                    f"{self.host}:{self.port} answers {ClientCommand(command).name} with FAIL"
                )
            body[:] = read_bytes(stream.read, reply.length)

        self._pipeline(command, [ANY_KEY], take)
        return bytes(body)

    def _pipeline(self, command, keys, take):
        """A request for each key, WINDOW at a time; each reply to take. Resumes where it broke."""
        headers = [_request(command, key) for key in keys]
        done = 0

        def exchange(stream):
            nonlocal done
            sent = done
            while done < len(headers):
                if sent < len(headers) and sent - done <= WINDOW // 2:
                    more = headers[sent : done + WINDOW]
                    stream.write(b"".join(more))
                    sent += len(more)
                take(stream, done, self._reply(stream))
                done += 1

        if headers:
            self._call(exchange)


def arena_of(path):
    """What tells a server's memory from any other: device, inode, and a path that has its boot."""
    info = os.stat(path)
    return f"{info.st_dev} {info.st_ino} {path}".encode()


def count_leading(exists_many, keys):
    """Asks tail first: the head of a prefix is to be the last to go, see ChunkStore.release."""
    answers = exists_many(keys[::-1])
    return len(list(takewhile(bool, answers[::-1]))) if len(answers) == len(keys) else 0


def _request(command, key, meta=()):
    """meta: a RemoteMeta, or its first fields."""
    return ClientMetaMessage(command, key, *meta).serialize()


def connect_remote(config: LMCacheEngineConfig, timeout_sec: float = 5.0) -> RemoteClient | None:
    """The client of what config.remote_url names, or None. For lms:// the PEM files are
    extra_config's remote_tls_cert, remote_tls_key and remote_tls_ca."""
    if config.remote_url is None:
        return None
    extra = config.extra_config or {}
    files = [extra.get(f"remote_tls_{name}") for name in ("cert", "key", "ca")]
    tls = tls_context(*files, False)  # type: ignore[call-arg]
    return RemoteClient(config.remote_url, timeout_sec, tls=tls)


# --------------------------------------------------------------------------------------------------
# What an engine keeps of a remote below its own store

ANSWER_SEC = 0.5  # a lookup waits no longer for the remote
BACKOFF_SEC = 1.0  # a remote that failed is left alone for so long, then twice as long, ...
MAX_BACKOFF_SEC = 30.0
RECHECK_SEC = 2.0  # a chunk is sent, or asked for again, at most so often
BATCH_CHUNKS = 16  # that leave in one go
FORKED = threading.Lock()  # one thread of a forked process makes what it needs anew


class RemoteTier:
    """Asks a remote for what the engine's store has not, and sends it what is new, in the
    background. Whatever the remote does, or does not, is a miss; after a fault nobody waits for it:
    it is left alone, longer each time, and asked in the background whether it is well again.

    remote: exists_many(keys) -> [bool], get_many(keys, fill), put_many(items), and, where it has
    it, leading(keys) -> int, in place of exists_many for a lookup. Its outbox holds chunks
    in use, at most half the store's memory; what finds no room in it is the tail of a prompt."""

    def __init__(self, engine, remote):
        self._engine, self._store, self._names = engine, engine.chunks, engine.names
        self._remote, self._log = remote, RareLog(logger)
        self._backoff_sec, self._retry_at = BACKOFF_SEC / 2, 0.0  # 0 if it is well: not known yet
        self._outbox, self._outbox_bytes = deque(), 0  # (key, chunk in use, was it sent before)
        self._batch = []  # of the outbox, what is being sent
        self._heard = threading.local()  # of chunks that were lost, how many, at its last flush()
        self._ready = threading.Condition()  # of the outbox
        self._questions = queue.SimpleQueue()  # (keys, Future)
        self._closed = False
        self._threads = Service("remote-writer", self._write), Service("remote-asker", self._answer)
        with suppress(TimeoutError):  # it may take longer: then the asker goes on by itself
            self._ask([]).result(ANSWER_SEC)
        self._pid = os.getpid()

    # -- is it well?

    def _is_well(self):
        if self._pid != os.getpid():  # a forked process: it has not our threads
            with FORKED:
                if self._pid != os.getpid():
                    self._store.release([chunk for _, chunk, _ in [*self._outbox, *self._batch]])
                    self.__init__(self._engine, self._remote)
        return not self._backoff_sec

    def _failed(self, error):
        self._engine.count(remote_errors=1)
        # A ValueError is ours, as of a key too long; several faults at once count as one.
        if not isinstance(error, ValueError) and monotonic() >= self._retry_at:
            self._backoff_sec = min(max(2 * self._backoff_sec, BACKOFF_SEC), MAX_BACKOFF_SEC)
            self._retry_at = monotonic() + self._backoff_sec
        self._log(type(error).__name__, "remote failed, left alone for a while: %r", error)

    def _try(self, ask, otherwise):
        if not self._is_well():
            self._engine.count(remote_skipped=1)
            return otherwise
        try:
            return ask()
        except Exception as error:
            self._failed(error)
            return otherwise

    # -- lookups

    def leading(self, keys):
        """How many leading ones of these the remote has; for it that is a use of each."""
        return self._try(lambda: self._ask(keys).result(ANSWER_SEC), 0)

    def touch(self, keys):
        """The same, and nobody waits for the answer."""
        if self._is_well() and keys:
            self._ask(keys)

    def _ask(self, keys):
        question = Future()
        self._questions.put((keys, question))
        return question

    def _answer(self):
        """A step of the asker: a question, or whether a remote that failed is well again."""
        try:
            keys, question = self._questions.get(timeout=0.1)
        except queue.Empty:
            if not self._backoff_sec or monotonic() < self._retry_at:
                return
            keys, question = [], Future()
        try:
            by_key = partial(count_leading, self._remote.exists_many)
            texts = [*map(self._names.text, keys or [0])]
            count = getattr(self._remote, "leading", by_key)(texts)
            question.set_result(max(0, min(count, len(keys))))
            self._backoff_sec = 0.0
        except Exception as error:
            self._failed(error)
            question.set_result(0)

    # -- retrieves

    def fetch(self, wanted, keys, lengths, here):
        """Gets chunks keys[i], of lengths[i] tokens, for each wanted i, into here[i], in use: kept
        in the store, or loose, where there is no room for them, or in the memory of a server on
        this host."""

        store = self._store

        def fill(number, meta, receive, own=None):
            index = wanted[number]
            if meta != (expected := self._names.meta(lengths[index])):
                self._log("other", "the remote has another chunk: %s, not %s", meta, expected)
                return
            keep = self._engine.config.local_cpu and own is None
            chunk = (keep and store.reserve(meta.length)) or store.loose(meta.length, own)
            try:
                if own is None:
                    store.fill(chunk, receive)
            except BaseException:
                store.release([chunk])
                raise
            chunk.meta, chunk.known_at = lengths[index], monotonic()
            here[index] = store.commit(keys[index], chunk, keep=True)

        def get():
            hold = getattr(self._remote, "hold_many", lambda _: None)
            held = hold(texts) if store.device.type == "cpu" else None
            if held is None:
                self._remote.get_many(texts, fill)
            for number, found in enumerate(held or ()):
                if found:
                    fill(number, found[0], None, found[1])

        texts = [self._names.text(keys[index]) for index in wanted]
        self._try(get, None)

    def let_go(self):
        """Whether what fetch() found in place, if anything, was there until now."""
        try:
            getattr(self._remote, "let_go", bool)()
            return True
        except Exception as error:
            self._failed(error)
            return False

    # -- stores

    def send(self, keys, chunks):
        """Puts a prompt's chunks, in its order, in the outbox, but those that were there a moment
        ago; how many of the new ones found no room."""
        self._is_well()
        now, taken, dropped = monotonic(), deque(), 0
        with self._ready:
            for key, chunk in zip(keys, chunks, strict=True):
                if chunk is None or now < chunk.known_at + RECHECK_SEC:
                    continue
                known, size = chunk.known_at > 0, chunk.nbytes
                full = self._outbox_bytes + size > self._store.max_bytes // 2
                if dropped or full or self._closed:  # its tail is dropped, too
                    dropped += not known
                    continue
                chunk.known_at = now
                self._outbox_bytes += size
                self._store.hold([chunk])
                taken.appendleft((key, chunk, known))
            self._outbox.extend(taken)
            self._ready.notify()
        self._engine.count(remote_dropped=dropped)
        return dropped

    def _write(self):
        """A step of the writer: a batch out of the outbox."""
        with self._ready:
            self._ready.wait_for(lambda: self._outbox, 0.1)
            count = min(len(self._outbox), BATCH_CHUNKS)
            batch = self._batch = [self._outbox.popleft() for _ in range(count)]
        try:
            if batch:
                new = sum(not known for _, _, known in batch)
                put, lost = self._try(lambda: self._put(batch), (0, new))
                self._engine.count(remote_puts=put, remote_dropped=lost)
        finally:
            self._done_with(batch)

    def _put(self, batch):
        """How many it sent, and how many of them the remote has not. What was sent before is only
        asked for: so what the remote has lost comes back."""
        asked = [self._names.text(key) for key, _, known in batch if known]
        answers = self._remote.exists_many(asked) if asked else []
        there = {text for text, found in zip(asked, answers, strict=True) if found}
        items = [
            (text, self._names.meta(chunk.meta), self._store.pieces(chunk))
            for key, chunk, _ in batch
            if (text := self._names.text(key)) not in there
        ]
        if not items:
            return 0, 0
        self._remote.put_many(iter(items))
        kept = self._remote.exists_many([text for text, _, _ in items])  # now others see them, too
        return len(items), max(0, len(items) - sum(kept))

    def _done_with(self, batch):
        self._batch = []
        self._store.release(chunk for _, chunk, _ in batch)
        with self._ready:
            self._outbox_bytes -= sum(chunk.nbytes for _, chunk, _ in batch)
            self._ready.notify_all()

    def flush(self, timeout_sec):
        """Waits for the outbox; whether the remote is well, and took all since this thread's last
        flush."""
        self._is_well()
        with self._ready:
            emptied = self._ready.wait_for(lambda: not self._outbox_bytes, timeout_sec)
        before, lost = getattr(self._heard, "lost", 0), self._engine.stats()["remote_dropped"]
        self._heard.lost = lost
        return self._is_well() and emptied and lost == before

    def close(self, timeout_sec):
        """Hands over what is in the outbox, if the remote is well, and ends the threads."""
        well = self._is_well()
        with self._ready:
            self._ready.wait_for(lambda: not (well and self._outbox_bytes), timeout_sec)
        self._closed = True
        for thread in self._threads:
            thread.close()
        with self._ready:
            dropped, self._outbox = self._outbox, deque()
        self._engine.count(remote_dropped=len(dropped))
        self._done_with(dropped)


# --------------------------------------------------------------------------------------------------
# The script


def memory_limit():
    """Bytes that this machine, or the cgroup that we are in, has."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("memory.max", "memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # "max" is none
            limits.append(int(Path("/sys/fs/cgroup", file).read_text()))
    return min(limits)


def demo():
    """A server and a client in one process: put, get, evict."""
    with LMCacheServer("127.0.0.1", 0, max_bytes=8 << 20) as server:
        threading.Thread(target=server.run, daemon=True).start()
        with RemoteClient(f"lm://127.0.0.1:{server.port}") as client:
            keys, chunk = [f"{number}" for number in range(6)], torch.randn(2, 8, 256, 128)  # 2 MiB
            for key in keys:
                client.put(key, chunk)  # [2, L, T, H*D]
            meta, data = client.get("5")
            same = torch.equal(torch.frombuffer(data, dtype=torch.float32), chunk.flatten())
            print(f"put, get   {meta}: equal {same}")
            print(f"evict      6 chunks of 2 MiB into 8 MiB: {client.exists_many(keys)}")
    return 0 if same else 1


def arguments():
    parser = argparse.ArgumentParser(description="A TCP cache server, LMCache's protocol.")
    add = parser.add_argument
    add("host", help="address to listen on, or to ask; e.g. 127.0.0.1, 0.0.0.0, ::1")
    add("port", type=int, help="0 picks a free one")
    add("device", nargs="?", default="cpu", help="where chunks live: cpu (default), cuda, cuda:N")
    add("--max-gib", type=float, default=5.0, help="GiB of chunks, fractions too (%(default)s)")
    add("--max-clients", type=int, default=1024, help="connections at once (%(default)s)")
    add("--stall-sec", type=float, default=30.0, help="for half a request (%(default)s)")
    add("--eviction", default="slru", choices=POLICIES, help="which chunks go first (%(default)s)")
    add("--dir", metavar="FOLDER", help="keep the chunks in files there, over a restart")
    add("--stats", action="store_true", help="a running server's figures; exit 0 if it is well")
    add("--prometheus", action="store_true", help="with --stats: as Prometheus reads them")
    add("--clear", action="store_true", help="remove every key from a running server")
    add("--delete", metavar="KEY", help="remove one; exit 1 if the server has it not")
    for name in ("cert", "key", "ca"):
        add(f"--tls-{name}", metavar="PEM", help="all three: mutual TLS, lms://")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if list(argv) == ["--demo"]:
        return demo()
    parser = arguments()
    args = parser.parse_args(argv)
    asking = args.stats or args.clear or args.delete
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        tls = tls_context(args.tls_cert, args.tls_key, args.tls_ca, server_side=not asking)
        if asking:
            return ask(args, tls)
        if not 0 < args.max_gib <= 2**20:
            raise ValueError(f"--max-gib {args.max_gib} must be above 0, and at most {2**20}")
        server = LMCacheServer(args.host, args.port, args.device, int(args.max_gib * 2**30),
                               args.max_clients, args.stall_sec, tls, args.eviction,
                               args.dir)  # fmt: skip
    except (ValueError, OSError, MemoryError) as error:
        parser.error(str(error))
    with server:
        for number in (signal.SIGINT, signal.SIGTERM):  # a handler may not wait for a lock
            signal.signal(number, lambda *_: threading.Thread(target=server.close).start())
        url, device = url_of(server.host, server.port, tls), server.store.device
        logger.info("listening on %s, device %s, budget %.3g GiB", url, device, args.max_gib)
        if device.type == "cpu" and server.store.max_bytes > memory_limit():
            limit_gib = memory_limit() / 2**30
            logger.warning("the budget is above this machine's or its cgroup's %.3g GiB", limit_gib)
        if tls is None and not re.fullmatch(r"127\..*|::1", server.host):
            logger.warning("no TLS: anyone who reaches this port can read and write the cache")
        server.run()
    logger.info("stopped")
    return 0


def url_of(host, port, tls):
    return f"{'lms' if tls else 'lm'}://{f'[{host}]' if ':' in host else host}:{port}"


def ask(args, tls):
    """--stats, --clear, --delete: the exit status."""
    url = url_of(args.host, args.port, tls)
    try:
        with RemoteClient(url, timeout_sec=2.0, tls=tls) as client:
            if args.clear:
                client.clear()
            if args.delete and not client.delete(args.delete):
                return 1
            for name, value in client.stats().items() if args.stats else ():
                print(f"lmcache_{name} {value}" if args.prometheus else f"{name:16} {value}")
        return 0
    except (OSError, ValueError) as error:
        print(f"{url}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
