"""The CUDA paths on a CPU: the same code with make-believe GPUs and streams that check the order of
what it queues.

Every queued step is stamped with a vector clock: a stream's steps are in order, wait_stream brings
in what came before, and a copy that blocks lets the host know of all before it. Two steps that
touch the same memory, one of them writing, must be ordered, whatever the GPU does in between; and
the host may touch memory only after it has waited for the last step there. The steps themselves run
at once, on CPU tensors, so that the bytes are checked too.
"""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from toys import wait_for

import engine
from engine import (
    STAGING_BUFFERS,
    STAGING_BYTES,
    ChunkStore,
    LMCacheEngine,
    LMCacheEngineConfig,
    LMCacheMetadata,
    PagedKVCache,
)

Clock = Counter[int]  # stream number -> its steps that have certainly happened


class World:
    """What is running: the streams, and for each piece of memory who touched it when."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self, None)
        self.host: Clock = Counter()
        # start, end, writes, stream, clock, what
        self.touched: list[tuple[int, int, bool, int, Clock, str]] = []
        self.pinned_buffers = 0
        self.registered: set[int] = set()  # addresses

    def step(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Queued on the current stream."""
        stream = self.current
        stream.clock |= self.host  # queued by the host, after all that it waited for
        stream.clock[stream.number] += 1
        touches = [(each, False) for each in reads] + [(each, True) for each in writes]
        for tensor, writing in touches:
            start, end = place_of(tensor)
            for other_start, other_end, wrote, number, clock, other in self.touched:
                if (wrote or writing) and start < other_end and other_start < end:
                    assert stream.clock[number] >= clock[number], f"{what} races with {other}"
            self.touched.append((start, end, writing, stream.number, Counter(stream.clock), what))

    def host_touches(self, *tensors: torch.Tensor) -> None:
        for start, end in map(place_of, tensors):
            for other_start, other_end, _, number, clock, other in self.touched:
                if start < other_end and other_start < end:
                    text = f"the host touches memory before {other} is complete"
                    assert self.host[number] >= clock[number], text


def place_of(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()


class Stream:
    def __init__(self, world: World, device: Any):
        self.world, self.device = world, device
        self.number, self.clock = len(world.streams), Counter()
        world.streams.append(self)

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        self.world.host |= self.clock


class Cudart:
    """Host memory that is registered."""

    def __init__(self, world: World):
        self.world = world

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        self.world.registered.add(address)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.world.registered.remove(address)
        return 0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """Two GPUs, whose memory is the CPU's."""
    world = World()
    copy_, empty, empty_like = torch.Tensor.copy_, torch.empty, torch.empty_like

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, world.current = world.current, stream
        try:
            yield
        finally:
            world.current = before

    def copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> Any:
        world.step("a copy", [source], [target])
        if not non_blocking:
            world.current.synchronize()
        return copy_(target, source)

    def new(*size: Any, pin_memory: bool = False, device: Any = None, **how: Any) -> torch.Tensor:
        world.pinned_buffers += pin_memory
        return empty(*size, **how)

    monkeypatch.setattr(torch, "empty", new)
    monkeypatch.setattr(torch, "empty_like", lambda tensor, device=None: empty_like(tensor))
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(world, device))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: world.default)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: Cudart(world))
    return world


@pytest.fixture
def pages_on(world: World, monkeypatch: pytest.MonkeyPatch) -> Any:
    """pages_on(device): from then on paged caches are said to be on it, and their moves are steps
    of the current stream, or the host's own."""

    class Pages(PagedKVCache):
        where = torch.device("cpu")
        fault: Exception | None = None  # raised after the first move

        def __init__(self, kvcaches: Any, layout: str, metadata: Any):
            super().__init__(kvcaches, layout, metadata)
            self.device, self.tensors = self.where, list(kvcaches)

        def gather(self, jobs: Any) -> None:
            self._go("gather", self.tensors, [chunk for _, chunk in jobs], jobs)

        def scatter(self, jobs: Any) -> None:
            self._go("scatter", [chunk for _, chunk in jobs], self.tensors, jobs)

        def _go(self, name: str, reads: Any, writes: Any, jobs: Any) -> None:
            if self.device.type == "cpu":
                world.host_touches(*reads, *writes)
            else:
                assert world.current.device == self.device, "a stream of another device"
                world.step(name, reads, writes)
            device, self.device = self.device, torch.device("cpu")
            getattr(PagedKVCache, name)(self, jobs)
            self.device = device
            if self.fault is not None:
                raise self.fault

    monkeypatch.setattr(engine, "PagedKVCache", Pages)

    def place(device: str, fault: Exception | None = None) -> None:
        Pages.where, Pages.fault = torch.device(device), fault

    return place


METADATA = LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (2, 2, 16, 2, 8))
TOKENS = list(range(112))  # 7 chunks
DEVICES = [("cuda:0", "cuda:0"), ("cuda:0", "cpu"), ("cuda:1", "cpu"), ("cpu", "cuda:0")]


def new_engine(device: str) -> LMCacheEngine:
    return LMCacheEngine(LMCacheEngineConfig(chunk_size=16, max_local_cpu_size=0.001), METADATA,
                         device=device)  # fmt: skip


def new_pages() -> list[torch.Tensor]:
    return [torch.randn(2, 32, 4, 2, 8) for _ in range(2)]


@pytest.mark.parametrize("pages_at, store_at", DEVICES)
def test_store_and_retrieve(world: World, pages_on: Any, pages_at: str, store_at: str) -> None:
    """After what the caller has queued, before what it queues next, and complete on return."""
    pages, slots = new_pages(), torch.randperm(128)[:112]
    before = [page.clone() for page in pages]
    pages_on(pages_at)
    with new_engine(store_at) as engine:
        engine.register_kv_caches(pages, "2BNHD")

        def forward_pass() -> None:
            if pages_at != "cpu":
                world.step("the caller's forward pass", [], pages)

        def host_looks_at_all() -> None:
            for key in engine.chunks.keys():  # noqa: SIM118  it is a method of ours
                chunk = engine.chunks.acquire(key)
                assert chunk is not None
                world.host_touches(engine.chunks.memory.of(chunk))
                engine.chunks.release([chunk])
            world.host_touches(*pages)

        forward_pass()
        assert engine.store(TOKENS, slot_mapping=slots) == 112
        host_looks_at_all()
        for page in pages:
            page.zero_()
        forward_pass()
        assert engine.retrieve(TOKENS, slot_mapping=slots).all()
        host_looks_at_all()
        forward_pass()
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page.flatten(1, 2)[:, slots], old.flatten(1, 2)[:, slots])
    assert len(world.touched) > 4 and not world.registered


@pytest.mark.parametrize("pages_at, store_at", DEVICES)
def test_a_move_that_fails_leaves_none_under_way(
    world: World, pages_on: Any, pages_at: str, store_at: str
) -> None:
    """The memory goes to somebody else."""
    pages = new_pages()
    pages_on(pages_at)
    with new_engine(store_at) as engine:
        engine.register_kv_caches(pages, "2BNHD")
        assert engine.store(TOKENS[:48], slot_mapping=torch.arange(48)) == 48
        for fault in (RuntimeError("CUDA error"), KeyboardInterrupt()):
            pages_on(pages_at, fault)
            with contextlib.suppress(KeyboardInterrupt):
                assert engine.store(TOKENS, slot_mapping=torch.arange(112)) == 0
            with contextlib.suppress(KeyboardInterrupt):
                assert not engine.retrieve(TOKENS, slot_mapping=torch.arange(112)).any()
            pages_on(pages_at)
            chunks = engine.chunks.reserve_many([64] * 100)
            world.host_touches(*pages, *map(engine.chunks.memory.of, chunks))
            engine.chunks.release(chunks)
            assert engine.stats()["in_use"] == 0


def test_each_gpu_has_a_stream_of_its_own(world: World, pages_on: Any) -> None:
    """Pages on one and then on another: no stream of the first moves those of the second."""
    with new_engine("cpu") as engine:
        for device in ("cuda:0", "cuda:1", "cuda:0"):
            pages_on(device)
            engine.register_kv_caches(new_pages(), "2BNHD")
            first = 1000 * len(world.touched)
            tokens = list(range(first, first + 112))
            assert engine.store(tokens, slot_mapping=torch.arange(112)) == 112
            assert engine.retrieve(tokens, slot_mapping=torch.arange(112)).all()
        assert engine.stats()["faults"] == 0
    assert [stream.device for stream in world.streams[1:]] == [
        torch.device("cuda:0"),
        torch.device("cuda:1"),
    ]


def test_host_memory_stays_registered_while_somebody_uses_it(world: World, pages_on: Any) -> None:
    """And is never registered where the pages are on the CPU, or for a server."""
    pages_on("cuda:0")
    engine = new_engine("cpu")
    engine.register_kv_caches(new_pages(), "2BNHD")
    assert len(world.registered) == 1
    engine.store(TOKENS, slot_mapping=torch.arange(112))
    chunk = engine.chunks.acquire(engine.chunks.keys()[0])
    assert chunk is not None
    engine.close()
    assert len(world.registered) == 1
    engine.chunks.release([chunk])
    engine.chunks.close()
    assert not world.registered
    pages_on("cpu")
    with new_engine("cpu") as engine, ChunkStore("cpu", 1 << 20):
        engine.register_kv_caches(new_pages(), "2BNHD")
        assert not world.registered


# -- between a socket and a GPU


def as_tensor(view: memoryview) -> torch.Tensor:
    return torch.frombuffer(view, dtype=torch.uint8)


@pytest.mark.parametrize("size", [1, STAGING_BYTES - 1, STAGING_BYTES, 3 * STAGING_BYTES + 5])
def test_a_chunk_goes_through_the_staging_buffers(world: World, size: int) -> None:
    data, taken = torch.randint(0, 256, (size,), dtype=torch.uint8), 0
    with ChunkStore("cuda:0", 4 * size + 1024) as store:
        chunk = store.reserve(size)
        assert chunk is not None

        def receive(view: memoryview) -> None:
            nonlocal taken
            world.host_touches(as_tensor(view))
            as_tensor(view)[:] = data[taken : taken + len(view)]
            taken += len(view)

        store.fill(chunk, receive)
        world.host_touches(store.memory.of(chunk))
        got = bytearray()
        for piece in store.pieces(chunk):
            world.host_touches(as_tensor(piece))
            got += piece
        assert bytes(got) == bytes(data.tolist())
        store.release([store.commit("key", chunk)])
    assert len(world.touched) == 4 * -(-size // STAGING_BYTES)


@pytest.mark.parametrize("way", ["in", "out"])
def test_a_peer_that_leaves_in_the_middle_leaves_no_copy_under_way(world: World, way: str) -> None:
    """Neither its chunk's memory nor its buffer is given to another while a copy runs."""
    size, buffers = 3 * STAGING_BYTES, set()
    with ChunkStore("cuda:0", size) as store:
        for _ in range(2 * STAGING_BUFFERS):
            chunk, seen = store.reserve(size), []
            assert chunk is not None
            world.host_touches(store.memory.of(chunk))

            def receive(view: memoryview, seen: list[int] = seen) -> None:
                world.host_touches(as_tensor(view))
                buffers.add(as_tensor(view).data_ptr())
                seen.append(len(view))
                if way == "in" and len(seen) == 2:
                    raise ConnectionError("gone")

            with contextlib.suppress(ConnectionError):
                store.fill(chunk, receive)
            if way == "out":
                pieces = store.pieces(chunk)
                world.host_touches(as_tensor(next(pieces)))
                pieces.close()  # type: ignore[attr-defined]
            store.release([chunk])
            assert store.stats()["bytes_used"] == 0
    assert len(buffers) <= world.pinned_buffers <= STAGING_BUFFERS


def test_all_connections_share_a_few_buffers(world: World) -> None:
    """One more reader than there are buffers waits for one that is let go of."""
    with ChunkStore("cuda:0", 1 << 20) as store:
        chunk = store.reserve(1 << 20)
        assert chunk is not None
        readers = [store.pieces(chunk) for _ in range(STAGING_BUFFERS)]
        places = {as_tensor(next(reader)).data_ptr() for reader in readers}
        assert len(places) == world.pinned_buffers == STAGING_BUFFERS
        got: list[int] = []
        late = threading.Thread(target=lambda: got.extend(map(len, store.pieces(chunk))))
        late.start()
        late.join(0.1)
        assert not got
        for reader in readers:
            reader.close()  # type: ignore[attr-defined]
        assert wait_for(lambda: got == [1 << 20]) and world.pinned_buffers == STAGING_BUFFERS
        late.join()
        store.release([chunk])
