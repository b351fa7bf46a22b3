"""vllm_connector.py - the four modules behind a real vLLM: prefixes survive eviction, restarts, and other machines.

It is a KV connector for vLLM 0.32 (vllm/distributed/kv_transfer/kv_connector/v1/base.py says what each hook is for).

    $ PYTHONPATH=.:examples vllm serve MODEL --kv-transfer-config '{"kv_connector": "KVOffloadConnector",
          "kv_connector_module_path": "vllm_connector", "kv_role": "kv_both",
          "kv_connector_extra_config": {"max_local_cpu_size": 20, "remote_url": "lm://127.0.0.1:8080"}}'

    scheduler process                                             worker process, one a rank
    get_num_new_matched_tokens: LMCacheLookupClient  --lookup-->  LMCacheLookupServer -> LMCacheEngine <-> remote server
    build_connector_meta: what to load, store, unpin  --step-->   start_load_kv: engine.retrieve into the pages
                                                                  wait_for_save: engine.store out of the pages
                                          anybody  --offload-->   ZMQOffloadServer -> engine.store

kv_connector_extra_config, all optional; an unknown name or a bad value stops vLLM at its start:
    every field of engine.LMCacheEngineConfig: max_local_cpu_size (GiB a rank, default 5), remote_url, chunk_size
        (tokens, a multiple of vLLM's block_size; default 256, or the block_size where that is 128 or more),
        lookup_timeout_ms, pin_timeout_sec, pre_caching_hash_algorithm, lookup_server_worker_ids, extra_config
    device            where each rank keeps its chunks: cpu (default), cuda, cuda:N
    layout            how a layer's pages lie: a name that engine.PagedKVCache knows, or "blocks", opaque ones;
                      default: blocks on a CPU, whose attention packs keys in its own way, else by the pages' shape
    model_name        the model's name in keys, for machines that have it under different paths; default: its path
    lmcache_rpc_port  of the lookup servers, see lookup.py (sockets lie in VLLM_RPC_BASE_PATH, default /tmp/vllm_rpc)

Who stores, and when: the worker, after the forward pass of the step that completes a chunk. Nothing is asked over a
wire then, so that tags (below) need no place in the offload protocol, a prompt can be hit while its first request still
decodes, and no page has to outlive its request. The offload server runs for others who know what lies in which slot.
What a step computes after a failed load is wrong and is not stored. Where another rank may be the one that failed, or
the next step is planned before the answer comes, nothing is stored until it has come; a later step makes up for it.

What else KV depends on is a tag of its chunks' keys: LoRA, cache_salt, multimodal items with their places in the
prompt (one digest for the whole prompt). Prompts given as embeddings are not cached. A fault of ours is a miss: a
chunk that was promised and is gone is reported to vLLM, which computes it (kv_load_failure_policy is set to recompute).

Not here: loading layer by layer or during other work, hybrid models (more than one kind of page), context parallelism.
"""

import hashlib
import logging
import re
import secrets
from dataclasses import dataclass, field
from typing import Any

import torch
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, KVConnectorRole

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lookup import LMCacheLookupClient, LMCacheLookupServer
from offload_server import ZMQOffloadServer
from remote_server import RemoteClient

logger = logging.getLogger("vllm.lmcache_connector")  # below vLLM's own logger, so that it is printed as vLLM's are


@dataclass
class Transfer:
    """Whole chunks of one request, and the blocks in which their KV lies or is to lie."""

    request_id: str
    tokens: list[int]  # from the first of the prompt
    blocks: list[int]  # len(tokens) / block_size of them
    configs: dict[str, str] | None  # its tags, as the engine takes them
    local: int = 0  # leading tokens that vLLM has itself, in blocks that others may share: not to be written


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What the scheduler tells every worker to do in one step; vLLM pickles it."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    unpins: list[str] = field(default_factory=list)  # lookup ids, to be unpinned after the loads


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def page_views(layers: list[torch.Tensor], layout: str, block_size: int, num_kv: int) -> tuple[list, str, tuple]:
    """The layers as engine.PagedKVCache takes them, the name of their layout there, and (K, H, D)."""
    if layout == "blocks":
        # A block is so many bytes, whatever they mean: [B, H, N, 2*D] in vLLM becomes [B, N, H*2*D], as MLA's one
        # latent. Subtle: a slot of it is no token; it is right as long as only whole blocks move, and ours do.
        layers = [layer.view(len(layer), block_size, -1) for layer in layers]
        return layers, "BNC", (1, 1, layers[0].shape[-1])
    if layout == "auto":
        layout = {3: "BNC", 4: "BHNC", 5: "2BNHD" if len(layers[0]) == 2 else "B2NHD"}.get(layers[0].dim(), "")
    sizes = dict(zip(layout, layers[0].shape, strict=False))  # a layout that does not fit is the engine's to refuse
    return layers, layout, (num_kv, sizes.get("H", 1), sizes.get("D", sizes.get("C", num_kv) // num_kv))


class KVOffloadConnector(KVConnectorBase_V1):
    """vLLM makes one in each process: with role SCHEDULER, which plans, and with role WORKER, which copies."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel, self.block_size = vllm_config.parallel_config, vllm_config.cache_config.block_size
        if len(kv_cache_config.kv_cache_groups) != 1 or parallel.decode_context_parallel_size > 1:
            raise ValueError("KVOffloadConnector: models with one kind of page only, and no context parallelism")
        self.extra = dict(self._kv_transfer_config.kv_connector_extra_config)
        own = ("device", "layout", "model_name", "lmcache_rpc_port")
        self.device, self.layout = self.extra.get("device", "cpu"), self.extra.get("layout", "auto")
        chunk = self.block_size if self.block_size >= 128 else 256 // self.block_size * self.block_size
        # Where K is 1, too, all ranks store and are asked: each has a store, and maybe a shard, of its own.
        values = {"chunk_size": chunk, "lookup_server_worker_ids": (), "extra_config": {"save_only_first_rank": False}}
        values |= {name: value for name, value in self.extra.items() if name not in own}
        self.config = LMCacheEngineConfig.from_defaults(**values)
        if self.config.chunk_size % self.block_size or self.config.save_unfull_chunk or self.config.enable_blending:
            raise ValueError(
                f"KVOffloadConnector moves whole blocks: chunk_size = {self.config.chunk_size} must be a multiple of "
                f"vLLM's block_size = {self.block_size}, save_unfull_chunk and enable_blending must be off"
            )
        self.rank, self.world_size = parallel.rank, parallel.world_size
        self.closing: list[Any] = []  # what shutdown() closes
        if role == KVConnectorRole.SCHEDULER:
            self._kv_transfer_config.kv_load_failure_policy = "recompute"  # vLLM reads it after making us
            metadata = self._metadata("-", 0, torch.uint8, (1, 2, 1, 1, 1))  # a client has no use for shapes
            self.client = LMCacheLookupClient(self.config, metadata)
            self.closing = [self.client]
            ahead = vllm_config.max_concurrent_batches  # steps under way at once
            self.quiet_after_load = 0 if ahead == self.world_size == 1 else ahead  # steps that store nothing
            self.quiet_steps = 0
            self.hits: dict[str, int] = {}  # request waiting to be scheduled -> what its lookup said
            self.requests: dict[str, Any] = {}  # scheduled at least once -> vLLM's Request
            self.external: dict[str, int] = {}  # scheduled in this step -> tokens to load
            self.stored: dict[str, int] = {}  # request -> leading tokens that are stored, or were loaded
            self.unpins: list[str] = []
            self.epoch = ""  # another one after reset_cache()

    def _metadata(self, name: str, rank: int, dtype: torch.dtype, kv_shape: Any) -> LMCacheMetadata:
        world, engine_id = self.world_size, self._kv_transfer_config.engine_id
        return LMCacheMetadata(
            name, world, world, rank, rank, dtype, kv_shape, use_mla=kv_shape[1] == 1,
            chunk_size=self.config.chunk_size, engine_id=engine_id, kv_connector_extra_config=self.extra,
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is lost is computed again

    # -- in the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens we have beyond the num_computed_tokens that vLLM has. Asked in every step until there is
        room for the request, and again after a preemption: one lookup, whose pin holds until the request is admitted.
        """
        if request.prompt_embeds is not None or request.skip_reading_prefix_cache:
            return 0, False
        request_id = request.request_id
        if request_id not in self.hits:
            tokens = list(request.all_token_ids[: request.num_tokens - 1])  # subtle: the last must be left to compute
            try:
                self.hits[request_id] = self.client.lookup(tokens, request_id, self._configs(request))
            except Exception:
                logger.exception("lookup of request %s failed: a miss", request_id)
                self.hits[request_id] = 0
        return max(0, self.hits[request_id] - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted, and has blocks for so many tokens of ours: what we said, or 0."""
        self.requests[request.request_id] = request
        self._forget_lookup(request.request_id)
        if num_external_tokens:
            self.external[request.request_id] = num_external_tokens

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        meta = StepMetadata(unpins=self.unpins)
        self.unpins = []
        running = scheduler_output.scheduled_cached_reqs
        first_token = dict(zip(running.req_ids, running.num_computed_tokens, strict=True))
        first_token |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        for request_id in self.external.keys() & first_token.keys():
            hits, external = first_token[request_id], self.external.pop(request_id)
            meta.loads.append(self._transfer(request_id, hits, scheduler_output, hits - external))
            self.stored[request_id] = hits
        if meta.loads:
            self.quiet_steps = self.quiet_after_load
        if self.quiet_steps:
            self.quiet_steps -= 1
            return meta
        for request_id, start in first_token.items():
            request = self.requests.get(request_id)
            if request is None or request.prompt_embeds is not None:
                continue
            # After this step there is KV for `end` tokens; what is drafted beyond the known ones may be rejected.
            end = min(start + scheduler_output.num_scheduled_tokens[request_id], request.num_tokens)
            end -= end % self.config.chunk_size
            if end > self.stored.get(request_id, 0):
                # All of it from the first token: what is there is not copied again, what was evicted is made whole.
                meta.stores.append(self._transfer(request_id, end, scheduler_output))
                self.stored[request_id] = end
        return meta

    def _transfer(self, request_id: str, num_tokens: int, scheduler_output: Any, local: int = 0) -> Transfer:
        request = self.requests[request_id]
        blocks = scheduler_output.kv_connector_block_state.get_block_ids(request_id)[0][: num_tokens // self.block_size]
        tokens = list(request.all_token_ids[:num_tokens])
        return Transfer(request_id, tokens, list(blocks), self._configs(request), local)

    def _configs(self, request: Any) -> dict[str, str] | None:
        lora, items = request.lora_request, request.mm_features or ()
        places = [(item.identifier, item.mm_position.offset, item.mm_position.length) for item in items]
        parts = (lora and (lora.lora_name, lora.lora_path), request.cache_salt, places, self.epoch)
        return {"lmcache.tag.for": digest(*parts)} if any(parts) else None

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.invalid_block_ids:
            self.stored.clear()  # nothing was stored after that load: plan it all again

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Finished, aborted, or never scheduled: nothing of it stays here, and vLLM may have its blocks at once."""
        for kept in (self.requests, self.stored, self.external):
            kept.pop(request.request_id, None)
        self._forget_lookup(request.request_id)
        return False, None

    def _forget_lookup(self, request_id: str) -> None:
        if self.hits.pop(request_id, None) is not None:
            self.client.clear_lookup_status(request_id)
            self.unpins.append(request_id)

    def reset_cache(self) -> bool:
        """From now on no key is one of before, here or at the remote; the old chunks go as room is needed."""
        self.epoch = secrets.token_hex(8)
        return True

    # -- in each worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's pages, one tensor a layer; with them it is known what a chunk is, and the engine can start."""
        model, cache = self._vllm_config.model_config, self._vllm_config.cache_config
        layers, num_kv = list(kv_caches.values()), 1 if model.use_mla else 2
        # Whatever else decides on what the bytes of a chunk mean is in the model's name.
        shown = self.extra.get("model_name") or model.model
        hf_config = {**model.hf_config.to_dict(), "_name_or_path": None, "transformers_version": None}
        facts = [shown, model.revision, model.quantization, model.dtype, cache.cache_dtype, hf_config]
        if layers[0].device.type == "cpu":
            from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # how this CPU packs keys

            facts.append(_get_attn_isa(model.dtype, self.block_size, model.get_head_size(), cache.cache_dtype))
            self.layout = "blocks" if self.layout == "auto" else self.layout
        if self.layout == "blocks":
            facts += [vllm.__version__, self.block_size]
        name = f"{re.sub('[^A-Za-z0-9._-]', '_', shown.rstrip('/').split('/')[-1])[:40]}-{digest(*facts)}"
        views, layout, (num_kv, heads, dim) = page_views(layers, self.layout, self.block_size, num_kv)
        kv_shape = (len(layers), num_kv, self.config.chunk_size, heads, dim)
        metadata = self._metadata(name, self.rank, layers[0].dtype, kv_shape)
        remote = RemoteClient(self.config.remote_url) if self.config.remote_url else None
        self.engine = LMCacheEngine(self.config, metadata, self.device, remote)
        self.engine.register_kv_caches(views, layout)
        servers = [LMCacheLookupServer(self.engine, metadata), ZMQOffloadServer(self.engine, self.rank)]
        self.closing = [*servers, self.engine, *([remote] if remote else [])]
        self.bad_blocks: set[int] = set()
        logger.info("rank %d keeps %s on %s", self.rank, name, self.device)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        for load in meta.loads:
            start = load.local - load.local % self.config.chunk_size
            mask = torch.arange(len(load.tokens)) >= start  # [T]
            # A chunk that vLLM has in part is loaded whole: that part goes to block 0, vLLM's null block.
            blocks = [0] * (load.local // self.block_size) + load.blocks[load.local // self.block_size :]
            try:
                slots = self._slots(blocks)
                loaded = self.engine.retrieve(load.tokens, mask, slot_mapping=slots, request_configs=load.configs)
                there = start + int(loaded.sum())
            except Exception:
                logger.exception("load of request %s failed", load.request_id)
                there = start
            if there < len(load.tokens):
                logger.warning("request %s: %d of %d tokens loaded", load.request_id, there, len(load.tokens))
                self.bad_blocks.update(load.blocks[max(there, load.local) // self.block_size :])
        for lookup_id in meta.unpins:
            self.engine.lookup_unpin(lookup_id)

    def wait_for_save(self) -> None:
        for store in self._get_connector_metadata().stores if not self.bad_blocks else ():
            try:
                self.engine.store(store.tokens, slot_mapping=self._slots(store.blocks), request_configs=store.configs)
            except Exception:
                logger.exception("store of request %s failed", store.request_id)

    def _slots(self, blocks: list[int]) -> torch.Tensor:
        return (torch.tensor(blocks)[:, None] * self.block_size + torch.arange(self.block_size)).flatten()  # [T]

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Everything is stored after the forward pass."""

    def shutdown(self) -> None:
        for one in self.closing:
            one.close()
