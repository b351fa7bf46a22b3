"""vllm_names.py - what a chunk of vLLM's KV is, for vllm_connector.py: its pages and its name.

    model@world_size@rank@hash@dtype@tag          one chunk's name
    |                     |          `- request_tags: LoRA adapter, cache_salt, tenant, resets
    |                     `- of named_tokens: what stands in the chunk and before it, pictures too
    `- model_name: the weights that were loaded, config, which layers

Everything is the same on every machine that has the same files: no path, no time, no process id.

Not here: weights that change in memory alone. Who changes them tells vLLM so, by
reset_prefix_cache(reset_connector=True).
"""

import functools
import hashlib
import json
import logging
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec

logger = logging.getLogger("vllm.lmcache_connector")

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.gguf", "*.pt", "*.pth", "adapter_config.json")
STRIDE_BYTES = 1 << 20  # from one sample to the next: 100 GB are 100,000 samples, about 0.5 s
SAMPLE_BYTES = 256
PICTURE_ID = 1 << 60  # above every token id, and twice it is below 2**63: ids are signed
TAG, SKIP_SAVE = "lmcache.tag.", "lmcache.skip_save"  # in a request's kv_transfer_params


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


# --------------------------------------------------------------------------------------------------
# Pages


def check_pages(kv_cache_config: Any) -> None:
    """ValueError unless every layer has pages for every token of a request, until it ends.

    Full attention has, and so have windows among full layers (Gemma 3): vLLM then gives them pages
    like the full ones. Windows alone give up their first pages, and a Mamba layer has one state for
    a whole prompt. KV of a non-causal layer depends on what comes after its token.
    """
    groups = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    specs = [one for spec in groups for one in getattr(spec, "kv_cache_specs", {"": spec}).values()]
    strange = {
        type(spec).__name__ + " (non-causal)" * getattr(spec, "non_causal", False)
        for spec in specs
        if type(spec) not in (FullAttentionSpec, MLAAttentionSpec) or spec.non_causal
    }
    if strange or len(groups) != 1:
        raise ValueError(
            f"KVOffloadConnector: one group of KV cache layers with full attention is supported, "
            f"this model has {len(groups)} groups, {sorted(strange) or 'all with full attention'}"
        )


def page_views(
    layers: list[torch.Tensor], layout: str, block_size: int, num_kv: int
) -> tuple[list, str, tuple]:
    """The layers as engine.PagedKVCache takes them, their layout's name there, and (K, H, D)."""
    if layout == "blocks":
        # A block is so many bytes, whatever they mean: [B, H, N, 2*D] in vLLM becomes
        # [B, N, H*2*D], as MLA's one latent. Subtle: a slot of it is no token; it is right as long
        # as only whole blocks move, and ours do.
        layers = [layer.view(len(layer), block_size, -1) for layer in layers]
        return layers, "BNC", (1, 1, layers[0].shape[-1])
    shape = layers[0].shape
    if layout == "auto":
        names = {3: "BNC", 4: "BHNC", 5: "2BNHD" if len(layers[0]) == 2 else "B2NHD"}
        layout = names.get(len(shape), "")
    sizes = dict(zip(layout, shape, strict=False))  # what does not fit is the engine's to refuse
    dim = sizes.get("D", sizes.get("C", num_kv) // num_kv)
    return layers, layout, (num_kv, sizes.get("H", 1), dim)


# --------------------------------------------------------------------------------------------------
# Weights


def weights_digest(model: str, revision: str | None = None, cache_dir: str | None = None) -> str:
    """Of a model's or an adapter's weight files: their names, sizes, and samples of their bytes.

    model: a folder, a file, or a Hugging Face id whose files are on this machine; else it is a
    FileNotFoundError.

    In a .safetensors file each tensor is sampled at its first byte, in its middle and every
    STRIDE_BYTES, so whatever rewrites a layer is seen. In the other formats it is every
    STRIDE_BYTES of the file. What it cannot see: a change that leaves every size and every sample
    as it was, such as a few elements edited by hand, or in other formats a tensor between samples.
    """
    found = hashlib.sha256()
    for path in weight_files(model, revision, cache_dir):
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            found.update(repr((path.name, size)).encode())
            for offset, length in samples(file, size):
                found.update(os.pread(file.fileno(), length, offset))
    return found.hexdigest()[:16]


def weight_files(model: str, revision: str | None, cache_dir: str | None) -> list[Path]:
    path = Path(model)
    if not path.exists():
        from huggingface_hub import snapshot_download  # here: only an id needs it

        try:
            path = Path(
                snapshot_download(
                    model, revision=revision, cache_dir=cache_dir, local_files_only=True
                )
            )
        except (OSError, ValueError) as error:
            raise FileNotFoundError(f"no files of {model} on this machine: {error}") from error
    files = (
        [path]
        if path.is_file()
        else sorted({f for pattern in WEIGHT_FILES for f in path.glob(pattern)})
    )
    if not files:
        raise FileNotFoundError(f"no weight files in {path}: none is {', '.join(WEIGHT_FILES)}")
    return files


def samples(file: BinaryIO, size: int) -> Iterator[tuple[int, int]]:
    """Offsets and lengths of what is to be read of a file."""
    for offset in range(0, size, STRIDE_BYTES):
        yield offset, SAMPLE_BYTES
    if file.name.endswith(
        ".safetensors"
    ):  # 8 bytes with the header's length, the header in JSON, the tensors
        (header_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(header_bytes))
        yield 8, header_bytes
        for name, tensor in header.items():
            if name != "__metadata__":
                first, end = (8 + header_bytes + offset for offset in tensor["data_offsets"])
                yield first, SAMPLE_BYTES
                yield (first + end) // 2, SAMPLE_BYTES


def model_name(
    vllm_config: Any, layer_names: list[str], on_cpu: bool, layout: str, shown: str
) -> str:
    """Of a rank's part of the model: where it is the same, the bytes of a chunk mean the same."""
    config, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    # Which layers are here, and which part of each: TP=2 and PP=2 both have a rank 1 of 2.
    facts = [layer_names, parallel.tensor_parallel_size, parallel.pipeline_parallel_size]
    facts += [cache.cache_dtype, *_model_facts(vllm_config, config)]
    speculative = vllm_config.speculative_config
    draft = speculative and speculative.draft_model_config
    if draft and draft is not config:  # its layers have pages, too
        facts += _model_facts(vllm_config, draft)
    if on_cpu:
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # how it packs keys

        size = cache.block_size, config.get_head_size()
        facts.append(_get_attn_isa(config.dtype, *size, cache.cache_dtype))
    if layout == "blocks":
        import vllm

        facts += [vllm.__version__, cache.block_size]
    shown = (shown or config.model).rstrip("/").split("/")[-1]
    return f"{re.sub('[^A-Za-z0-9._-]', '_', shown)[:40]}-{digest(*facts)}"


def _model_facts(vllm_config: Any, config: Any) -> list[Any]:
    hf_config = config.hf_config.to_dict() | {"_name_or_path": None, "transformers_version": None}
    folder = vllm_config.load_config.download_dir
    try:
        weights = weights_digest(config.model, config.revision, folder)
    except (OSError, ValueError) as error:
        logger.warning("keys have the model's path, for its weights are unreadable: %s", error)
        weights = f"{config.model} {config.revision}"
    return [weights, config.quantization, config.dtype, hf_config]


@functools.lru_cache(maxsize=1024)
def _adapter_digest(path: str, adapter_id: int, files: tuple | None) -> str:
    return weights_digest(path)


def adapter_digest(lora: Any) -> str:
    """Of the LoRA adapter of a request, vLLM's LoRARequest.

    vLLM loads an adapter when it first sees its id, and one with load_inplace for each request. So
    does this: without load_inplace, files that change under a running vLLM are not what it computes
    with. What it cannot see is an adapter that fell out of vLLM's own cache (max_cpu_loras) and was
    loaded again, from other files.
    """
    files = None
    if lora.load_inplace:
        stats = [file.stat() for file in weight_files(lora.lora_path, None, None)]
        files = tuple((stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in stats)
    return _adapter_digest(lora.lora_path, lora.lora_int_id, files)


# --------------------------------------------------------------------------------------------------
# Requests: vLLM's Request has what it was asked with


def named_tokens(request: Any, num_tokens: int) -> list[int]:
    """The first num_tokens ids, as chunks are named by them: where a picture stands, its own ids.

    vLLM has the same placeholder id there for every picture (video, sound). With ids made of the
    item's identifier, prompts share chunks up to the first item that differs, and none beyond:

        [1, 5, 5, 5, 9] with an item of 3 at 1  ->  [1, P, P+1, P+2, 9],
        P = 2**60 + 60 bits of sha256(identifier)
    """
    tokens = list(request.all_token_ids[:num_tokens])
    for item in request.mm_features or ():
        first, length = item.mm_position.offset, item.mm_position.length
        length = min(length, num_tokens - first)  # the prefix may end inside it, or before
        if length > 0:
            own = hashlib.sha256(item.identifier.encode()).digest()
            start = PICTURE_ID + int.from_bytes(own[:8], "big") % PICTURE_ID
            tokens[first : first + length] = range(start, start + length)
    return tokens


def request_tags(request: Any, epoch: str) -> dict[str, str] | None:
    """Whom else the KV of a request depends on, as one tag of its keys; a digest always fits them.

    epoch: what it is after a reset of the cache, "" before.
    """
    params = request.kv_transfer_params or {}
    tenant = sorted((name, str(value)) for name, value in params.items() if name.startswith(TAG))
    adapter = adapter_digest(request.lora_request) if request.lora_request else None
    parts = (adapter, request.cache_salt, tenant, epoch)
    return {f"{TAG}for": digest(*parts)} if any(parts) else None


def is_saved(request: Any) -> bool:
    """Whether KV of the request may be kept. What we do not understand is not kept, and said."""
    params = request.kv_transfer_params or {}
    for name in params:
        if name.startswith("lmcache.") and not name.startswith(TAG) and name != SKIP_SAVE:
            logger.warning(
                "request %s: %s is not known; known are %sNAME, %s",
                request.request_id,
                name,
                TAG,
                SKIP_SAVE,
            )
    skip = params.get(SKIP_SAVE, False)
    if skip not in (True, False):
        logger.warning(
            "request %s: %s = %r is neither true nor false: not kept",
            request.request_id,
            SKIP_SAVE,
            skip,
        )
    return skip in (True, False) and not skip
