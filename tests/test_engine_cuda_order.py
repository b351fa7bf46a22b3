"""The CUDA paths on a CPU: the same code with make-believe streams that check the order of what it
queues.

Every queued step is stamped with a vector clock: a stream's steps are in order, wait_event and
wait_stream bring in what came before. Two steps that touch the same memory, one of them writing,
must be ordered, whatever the GPU does in between; and the host may look at memory only after it has
waited for the last step that wrote it. The steps themselves run at once, on CPU tensors, so that
the bytes are checked too.
"""

import contextlib
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from engine import STAGING_BYTES, ChunkStore, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata

Clock = Counter[int]  # stream number -> its steps that have certainly happened


class World:
    """What is running: the streams, and for each piece of memory who touched it when."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current = self.default = Stream(self)
        self.host: Clock = Counter()
        self.touched: list[
            tuple[int, int, bool, int, Clock, str]
        ] = []  # start, end, writes, stream, clock, what

    def step(self, what: str, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        stream = self.current
        stream.clock |= self.host  # queued by the host, after all that it waited for
        stream.clock[stream.number] += 1
        for tensor, writing in [(tensor, False) for tensor in reads] + [
            (tensor, True) for tensor in writes
        ]:
            start = tensor.data_ptr()
            end = start + tensor.numel() * tensor.element_size()
            for other_start, other_end, wrote, number, clock, other in self.touched:
                if (wrote or writing) and start < other_end and other_start < end:
                    assert stream.clock[number] >= clock[number], f"{what} races with {other}"
            self.touched.append((start, end, writing, stream.number, Counter(stream.clock), what))

    def host_looks(self, start: int, end: int) -> None:
        for other_start, other_end, _, number, clock, other in self.touched:
            if start < other_end and other_start < end:
                assert self.host[number] >= clock[number], (
                    f"the host touches memory before {other} is complete"
                )


class Stream:
    def __init__(self, world: World):
        self.world, self.number, self.clock = world, len(world.streams), Counter()
        world.streams.append(self)

    def wait_event(self, event: "Event") -> None:
        self.clock |= event.clock

    def wait_stream(self, other: "Stream") -> None:
        self.clock |= other.clock

    def synchronize(self) -> None:
        self.world.host |= self.clock


class Event:
    def __init__(self, world: World):
        self.world, self.clock = world, Counter()

    def record(self, stream: Stream) -> None:
        self.clock = Counter(stream.clock)

    def synchronize(self) -> None:
        self.world.host |= self.clock


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    world = World()

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        before, world.current = world.current, stream
        yield
        world.current = before

    plain_copy = torch.Tensor.copy_

    def copy(
        target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False
    ) -> torch.Tensor:
        world.step("copy", [source], [target])
        return plain_copy(target, source)

    plain_empty = torch.empty
    monkeypatch.setattr(
        torch, "empty", lambda *size, pin_memory=False, **how: plain_empty(*size, **how)
    )
    monkeypatch.setattr(torch.Tensor, "copy_", copy)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None: Stream(world))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(world))
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: world.default)
    return world


@pytest.mark.parametrize("one_device", [True, False])
def test_store_and_retrieve(world: World, one_device: bool) -> None:
    metadata = LMCacheMetadata("m", 1, 1, 0, 0, torch.float32, (2, 2, 16, 2, 8))
    pages = [torch.randn(2, 32, 4, 2, 8) for _ in range(2)]
    before = [page.clone() for page in pages]
    slots = torch.randperm(128)[:112]  # 7 chunks
    with LMCacheEngine(
        LMCacheEngineConfig(chunk_size=16, max_local_cpu_size=0.001), metadata
    ) as engine:
        engine.register_kv_caches(pages, "2BNHD")
        paged = engine._paged
        assert paged is not None
        for name in ("gather", "scatter"):
            move = getattr(paged, name)

            def queued(jobs, move=move, name=name):  # type: ignore[no-untyped-def]
                chunks = [chunk for _, chunk in jobs]
                world.step(
                    name,
                    pages if name == "gather" else chunks,
                    chunks if name == "gather" else pages,
                )
                move(jobs)

            setattr(paged, name, queued)

        def move_cuda(move, paged, jobs, go=engine._move_cuda):  # type: ignore[no-untyped-def]
            if not one_device:
                paged.device = torch.device(
                    "cpu", 0
                )  # another than the store's "cpu", and still one
            go(move, paged, jobs)
            for _, chunk in jobs:
                start = engine.chunks.bytes_of(chunk).data_ptr()
                world.host_looks(start, start + chunk.nbytes)

        engine._move = move_cuda  # type: ignore[method-assign]
        world.step("the caller's forward pass", [], pages)
        assert engine.store(list(range(112)), slot_mapping=slots) == 112
        for page in pages:
            page.zero_()
        world.step("the caller's next forward pass", [], pages)
        assert engine.retrieve(list(range(112)), slot_mapping=slots).all()
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page.flatten(1, 2)[:, slots], old.flatten(1, 2)[:, slots])
    assert sum(what in ("gather", "scatter") for *_, what in world.touched) > (
        2 if one_device else 14
    )


@pytest.mark.parametrize("size", [1, STAGING_BYTES - 1, STAGING_BYTES, 3 * STAGING_BYTES + 5])
def test_a_server_chunk_goes_through_the_staging_buffers(world: World, size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8)
    store = ChunkStore("cpu", 4 * size + 1024)
    store._view = None  # as on a GPU: no memory that a socket could use
    chunk = store.reserve(size)
    assert chunk is not None
    taken = 0

    def address(view: memoryview) -> int:
        return torch.frombuffer(view, dtype=torch.uint8).data_ptr()

    def receive(view: memoryview) -> None:
        nonlocal taken
        world.host_looks(address(view), address(view) + len(view))
        torch.frombuffer(view, dtype=torch.uint8)[:] = data[taken : taken + len(view)]
        taken += len(view)

    store.fill(chunk, receive)
    start = store.bytes_of(chunk).data_ptr()
    world.host_looks(start, start + size)
    got = bytearray()
    for piece in store.pieces(chunk):
        world.host_looks(address(piece), address(piece) + len(piece))
        got += piece
    assert bytes(got) == bytes(data.tolist())
    store.release([store.commit("key", chunk)])
    store.close()
