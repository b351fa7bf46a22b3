"""engine.py - a KV cache engine: chunks of a paged KV cache, stored by name and found again.

It follows LMCache 0.3.14 (cache_engine.py, memory_management.py): same names, same chunk format.

    $ python engine.py      # store, lookup, partial hit, retrieve, evict on a toy paged cache

    tokens -> ChunkNames -> ChunkStore -> chunk [K, L, T, H*D] -> PagedKVCache -> the pages
              (lookup.py)       \\-- what is not here: RemoteTier (remote_server.py)

Shapes, one alphabet in all four modules: L layers, T tokens, H KV heads, D head_dim, B blocks, N
slots in a block (slot = block * N + offset), K = 2 (keys and values) or 1 (MLA's one latent).

One retrieve of 8 tokens, chunks of 4, N = 4, L = 2; the request was given blocks 5 and 2:

    tokens        0  1  2  3   4  5  6  7
    slot_mapping 20 21 22 23   8  9 10 11     block * 4 + offset: the KV of token 6 is at slot 10
    chunks       [ "hash a" ]  [ "hash b" ]   each [K, L, T, H*D] bytes in the store's one arena
                       |            |
    K * L planes       v            v         keys of layer 0, of layer 1, values of 0, of 1: each
    [B, N, H, D]    block 5      block 2      a view of the serving engine's own tensor

store() reads, and retrieve() writes, the slots of the pages that it is given, and no other.
Not here: names (lookup.py), sockets, layer-wise pipelining, compression.
"""

import bisect
import ctypes
import logging
import math
import mmap
import os
import queue
import shutil
import sqlite3
import threading
from collections import Counter, OrderedDict, deque
from contextlib import ExitStack, suppress
from itertools import chain, groupby, repeat, takewhile
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import torch

from lookup import (  # noqa: F401  # some of them for those who take the names from here
    DTYPE_TO_INT, DTYPE_TO_TEXT, LRU, MAX_KEY_BYTES, POLICIES, SLRU, TEXT_TO_DTYPE, CacheEngineKey,
    ChunkedTokenDatabase, ChunkNames, Closing, LMCacheEngineConfig, LMCacheMetadata, MemoryFormat,
    RareLog, RemoteMeta, SegmentTokenDatabase, Service, TokenDatabase, bytes_of, check_hashes,
    locked, make_rpc_folder, make_token_database, rpc_path,
)  # fmt: skip

logger = logging.getLogger("lmcache.engine")

# --------------------------------------------------------------------------------------------------
# The arena: one memory, carved into pieces that know their neighbours

ALIGN_BYTES = 64  # a cache line; also a multiple of every dtype's size
PLACES_TRIED = 32  # of places that are large enough, before the oldest of them is taken


def aligned(nbytes):
    return -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES


class Piece:
    """A stretch of the arena: as such a hole; a Chunk is one, too."""

    __slots__ = ("offset", "size", "left", "right", "used_at")

    def __init__(self, offset, size):
        self.offset, self.size = offset, size  # bytes, multiples of ALIGN_BYTES
        self.left = self.right = None  # the pieces before and behind it in memory
        self.used_at = 0  # the store's clock at its last use; below 0, of a hole


class Chunk(Piece):
    """A chunk's place in the store. Its life, and who may touch its memory:

    reserved   reserve()               key None, refs 1    the one who reserved it writes
    in use     commit(), acquire()     key set,  refs > 0  readers only; never evicted. A pin is one
    idle       release(), unpin()      key set,  refs 0    anyone may acquire() it; evicted for room
    replaced   commit() under its key  key None, refs > 0  its last readers finish, then it is free
    loose      loose()                 key None, own set   memory of its own, not in the store
    """

    __slots__ = ("key", "nbytes", "meta", "refs", "known_at", "own")

    def __init__(self, nbytes):
        super().__init__(0, aligned(nbytes))
        self.nbytes, self.refs = nbytes, 1
        self.key = None
        self.meta = None  # what its owner knows of it: a token count, a reply header
        self.known_at = 0.0  # monotonic() when a remote was last sent it, or asked for it
        self.own = None  # uint8 [nbytes], of a loose chunk


def _link(left, right):
    left.right, right.left = right, left


def _is_hole(piece):
    return type(piece) is Piece


def _is_free(piece):
    return _is_hole(piece) or not piece.refs


class Arena:
    """`size` bytes handed out in pieces; only offsets pass through. Of the holes the smallest that
    fits is taken, of those the one given back last, still warm."""

    def __init__(self, size):
        self.size, self.used, self.top = size, 0, 0  # [top, size) was never handed out
        self._holes = []  # sorted: (size, - count of holes before it, hole)
        self._count = 0
        hole = Piece(0, size)
        _link(Chunk(0), hole)  # walls are always in use
        _link(hole, Chunk(0))
        self._bin(hole)

    def find(self, size):
        """The best hole for so many bytes."""
        at = bisect.bisect_left(self._holes, (size,))
        return self._holes[at][2] if at < len(self._holes) else None

    def take(self, piece, hole):
        self._unbin(hole)
        piece.offset = hole.offset
        _link(hole.left, piece)
        if hole.size == piece.size:
            _link(piece, hole.right)
        else:
            hole.offset, hole.size = hole.offset + piece.size, hole.size - piece.size
            _link(piece, hole)
            self._bin(hole)
        self.used += piece.size
        self.top = max(self.top, piece.offset + piece.size)

    def give_back(self, piece):
        self.used -= piece.size
        left, right, hole = piece.left, piece.right, Piece(piece.offset, piece.size)
        if _is_hole(left):
            self._unbin(left)
            hole.offset, hole.size, left = left.offset, hole.size + left.size, left.left
        if _is_hole(right):
            self._unbin(right)
            hole.size, right = hole.size + right.size, right.right
        _link(left, hole)
        _link(hole, right)
        self._bin(hole)
        return hole

    def _bin(self, hole):
        self._count -= 1
        hole.used_at = self._count
        bisect.insort(self._holes, (hole.size, hole.used_at, hole))

    def _unbin(self, hole):
        del self._holes[bisect.bisect_left(self._holes, (hole.size, hole.used_at))]

    # -- whom to evict; nobody is before it is clear that it helps

    def plan(self, chunks, victims):
        """The leading chunks that find room, each with the pieces side by side, holes and idle
        chunks, that are to go for it; none for one that lies in a hole, or is to lie in what
        the place before leaves. victims: an iterator of idle chunks, the first to go first."""
        placed, claimed, room = [], set(), 0
        for chunk in chunks:
            place = ()
            if (hole := self.find(chunk.size)) is not None:
                self.take(chunk, hole)
            elif chunk.size <= room:  # in what the last place leaves
                room -= chunk.size
            else:
                place, passed = self._search(chunk.size, victims, claimed)
                if place is None:
                    break
                claimed.update(place)
                if passed := [piece for piece in passed if piece not in claimed]:
                    victims = chain(passed, victims)  # the next may find a place there
                room = sum(piece.size for piece in place) - chunk.size
                deque(map(self._unbin, filter(_is_hole, place)), 0)  # for nobody else
            placed.append((chunk, place))
        deque(map(self._bin, filter(_is_hole, claimed)), 0)
        return placed

    def _search(self, size, victims, claimed):
        """Of the places of `size` bytes that begin at the first to go, the one whose last use is
        the longest ago, or None; and whom it looked at."""
        found, seen, passed = [], set(), []
        for anchor in victims:
            if anchor in claimed:
                continue
            passed.append(anchor)
            if anchor in seen:
                continue
            place, room, before = [], 0, anchor.left
            piece = before if _is_hole(before) and before not in claimed else anchor
            while _is_free(piece) and piece not in claimed and (room < size or _is_hole(piece)):
                place.append(piece)  # a hole at either end, too: it costs nobody
                room, piece = room + piece.size, piece.right
            seen.update(place)
            if room < size:
                continue
            found.append(place)
            if anchor.size >= size or len(found) == PLACES_TRIED:
                break
        oldest = min(found, key=lambda place: max(each.used_at for each in place), default=None)
        return oldest, passed


# --------------------------------------------------------------------------------------------------
# The memory under a store

HUGE_PAGE_BYTES = 2 << 20
WARM_BYTES = 256 << 20  # a fresh page costs 4 to 10 times a copy: touch this much ahead of need
MADV_POPULATE_WRITE = 23  # linux/mman.h since 5.14: map pages without changing what they hold
STAGING_BYTES = 4 << 20  # a pinned buffer between a socket and the GPU
STAGING_BUFFERS = 4  # shared by all connections of a server


def parse_device(device):
    """`cpu`, `cuda` or `cuda:N`, where there is one; else a ValueError that lists what there is."""
    count = torch.cuda.device_count()
    allowed = ["cpu"] + ["cuda"] * bool(count) + [f"cuda:{index}" for index in range(count)]
    if str(device) not in allowed:
        raise ValueError(f"device {str(device)!r} is not here; this host has {', '.join(allowed)}")
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


class Memory:
    """`size` bytes on a device, and the way in and out of them for sockets."""

    def __init__(self, device, size, file=-1):
        self.device, self.size, self.pinned = parse_device(device), size, False
        self._file = file  # a descriptor of as many bytes, which others may map, too; or -1
        self._view = memoryview(b"")  # of a cpu's
        try:
            self.tensor = self._allocate()  # uint8 [size]
        except (OSError, RuntimeError, MemoryError, ValueError, OverflowError) as error:
            text = f"no room for a chunk store of {size} bytes on {self.device}: {error}"
            raise MemoryError(text) from error

    def _allocate(self):
        if self.device.type == "cuda":
            self._stream = torch.cuda.Stream(self.device)
            self._staging = queue.SimpleQueue()
            for _ in range(STAGING_BUFFERS):
                self._staging.put(None)  # allocated when it is first taken
            return torch.empty(self.size, dtype=torch.uint8, device=self.device)
        flags = mmap.MAP_SHARED if self._file >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(self._file, self.size, flags=flags)
        with suppress(OSError, AttributeError):  # a kernel without huge pages: slower
            memory.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(memory)
        return torch.frombuffer(memory, dtype=torch.uint8)

    def populate(self, start, size):
        """Has the kernel map these bytes, without the GIL; an older one maps at first use."""
        libc, address = ctypes.CDLL(None), ctypes.c_void_p(self.tensor.data_ptr() + start)
        libc.madvise(address, ctypes.c_size_t(size), MADV_POPULATE_WRITE)

    def pin(self):
        """Registers a cpu's with CUDA: copies to and from a GPU need no detour."""
        if self.device.type == "cpu" and not self.pinned:
            error = int(torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), self.size, 0))
            if error:
                raise MemoryError(f"cudaHostRegister of {self.size} bytes: error {error}")
            self.pinned = True

    def close(self):
        if self.pinned:
            self.pinned = False
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self.tensor, self._view = torch.empty(0, dtype=torch.uint8), memoryview(b"")

    def of(self, chunk):
        """uint8 [nbytes]. Not a copy."""
        if chunk.own is not None:
            return chunk.own
        return self.tensor[chunk.offset : chunk.offset + chunk.nbytes]

    def staged(self, chunk, into):
        """The chunk piece by piece, as a socket can use it, to be read, or `into`, to be written;
        each is valid until the next is asked for. Of a GPU's, each is copied through one of the few
        pinned buffers that all threads share, in the order of one stream, and waited for: who
        leaves in the middle leaves no copy under way."""
        if self.device.type == "cpu":
            view = self._view[chunk.offset : chunk.offset + chunk.nbytes]
            yield view if chunk.own is None else bytes_of(chunk.own)
            return
        for part in self.of(chunk).split(STAGING_BYTES):
            buffer = self._staging.get()
            try:
                if buffer is None:
                    buffer = torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True)
                piece = buffer[: len(part)]
                if not into:
                    self._copy(piece, part)
                yield bytes_of(piece)
                if into:
                    self._copy(part, piece)
            finally:
                self._staging.put(buffer)

    def _copy(self, target, source):
        with torch.cuda.stream(self._stream):
            target.copy_(source)


# --------------------------------------------------------------------------------------------------
# A store's memory in a file, and what is where in it, over a restart

VERSION = 1  # of what is in a store's folder


def boot_id():
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


class Index:
    """A store in a folder: `arena` there is its memory, which others of this host may map, and
    `index`, SQLite's, names each chunk from its commit on until it is dropped, which is written
    before its memory is used again. So it is all there again, however the store ended, while the
    machine stays up: the page cache has it. After a reboot only what was closed, and synced, is.

    Both lie in a folder named by version, size, and boot or "closed"; one of another name, or one
    whose arena somebody still writes, is not trusted, but removed. OSError: no room, files that are
    not ours alone or have been cut, a store that is alive there."""

    def __init__(self, folder, size):
        self.uses, self._lost = {}, False  # offset -> last use, to be written
        with ExitStack() as undo:
            undo.enter_context(locked(make_rpc_folder(f"{folder}/arena")))
            names = (f"lmcache-{VERSION}-{size}-{of}" for of in (boot_id(), "closed"))
            self._path, self._closed = (Path(folder, name) for name in names)
            if self._closed.exists():
                self._closed.rename(self._path)
            arenas = [*Path(folder).glob("lmcache-[0-9]*-[0-9]*-*/arena")]
            room = shutil.disk_usage(folder).free + sum(arena.stat().st_size for arena in arenas)
            if room < size:  # seen before any is removed
                raise OSError(f"no room for {size} bytes in {folder}: {room} are free, or ours")
            for arena in arenas:
                try:
                    if arena.parent != self._path:
                        raise OSError("of another version, size or boot")
                    with locked(arena):  # no client of the server before writes there any more
                        continue
                except OSError as error:
                    logger.warning("%s is removed: %s", arena, error)
                    shutil.rmtree(arena.parent)
            self._path.mkdir(0o700, exist_ok=True)
            number = os.open(folder, os.O_RDONLY)
            undo.callback(os.close, number)
            os.fsync(number)  # "closed" is gone before anything changes
            self.arena = self._path / "arena"
            self.arena.touch(0o600)
            self.file = undo.enter_context(self.arena.open("r+b"))
            new = os.fstat(self.file.fileno()).st_size != size  # or cut
            try:
                if new:
                    (self._path / "index").unlink(missing_ok=True)
                    os.ftruncate(self.file.fileno(), 0)
                    os.posix_fallocate(self.file.fileno(), 0, size)  # later it would be a SIGBUS
                self._db = sqlite3.connect(self._path / "index", check_same_thread=False)
                undo.callback(self._db.close)
                self._db.execute("PRAGMA synchronous = OFF")  # the page cache is enough
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")  # faster: no lock a write
                self._db.execute("CREATE TABLE IF NOT EXISTS chunks (offset INTEGER PRIMARY KEY, "
                         "nbytes, use, meta, key UNIQUE)")  # fmt: skip
                (check,) = self._db.execute("PRAGMA quick_check").fetchone()
                end = 0
                for offset, nbytes, *_ in [*self.found("offset"), (size, 0)]:
                    if check != "ok" or offset < end or offset % ALIGN_BYTES:
                        raise ValueError(f"{check}; {offset} after {end}")
                    end = offset + aligned(nbytes)
            except (OSError, sqlite3.Error, TypeError, ValueError) as error:
                if not new:
                    raise OSError(f"{self._path} is damaged, remove it: {error}") from error
                shutil.rmtree(self._path)
                raise OSError(f"no room for {size} bytes in {folder}: {error}") from error
            self._opened = undo.pop_all()

    def found(self, order="use"):
        """(offset, nbytes, last use, meta, key) of each chunk, in the order of their use."""
        columns = "offset, nbytes, use, meta, key"
        return self._db.execute(f"SELECT {columns} FROM chunks ORDER BY {order}").fetchall()

    def add(self, key, chunk, use):
        row = chunk.offset, chunk.nbytes, use, chunk.meta, key
        self.uses.pop(chunk.offset, None)
        self._write("INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?, ?)", row)

    def strike(self, chunk):
        self.uses.pop(chunk.offset, None)
        self._write("DELETE FROM chunks WHERE offset = ?", (chunk.offset,))

    def _write(self, *statement):
        """In one transaction; what the key named before goes in it. Where it cannot be written, on
        a full disk, nothing will be there again: better than what is not so."""
        if self._lost:
            return
        try:
            with self._db:
                self._db.executemany(
                    "UPDATE chunks SET use = ?2 WHERE offset = ?1", self.uses.items()
                )
                self._db.execute(*statement)
            self.uses.clear()
        except sqlite3.Error as error:
            self._lost = True
            logger.warning("%s is removed, it cannot be written: %s", self._path, error)
            shutil.rmtree(self._path, ignore_errors=True)

    def close(self):
        self._write("SELECT 1")  # the last uses
        try:
            self._db.close()
            for file in self._path.iterdir():
                with file.open("r+b") as opened:
                    os.fsync(opened.fileno())
            self._path.rename(self._closed)
        except OSError as error:
            logger.warning("%s: not closed in order: %s", self._path, error)
        self._opened.close()


# --------------------------------------------------------------------------------------------------
# The chunk store


class ChunkStore(Closing):
    """Chunks of any size within max_bytes on `cpu`, `cuda` or `cuda:N`: reserve, fill, commit; then
    in use and idle in turn; pins. A key is anything hashable. eviction: a name in POLICIES.
    warm_bytes: fresh memory is touched so far ahead. folder: for a memory that others may map and
    that outlives the store, see Index. Safe to share between threads."""

    def __init__(self, device, max_bytes, eviction="slru", warm_bytes=WARM_BYTES, folder=None):
        if max_bytes < 1:
            raise ValueError(f"max_bytes {max_bytes} must be 1 or more")
        if eviction not in POLICIES:
            raise ValueError(f"eviction policy {eviction!r} is none of {list(POLICIES)}")
        self.max_bytes, self.policy = int(max_bytes), POLICIES[eviction]()
        self._arena = Arena(self.max_bytes // ALIGN_BYTES * ALIGN_BYTES or ALIGN_BYTES)
        if folder and str(device) != "cpu":
            raise ValueError(f"device {device}: a store in a folder, {folder}, is on the cpu")
        index = Index(folder, self._arena.size) if folder else None
        self.memory = Memory(device, self._arena.size, index.file.fileno() if index else -1)
        self.device, self._closed = self.memory.device, False
        self._lock = threading.RLock()
        self._chunks = {}  # key -> Chunk
        self._pins = OrderedDict()  # lookup_id -> (deadline, chunks)
        self._in_use = self._clock = 0
        self.counters = Counter(hits=0, misses=0, evictions=0, rejected=0)
        self._log = RareLog(logger)
        self._warm_bytes, self._warm_end, self._warmer = warm_bytes, 0, None
        self._index, self.arena = None, ""
        if index:
            self._restore(index.found())
            self._index = index  # from here on it hears of what changes
            self.arena = f"/proc/self/fd/{index.file.fileno()}"  # the file, wherever it is now
        elif self.device.type == "cpu" and warm_bytes:
            with suppress(RuntimeError):  # no more threads: pages come at first use
                self._warmer = Service("warm", self._warm)

    def _warm(self):
        """A thread's step: touches fresh memory ahead of the arena's top, outside any request."""
        top, size = self._arena.top, self._arena.size
        if self._warm_end >= min(top + self._warm_bytes // 2, size):
            sleep(0.02)
            return
        os.setpriority(os.PRIO_PROCESS, 0, 19)  # subtle: of this thread alone; requests come first
        while self._warm_end < min(top + self._warm_bytes, size) and not self._closed:
            step = min(HUGE_PAGE_BYTES, size - self._warm_end)
            self.memory.populate(self._warm_end, step)
            self._warm_end += step

    def _restore(self, found):
        """Takes in what the store before has left, each where it was, in the order of their use."""
        at, gaps, end = {}, [], 0
        for offset, nbytes, *_ in sorted(found):
            if offset > end:
                gaps.append(self.reserve(offset - end))
            at[offset] = self.reserve(nbytes)
            end = offset + aligned(nbytes)
        for offset, _, last_use, meta, key in found:
            at[offset].meta = meta
            self.release([self.commit(key, at[offset])])
            self._clock = max(self._clock, last_use)
        self.release(gaps)

    def fill(self, chunk, receive):
        """Fills a reserved chunk: receive(view) is to write all of each view, one after another."""
        for view in self.memory.staged(chunk, into=True):
            receive(view)

    def pieces(self, chunk):
        """The bytes of a chunk in use in pieces; each is valid until the next is asked for."""
        return self.memory.staged(chunk, into=False)

    # -- a chunk's life

    def reserve(self, nbytes):
        """Memory for a chunk, evicting others where needed; None where too much is in use."""
        return next(iter(self.reserve_many([nbytes])), None)

    def reserve_many(self, sizes, whole=False):
        """Memory for chunks of so many bytes each: as many leading ones as there is room for;
        whole: all of them or none."""
        with self._lock:
            self._expire_pins()
            chunks = [] if self._closed else map(Chunk, sizes)
            placed = self._arena.plan(chunks, map(self._chunks.get, self.policy.victims()))
            refused = len(placed) < len(sizes)
            self.counters["rejected"] += refused
            if whole and refused:
                for chunk, _ in placed:
                    self._free(chunk)
                return []
            for chunk, place in placed:
                for piece in place:
                    if isinstance(piece, Chunk):
                        self.counters["evictions"] += 1
                        hole = self._drop(piece, evicted=True)
                if chunk.left is None:
                    self._arena.take(chunk, hole)
            self._in_use += len(placed)
            return [chunk for chunk, _ in placed]

    def reserve_hole(self, nbytes):
        """Memory for a chunk where that evicts nobody, else None."""
        chunk = Chunk(nbytes)
        with self._lock:
            hole = None if self._closed else self._arena.find(chunk.size)
            if hole is None:
                return None
            self._arena.take(chunk, hole)
            self._in_use += 1
            return chunk

    def loose(self, nbytes, own=None):
        """A chunk with memory of its own, uint8 [nbytes], for what only passes through."""
        chunk = Chunk(nbytes)
        if own is None:
            own = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        chunk.own = own
        with self._lock:
            self._in_use += 1
        return chunk

    def commit(self, key, chunk, keep=False):
        """Makes a reserved and filled chunk visible, at once and whole, over what `key` named; the
        chunk that it names now, in use until release(). keep: where one of the same meta is there
        already, that one stays, and the new one is dropped. A loose chunk is never visible."""
        with self._lock:
            if chunk.own is not None or self._closed:
                return chunk
            old = self._chunks.get(key)
            if keep and old is not None and old.meta == chunk.meta:
                self.release([chunk])
                self.hold([old])
                return old
            if self._index:
                self._index.add(key, chunk, self._clock)
            chunk.key = key
            if old is not None:
                self._drop(old)
            self._chunks[key] = chunk
            self.policy.added(key)
            return chunk

    def acquire(self, key, counted=True):
        """The chunk, in use until release(); None where there is none."""
        with self._lock:
            chunk = self._chunks.get(key)
            self.counters["misses" if chunk is None else "hits"] += counted
            if chunk is not None:
                self.hold((chunk,))
            return chunk

    def acquire_each(self, keys, metas, prefix=False):
        """Each chunk that is there with that meta, in use until release(), or None; prefix: up to
        the first None."""
        with self._lock:
            self._expire_pins()
            found = []
            for chunk, meta in zip(map(self._chunks.get, keys), metas, strict=True):
                there = chunk is not None and chunk.meta == meta
                found.append(chunk if there else None)
                if prefix and not there:
                    break
            self.hold(filter(None, found))
            return found

    def hold(self, chunks):
        """Begins a use of each."""
        with self._lock:
            woken = []
            for chunk in chunks:
                if not chunk.refs:
                    woken.append(chunk.key)
                chunk.refs += 1
            self._in_use += len(woken)
            self.policy.take(woken)

    def release(self, chunks):
        """Ends a use of each; a prompt's chunks are given in its order, and let go of tail first:
        its head is to be the last to be evicted; without it the rest could not be found (4 chunks
        and a new one: LMCache has 0 hits left, here 3). Whoever commits, or sends to a remote, goes
        tail first, too."""
        with self._lock:
            idle = []
            for chunk in reversed(chunks if type(chunks) is list else list(chunks)):
                chunk.refs -= 1
                if not chunk.refs:
                    self._in_use -= 1
                    if chunk.key is None:
                        self._free(chunk)
                    else:
                        idle.append(chunk)
            self._set_idle(idle)

    def contains(self, key):
        """Whether it is there; that is a use. touch() of one, in half the time."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None and not chunk.refs:
                self.policy.take((key,))
                self._set_idle([chunk])
            return chunk is not None

    def touch(self, keys):
        """How many leading ones of these are there; that is a use of each."""
        with self._lock:
            there = [*takewhile(bool, map(self._chunks.get, keys))]
            self.hold(there)
            self.release(there)
            return len(there)

    def remove(self, key):
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._drop(chunk)
            return chunk is not None

    def clear(self):
        """Drops every chunk and every pin; what is in use stays readable until released."""
        with self._lock:
            while self._pins:
                self.release(self._pins.popitem()[1][1])
            for chunk in list(self._chunks.values()):
                self._drop(chunk)

    def keys(self):
        """The idle ones, the first to go first, then those in use."""
        with self._lock:
            idle = list(self.policy.victims())
            if len(idle) < len(self._chunks):
                idle += [key for key, chunk in self._chunks.items() if chunk.refs]
            return idle

    def pin(self, lookup_id, chunks, timeout_sec):
        """Keeps acquired chunks in use until unpin() or the timeout, the same for all; a second pin
        under an id replaces it."""
        with self._lock:
            self.unpin(lookup_id)
            if chunks:  # a lookup that found nothing leaves nothing
                self._pins[lookup_id] = (monotonic() + timeout_sec, chunks)

    def unpin(self, lookup_id):
        with self._lock:
            if lookup_id in self._pins:
                self.release(self._pins.pop(lookup_id)[1])

    def stats(self):
        """in_use: chunks; hits, misses: of acquire(); rejected: reservations."""
        with self._lock:
            self._expire_pins()
            pinned = sum(len(chunks) for _, chunks in self._pins.values())
            return dict(
                chunks=len(self._chunks), bytes_used=self._arena.used, max_bytes=self.max_bytes,
                in_use=self._in_use, pins=len(self._pins), pinned_chunks=pinned, **self.counters,
            )  # fmt: skip

    def close(self):
        """Drops all, takes nothing more, gives up the memory unless some is in use. Idempotent."""
        self._closed = True
        if self._warmer is not None:  # subtle: let go of by a daemon thread at exit, torch's memory
            self._warmer.close()  # aborts the process
        with self._lock:
            index, self._index = self._index, None
        self.clear()
        if index:
            index.close()
        if not self._arena.used:
            self.memory.close()

    # -- under the lock

    def _set_idle(self, chunks):
        for chunk in chunks:
            self._clock += 1
            chunk.used_at = self._clock
        if self._index:
            self._index.uses |= {chunk.offset: chunk.used_at for chunk in chunks}
        self.policy.used([chunk.key for chunk in chunks])

    def _drop(self, chunk, evicted=False):
        """Takes a chunk's name; its memory, too, where nobody uses it: the hole then."""
        if self._index:
            self._index.strike(chunk)
        del self._chunks[chunk.key]
        self.policy.removed(chunk.key, evicted)
        chunk.key = None
        return None if chunk.refs else self._arena.give_back(chunk)

    def _free(self, chunk):
        if chunk.left is not None:  # it has a place: it is neither loose nor only planned
            self._arena.give_back(chunk)

    def _expire_pins(self):
        while self._pins:
            lookup_id, (deadline, chunks) = next(iter(self._pins.items()))
            if deadline > monotonic():
                return
            self._log("pin", "pin of lookup %s timed out: %d chunks", lookup_id, len(chunks))
            self.unpin(lookup_id)


# --------------------------------------------------------------------------------------------------
# Paged KV caches, in whatever layout the serving engine has them

WIDE = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class PagedKVCache:
    """The L layer tensors of a paged KV cache, their layout named in letters, an axis each:

    "2BNHD"  vLLM flash-attn            "B2NHD"  FlashInfer                "BNC"  MLA
    "BHNC"   newer vLLM, C = 2*D        "SHD"    SGLang, S = B*N slots, kvcaches is [keys, values]

    Letters: 2 keys then values, B, N, H, D, S; C is what is left of H and D and, in "BHNC", of 2
    before D. Any order of them works in which D or C is the last. Whatever the layout, KV is read
    and written through planes [B, N, H, D], views of the same memory, one for each of keys and
    values of each layer. Slots that fill whole blocks move as whole blocks, twice as fast.
    """

    def __init__(self, kvcaches, layout, metadata):
        num_layers, self.num_kv, _, self.heads, self.head_dim = metadata.kv_shape
        self.layout, self.dtype = layout, metadata.kv_dtype
        layers = [[tensor] for tensor in kvcaches]
        if "S" in layout and len(layers) == 2 and not isinstance(kvcaches[0], torch.Tensor):
            layers = [list(pair) for pair in zip(*kvcaches, strict=True)]  # [L][2]
        if len(layers) != num_layers:
            raise ValueError(f"kvcaches has {len(layers)} layers, kv_shape says {num_layers}")
        planes = [self._planes(index, tensors) for index, tensors in enumerate(layers)]  # [L][K]
        planes = [plane for of_kv in zip(*planes, strict=True) for plane in of_kv]  # [K*L]
        first = planes[0]  # [B, N, H, D]
        if any(plane.shape != first.shape or plane.device != first.device for plane in planes):
            raise ValueError("kvcaches: all layers must have the same shape and device")
        self.num_blocks, self.block_size = first.shape[:2]
        self.device, self.num_slots = first.device, self.num_blocks * self.block_size
        self.wide = self._widest(planes)
        self._by_place = [plane.view(self.wide) for plane in planes]  # K*L of [B, N, H, D]
        self._by_slot = _merge(self._by_place, self.num_slots)  # of [B*N, H*D], or None
        self._by_block = _merge(self._by_place, self.num_blocks) or self._by_place  # of [B, N*H*D]

    def _planes(self, layer, tensors):
        """The K planes [B, N, H, D] of one layer, from one tensor with both or from two."""
        sizes, planes = {"2": self.num_kv // len(tensors), "H": self.heads, "D": self.head_dim}, []
        for view in tensors:
            if (found := getattr(view, "dtype", type(view))) != self.dtype:
                raise ValueError(f"kvcaches[{layer}] is {found}, kv_dtype is {self.dtype}")
            letters, shape = self.layout.replace("S", "B"), [*view.shape]
            try:
                if letters.endswith("C"):
                    missing = [letter for letter in "2HD" if letter not in letters]
                    view = view.unflatten(-1, [sizes[letter] for letter in missing])
                    letters = letters[:-1] + "".join(missing)
                for letter in "2NH":
                    if letter not in letters:
                        view, letters = view.unsqueeze(0), letter + letters
                view = view.permute([letters.index(letter) for letter in "2BNHD"])
                if (view.shape[0], *view.shape[3:]) != (*sizes.values(),):
                    raise ValueError("another H, D or K")
            except (RuntimeError, ValueError, IndexError) as error:
                raise ValueError(
                    f"kvcaches of layer {layer}: shape {shape} is not {self.layout!r} with "
                    f"K={self.num_kv}, H={self.heads}, D={self.head_dim} ({error})"
                ) from error
            planes += view.unbind(0)
        return planes

    def _widest(self, planes):
        """The widest dtype as which all KV can be seen: bytes move the same, in fewer steps."""
        size = self.dtype.itemsize
        if any(plane.stride(-1) != 1 and self.head_dim > 1 for plane in planes):
            return WIDE[size]
        steps = [16, self.head_dim * size, *(plane.data_ptr() for plane in planes)]
        steps += [stride * size for plane in planes for stride in plane.stride()[:-1]]
        return WIDE[math.gcd(*steps)]  # a power of two, as 16 is

    def slots_of(self, slot_mapping, num_tokens, start, end):
        """slot_mapping as int64 [T] on the CPU; ValueError where it is not one slot a token, or one
        of those from start to end is not in the cache."""
        try:
            slots = torch.as_tensor(slot_mapping).cpu()  # [T]
            ints = not slots.dtype.is_floating_point and slots.dtype != torch.bool
            if slots.shape != (num_tokens,) or not (ints or num_tokens == 0):
                raise TypeError(f"not {slots.dtype} {[*slots.shape]}")
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            text = f"slot_mapping must be {num_tokens} ints, one a token: {error}"
            raise ValueError(text) from error
        slots = slots.to(torch.int64)
        used = slots[start:end]
        if len(used) and (int(used.min()) < 0 or int(used.max()) >= self.num_slots):
            bad = int(used[(used < 0) | (used >= self.num_slots)][0])
            bad = "slot -1 (padding)" if bad == -1 else f"slot {bad}"
            raise ValueError(f"{bad} is not in the paged cache; allowed: 0..{self.num_slots - 1}")
        return slots

    def gather(self, jobs):
        """For each (slots, int64 [T] on the CPU; chunk, uint8 [nbytes] beside the pages): the KV at
        the slots into the chunk, [K, L, T, H*D] as bytes."""
        for plane, index, part in self._steps(jobs):
            torch.ops.aten.index.Tensor_out(plane, index, out=part)  # plane[index], nothing between

    def scatter(self, jobs):
        """The other way: for each (slots, chunk), the chunk to the slots."""
        for plane, index, part in self._steps(jobs):
            plane[index] = part

    def _steps(self, jobs):
        """Plane by plane, not chunk by chunk: neighbouring reads are a quarter faster."""
        for same_plane in zip(*(self._batch(*stack) for stack in _side_by_side(jobs)), strict=True):
            yield from same_plane

    def _batch(self, slots, chunks):
        """slots [C, T], chunks uint8 [C, nbytes]: for each of the K*L planes a tensor, an index,
        and where in the chunks tensor[index] has its place; by whole blocks where slots are
        such."""
        size, planes, index = self.block_size, self._by_slot, (slots,)
        if slots.shape[1] % size == 0:
            blocks = slots.view(len(slots), -1, size)  # [C, T/N, N]
            first = blocks[:, :, :1]
            if bool((blocks == first + torch.arange(size)).all() & (first % size == 0).all()):
                planes, index = self._by_block, (first[:, :, 0] // size,)
        if planes is None:  # no view has slots as rows
            planes, index = self._by_place, (slots // size, slots % size)
        index = tuple(each.to(self.device) for each in index)
        shape = (len(slots), len(planes), index[0].shape[1], *planes[0].shape[len(index) :])
        parts = chunks.view(self.wide).view(shape).unbind(1)  # K*L of [C, T or T/N, ...]
        return zip(planes, repeat(index), parts)  # the index is the same for all


def _side_by_side(jobs):
    """Jobs as (slots [C, T], chunks uint8 [C, nbytes]): chunks of one size that lie side by side in
    one memory, as those of a prompt mostly do in a store, move in one step a plane."""

    def same_row(numbered):
        number, (_, chunk) = numbered
        start = chunk.data_ptr() - number * aligned(len(chunk))
        return start, len(chunk), chunk.untyped_storage().data_ptr()

    in_order = sorted(jobs, key=lambda job: job[1].data_ptr())
    for _, row in groupby(enumerate(in_order), same_row):
        slots, chunks = zip(*(job for _, job in row), strict=True)
        shape, strides = (len(chunks), len(chunks[0])), (aligned(len(chunks[0])), 1)
        yield torch.stack(slots), chunks[0].as_strided(shape, strides)


def _merge(planes, rows):
    try:
        return [plane.view(rows, -1) for plane in planes]
    except RuntimeError:  # of one of them, the axes are not neighbours in memory
        return None


# --------------------------------------------------------------------------------------------------
# The engine

FETCH_CHUNKS = 16  # that come from the remote in one go
ENGINE_COUNTERS = """stores stored_tokens lookups lookup_tokens hit_tokens hits misses retrieves
retrieved_tokens faults remote_puts remote_dropped remote_errors
remote_skipped""".split()  # noqa: SIM905


class NoTier:
    """What is below the store of an engine without a remote, see remote_server.RemoteTier."""

    leading = send = lambda self, *_: 0
    fetch = touch = close = lambda self, *_: None
    flush = let_go = lambda self, *_: True


class LMCacheEngine(Closing):
    """Stores, finds and copies back the KV of token prefixes (LMCache cache_engine.py).

    device: where the chunks are kept, `cpu`, `cuda` or `cuda:N`, within config.max_local_cpu_size.
    remote: an object with the interface of remote_server.RemoteClient, for what is below the store:
        exists_many(keys) -> [bool], get_many(keys, fill), put_many(items). Whatever it raises is a
        miss, see remote_server.RemoteTier. It is the caller's to close.

    A prompt is `tokens`, ids in a list, tuple, array or int tensor [T]; or `hashes`, 64-bit ints or
    bytes, and `offsets`, each chunk's LENGTH in tokens. mask: bool [T], False for a prefix of
    whole chunks that is left out, then True. slot_mapping: int [T], the slot of every token.
    kvcaches: other pages than those registered. request_configs: a dict whose lmcache.tag.NAME
    entries are part of the chunks' names. ValueError for what is none of that. Safe to share
    between threads."""

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, device="cpu",
                 remote: Any = None):  # fmt: skip
        self.names = ChunkNames(config, metadata)
        if config.remote_url and remote is None:
            raise ValueError(
                f"config.remote_url = {config.remote_url!r} is not connected: "
                "LMCacheEngine(config, metadata, remote=remote_server.connect_remote(config))"
            )
        if remote is not None and metadata.kv_dtype not in DTYPE_TO_INT:
            raise ValueError(f"kv_dtype {metadata.kv_dtype} has no number on a remote's wire")
        self.config, self.metadata, self.remote = config, metadata, remote
        self.token_database = self.names.token_database
        self._paged = None
        self._lock = threading.Lock()  # of the counters
        self._counters = Counter(dict.fromkeys(ENGINE_COUNTERS, 0))
        self._move_lock, self._streams = threading.Lock(), {}  # torch.device -> its stream
        self._closed = False
        self._log = RareLog(logger)
        max_bytes = int(config.max_local_cpu_size * 2**30)
        warm_bytes = WARM_BYTES if config.local_cpu else 0
        self.chunks = ChunkStore(device, max_bytes, config.eviction_policy, warm_bytes)
        self.tier = NoTier()
        if remote is not None:
            from remote_server import RemoteTier  # here: that module stands on this one

            self.tier = RemoteTier(self, remote)  # type: ignore[assignment]

    def register_kv_caches(self, kvcaches, layout):
        """Names the serving engine's L layer tensors and their layout, see PagedKVCache."""
        self._paged = PagedKVCache(kvcaches, layout, self.metadata)
        if self._paged.device.type == "cuda":
            self.chunks.memory.pin()

    # -- store

    def store(self, tokens=None, hashes=None, offsets=None, mask=None, kvcaches=None,
              slot_mapping=None, request_configs=None, deadline=None) -> int:  # fmt: skip
        """Copies the chunks of a prompt that are not here yet out of the pages; how many tokens.
        deadline: of monotonic(), after which nothing is stored: the pages may be another's.
        Given tokens, it stores as long a prefix as there is room for, and a fault of ours stores
        nothing. Given hashes, it is all or nothing, and no room is a MemoryError: they are told."""
        names = self.names.of(tokens, hashes, offsets, mask, request_configs)
        paged, slots = self._pages_and_slots(kvcaches, slot_mapping, names)
        if self._closed and hashes is not None:
            raise RuntimeError("the engine is closed")
        if self._closed or (self.names.save_only_first_rank and self.metadata.worker_id != 0):
            return 0
        stored, made = 0, []  # made: reserved chunks, of the first of the missing
        # Held from here on: our head does not go for our tail.
        here = self.chunks.acquire_each(names.keys, names.lengths)
        try:
            missing = [i for i in range(names.masked, len(here)) if here[i] is None]
            sizes = [names.lengths[i] * self.names.token_bytes for i in missing]
            if self.config.local_cpu:
                made += self.chunks.reserve_many(sizes, whole=hashes is not None)
            elif self.remote is not None:
                made += map(self.chunks.loose, sizes)
            if hashes is not None and len(made) < len(missing):
                raise MemoryError(f"no room for {len(missing)} chunks: {self.chunks.stats()}")
            del missing[len(made) :]
            _check_time(deadline)
            jobs = [(slots[names.slices[i]], chunk) for i, chunk in zip(missing, made, strict=True)]
            self._move(paged.gather, paged, jobs)
            _check_time(deadline)
            while made:  # tail first: whoever sees a chunk can use it
                i = missing.pop()
                made[-1].meta = names.lengths[i]
                here[i] = self.chunks.commit(names.keys[i], made[-1], keep=True)
                stored += names.lengths[i] * (here[i] is made.pop())
            self.tier.send(names.keys, here)
        except Exception:
            if hashes is not None:
                raise
            self._log("store", "store failed, nothing stored", traceback=True)
            self.count(faults=1)
            return 0
        finally:
            self.chunks.release([*filter(None, here), *made])
        self.count(stores=1, stored_tokens=stored)
        return stored

    # -- lookup

    def lookup(self, tokens=None, hashes=None, offsets=None, lookup_id=None, pin=False,
               request_configs=None) -> int:  # fmt: skip
        """How many leading tokens of a prompt are here or at the remote. pin: keeps the chunks that
        are here until lookup_unpin(lookup_id: str), or config.pin_timeout_sec at most."""
        if pin and not isinstance(lookup_id, str):
            raise ValueError(f"pin=True needs a lookup_id, a str to unpin it by, not {lookup_id!r}")
        names = self.names.of(tokens, hashes, offsets, None, request_configs)
        if self._closed:
            return 0
        here, count = self.chunks.acquire_each(names.keys, names.lengths, self.remote is None), 0
        try:
            missing = [i for i, chunk in enumerate(here) if chunk is None]
            # The remote does not say how long a chunk is: only what we would have stored is there.
            asked = list(takewhile(lambda i: self.names.fits(i, names.lengths), missing))
            there = self.tier.leading([names.keys[i] for i in asked]) if asked else 0
            leading = missing[there] if there < len(missing) else len(here)
            self.tier.send(names.keys[:leading], here[:leading])  # what it has lost comes back
            if pin:
                pinned = [*filter(None, here[:leading])]
                self.chunks.pin(lookup_id, pinned, self.config.pin_timeout_sec)
                count = leading  # these are the pin's now
        finally:
            self.chunks.release(filter(None, here[count:]))
        hits = names.end_of(leading)
        hit = hits > 0
        self.count(
            lookups=1, lookup_tokens=names.num_tokens, hit_tokens=hits, hits=hit, misses=not hit
        )
        return hits

    def lookup_unpin(self, lookup_id: str):
        self.chunks.unpin(lookup_id)

    # -- retrieve

    def retrieve(self, tokens=None, mask=None, hashes=None, offsets=None, kvcaches=None,
                 slot_mapping=None, request_configs=None) -> torch.Tensor:  # fmt: skip
        """Copies the leading chunks of a prompt that are here, or at the remote, into the pages: a
        BoolTensor [T], True exactly where KV was written. What came from the remote is kept here,
        if there is room, but what lies in the memory of a server on this host. A remote that fails
        on the way makes the hit shorter."""
        names = self.names.of(tokens, hashes, offsets, mask, request_configs)
        paged, slots = self._pages_and_slots(kvcaches, slot_mapping, names)
        written, done = torch.zeros(names.num_tokens, dtype=torch.bool), names.masked  # [T]
        here = self.chunks.acquire_each(names.keys, names.lengths)
        try:
            while done < len(here) and not self._closed:
                if here[done] is None:  # the missing ones of the next few
                    ahead = range(done, min(done + FETCH_CHUNKS, len(here)))
                    wanted = [i for i in ahead if here[i] is None]
                    self.tier.fetch(wanted, names.keys, names.lengths, here)
                end = next((i for i in range(done, len(here)) if here[i] is None), len(here))
                if end == done:
                    break
                jobs = [(slots[names.slices[i]], here[i]) for i in range(done, end)]
                self._move(paged.scatter, paged, jobs)
                if not self.tier.let_go():
                    break
                for i in range(done, end):
                    written[names.slices[i]] = True
                done = end
                loose = [chunk for chunk in filter(None, here) if chunk.own is not None]
                here = [None if chunk in loose else chunk for chunk in here]
                self.chunks.release(loose)  # subtle: also those behind a gap, in place no more
        except Exception:
            self._log("retrieve", "retrieve failed at chunk %d: a miss", done, traceback=True)
            self.count(faults=1)
        finally:
            self.chunks.release(filter(None, here))
            self.tier.let_go()  # of what was fetched in vain
        self.tier.touch(names.keys[:done])  # there too the head is to be the last to go
        self.count(retrieves=1, retrieved_tokens=int(written.sum()))
        return written

    # -- moves

    def _pages_and_slots(self, kvcaches, slot_mapping, names):
        """The paged cache, and the slots as int64 [T] on the CPU, or a ValueError."""
        paged = self._paged
        if kvcaches is not None:
            default = "BNC" if self.metadata.use_mla else "2BNHD"
            paged = PagedKVCache(kvcaches, paged.layout if paged else default, self.metadata)
        if paged is None:
            raise ValueError("no paged cache: call register_kv_caches first, or give kvcaches")
        start, end = names.end_of(names.masked), names.end_of(len(names.keys))
        return paged, paged.slots_of(slot_mapping, names.num_tokens, start, end)

    def _move(self, move, paged, jobs):
        """Gathers or scatters (slots, chunk) pairs; when it returns, every byte is in its place.
        With a GPU on either side, on one stream: straight between pages and store on one device,
        else each chunk through memory beside the pages."""
        jobs = [(slots, self.chunks.memory.of(chunk)) for slots, chunk in jobs]
        gpus = [each for each in (paged.device, self.chunks.device) if each.type == "cuda"]
        if not gpus or not jobs:
            move(jobs)
            return
        with self._move_lock:
            if gpus[0] not in self._streams:
                self._streams[gpus[0]] = torch.cuda.Stream(gpus[0])
            stream = self._streams[gpus[0]]
            stream.wait_stream(torch.cuda.current_stream(gpus[0]))  # the caller's work comes first
            try:
                with torch.cuda.stream(stream):
                    self._move_on_stream(move, paged, jobs)
            finally:  # also on a fault: no memory is given up with a copy under way
                stream.synchronize()

    def _move_on_stream(self, move, paged, jobs):
        if paged.device == self.chunks.device:
            move(jobs)
            return
        on_gpu = paged.device.type == "cuda"
        for slots, stored in jobs:
            # subtle: torch gives one chunk's memory to the next in the order of the stream
            beside = torch.empty_like(stored, device=paged.device)
            if move == paged.gather:
                move([(slots, beside)])
                stored.copy_(beside, non_blocking=on_gpu)
            else:
                beside.copy_(stored, non_blocking=on_gpu)
                move([(slots, beside)])

    # -- small things

    def count(self, **amounts: int):
        with self._lock:
            self._counters.update(amounts)

    def stats(self) -> dict[str, int]:
        """Counters, and the store's figures; hits and misses: lookups of some tokens, and none."""
        with self._lock:
            counted = dict(self._counters)
        return self.chunks.stats() | counted

    def flush(self, timeout_sec: float = 10.0) -> bool:
        """Waits for the remote; whether it took all since this thread's last flush."""
        return self.tier.flush(timeout_sec)

    def clear(self):
        self.chunks.clear()

    def close(self, timeout_sec: float = 5.0):
        """Hands what is on its way to the remote, and gives up the memory. Idempotent."""
        if not self._closed:
            self._closed = True
            self.tier.close(timeout_sec)
            self.chunks.close()


def _check_time(deadline):
    if deadline is not None and monotonic() > deadline:
        raise TimeoutError("whoever asked for it has given up: the pages may be another's by now")


# --------------------------------------------------------------------------------------------------
# The demo


def toy_engine(world_size=1, rank=0):
    """Of a model of 2 layers, 2 heads, head_dim 8; room for 8 chunks of 256 tokens. And its pages,
    [L, 2, B, N, H, D], of 4,096 slots."""
    shape, pages = (2, 2, 256, 2, 8), torch.randn(2, 2, 256, 16, 2, 8)  # L, K, chunk_size, H, D
    metadata = LMCacheMetadata(
        "toy", world_size, world_size, rank, rank, pages.dtype, shape, engine_id="demo"
    )
    engine = LMCacheEngine(LMCacheEngineConfig(max_local_cpu_size=2**-11), metadata)
    engine.register_kv_caches([*pages], "2BNHD")
    return engine, pages


def main():
    """A prompt of 5 chunks, in blocks in any order."""
    (engine, pages), prompt = toy_engine(), list(range(1280))
    slots = torch.randperm(256).repeat_interleave(16) * 16 + torch.arange(16).repeat(256)  # [B*N]
    old, new = slots[:1280], slots[2560:3840]
    with engine:
        print(f"store     1280 tokens: {engine.store(prompt, slot_mapping=old)} newly stored")
        print(f"lookup    the same prompt: {engine.lookup(prompt)} of 1280 tokens hit")
        print(f"lookup    640 tokens, then others: {engine.lookup(prompt[:640] + [7] * 640)} hit")
        hit, rows = int(engine.retrieve(prompt, slot_mapping=new).sum()), pages.flatten(2, 3)
        same = torch.equal(rows[:, :, new], rows[:, :, old])  # of [L, 2, B*N, H, D]
        print(f"retrieve  into other pages: {hit} tokens copied back, equal: {same}")
        for first in (2000, 3000):
            engine.store(list(range(first, first + 768)), slot_mapping=slots[:768])
        print(f"evict     after two more, {engine.lookup(prompt)} of 1280 hit: its tail went")
    if not same or hit != 1280:
        raise SystemExit("the KV that came back is not the KV that was stored")


if __name__ == "__main__":
    main()
