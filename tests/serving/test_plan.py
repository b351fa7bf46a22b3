"""What the connector plans and refuses, in this process: vLLM's classes are real, no model runs."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch
import vllm_connector
from test_names import make_request
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm_connector import KVOffloadConnector, read_settings, remote_of
from vllm_names import check_pages, model_name

BLOCK, CHUNK = 4, 8
ATTENTION = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}


def pages(*specs) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer {index}"], spec) for index, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks=10, kv_cache_tensors=[], kv_cache_groups=groups)


class Client:
    """In place of LMCacheLookupClient: hits are of prompts that begin with a token."""

    def __init__(self, config, metadata):
        self.metadata, self.hits, self.lookups = metadata, {}, []

    def lookup(self, tokens, lookup_id, tags):
        self.lookups.append((lookup_id, tags))
        return min(self.hits.get(tokens[0], 0), len(tokens) // CHUNK * CHUNK)

    def clear_lookup_status(self, lookup_id):
        pass

    def close(self):
        pass


class Scheduler:
    """vLLM's scheduler as the connector sees it: tables of blocks, and requests in steps."""

    def __init__(
        self,
        monkeypatch,
        ahead: int = 2,
        ranks: int = 1,
        role: str = "kv_both",
        chunked: int = 10**6,
        **extra,
    ):
        monkeypatch.setattr(vllm_connector, "LMCacheLookupClient", Client)
        transfer = KVTransferConfig(
            kv_connector="KVOffloadConnector",
            kv_connector_module_path="vllm_connector",
            kv_role=role,
            kv_connector_extra_config={"chunk_size": CHUNK, **extra},
        )
        parallel = SimpleNamespace(
            rank=0,
            world_size=ranks,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        )
        config = SimpleNamespace(
            kv_transfer_config=transfer, parallel_config=parallel, max_concurrent_batches=ahead,
            cache_config=SimpleNamespace(block_size=BLOCK),
        )  # fmt: skip
        self.connector = KVOffloadConnector(
            config, KVConnectorRole.SCHEDULER, pages(FullAttentionSpec(**ATTENTION))
        )
        self.client = self.connector.client
        self.requests, self.computed, self.tables, self.free = {}, {}, {}, list(range(1, 1000))
        self.evicted: set[int] = set()  # from vLLM's prefix cache: nobody new shares them
        manager = SimpleNamespace(
            get_block_ids=lambda name: ([*self.tables.get(name, [])],),
            evict_blocks=self.evicted.update,
            block_pool=None,
        )
        self.connector.bind_kv_cache_manager(manager)
        self.chunked = chunked  # tokens computed for a request in one step, at most

    def add(self, request_id: str, tokens: list[int], local: list[int] = (), **fields) -> None:
        """Admits a request. local: blocks of others that it shares."""
        request = make_request(
            tokens,
            request_id=request_id,
            num_tokens=len(tokens),
            prompt_embeds=None,
            skip_reading_prefix_cache=False,
            **fields,
        )
        self.requests[request_id] = request
        external, waits = self.connector.get_num_new_matched_tokens(request, len(local) * BLOCK)
        assert not waits
        needed = -(-len(tokens) // BLOCK) - len(local)
        self.tables[request_id] = [*local, *(self.free.pop(0) for _ in range(needed))]
        self.connector.update_state_after_alloc(request, None, external)
        self.computed[request_id] = len(local) * BLOCK + external

    def finish(self, request_id: str) -> None:
        self.connector.request_finished(self.requests.pop(request_id), [])
        mine = self.tables.pop(request_id)
        self.free += set(mine).difference(*self.tables.values())
        del self.computed[request_id]

    def take_back(self, failed: set[int]) -> None:
        """As vLLM does: to a block that failed, for the first request that has it."""
        marked: set[int] = set()
        for name, table in self.tables.items():
            computed = table[: -(-self.computed[name] // BLOCK)]
            if hit := [at for at, block in enumerate(computed) if block in failed - marked]:
                self.computed[name] = hit[0] * BLOCK
            marked |= failed & set(computed)

    def step(self):
        """The plan of one step, and what it computes: {request: (from, to)}."""
        ends = {
            name: min(request.num_tokens, self.computed[name] + self.chunked)
            for name, request in self.requests.items()
        }
        ranges = {
            name: (self.computed[name], end)
            for name, end in ends.items()
            if end > self.computed[name]
        }
        output = SimpleNamespace(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=SimpleNamespace(
                req_ids=list(ranges), num_computed_tokens=[start for start, _ in ranges.values()]
            ),
            num_scheduled_tokens={name: end - start for name, (start, end) in ranges.items()},
        )
        self.computed |= {name: end for name, (_, end) in ranges.items()}
        return self.connector.build_connector_meta(output), ranges

    def grow(self, request_id: str, tokens: list[int]) -> None:
        request = self.requests[request_id]
        request.all_token_ids = request.all_token_ids + tokens
        request.num_tokens = len(request.all_token_ids)
        while len(self.tables[request_id]) * BLOCK < request.num_tokens:
            self.tables[request_id].append(self.free.pop(0))


def stored(meta) -> dict[str, int]:
    return {store.request_id: len(store.tokens) for store in meta.stores}


def prompt(first: int, chunks: int = 2, more: int = 1) -> list[int]:
    return [first] * (chunks * CHUNK + more)


# --------------------------------------------------------------------------------------------------
# Stores


@pytest.mark.parametrize("ahead, ranks", [(1, 1), (2, 1), (1, 2), (3, 2)])
def test_new_prompts_are_stored_while_others_load(monkeypatch, ahead: int, ranks: int) -> None:
    """Answers of one token, in every step a hit and a new prompt: a load keeps no other waiting."""
    scheduler = Scheduler(monkeypatch, ahead, ranks)
    scheduler.client.hits[1] = 2 * CHUNK
    kept = []
    for step in range(38):
        scheduler.add(f"hit {step}", prompt(1))
        scheduler.add(f"new {step}", prompt(100 + step))
        meta, _ = scheduler.step()
        assert [load.request_id for load in meta.loads] == [f"hit {step}"]
        kept += stored(meta)
        scheduler.finish(f"hit {step}")
        scheduler.finish(f"new {step}")
    assert kept == [f"new {step}" for step in range(38)]


@pytest.mark.parametrize("ahead, ranks, waits", [(1, 1, 0), (2, 1, 2), (1, 2, 1), (3, 2, 3)])
def test_whoever_loads_stores_once_the_answer_is_there(
    monkeypatch, ahead: int, ranks: int, waits: int
) -> None:
    """The step that loads computes the tail; others that load later do not make it wait longer."""
    scheduler = Scheduler(monkeypatch, ahead, ranks)
    scheduler.client.hits |= dict.fromkeys(range(1, 10), 2 * CHUNK)
    scheduler.add("0", prompt(1, chunks=3))
    for step in range(waits):
        meta, _ = scheduler.step()
        assert stored(meta) == {}
        scheduler.grow("0", [1])
        scheduler.add(f"{step + 1}", prompt(step + 2))
    assert stored(scheduler.step()[0])["0"] == 3 * CHUNK


def test_whoever_shares_a_loaded_block_waits_too(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch, ahead=2)
    scheduler.client.hits[1] = 2 * CHUNK
    scheduler.add("loads", prompt(1))
    scheduler.client.hits.clear()
    scheduler.add("shares", prompt(1, chunks=3), local=scheduler.tables["loads"][:4])
    for expected in ({}, {}, {"loads": 0, "shares": 3 * CHUNK}):
        found = stored(scheduler.step()[0])
        assert found.get("shares") == expected.get("shares")
        scheduler.grow("shares", [1])


def test_what_failed_to_load_is_neither_stored_nor_shared(monkeypatch) -> None:
    """vLLM takes the first request with such a block back; others that share it go on."""
    scheduler = Scheduler(monkeypatch, ahead=1, ranks=2)
    scheduler.client.hits[1] = 2 * CHUNK
    scheduler.add("loads", prompt(1, chunks=3))
    scheduler.client.hits.clear()
    scheduler.add("shares", prompt(1, chunks=3), local=scheduler.tables["loads"][:4])
    scheduler.add("other", prompt(2, chunks=3))
    assert stored(scheduler.step()[0]) == {"other": 3 * CHUNK}
    failed = set(scheduler.tables["loads"][2:4])
    scheduler.connector.update_connector_output(SimpleNamespace(invalid_block_ids=failed))
    assert scheduler.evicted == {*scheduler.tables["loads"][2:], *scheduler.tables["shares"][2:]}
    scheduler.computed["loads"] = 2 * BLOCK
    for name in scheduler.requests:
        scheduler.grow(name, [1] * CHUNK)
    assert stored(scheduler.step()[0]) == {"other": 4 * CHUNK}
    scheduler.finish("loads")
    scheduler.add("again", prompt(1, chunks=3))
    assert stored(scheduler.step()[0]) == {"again": 3 * CHUNK}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("ahead, ranks", [(1, 2), (2, 1), (3, 2)])
def test_nothing_wrong_is_ever_stored(monkeypatch, seed: int, ahead: int, ranks: int) -> None:
    """Loads that fail at random, blocks shared and reused; what follows a wrong block is wrong."""
    chance = random.Random(seed)
    scheduler = Scheduler(monkeypatch, ahead, ranks, chunked=3 * BLOCK)
    scheduler.client.hits = {first: chance.choice([0, CHUNK, 3 * CHUNK]) for first in range(4)}
    scheduler.client.hits[4] = CHUNK
    wrong, answers, total, failures = set(), [], 0, 0
    for number in range(300):
        # The answer of `ahead` steps ago comes before this step is planned.
        if len(answers) == ahead and (failed := answers.pop(0)):
            answer = SimpleNamespace(invalid_block_ids=failed)
            scheduler.connector.update_connector_output(answer)
            scheduler.take_back(failed)
        if len(scheduler.requests) < 4:
            first = chance.randrange(5)
            sharing = [
                name for name, one in scheduler.requests.items() if one.all_token_ids[0] == first
            ]
            local = (
                scheduler.tables[sharing[0]][: scheduler.computed[sharing[0]] // BLOCK]
                if sharing
                else []
            )
            local = [*itertools.takewhile(lambda block: block not in scheduler.evicted, local)]
            scheduler.add(f"{number}", prompt(first, chunks=4), local=local[: 4 * CHUNK // BLOCK])
            scheduler.evicted -= set(scheduler.tables[f"{number}"][len(local) :])
        meta, ranges = scheduler.step()
        failed = set()
        for load in meta.loads:
            loaded = load.blocks[load.local // BLOCK :]
            wrong -= set(loaded)
            if chance.random() < 0.3:
                failed |= set(loaded[chance.randrange(len(loaded)) :])
                failures += 1
        wrong |= failed
        answers.append(failed)
        for name, (start, end) in ranges.items():
            table = scheduler.tables[name]
            before, now = table[: start // BLOCK], table[start // BLOCK : -(-end // BLOCK)]
            wrong = wrong | set(now) if wrong & set(before) else wrong - set(now)
        for store in meta.stores:  # of a rank that has not failed itself
            assert not wrong & set(store.blocks), f"step {number}: {store}"
            total += 1
        for name in [
            name for name in scheduler.requests if name not in ranges or chance.random() < 0.1
        ]:
            scheduler.finish(name)
    assert total > 5 and failures > 5


def test_a_null_block_is_not_stored(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch, ahead=1)
    scheduler.add("0", prompt(1))
    scheduler.tables["0"][0] = 0
    scheduler.add("1", prompt(2))
    assert stored(scheduler.step()[0]) == {"1": 2 * CHUNK}


# --------------------------------------------------------------------------------------------------
# Lookups and their pins


def test_each_lookup_has_an_id_of_its_own_and_is_unpinned(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch)
    scheduler.client.hits[1] = CHUNK
    scheduler.add("hit", prompt(1))
    scheduler.add("miss", prompt(2))
    unpins = scheduler.step()[0].unpins
    for name in (
        "hit",
        "miss",
    ):  # preempted, and back: looked up again before the workers have seen the step
        request = scheduler.requests[name]
        scheduler.connector.get_num_new_matched_tokens(request, 0)
        scheduler.connector.get_num_new_matched_tokens(request, 0)  # no room yet: asked again
        scheduler.connector.request_finished(request, [])
    ids = [lookup_id for lookup_id, _ in scheduler.client.lookups]
    assert len(set(ids)) == len(ids) == 4 and unpins == ids[:2]
    scheduler.requests.clear()
    assert scheduler.step()[0].unpins == ids[2:]


def test_a_lookup_that_fails_is_a_miss(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch)
    monkeypatch.setattr(scheduler.client, "lookup", lambda *_: 1 / 0)
    scheduler.add("0", prompt(1))
    meta, _ = scheduler.step()
    assert not meta.loads and len(meta.unpins) == 1 and stored(meta) == {"0": 2 * CHUNK}


def test_a_reset_makes_waiting_requests_look_again(monkeypatch) -> None:
    """And what runs on from before it stores nothing that anybody finds."""
    scheduler = Scheduler(monkeypatch)
    scheduler.client.hits[1] = 2 * CHUNK
    scheduler.add("runs", prompt(2))
    waiting = make_request(
        prompt(1),
        request_id="waits",
        num_tokens=17,
        prompt_embeds=None,
        skip_reading_prefix_cache=False,
    )
    assert scheduler.connector.get_num_new_matched_tokens(waiting, 0) == (2 * CHUNK, False)
    assert scheduler.connector.reset_cache()
    scheduler.connector.get_num_new_matched_tokens(waiting, 0)
    (_, runs), (first, before), (second, after) = scheduler.client.lookups
    assert runs == before is None and after is not None and first != second
    meta, _ = scheduler.step()
    assert meta.stores[0].tags is None and first in meta.unpins and second not in meta.unpins


def test_whoever_was_preempted_is_followed_anew(monkeypatch) -> None:
    """Here after a reset: it is looked up, loaded and stored under the new tag, from the start."""
    scheduler = Scheduler(monkeypatch, ahead=1)
    scheduler.add("0", prompt(1))
    assert [store.tags for store in scheduler.step()[0].stores] == [None]
    scheduler.connector.reset_cache()
    scheduler.client.hits[1] = CHUNK
    request = scheduler.requests["0"]
    assert scheduler.connector.get_num_new_matched_tokens(request, 0) == (CHUNK, False)
    scheduler.connector.update_state_after_alloc(request, None, CHUNK)
    scheduler.computed["0"] = CHUNK
    meta, _ = scheduler.step()
    (_, tags) = scheduler.client.lookups[-1]
    assert tags is not None and [load.tags for load in meta.loads] == [tags]
    assert stored(meta) == {"0": 2 * CHUNK} and meta.stores[0].tags == tags


# --------------------------------------------------------------------------------------------------
# Settings


@pytest.mark.parametrize(
    "role, loads, stores", [("kv_both", 1, 2), ("kv_producer", 0, 2), ("kv_consumer", 1, 0)]
)
def test_roles(monkeypatch, role: str, loads: int, stores: int) -> None:
    scheduler = Scheduler(monkeypatch, ahead=1, role=role)
    scheduler.client.hits[1] = CHUNK
    scheduler.add("hit", prompt(1))
    scheduler.add("new", prompt(2))
    meta, _ = scheduler.step()
    assert (len(meta.loads), len(meta.stores)) == (loads, stores)
    assert len(scheduler.client.lookups) == 2 * loads


def test_tags_and_skip_save_of_a_request(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch, ahead=1)
    scheduler.add("plain", prompt(1))
    scheduler.add("alice", prompt(1), kv_transfer_params={"lmcache.tag.user": "alice"})
    scheduler.add("skips", prompt(1), kv_transfer_params={"lmcache.skip_save": True})
    meta, _ = scheduler.step()
    tags = [tags for _, tags in scheduler.client.lookups]
    assert tags[0] is tags[2] is None and [*tags[1]] == ["lmcache.tag.for"]
    assert {store.request_id: store.tags for store in meta.stores} == {
        "plain": None,
        "alice": tags[1],
    }


def test_pictures_are_in_lookups_and_stores(monkeypatch) -> None:
    scheduler = Scheduler(monkeypatch, ahead=1)
    seen = []
    monkeypatch.setattr(scheduler.client, "lookup", lambda tokens, *_: seen.append(tokens) or 0)
    for name in ("cat", "dog"):
        scheduler.add(name, [*range(24), 99], pictures={CHUNK: (name, 3)})
    meta, _ = scheduler.step()
    assert [store.tokens for store in meta.stores] == seen
    assert (
        seen[0][:CHUNK] == seen[1][:CHUNK]
        and seen[0][CHUNK] != seen[1][CHUNK]
        and seen[0][11:] == seen[1][11:]
    )


def test_an_adapter_without_files_is_not_cached(monkeypatch, tmp_path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_model.safetensors").write_bytes(b"1234")
    scheduler = Scheduler(monkeypatch, ahead=1)
    for number, name in enumerate(("nothing", "broken")):
        lora = SimpleNamespace(lora_path=str(tmp_path / name), lora_int_id=91, load_inplace=False)
        scheduler.add(f"{number}", prompt(1), lora_request=lora)
    meta, _ = scheduler.step()
    assert meta.stores == [] == scheduler.client.lookups


def test_settings_go_over_the_environment_and_that_over_the_file(monkeypatch, tmp_path) -> None:
    file = tmp_path / "lmcache.toml"
    file.write_text("chunk_size = 32\nmax_local_cpu_size = 1.0\nlookup_timeout_ms = 1\n")
    monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(file))
    monkeypatch.setenv("LMCACHE_MAX_LOCAL_CPU_SIZE", "2")
    monkeypatch.setenv("LMCACHE_LOOKUP_TIMEOUT_MS", "2")
    own, config = read_settings(
        {"lmcache.lookup_timeout_ms": 3, "device": "cpu", "lmcache_rpc_port": "a"}, block_size=16
    )
    assert (config.chunk_size, config.max_local_cpu_size, config.lookup_timeout_ms) == (32, 2, 3)
    assert (own["device"], own["lmcache_rpc_port"], own["remote_timeout_sec"]) == ("cpu", "a", 5.0)


@pytest.mark.parametrize(
    "settings, said",
    [
        ({"chunck_size": 16}, "(?s)chunck_size.*chunk_size.*remote_timeout_sec"),
        ({"chunk_size": 24}, "multiple of vLLM's block_size = 16"),
        ({"chunk_size": "many"}, "chunk_size"),
        ({"save_unfull_chunk": True}, "save_unfull_chunk"),
        ({"enable_blending": True}, "enable_blending"),
        ({"extra_config": {"save_only_first_rank": True}}, "save_only_first_rank"),
    ],
)
def test_settings_that_are_refused(settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_settings(settings, block_size=16)


@pytest.mark.parametrize("scheme", ["lm", "valkey", "redis"])
def test_the_remote_that_a_url_names(scheme: str) -> None:
    if scheme != "lm":
        pytest.importorskip("valkey", reason="pip install -r requirements/valkey.txt")
    _, config = read_settings({"remote_url": f"{scheme}://127.0.0.1:1"}, block_size=16)
    remote = remote_of(config, 0.1)
    kind = "RemoteClient" if scheme == "lm" else "ValkeyRemote"
    assert type(remote).__name__ == kind
    with pytest.raises(OSError):  # nobody is there, and nobody waits
        remote.exists_many(["m@1@0@1@half"])
    remote.close()


def test_no_remote() -> None:
    assert remote_of(read_settings({}, block_size=16)[1], 1.0) is None


def test_an_unknown_scheme_lists_the_known_and_tells_no_password() -> None:
    with pytest.raises(ValueError, match="mooncake.*lm://, lms://, valkey://.*rediss://") as error:
        read_settings({"remote_url": "mooncake://user:secret@host:1"}, block_size=16)
    assert "secret" not in str(error.value)


def test_the_schedulers_metadata_has_the_chunk_size(monkeypatch) -> None:
    metadata = Scheduler(monkeypatch, chunk_size=4 * BLOCK).client.metadata
    assert metadata.chunk_size == metadata.kv_shape[2] == 4 * BLOCK


# --------------------------------------------------------------------------------------------------
# Models


WINDOW = SlidingWindowSpec(**ATTENTION, sliding_window=256)
FULL = FullAttentionSpec(**ATTENTION)
MAMBA = MambaSpec(block_size=BLOCK, shapes=((2, 2),), dtypes=(torch.float32,))
LOCAL = ChunkedLocalAttentionSpec(**ATTENTION, attention_chunk_size=256)


@pytest.mark.parametrize(
    "specs, name",
    [
        ([WINDOW], "SlidingWindowSpec"),
        ([FULL, WINDOW], "SlidingWindowSpec"),
        ([MAMBA], "MambaSpec"),
        ([LOCAL], "ChunkedLocalAttentionSpec"),
        ([FullAttentionSpec(**ATTENTION, non_causal=True)], "non-causal"),
        (
            [UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": WINDOW, "b": WINDOW})],
            "SlidingWindowSpec",
        ),
        ([FULL, FULL], "2 groups"),
        ([], "0 groups"),
    ],
)
def test_models_that_are_refused(specs: list, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        check_pages(pages(*specs))


@pytest.mark.parametrize(
    "spec",
    [
        FULL,
        MLAAttentionSpec(**ATTENTION),
        FullAttentionSpec(
            **ATTENTION, sliding_window=256
        ),  # Gemma 3, as vLLM gives it to a connector
        UniformTypeKVCacheSpecs(block_size=BLOCK, kv_cache_specs={"a": FULL, "b": FULL}),
    ],
)
def test_models_that_are_taken(spec) -> None:
    check_pages(pages(spec))


def test_ranks_that_split_a_model_differently_share_no_name(model) -> None:
    """TP=2 and PP=2 have both a rank 1 of 2."""
    facts = SimpleNamespace(
        model=str(model), revision=None, quantization=None, dtype=torch.float32,
        hf_config=SimpleNamespace(to_dict=lambda: {"hidden_size": 8}),
    )  # fmt: skip
    names = set()
    for tp, pp, layers in (
        (2, 1, "abcd"),
        (1, 2, "ab"),
        (1, 2, "cd"),
        (1, 1, "abcd"),
        (1, 1, "abcd"),
    ):
        config = SimpleNamespace(
            model_config=facts,
            speculative_config=None,
            cache_config=SimpleNamespace(cache_dtype="auto"),
            load_config=SimpleNamespace(download_dir=None),
            parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp),
        )
        names.add(model_name(config, [*layers], False, "2BNHD", ""))
    assert len(names) == 4 and all(name.startswith("smollm2-") for name in names)
