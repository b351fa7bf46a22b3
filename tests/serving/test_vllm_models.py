"""What a real vLLM has loaded: other weights share nothing, windows are right or refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from llm_process import LLMProcess
from remotes import RemoteServer
from safetensors.torch import load_file, save_file

BLOCK = 128
F32 = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 1 << 28,
    "enable_prefix_caching": False,
}


def test_other_weights_in_the_same_folder_after_a_restart(
    model: Path, text: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And LMCACHE_CONFIG_FILE, LMCACHE_<FIELD> and the connector's own settings together."""
    folder, settings = tmp_path / "model", {**F32, "kv_cache_memory_bytes": 1 << 30}
    shutil.copytree(model, folder)
    prompt = text[:700]
    with RemoteServer() as remote:
        (tmp_path / "lmcache.json").write_text(
            json.dumps({"remote_url": remote.url, "chunk_size": 1})
        )
        monkeypatch.setenv("LMCACHE_CONFIG_FILE", str(tmp_path / "lmcache.json"))
        monkeypatch.setenv("LMCACHE_CHUNK_SIZE", str(BLOCK))
        connector = {"max_local_cpu_size": 1, "remote_timeout_sec": 9}
        with LLMProcess(folder, tmp_path / "first.log", connector, **settings) as llm:
            (cold,) = llm.generate([prompt], max_tokens=8)
            assert llm.call("flush")
        (weights,) = folder.glob("*.safetensors")
        tensors = load_file(weights)
        tensors["model.layers.7.self_attn.k_proj.weight"] *= 1.5
        save_file(tensors, weights, metadata={"format": "pt"})
        with LLMProcess(folder, tmp_path / "changed.log", connector, **settings) as llm:
            (changed,) = llm.generate([prompt], max_tokens=8)
        other = tmp_path / "elsewhere" / "model"  # the first weights, in another folder
        shutil.copytree(model, other)
        with LLMProcess(other, tmp_path / "back.log", connector, **settings) as llm:
            (back,) = llm.generate([prompt], max_tokens=8)
    assert [answer["cached"] for answer in (cold, changed, back)] == [0, 0, 5 * BLOCK]
    assert back["tokens"] == cold["tokens"]


def write_adapter(folder: Path, seed: int) -> None:
    """A LoRA adapter of SmolLM2's value projections, strong enough to be seen in what comes out."""
    torch.manual_seed(seed)
    names = [f"base_model.model.model.layers.{layer}.self_attn.v_proj" for layer in range(30)]
    tensors = {f"{name}.lora_A.weight": torch.randn(8, 576) / 4 for name in names}
    tensors |= {f"{name}.lora_B.weight": torch.randn(192, 8) / 4 for name in names}
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"r": 8, "lora_alpha": 8, "target_modules": ["v_proj"], "peft_type": "LORA"}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_an_adapter_reloaded_in_place(model: Path, text: list[int], tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", seed=1)
    lora = {"lora_name": "a", "lora_int_id": 1, "lora_path": str(tmp_path / "adapter")}
    settings = {**F32, "kv_cache_memory_bytes": 1 << 30, "enable_lora": True, "max_lora_rank": 8}
    connector = {"chunk_size": BLOCK, "max_local_cpu_size": 1}
    with LLMProcess(model, tmp_path / "log", connector, **settings) as llm:

        def ask(lora: dict | None) -> tuple[int, list[int]]:
            (answer,) = llm.generate([text[:700]], max_tokens=8, lora=lora)
            return answer["cached"], answer["tokens"]

        plain, first, again = ask(None), ask(lora), ask(lora)
        write_adapter(tmp_path / "adapter", seed=2)
        not_yet = ask(lora)  # vLLM still computes with what it loaded
        lora["load_inplace"] = True
        second, second_again = ask(lora), ask(lora)
    answers = [plain, first, again, not_yet, second, second_again]
    assert [cached for cached, _ in answers] == [0, 0, 640, 640, 0, 640]
    assert first[1] == again[1] == not_yet[1] and second[1] == second_again[1]
    assert len({tuple(tokens) for _, tokens in (plain, first, second)}) == 3


TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 512,
    "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 2048,
}  # fmt: skip
RANDOM = {"skip_tokenizer_init": True, "load_format": "safetensors"}


def test_a_model_of_windows_alone_is_refused_by_name(tmp_path: Path) -> None:
    config = {
        **TINY,
        "num_hidden_layers": 2,
        "sliding_window": 256,
        "architectures": ["MistralForCausalLM"],
    }
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mistral"}))
    settings = {**F32, **RANDOM, "load_format": "dummy"}
    with pytest.raises(RuntimeError, match="vLLM ended"):
        LLMProcess(tmp_path, tmp_path / "log", {"chunk_size": BLOCK}, **settings)
    log = (tmp_path / "log").read_text()
    assert "ValueError: KVOffloadConnector" in log and "['SlidingWindowSpec']" in log


def test_five_windows_to_one_full_layer(tmp_path: Path) -> None:
    """As Gemma 3: right in both kinds of layers, also where a prompt is longer than the window."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    kinds = ["sliding_attention"] * 5 + ["full_attention"]
    config = Gemma3TextConfig(**TINY, num_hidden_layers=6, sliding_window=256, layer_types=kinds)
    # So that what comes out depends on what went before, and not on the last token alone.
    torch.manual_seed(0)
    config.initializer_range, config.tie_word_embeddings = 0.3, False
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma")
    prompt = [3 + index * index % 500 for index in range(1024)]
    questions = [prompt, prompt + prompt[:200], prompt[:400] + prompt[500:530]]
    with LLMProcess(tmp_path / "gemma", tmp_path / "plain.log", None, **F32, **RANDOM) as llm:
        alone = [llm.generate([one], max_tokens=24)[0] for one in questions]
    with LLMProcess(
        tmp_path / "gemma", tmp_path / "log", {"chunk_size": BLOCK}, **F32, **RANDOM
    ) as llm:
        llm.generate(questions[:1], max_tokens=24)
        warm = [llm.generate([one], max_tokens=24)[0] for one in questions]
    assert [one["cached"] for one in warm] == [7 * BLOCK, 8 * BLOCK, 3 * BLOCK]
    assert [one["tokens"] for one in warm] == [one["tokens"] for one in alone]
    # One prompt's KV would not be right for another's.
    assert len({tuple(one["tokens"]) for one in alone}) == 3
