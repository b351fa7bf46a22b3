"""valkey_remote.py - a Valkey or Redis server, or a cluster of them, as an engine's remote.

Chunks lie there as LMCache 0.3.14's redis:// connector lays them (its redis_connector.py, and
RemoteMetadata in its protocol.py), so that each reads what the other wrote. A chunk is two keys:

    KEYkv_bytes    the payload, written first
    KEYmetadata    7 little-endian int32: length in bytes, fmt, dtype, shape (see engine.RemoteMeta)

KEY is the engine's key text. The metadata of 512 bytes, KV_2LTD, float32, shape [2, 2, 4, 8]:

    00020000 01000000 04000000 02000000 02000000 04000000 08000000
    length   fmt      dtype    shape

    $ pip install -r requirements/valkey.txt
    $ PYTHONPATH=. python examples/valkey_remote.py valkey://127.0.0.1:6379    # there and back

    engine = LMCacheEngine(config, metadata, remote=remote_of_url("valkey://user:password@host"))

valkeys:// and rediss:// speak TLS; the URL says the rest, as the client takes it
(?ssl_ca_certs=...&ssl_certfile=...). A server should have `maxmemory` and `maxmemory-policy
allkeys-lru`; a cluster `cluster-require-full-coverage no`, or one dead node makes all of it a miss.

Not here: sentinels; reads from replicas; LMCache's valkey:// layout, which is another one;
following MOVED and ASK within a call: what has moved is a miss, and then its new place is known.
"""

import logging
import os
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from valkey import Valkey, ValkeyCluster
from valkey import exceptions as client_errors

from engine import RemoteMeta
from remote_server import count_leading

logger = logging.getLogger("lmcache.valkey_remote")

SCHEMES = ("valkey", "valkeys", "redis", "rediss")
METADATA = struct.Struct("<7i")  # length, fmt, dtype, s0..s3: 28 bytes
CHUNKS_AT_ONCE = 8  # held here beside the engine's memory: of 4 MiB each, 32 MiB
NODE_COOLDOWN_SEC = 1.0  # a node that failed is left alone for so long, while the others go on
REFRESH_SEC = 0.2  # a cluster is asked at most so often which node has which keys

# Whatever the client raises where a server is at fault. Of its own, none is an OSError.
FAULTS = (client_errors.ValkeyError, client_errors.ValkeyClusterException, OSError)
ELSEWHERE = (client_errors.AskError, client_errors.ClusterDownError)  # MovedError is an AskError

Command = tuple[str, str] | tuple[str, str, bytes | memoryview]  # name, key, value of a SET
Fill = Callable[[int, RemoteMeta, Callable[[memoryview], Any]], None]

# --------------------------------------------------------------------------------------------------
# One server, or the nodes of a cluster


class Cluster(ValkeyCluster):
    """Knows which node has a key. What is asked goes to that node's own client, see Nodes."""

    def command(self, **_: Any) -> dict[str, Any]:
        """No table of commands: it would be asked of the first master, which may be a dead one."""
        return {}


class Nodes:
    """Who has which key, and what to do about those who do not answer. Connects at the first ask.

    A server may be silent for a third of timeout_sec, and none is asked after two thirds of it: an
    ask ends within timeout_sec, unless bytes keep trickling in.
    """

    def __init__(self, url: str, timeout_sec: float):
        self.url, self.timeout_sec, self.closed = url, timeout_sec, False
        self.silence_sec = timeout_sec / 3
        self.options = {"socket_timeout": self.silence_sec}  # also for connecting
        self._begin()

    def _begin(self) -> None:
        """Knows nothing but the URL. After a fork too: no socket of the parent's, nor its locks."""
        self.seed = Valkey.from_url(self.url, **self.options)
        connection = self.seed.connection_pool.make_connection()  # not connected: a check
        self.seed_name = f"{connection.host}:{connection.port}"
        self.servers: Valkey | Cluster | None = None  # one or the other, once we know which
        self.down_until: dict[str, float] = {}  # "host:port" of a node -> time.monotonic()
        self.stale = False  # a key is not where we thought: the cluster is to be asked again
        self.refresh_at = 0.0
        self.lock, self.pid = threading.Lock(), os.getpid()

    def deadline(self) -> float:
        return time.monotonic() + 2 * self.silence_sec

    def ask(self, commands: Sequence[Command], deadline: float) -> list[Any]:
        """The reply to each command, in one pipeline a node; None where there is none, or an error.

        ConnectionError where every node is down, TimeoutError after the deadline.
        """
        replies: list[Any] = [None] * len(commands)
        if not commands:
            return replies
        servers = self._connected(deadline)
        for name, (client, indices) in self._by_node(servers, commands).items():
            if not self._is_down(name):
                mine = [commands[index] for index in indices]
                answers = self._pipeline(name, client, mine, deadline)
                for index, answer in zip(indices, answers, strict=True):
                    replies[index] = answer
        is_cluster = isinstance(servers, Cluster)
        names = [node.name for node in servers.get_primaries()] if is_cluster else [self.seed_name]
        if all(map(self._is_down, names)):
            raise ConnectionError(f"no answer from {', '.join(names)}")
        return replies

    def close(self) -> None:
        self.closed = True
        self._disconnect()

    def _pipeline(
        self, name: str, client: Valkey, commands: Sequence[Command], deadline: float
    ) -> list[Any]:
        self._check_time(deadline)
        pipeline = client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        try:
            answers = pipeline.execute(raise_on_error=False)
        except FAULTS as error:
            self._failed(name, error)
            return [None] * len(commands)
        refused = [answer for answer in answers if isinstance(answer, Exception)]
        if refused:
            logger.warning("%s refused %d commands: %r", name, len(refused), refused[0])
            self.stale |= any(isinstance(error, ELSEWHERE) for error in refused)
        return [None if isinstance(answer, Exception) else answer for answer in answers]

    def _by_node(
        self, servers: Valkey | Cluster, commands: Sequence[Command]
    ) -> dict[str, tuple[Valkey, list[int]]]:
        """A node's name -> its client, and the indices of the commands whose keys it has."""
        if isinstance(servers, Valkey):
            return {self.seed_name: (servers, list(range(len(commands))))}
        nodes: dict[str, tuple[Valkey, list[int]]] = {}
        for index, command in enumerate(commands):
            try:
                node = servers.get_node_from_key(command[1])
            except client_errors.SlotNotCoveredError:  # no node has keys like this one
                self.stale = True
                continue
            if node.name not in nodes:
                nodes[node.name] = servers.get_valkey_connection(node), []
            nodes[node.name][1].append(index)
        return nodes

    def _connected(self, deadline: float) -> Valkey | Cluster:
        if self.pid != os.getpid():
            self._begin()
        if self.closed:
            raise ConnectionError("this remote is closed")
        servers = self.servers
        if servers is not None and not (self.stale and time.monotonic() >= self.refresh_at):
            return servers
        if not self.lock.acquire(timeout=self.silence_sec if servers is None else 0):
            if servers is None:
                raise TimeoutError(f"{self.seed_name}: another thread is still connecting")
            return servers  # another thread is asking where the keys are now
        try:
            if self.servers is None:
                self.servers = self._discover()
            elif self.stale:
                self._refresh(self.servers, deadline)
            return self.servers
        finally:
            self.lock.release()

    def _discover(self) -> Valkey | Cluster:
        """Asks the server of the URL what it is."""
        try:
            if not self.seed.info("cluster").get("cluster_enabled"):
                return self.seed
            return Cluster.from_url(self.url, **self.options)
        except FAULTS as error:
            raise ConnectionError(f"{self.seed_name}: {error}") from error

    def _refresh(self, servers: Valkey | Cluster, deadline: float) -> None:
        """Asks one node after the other where the keys are now, first those that are up."""
        if isinstance(servers, Valkey):
            self.stale = False
            return
        known = servers.get_nodes()
        for node in sorted(known, key=lambda node: self._is_down(node.name)):
            self._check_time(deadline)
            servers.nodes_manager.startup_nodes = {node.name: node}  # else it asks dead ones first
            try:
                servers.nodes_manager.initialize()
            except FAULTS as error:
                self._failed(node.name, error)
                continue
            self.stale, self.refresh_at = False, time.monotonic() + REFRESH_SEC
            names = {node.name for node in servers.get_nodes()}
            for left in (node for node in known if node.name not in names):
                left.valkey_connection.connection_pool.disconnect()
            return
        self._disconnect()
        self.servers = None  # all of them are gone: the next ask begins at the URL again
        raise ConnectionError(f"no node of the cluster at {self.seed_name} answers")

    def _failed(self, name: str, error: Exception) -> None:
        logger.warning("%s failed, and is left alone for a second: %s", name, error)
        self.down_until[name] = time.monotonic() + NODE_COOLDOWN_SEC
        self.stale = True

    def _is_down(self, name: str) -> bool:
        return time.monotonic() < self.down_until.get(name, 0.0)

    def _check_time(self, deadline: float) -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{self.seed_name}: not done within {self.timeout_sec:.1f} s")

    def _disconnect(self) -> None:
        if isinstance(self.servers, Cluster):
            self.servers.disconnect_connection_pools()
        self.seed.connection_pool.disconnect()


# --------------------------------------------------------------------------------------------------
# The remote


class ValkeyRemote:
    """What an engine takes as its `remote`, see remote_server.RemoteClient.

    A node that does not answer is a miss for its keys. ConnectionError where no node is left,
    TimeoutError where a call runs out of time; both are OSErrors. Safe to share between threads,
    each on connections of its own, and usable after a fork.
    """

    def __init__(self, url: str, timeout_sec: float = 5.0):
        if not timeout_sec > 0:
            raise ValueError(f"timeout_sec {timeout_sec} must be above 0")
        try:
            self._nodes = Nodes(url, timeout_sec)
        except (TypeError, ValueError) as error:
            raise ValueError(f"remote url: {error}") from error
        self._lost, self._lost_lock = 0, threading.Lock()  # puts since the last flush

    def exists_many(self, keys: Sequence[str]) -> list[bool]:
        """Which of these chunks are there, both halves. Asking counts as use; EXISTS would not."""
        commands = [("STRLEN", key + "kv_bytes") for key in keys]
        commands += [("GET", key + "metadata") for key in keys]
        replies = self._nodes.ask(commands, self._nodes.deadline())
        halves = zip(replies[len(keys) :], replies[: len(keys)], strict=True)
        return [_meta(raw, nbytes) is not None for raw, nbytes in halves]

    def leading(self, keys: Sequence[str]) -> int:
        """How many leading ones are there. Asks for the head last: of a prefix it stays longest."""
        return count_leading(self.exists_many, keys)

    def get_many(self, keys: Sequence[str], fill: Fill) -> None:
        """For each chunk that is there, in order, fill(index, meta, receive).

        receive(view) takes the next len(view) bytes of the payload; ValueError where there are
        fewer left.
        """
        deadline = self._nodes.deadline()
        for first in range(0, len(keys), CHUNKS_AT_ONCE):
            batch = keys[first : first + CHUNKS_AT_ONCE]
            commands = [("GET", key + half) for half in ("metadata", "kv_bytes") for key in batch]
            replies = self._nodes.ask(commands, deadline)
            halves = zip(replies[: len(batch)], replies[len(batch) :], strict=True)
            for index, (raw, payload) in enumerate(halves, first):
                meta = None if payload is None else _meta(raw, len(payload))
                if meta is not None:
                    fill(index, meta, _receiver(payload))

    def put_many(self, items: Iterable[tuple[str, RemoteMeta, Iterable[memoryview]]]) -> None:
        """Stores chunks: key, meta, payload in pieces. flush() tells of those that a node lost."""
        deadline, items = self._nodes.deadline(), iter(items)
        while batch := [
            (key, meta, _joined(meta, pieces))
            for key, meta, pieces in islice(items, CHUNKS_AT_ONCE)
        ]:
            payloads = [("SET", key + "kv_bytes", payload) for key, _, payload in batch]
            taken = self._nodes.ask(payloads, deadline)
            metas = [
                ("SET", key + "metadata", METADATA.pack(*meta[:3], *meta.shape))
                for (key, meta, _), ok in zip(batch, taken, strict=True)
                if ok  # else it may be half a chunk
            ]
            named = sum(map(bool, self._nodes.ask(metas, deadline)))
            with self._lost_lock:
                self._lost += len(batch) - named

    def flush(self) -> None:
        """Each put had its reply already: ConnectionError where some were not taken."""
        with self._lost_lock:
            lost, self._lost = self._lost, 0
        if lost:
            raise ConnectionError(f"{lost} puts were lost: a node was down or refused them")

    def close(self) -> None:
        """Ends the connections; a call in flight fails. Idempotent."""
        self._nodes.close()


def _meta(raw: bytes | None, nbytes: int | None) -> RemoteMeta | None:
    """A chunk's metadata; None where a half is missing, or is not of a payload of nbytes."""
    if raw is None or len(raw) != METADATA.size:
        return None
    length, fmt, dtype, *shape = METADATA.unpack(raw)
    return RemoteMeta(length, fmt, dtype, tuple(shape)) if 0 < length == nbytes else None


def _joined(meta: RemoteMeta, pieces: Iterable[memoryview]) -> memoryview:
    """A payload as one SET takes it. Subtle: a piece may be gone as soon as the next is there."""
    payload = bytearray()
    for piece in pieces:
        payload += piece
    if len(payload) != meta.length:
        raise ValueError(f"meta says {meta.length} bytes, the pieces have {len(payload)}")
    return memoryview(payload)


def _receiver(payload: bytes) -> Callable[[memoryview], None]:
    left = memoryview(payload)

    def receive(view: memoryview) -> None:
        nonlocal left
        if len(view) > len(left):
            raise ValueError(f"{len(view)} bytes asked for, {len(left)} are left of this chunk")
        view[:] = left[: len(view)]
        left = left[len(view) :]

    return receive


def remote_of_url(url: str, timeout_sec: float = 5.0) -> ValkeyRemote:
    """The remote at valkey://[user:password@]host[:port][/db][?option=value&...].

    ValueError for a scheme that is none of SCHEMES, and for what the client cannot read.
    """
    if (scheme := urlsplit(url).scheme) not in SCHEMES:
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"remote url has the scheme {scheme!r}; known: {known}")
    return ValkeyRemote(url, timeout_sec)


def main() -> int:
    """Puts one chunk of 512 bytes, asks for it and gets it back."""
    remote, key, data = remote_of_url(sys.argv[1]), "demo@1@0@abc@float", bytes(range(256)) * 2
    back = bytearray(len(data))

    def fill(_: int, meta: RemoteMeta, receive: Callable[[memoryview], Any]) -> None:
        print(meta)
        receive(memoryview(back))

    remote.put_many([(key, RemoteMeta(len(data), 1, 4, (2, 2, 4, 8)), [memoryview(data)])])
    remote.flush()
    remote.get_many(["nothing", key], fill)
    print(f"there: {remote.exists_many(['nothing', key])}, equal: {back == data}")
    remote.close()
    return int(back != data)


if __name__ == "__main__":
    sys.exit(main())
