"""bench_cuda.py - GB/s of store, retrieve, PUT and GET on a GPU, against plain copies measured in
the same run.

$ make bench-cuda       # needs a GPU; Llama-3-8B's shape, chunks of 256 tokens, 4,096 tokens
"""

import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata  # noqa: E402
from remote_server import LMCacheServer, RemoteClient  # noqa: E402

LAYERS, HEADS, DIM, BLOCK, TOKENS, ROUNDS = 32, 8, 128, 16, 4096, 9
BYTES = 2 * LAYERS * TOKENS * HEADS * DIM * 2  # bf16: 536,870,912


def rate(
    work: Callable[[], object], before: Callable[[], object] = lambda: None, size: int = BYTES
) -> float:
    """GB/s, the median of ROUNDS."""
    times = []
    for _ in range(ROUNDS + 1):
        before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return size / statistics.median(times[1:]) / 1e9


def bench_engine(store_on: str, floor: dict[str, float]) -> None:
    metadata = LMCacheMetadata("llama", 1, 1, 0, 0, torch.bfloat16, (LAYERS, 2, 256, HEADS, DIM))
    blocks = TOKENS // BLOCK * 2
    pages = [
        torch.randn(2, blocks, BLOCK, HEADS, DIM, device="cuda").to(torch.bfloat16)
        for _ in range(LAYERS)
    ]
    tokens = list(range(TOKENS))
    whole = (
        torch.randperm(blocks)[: TOKENS // BLOCK, None] * BLOCK + torch.arange(BLOCK)
    ).flatten()
    scattered = torch.randperm(blocks * BLOCK)[:TOKENS]
    with LMCacheEngine(
        LMCacheEngineConfig(max_local_cpu_size=1.0), metadata, device=store_on
    ) as engine:
        engine.register_kv_caches(pages, "2BNHD")
        for name, slots in (("whole blocks", whole), ("scattered slots", scattered)):
            store = rate(lambda slots=slots: engine.store(tokens, slot_mapping=slots), engine.clear)
            back = rate(lambda slots=slots: engine.retrieve(tokens, slot_mapping=slots))
            for what, got in (("store", store), ("retrieve", back)):
                against = (
                    floor["device to device"] if store_on == "cuda" else floor[f"pinned, {what}"]
                )
                print(
                    f"{what:9} to {store_on:4} {name:16} {got:9.1f} GB/s  "
                    f"{got / against:6.2f} of the plain copy"
                )


def floors() -> dict[str, float]:
    source = torch.empty(BYTES, dtype=torch.uint8, device="cuda")
    target, pinned = (
        torch.empty_like(source),
        torch.empty(BYTES, dtype=torch.uint8, pin_memory=True),
    )
    rows = torch.empty(2 * TOKENS, BYTES // TOKENS, dtype=torch.uint8, device="cuda").view(
        torch.int64
    )
    index = torch.randperm(2 * TOKENS, device="cuda")[:TOKENS]
    out = target.view(torch.int64).view(TOKENS, -1)
    return {
        "device to device": rate(lambda: target.copy_(source)),
        "index_select": rate(lambda: torch.index_select(rows, 0, index, out=out)),
        "pinned, store": rate(lambda: pinned.copy_(source, non_blocking=True)),
        "pinned, retrieve": rate(lambda: source.copy_(pinned, non_blocking=True)),
    }


def bench_server(size: int = 32 << 20, count: int = 16) -> None:
    data = bytes(size)
    for device in ("cpu", "cuda"):
        with LMCacheServer("127.0.0.1", 0, device, max_bytes=2 << 30) as server:
            threading.Thread(target=server.run, daemon=True).start()
            with RemoteClient(f"lm://127.0.0.1:{server.port}", timeout_sec=60) as client:

                def put(client: RemoteClient = client) -> None:
                    for number in range(count):
                        client.put(f"key{number}", data)
                    client.flush()

                print(f"PUT 32 MiB on {device:4} {rate(put, size=size * count):9.1f} GB/s")
                got = rate(
                    lambda c=client: [c.get(f"key{n}") for n in range(count)], size=size * count
                )
                print(f"GET 32 MiB on {device:4} {got:9.1f} GB/s")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("bench-cuda: torch sees no GPU here")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}; "
        f"{TOKENS} tokens, {BYTES / 2**20:.0f} MiB"
    )
    floor = floors()
    for name, got in floor.items():
        print(f"{name:31} {got:9.1f} GB/s")
    for store_on in ("cuda", "cpu"):
        bench_engine(store_on, floor)
    bench_server()


if __name__ == "__main__":
    main()
