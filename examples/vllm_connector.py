"""vllm_connector.py - the four modules behind a real vLLM: prefixes survive eviction and restarts.

A KV connector for vLLM 0.32 (vllm/distributed/kv_transfer/kv_connector/v1/base.py has the hooks).

    $ PYTHONPATH=.:examples vllm serve MODEL --kv-transfer-config '{
          "kv_connector": "KVOffloadConnector", "kv_connector_module_path": "vllm_connector",
          "kv_role": "kv_both",
          "kv_connector_extra_config": {"max_local_cpu_size": 20, "remote_url": "lm://host:8080"}}'

    scheduler process                                  worker process, one a rank
    get_num_new_matched_tokens: LMCacheLookupClient -> LMCacheLookupServer
    build_connector_meta: loads, stores, unpins -----> start_load_kv: engine.retrieve into the pages
                                                       wait_for_save: engine.store out of the pages
                                anybody: offload ----> ZMQOffloadServer -> engine.store

kv_role: kv_both, kv_producer (stores, loads nothing) or kv_consumer (loads, stores nothing).

kv_connector_extra_config, all optional; an unknown name or a bad value stops vLLM at its start:
    any field of LMCacheEngineConfig, also as lmcache.FIELD: max_local_cpu_size (GiB a rank),
        remote_url, chunk_size (tokens, a multiple of vLLM's block_size), ... It goes over
        LMCACHE_<FIELD> in the environment, and that over the file that LMCACHE_CONFIG_FILE names.
        remote_url: lm://, or lms://, for which extra_config has remote_tls_cert, remote_tls_key
        and remote_tls_ca, PEM files; or valkey://, valkeys://, redis://, rediss://, one server or a
        cluster, see valkey_remote.py
    device              where each rank keeps its chunks: cpu (default), cuda, cuda:N
    layout              how a layer's pages lie: a name that engine.PagedKVCache knows, or "blocks",
                        opaque ones; default: blocks on a CPU, whose attention packs keys in its
                        own way, else by the pages' shape
    model_name          the model's name in keys; default: the last part of its path
    remote_timeout_sec  of a request to the remote, default 5
    lmcache_rpc_port    of the lookup servers, see lookup.py (they lie in VLLM_RPC_BASE_PATH)

kv_transfer_params of a request: lmcache.tag.NAME (prompts with another value share nothing with it)
and lmcache.skip_save (true: nothing of it is kept); an unknown lmcache.NAME is a warning.

Who stores, and when: the worker, after the forward pass of the step that completes a chunk. So
nothing is asked over a wire, a prompt can be hit while its first request still decodes, and no page
has to outlive its request. But what is computed from a block that could not be loaded is wrong. So
a loaded block is unsure until the workers have answered, a step or two later, and who has it in its
table waits for so long with its stores; nobody else does. (A request that loads, and ends before
that, leaves no more than was there.)

What else KV depends on is in vllm_names.py. Prompts given as embeddings are not cached. A fault of
ours is a miss: a chunk that was promised and is gone is reported to vLLM, which computes it
(kv_load_failure_policy is set to recompute).

Not here: loading layer by layer or during other work, context parallelism, models that give up
pages before a request ends (sliding windows alone, Mamba): they are refused at the start.
"""

import itertools
import logging
import secrets
import sys
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import msgspec
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm_names import check_pages, is_saved, model_name, named_tokens, page_views, request_tags

from engine import LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lookup import LMCacheLookupClient, LMCacheLookupServer
from offload_server import ZMQOffloadServer
from remote_server import connect_remote

logger = logging.getLogger(
    "vllm.lmcache_connector"
)  # below vLLM's, so that it is printed as theirs

OWN_SETTINGS = {"device": "cpu", "layout": "auto", "model_name": "", "remote_timeout_sec": 5.0}
OWN_SETTINGS |= {"lmcache_rpc_port": 0}
NULL_BLOCK = 0  # vLLM's: stands in a table where there is no block
SCHEMES = ("lm", "lms", "valkey", "valkeys", "redis", "rediss")  # of a remote_url


# --------------------------------------------------------------------------------------------------
# What the scheduler knows, and tells the workers


@dataclass
class Followed:
    """A request, from when it waits to be admitted until it waits again (preempted) or ends."""

    request: Any  # vLLM's Request
    tags: dict[str, str] | None  # as the engine takes them
    is_cached: bool  # whether we have anything to do with it
    is_saved: bool  # whether what it computes is stored
    lookup_id: str = ""  # of the lookup whose pins hold until it is admitted
    hits: int = 0  # what that lookup said
    admitted: bool = False
    to_load: int = 0  # tokens of ours that vLLM has made room for in this step
    stored: int = 0  # leading tokens that are stored, or were loaded


@dataclass
class Transfer:
    """Whole chunks of one request, and the blocks in which their KV lies or is to lie."""

    request_id: str
    tokens: list[int]  # from the first of the prompt, see named_tokens
    blocks: list[int]  # len(tokens) / block_size of them
    tags: dict[str, str] | None
    local: int = 0  # leading tokens that vLLM has itself, in blocks that are not to be written


@dataclass
class StepMetadata(KVConnectorMetadata):
    """What every worker is to do in one step; vLLM pickles it."""

    loads: list[Transfer] = field(default_factory=list)
    stores: list[Transfer] = field(default_factory=list)
    unpins: list[str] = field(default_factory=list)  # lookup ids, to be unpinned after the loads


# --------------------------------------------------------------------------------------------------
# What is checked at the start


def remote_of(config: LMCacheEngineConfig, timeout_sec: float) -> Any:
    """The client of what config.remote_url names, or None."""
    scheme = urlsplit(config.remote_url or "lm:").scheme
    if scheme in ("lm", "lms"):
        return connect_remote(config, timeout_sec)
    try:
        from valkey_remote import remote_of_url
    except ImportError as error:
        raise ValueError(f"{scheme}:// needs requirements/valkey.txt: {error}") from error
    return remote_of_url(config.remote_url, timeout_sec)


def read_settings(extra: dict, block_size: int) -> tuple[dict[str, Any], LMCacheEngineConfig]:
    """kv_connector_extra_config as our own settings, all of them, and the engine's config."""
    given = {name.removeprefix("lmcache."): value for name, value in extra.items()}
    own = {name: given.pop(name, default) for name, default in OWN_SETTINGS.items()}
    try:
        config = LMCacheEngineConfig.from_env(**given)
    except ValueError as error:
        own_names = ", ".join(OWN_SETTINGS)
        raise ValueError(f"kv_connector_extra_config: {error}, or {own_names}") from error
    scheme = urlsplit(config.remote_url or "lm:").scheme
    if scheme not in SCHEMES:  # the rest of a URL may hold a password
        known = ", ".join(f"{name}://" for name in SCHEMES)
        raise ValueError(f"remote_url has the scheme {scheme!r}; known are {known}")
    # Also where K is 1 each rank has a store, and maybe a shard, of its own.
    extra_config = {"save_only_first_rank": False, **(config.extra_config or {})}
    parts = [config.save_unfull_chunk, config.enable_blending, extra_config["save_only_first_rank"]]
    if config.chunk_size % block_size or any(parts):
        raise ValueError(
            f"KVOffloadConnector moves whole blocks of each rank: chunk_size = {config.chunk_size} "
            f"must be a multiple of vLLM's block_size = {block_size}; save_unfull_chunk, "
            "enable_blending and extra_config's save_only_first_rank must be off"
        )
    return own, msgspec.structs.replace(config, extra_config=extra_config)


# --------------------------------------------------------------------------------------------------
# The connector


class KVOffloadConnector(KVConnectorBase_V1):
    """vLLM makes one in each process: with role SCHEDULER it plans, with role WORKER it copies."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        parallel, transfer = vllm_config.parallel_config, self._kv_transfer_config
        check_pages(kv_cache_config)
        if max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1:
            raise ValueError("KVOffloadConnector: no context parallelism")
        self.block_size = vllm_config.cache_config.block_size
        self.own, self.config = read_settings(transfer.kv_connector_extra_config, self.block_size)
        self.rank, self.world_size = parallel.rank, parallel.world_size
        self.closing: list[Any] = []  # what shutdown() closes
        if role == KVConnectorRole.SCHEDULER:
            transfer.kv_load_failure_policy = "recompute"  # vLLM reads it after making us
            self.loads, self.saves = transfer.is_kv_consumer, transfer.is_kv_producer
            shape = (1, 2, self.config.chunk_size, 1, 1)  # a client has no use for the others
            metadata = self._metadata("-", 0, torch.uint8, shape)
            self.client = LMCacheLookupClient(self.config, metadata)
            self.closing = [self.client]
            self.lookup_numbers = itertools.count()
            self.followed: dict[str, Followed] = {}  # by request id
            self.unpins: list[str] = []
            self.epoch = ""  # another one after reset_cache()
            # Block -> the step from which its KV is known to be right; the null block's never is.
            self.unsure = {NULL_BLOCK: sys.maxsize}
            self.step = 0
            # A step's answer is there when the step after so many is planned. Subtle: one worker
            # alone, that takes one step at a time, knows by itself what to leave out.
            ahead = vllm_config.max_concurrent_batches
            self.answer_steps = 0 if ahead == self.world_size == 1 else ahead

    def _metadata(self, name: str, rank: int, dtype: torch.dtype, kv_shape: Any) -> LMCacheMetadata:
        world, engine_id = self.world_size, self._kv_transfer_config.engine_id
        return LMCacheMetadata(
            name, world, world, rank, rank, dtype, kv_shape, use_mla=kv_shape[1] == 1,
            chunk_size=self.config.chunk_size, engine_id=engine_id,
            kv_connector_extra_config=self.own,
        )  # fmt: skip

    @property
    def requires_kv_delivery(self) -> bool:
        return False  # a cache: what is lost is computed again

    # -- in the scheduler: lookups

    def get_num_new_matched_tokens(self, request: Any, num_computed: int) -> tuple[int, bool]:
        """How many tokens we have beyond the num_computed that vLLM has. Asked in every step until
        there is room for the request, and again after a preemption: one lookup for each time.
        """
        followed = self._follow(request)
        if not self.loads or not followed.is_cached or request.skip_reading_prefix_cache:
            return 0, False
        if not followed.lookup_id:
            self._look_up(followed)
        return max(0, followed.hits - num_computed), False

    def _follow(self, request: Any) -> Followed:
        """The entry of a request that waits, made anew each time: it may have other tags then."""
        followed = self.followed.get(request.request_id)
        if followed is None or followed.admitted:
            try:
                cached, tags = request.prompt_embeds is None, request_tags(request, self.epoch)
            except Exception:  # files of its adapter are gone or broken
                logger.exception("request %s cannot be named: not cached", request.request_id)
                cached, tags = False, None
            followed = Followed(request, tags, cached, is_saved(request) and cached and self.saves)
            self.followed[request.request_id] = followed
        return followed

    def _look_up(self, followed: Followed) -> None:
        # An id of its own: the unpin of a request's first lookup may come after its second lookup.
        request = followed.request
        followed.lookup_id = f"{request.request_id}#{next(self.lookup_numbers)}"
        tokens = named_tokens(request, request.num_tokens - 1)  # subtle: one is left to compute
        try:
            followed.hits = self.client.lookup(tokens, followed.lookup_id, followed.tags)
        except Exception:
            logger.exception("lookup of request %s failed: a miss", request.request_id)

    def _end_lookup(self, followed: Followed) -> None:
        if followed.lookup_id:
            self.client.clear_lookup_status(followed.lookup_id)
            self.unpins.append(followed.lookup_id)  # after a 0, too: one rank may have found more
            followed.lookup_id = ""

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The request is admitted, with room for so many tokens of ours: what we said, or 0."""
        followed = self._follow(request)
        followed.admitted, followed.to_load = True, num_external_tokens
        self._end_lookup(followed)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Finished, aborted, or never scheduled: vLLM may have its blocks at once."""
        if followed := self.followed.pop(request.request_id, None):
            self._end_lookup(followed)
        return False, None

    def reset_cache(self) -> bool:
        """From now on no key is one of before, here or at the remote; what is old goes as it ages.

        Who waits is looked up again. Who runs on has KV of before, and stores it under old keys.
        """
        self.epoch = secrets.token_hex(8)
        for name in [name for name, followed in self.followed.items() if not followed.admitted]:
            self._end_lookup(self.followed.pop(name))
        return True

    # -- in the scheduler: the plan of a step

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        self.step += 1
        self.unsure = {block: step for block, step in self.unsure.items() if step > self.step}
        unpins, self.unpins = self.unpins, []
        new, running = scheduler_output.scheduled_new_reqs, scheduler_output.scheduled_cached_reqs
        starts = {one.req_id: one.num_computed_tokens for one in new}  # tokens that have KV
        starts |= zip(running.req_ids, running.num_computed_tokens, strict=True)
        scheduled = scheduler_output.num_scheduled_tokens
        # All loads first: the blocks that they make unsure, others may share.
        loads = [self._plan_load(name, start) for name, start in starts.items()]
        stores = [self._plan_store(name, start + scheduled[name]) for name, start in starts.items()]
        return StepMetadata([*filter(None, loads)], [*filter(None, stores)], unpins)

    def _plan_load(self, request_id: str, hits: int) -> Transfer | None:
        followed = self.followed[request_id]
        if not followed.to_load:
            return None
        local = hits - followed.to_load
        load = self._transfer(followed, hits, local)
        loaded = load.blocks[local // self.block_size :]
        self.unsure |= dict.fromkeys(loaded, self.step + self.answer_steps)
        followed.stored, followed.to_load = hits, 0
        return load

    def _plan_store(self, request_id: str, end: int) -> Transfer | None:
        """After this step there is KV for `end` tokens."""
        followed = self.followed[request_id]
        end = min(end, followed.request.num_tokens)  # drafted ones may be rejected yet
        end -= end % self.config.chunk_size
        if not followed.is_saved or end <= followed.stored:
            return None
        # From the first token: what is there is not copied again, what was evicted is made whole.
        store = self._transfer(followed, end)
        if any(self.unsure.get(block, 0) > self.step for block in store.blocks):
            return None
        followed.stored = end
        return store

    def _transfer(self, followed: Followed, num_tokens: int, local: int = 0) -> Transfer:
        name = followed.request.request_id
        tokens = named_tokens(followed.request, num_tokens)
        blocks = self._blocks(name)[: num_tokens // self.block_size]
        return Transfer(name, tokens, blocks, followed.tags, local)

    def _blocks(self, request_id: str) -> list[int]:
        return self._kv_cache_manager.get_block_ids(request_id)[0]

    def update_connector_output(self, connector_output: Any) -> None:
        """A step's answer: maybe blocks that could not be loaded. vLLM computes them again, but not
        what others have computed from them: nothing more that stands on them is stored or shared.
        """
        failed = connector_output.invalid_block_ids or set()
        tainted = set(failed)
        for name, followed in self.followed.items() if failed else ():
            blocks = self._blocks(name)
            if at := [at for at, block in enumerate(blocks) if block in failed]:
                followed.is_saved = False
                tainted.update(blocks[at[0] :])
        if tainted:
            self._kv_cache_manager.evict_blocks(tainted)  # from vLLM's own prefix cache

    # -- in each worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """vLLM's pages, one tensor a layer: now it is known what a chunk is, the engine starts."""
        config, layers, layout = self._vllm_config, list(kv_caches.values()), self.own["layout"]
        on_cpu = layers[0].device.type == "cpu"
        if layout == "auto" and on_cpu:
            layout = "blocks"
        name = model_name(config, list(kv_caches), on_cpu, layout, self.own["model_name"])
        num_kv = 1 if config.model_config.use_mla else 2
        views, layout, (num_kv, heads, dim) = page_views(layers, layout, self.block_size, num_kv)
        kv_shape = (len(layers), num_kv, self.config.chunk_size, heads, dim)
        metadata = self._metadata(name, self.rank, layers[0].dtype, kv_shape)
        remote = remote_of(self.config, float(self.own["remote_timeout_sec"]))
        self.engine = LMCacheEngine(self.config, metadata, self.own["device"], remote)
        self.engine.register_kv_caches(views, layout)
        lookups = LMCacheLookupServer(self.engine, metadata)
        offloads = ZMQOffloadServer(self.engine, self.rank)
        self.closing = [lookups, offloads, self.engine, *([remote] if remote else [])]
        self.bad_blocks: set[int] = set()
        logger.info("rank %d keeps %s on %s", self.rank, name, self.own["device"])

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        meta = self._get_connector_metadata()
        for load in meta.loads:
            self._load(load)
        for lookup_id in meta.unpins:
            self.engine.lookup_unpin(lookup_id)

    def _load(self, load: Transfer) -> None:
        start = load.local - load.local % self.config.chunk_size
        mask = torch.arange(len(load.tokens)) >= start  # [T]
        # A chunk that vLLM has in part is loaded whole: that part to the null block, for nobody.
        own = load.local // self.block_size
        slots = self._slots([NULL_BLOCK] * own + load.blocks[own:])
        there, wanted = start, len(load.tokens)
        try:
            loaded = self.engine.retrieve(
                load.tokens, mask, slot_mapping=slots, request_configs=load.tags
            )
            there += int(loaded.sum())
        except Exception:
            logger.exception("load of request %s failed", load.request_id)
        if there < wanted:
            logger.warning("request %s: %d of %d tokens loaded", load.request_id, there, wanted)
            self.bad_blocks.update(load.blocks[max(there, load.local) // self.block_size :])

    def wait_for_save(self) -> None:
        for store in self._get_connector_metadata().stores:
            if not self.bad_blocks.isdisjoint(store.blocks):
                continue
            slots = self._slots(store.blocks)
            try:
                self.engine.store(store.tokens, slot_mapping=slots, request_configs=store.tags)
            except Exception:
                logger.exception("store of request %s failed", store.request_id)

    def _slots(self, blocks: list[int]) -> torch.Tensor:
        inside = torch.arange(self.block_size)  # [N]
        return (torch.tensor(blocks)[:, None] * self.block_size + inside).flatten()  # [T]

    def get_block_ids_with_load_errors(self) -> set[int]:
        bad, self.bad_blocks = self.bad_blocks, set()
        return bad

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything was loaded before the forward pass."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        """Everything is stored after the forward pass."""

    def shutdown(self) -> None:
        for one in self.closing:
            one.close()
