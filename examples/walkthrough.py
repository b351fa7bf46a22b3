"""walkthrough.py - one prompt's way: look up, retrieve, compute, store, unpin; the model is a sum.

    $ PYTHONPATH=. python examples/walkthrough.py

A cache server, and two workers that come one after the other; each has pages of its own, and all
of them are in this process. The "KV" of a token is the sum of the tokens up to it, so that wrong
KV shows. Read it beside the picture in README.md.
"""

import os
import tempfile
import threading

import torch

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lookup import LMCacheLookupClient, LMCacheLookupServer
from remote_server import LMCacheServer, connect_remote

L, H, D, B, N, CHUNK = 2, 1, 4, 16, 4, 8  # layers, heads, head_dim, blocks, slots a block, tokens


def compute(pages, slots, tokens, first):
    """The toy's prefill: writes the KV of tokens[first:], whose KV before `first` must be there."""
    total = float(pages.flatten(2, 3)[0, 0, slots[first - 1], 0, 0]) if first else 0.0
    for slot, token in zip(slots[first:], tokens[first:], strict=True):
        total += token
        pages.flatten(2, 3)[:, :, slot] = total  # of [L, 2, B*N, H, D]
    return total


def worker(number, url, prompts):
    """Serves prompts with an empty paged cache, an engine and its lookup server."""
    config = LMCacheEngineConfig(chunk_size=CHUNK, max_local_cpu_size=0.001, remote_url=url)
    shape = (L, 2, CHUNK, H, D)
    metadata = LMCacheMetadata("toy", 1, 1, 0, 0, torch.float32, shape, engine_id=f"w{number}")
    pages = torch.zeros(L, 2, B, N, H, D)
    with connect_remote(config) as remote, LMCacheEngine(config, metadata, remote=remote) as engine:
        engine.register_kv_caches([*pages], "2BNHD")
        with LMCacheLookupServer(engine, metadata), LMCacheLookupClient(config, metadata) as client:
            for index, prompt in enumerate(prompts):
                name, slots = f"request-{index}", torch.randperm(B * N)[: len(prompt)]
                hits = client.lookup(prompt, name)  # the scheduler asks: pinned under this name
                back = engine.retrieve(prompt[:hits], slot_mapping=slots[:hits])
                answer = compute(pages, slots, prompt, int(back.sum()))
                engine.store(prompt, slot_mapping=slots)
                engine.lookup_unpin(name)
                print(
                    f"worker {number}: {len(prompt)} tokens, {hits} of them cached, sum {answer:g}"
                )
                assert answer == sum(prompt), "wrong KV"
        assert engine.flush(), "the cache server has not all of it"


if __name__ == "__main__":
    os.environ["VLLM_RPC_BASE_PATH"] = tempfile.mkdtemp()
    with LMCacheServer("127.0.0.1", 0, max_bytes=1 << 20) as server:
        threading.Thread(target=server.run, daemon=True).start()
        system, url = list(range(20)), f"lm://127.0.0.1:{server.port}"
        worker(1, url, [[*system, 7, 7, 7, 7], [*system, 9, 9]])
        worker(2, url, [[*system, 7, 7, 7, 7, 8]])  # a fresh process would do the same
    os.rmdir(os.environ["VLLM_RPC_BASE_PATH"])
