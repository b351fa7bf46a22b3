"""The same results on a GPU as on a CPU: stores on either device, all layouts, streams, and the
server on `cuda`.

Every test here skips where torch sees no GPU.
"""

import threading

import pytest
import torch

from engine import ChunkStore, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from remote_server import LMCacheServer, RemoteClient

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.leaks_ok,  # the CUDA driver keeps files and threads of its own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU"),
]

L, B, N, H, D, T = 3, 40, 16, 2, 32, 512
LAYOUTS = {
    "2BNHD": (2, B, N, H, D),
    "B2NHD": (B, 2, N, H, D),
    "BHNC": (B, H, N, 2 * D),
    "BNC": (B, N, D),
}
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2]


def make(layout: str, dtype: torch.dtype, store_on: str, gib: float = 0.02, remote: object = None):
    """An engine, its pages on the GPU with random bytes, and a copy of them on the CPU."""
    mla = layout == "BNC"
    metadata = LMCacheMetadata(
        "m", 1, 1, 0, 0, dtype, (L, 1 if mla else 2, 256, 1 if mla else H, D), use_mla=mla
    )
    engine = LMCacheEngine(
        LMCacheEngineConfig(max_local_cpu_size=gib), metadata, device=store_on, remote=remote
    )
    shape = LAYOUTS[layout]
    sizes = (*shape[:-1], shape[-1] * dtype.itemsize)
    pages = [
        torch.randint(0, 256, sizes, dtype=torch.uint8, device="cuda").view(dtype) for _ in range(L)
    ]
    engine.register_kv_caches(pages, layout)
    return engine, pages, [page.view(torch.uint8).cpu() for page in pages]


def slots_of(kind: str) -> torch.Tensor:
    """int64 [T]: scattered, or whole blocks in any order."""
    if kind == "scattered":
        return torch.randperm(B * N)[:T]
    return (torch.randperm(B)[: T // N, None] * N + torch.arange(N)).flatten()


def poison(pages: list[torch.Tensor]) -> None:
    for page in pages:
        page.view(torch.uint8).fill_(0xA5)


def at(page: torch.Tensor, layout: str, slots: torch.Tensor) -> torch.Tensor:
    """The bytes of these slots, taken the slow and plain way."""
    block, offset = slots // N, slots % N
    raw = page.cpu()
    if layout == "2BNHD":
        return raw[:, block, offset]
    if layout == "B2NHD":
        return raw[block, :, offset]
    if layout == "BHNC":
        return raw[block, :, offset]
    return raw[block, offset]


@pytest.mark.parametrize("store_on", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", ["scattered", "blocks"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_comes_back_is_what_was_stored(
    layout: str, dtype: torch.dtype, kind: str, store_on: str
) -> None:
    engine, pages, before = make(layout, dtype, store_on)
    with engine:
        slots, others = slots_of(kind), slots_of(kind)
        assert engine.store(list(range(T)), slot_mapping=slots) == T
        poison(pages)
        assert engine.retrieve(list(range(T)), slot_mapping=others).all()
        for page, old in zip(pages, before, strict=True):
            assert torch.equal(at(page.view(torch.uint8), layout, others), at(old, layout, slots))


@pytest.mark.parametrize("store_on", ["cpu", "cuda"])
def test_the_chunk_is_the_same_as_on_a_cpu(store_on: str) -> None:
    engine, pages, before = make("2BNHD", torch.bfloat16, store_on)
    twin = LMCacheEngine(LMCacheEngineConfig(max_local_cpu_size=0.02), engine.metadata)
    with engine, twin:
        twin.register_kv_caches([page.view(torch.bfloat16) for page in before], "2BNHD")
        slots = slots_of("scattered")
        for each in (engine, twin):
            each.store(list(range(T)), slot_mapping=slots)
        keys = engine.chunks.keys()
        assert len(keys) == T // 256
        for key in keys:
            mine, theirs = engine.chunks.acquire(key), twin.chunks.acquire(key)
            assert mine is not None and theirs is not None
            assert torch.equal(engine.chunks.memory.of(mine).cpu(), twin.chunks.memory.of(theirs))
            engine.chunks.release([mine])
            twin.chunks.release([theirs])


@pytest.mark.parametrize("store_on", ["cpu", "cuda"])
def test_store_waits_for_the_callers_stream_and_the_caller_sees_retrieve(store_on: str) -> None:
    engine, pages, _ = make("2BNHD", torch.float32, store_on)
    stream = torch.cuda.Stream()
    slots = slots_of("blocks")
    with engine, torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # cycles, about 0.1 s: what follows on this stream is late
        for page in pages:
            page.fill_(7.0)
        engine.store(list(range(T)), slot_mapping=slots)
        for page in pages:
            page.fill_(0.0)
        engine.retrieve(list(range(T)), slot_mapping=slots)
        total = sum(
            page.flatten(1, 2)[:, slots.cuda()].sum() for page in pages
        )  # on the caller's stream
        assert total.item() == 7.0 * L * 2 * T * H * D


def test_concurrent_store_and_retrieve() -> None:
    engine, pages, before = make("2BNHD", torch.bfloat16, "cpu", gib=0.005)
    failures: list[str] = []

    def work(number: int) -> None:
        tokens = list(range(number * 1000, number * 1000 + 256))
        own = torch.arange(number * 256 % (B * N - 256), number * 256 % (B * N - 256) + 256)
        for _ in range(30):
            engine.store(tokens, slot_mapping=own)
            if int(engine.lookup(tokens)) not in (0, 256):
                failures.append(f"{number}: a hit of no whole chunk")

    with engine:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert engine.stats()["faults"] == 0
    for page, old in zip(pages, before, strict=True):
        assert torch.equal(page.view(torch.uint8).cpu(), old)  # storing only reads


@pytest.mark.parametrize("size", [0, 1, 1000, (4 << 20) - 1, 4 << 20, (9 << 20) + 5])
def test_server_on_cuda_returns_the_same_bytes(size: int) -> None:
    data = bytes(torch.randint(0, 256, (size,), dtype=torch.uint8).tolist())
    with LMCacheServer("127.0.0.1", 0, "cuda", max_bytes=64 << 20) as server:
        threading.Thread(target=server.run, daemon=True).start()
        with RemoteClient(f"lm://127.0.0.1:{server.port}", timeout_sec=30) as client:
            client.put("key", data)
            found = client.get("key")
            assert found is not None and bytes(found[1]) == data


def test_eviction_while_a_get_is_in_flight() -> None:
    size = 6 << 20
    with LMCacheServer("127.0.0.1", 0, "cuda", max_bytes=4 * size) as server:
        threading.Thread(target=server.run, daemon=True).start()
        url = f"lm://127.0.0.1:{server.port}"
        stop = threading.Event()

        def churn() -> None:
            with RemoteClient(url, timeout_sec=30) as other:
                number = 0
                while not stop.is_set():
                    other.put(f"churn{number % 8}", bytes([number % 251]) * size)
                    number += 1

        thread = threading.Thread(target=churn)
        thread.start()
        try:
            with RemoteClient(url, timeout_sec=30) as client:
                for number in range(40):
                    client.put("mine", bytes([number]) * size)
                    found = client.get("mine")
                    assert found is None or set(found[1]) == {number}
        finally:
            stop.set()
            thread.join()


def test_an_engine_on_cuda_and_its_remote() -> None:
    with LMCacheServer("127.0.0.1", 0, "cuda", max_bytes=64 << 20) as server:
        threading.Thread(target=server.run, daemon=True).start()
        with RemoteClient(f"lm://127.0.0.1:{server.port}", timeout_sec=30) as client:
            first, _, before = make("2BNHD", torch.bfloat16, "cuda", remote=client)
            second, pages, _ = make("2BNHD", torch.bfloat16, "cuda", remote=client)
            slots = slots_of("blocks")
            with first, second:
                first.store(list(range(T)), slot_mapping=slots)
                assert first.flush()
                poison(pages)
                assert second.retrieve(list(range(T)), slot_mapping=slots).all()
            for page, old in zip(pages, before, strict=True):
                assert torch.equal(
                    at(page.view(torch.uint8), "2BNHD", slots), at(old, "2BNHD", slots)
                )


def test_more_memory_than_the_gpu_has_is_a_clear_refusal() -> None:
    with pytest.raises(MemoryError, match="no room for a chunk store of .* on cuda"):
        ChunkStore("cuda", 1 << 45)


def test_a_gpu_that_is_not_there() -> None:
    count = torch.cuda.device_count()
    with pytest.raises(
        ValueError, match=rf"device 'cuda:{count}' is not here; this host has cpu, cuda, cuda:0"
    ):
        ChunkStore(f"cuda:{count}", 1 << 20)
