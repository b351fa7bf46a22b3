"""tp_demo.py - tensor parallelism: each rank keeps the KV of its own heads, the scheduler asks all.

    $ torchrun --standalone --nproc-per-node 2 examples/tp_demo.py    # two processes, CPU, gloo

A small Llama of transformers with random weights is split as Megatron-LM splits it: a rank has some
heads of the attention and some columns of the MLP, and their outputs are summed over the ranks.

    rank 0                                               rank 1
    scheduler: LMCacheLookupClient  --+-------ipc------> LMCacheLookupServer -> LMCacheEngine
                                      +--> LMCacheLookupServer -> LMCacheEngine
    heads 0-3, KV heads 0-1             <--all_reduce--> heads 4-7, KV heads 2-3

A chunk has one hash, and a key a rank. Ranks may have evicted different chunks (here rank 1 has
less room): the smallest answer counts, so that all of them go on from the same token.

Not here: MLA, whose latent every rank has, so that rank 0 stores alone; more than one host.
"""

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the four modules are
from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lookup import LMCacheLookupClient, LMCacheLookupServer

L, H, D, RANKS = 3, 4, 16, 2  # layers, KV heads of all ranks, head_dim
CHUNK, B, N = 16, 16, 8  # tokens in a chunk; blocks, slots in a block
ROOM = [12, 5]  # chunks that each rank can keep
DTYPE = torch.float64  # a sum in another order must not change which token is the likeliest
CHUNK_BYTES = L * 2 * CHUNK * (H // RANKS) * D * DTYPE.itemsize  # of one rank: 49,152
FIRST, SECOND = [*range(100, 185)], [*range(300, 353)]  # prompts: 5 chunks and more, 3 and more


def whole_model() -> LlamaForCausalLM:
    torch.manual_seed(0)  # the same weights on every rank
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=L, head_dim=D,
        num_attention_heads=2 * H, num_key_value_heads=H, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(DTYPE).eval()


class SummedLinear(nn.Module):
    """A linear layer whose input features lie split over the ranks: each multiplies its own."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)  # [out, in / ranks]

    def forward(self, part: torch.Tensor) -> torch.Tensor:
        output = nn.functional.linear(part, self.weight)  # [1, T, out], a summand of it
        dist.all_reduce(output)
        return output


def split(model: LlamaForCausalLM, rank: int) -> LlamaForCausalLM:
    """Keeps this rank's heads and MLP columns; the features of a head lie side by side."""
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = [attention.q_proj, attention.k_proj, attention.v_proj]
        for linear in [*qkv, mlp.gate_proj, mlp.up_proj]:
            linear.weight = nn.Parameter(
                linear.weight.chunk(RANKS, dim=0)[rank]
            )  # [out / ranks, in]
        attention.o_proj = SummedLinear(attention.o_proj.weight.chunk(RANKS, dim=1)[rank])
        mlp.down_proj = SummedLinear(mlp.down_proj.weight.chunk(RANKS, dim=1)[rank])
    return model


@torch.inference_mode()
def generate(model: LlamaForCausalLM, tokens: list[int], cache: DynamicCache) -> list[int]:
    """The 8 likeliest tokens after these, which come after those in the cache."""
    answer: list[int] = []
    for _ in range(8):
        input_ids = torch.tensor([answer[-1:] or tokens])  # [1, T]
        logits = model(input_ids, cache=cache, logits_to_keep=1).logits  # [1, 1, vocabulary]
        answer.append(int(logits.argmax()))
    return answer


class Rank:
    """One rank's share of the model, its pages and its engine."""

    def __init__(self, engine: LMCacheEngine, model: LlamaForCausalLM):
        self.engine, self.model, self.slots = engine, model, torch.randperm(B * N)
        self.pages = [torch.empty(2, B, N, H // RANKS, D, dtype=DTYPE) for _ in range(L)]
        engine.register_kv_caches(self.pages, "2BNHD")

    def answer(self, tokens: list[int], hits: int, lookup_id: str) -> list[int]:
        """Goes on from what this rank and all others could retrieve, and stores the prompt."""
        for page in self.pages:
            page.fill_(float("nan"))  # what rests on a slot that nobody wrote is garbage
        written = self.engine.retrieve(tokens[:hits], slot_mapping=self.slots[:hits])  # bool [hits]
        self.engine.lookup_unpin(lookup_id)
        ready, slots = smallest(int(written.sum())), self.slots[: len(tokens)]
        cache = DynamicCache()
        for index, page in enumerate(self.pages):
            kv = page.flatten(1, 2)[:, slots[:ready]].transpose(1, 2)  # [2, H, ready, D]
            cache.update(*kv.contiguous().split(1), index)  # two of [1, H, ready, D]
        answer = generate(self.model, tokens[ready:], cache)  # no prompt here ends with a chunk
        for page, layer in zip(self.pages, cache.layers, strict=True):
            kv = torch.cat([layer.keys, layer.values])[:, :, : len(tokens)]  # [2, H, T, D]
            page.flatten(1, 2)[:, slots] = kv.transpose(1, 2)  # [2, T, H, D] into [2, B*N, H, D]
        self.engine.store(tokens, slot_mapping=slots)
        return answer


def smallest(count: int) -> int:
    """Of all ranks."""
    counts = torch.tensor(count)
    dist.all_reduce(counts, dist.ReduceOp.MIN)
    return int(counts)


def ask(name: str, tokens: list[int], rank: Rank, scheduler: LMCacheLookupClient | None) -> bool:
    """One request; True where its answer is that of the whole model, on every rank."""
    dist.all_gather_object(here := [0] * RANKS, rank.engine.lookup(tokens))
    hits = smallest(scheduler.lookup(tokens, name) if scheduler else len(tokens))  # rank 0 tells
    answer = rank.answer(tokens, hits, lookup_id=name)
    same = bool(smallest(answer == generate(whole_model(), tokens, DynamicCache())))
    if scheduler:
        print(f"{name}\n    ranks have {here}, scheduler says {hits} of {len(tokens)} tokens")
        print(f"    answer {answer}, as by the whole model: {same}", flush=True)
    return same


def main() -> int:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    number = dist.get_rank()
    if dist.get_world_size() != RANKS:
        raise SystemExit(f"needs {RANKS} ranks, not {dist.get_world_size()}: see the first lines")
    room_gib = ROOM[number] * CHUNK_BYTES / 2**30
    config = LMCacheEngineConfig(chunk_size=CHUNK, max_local_cpu_size=room_gib)
    metadata = LMCacheMetadata(
        "toy", RANKS, RANKS, number, number, DTYPE, (L, 2, CHUNK, H // RANKS, D),
        engine_id=f"tp-{os.environ['MASTER_PORT']}",  # the ipc paths are this run's alone
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        engine = stack.enter_context(LMCacheEngine(config, metadata))
        stack.enter_context(LMCacheLookupServer(engine, metadata))
        client = stack.enter_context(LMCacheLookupClient(config, metadata)) if number == 0 else None
        rank = Rank(engine, split(whole_model(), number))
        dist.barrier()  # all servers are up
        right = ask("cold", FIRST, rank, client)
        right &= ask("warm", FIRST, rank, client)
        right &= ask("another prompt, cold", SECOND, rank, client)
        right &= ask("the first one, its tail evicted on rank 1", FIRST, rank, client)
        if number == 1:
            engine.clear()
        right &= ask("the first one, gone on rank 1", FIRST, rank, client)
        dist.barrier()  # nobody asks any more
    dist.destroy_process_group()
    return int(not right)


if __name__ == "__main__":
    sys.exit(main())
