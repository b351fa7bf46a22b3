"""What a chunk of vLLM's KV is called (examples/vllm_names.py): other KV, another name."""

import json
import os
import shutil
import struct
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from vllm.lora.request import LoRARequest
from vllm_names import (
    STRIDE_BYTES,
    adapter_digest,
    is_saved,
    named_tokens,
    request_tags,
    weights_digest,
)

IMAGE = 5  # the placeholder id


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two layers with large and small tensors, in two files as of a sharded model."""
    torch.manual_seed(0)
    for layer in range(2):
        tensors = {
            f"{layer}.norm": torch.randn(8),
            f"{layer}.mlp": torch.randn(700, 700),
            f"{layer}.bias": torch.randn(8),
        }
        save_file(tensors, tmp_path / f"model-{layer}.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


# --------------------------------------------------------------------------------------------------
# Weights


def test_the_same_files_elsewhere_and_later_have_the_same_digest(
    folder: Path, tmp_path_factory
) -> None:
    other = tmp_path_factory.mktemp("other") / "name"
    shutil.copytree(folder, other)
    for file in other.iterdir():
        os.utime(file, (1, 1))
    (other / "config.json").write_text('{"other": 1}')  # no weight file: vLLM's hf_config says it
    assert weights_digest(str(folder)) == weights_digest(str(other))


@pytest.mark.parametrize("name", ["1.norm", "1.mlp", "1.bias"])
def test_one_other_tensor_is_another_digest(folder: Path, name: str) -> None:
    """Of every size: none lies between two samples."""
    from safetensors.torch import load_file

    before = weights_digest(str(folder))
    tensors = load_file(folder / "model-1.safetensors")
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
    assert weights_digest(str(folder)) == before
    tensors[name] += 0.01
    save_file(tensors, folder / "model-1.safetensors", metadata={"format": "pt"})
    assert weights_digest(str(folder)) != before


def test_one_file_more_or_another_name_is_another_digest(folder: Path) -> None:
    digests = [weights_digest(str(folder))]
    (folder / "extra.bin").write_bytes(bytes(10))
    digests.append(weights_digest(str(folder)))
    (folder / "extra.bin").rename(folder / "extra.pt")
    digests.append(weights_digest(str(folder)))
    assert len(set(digests)) == 3


@pytest.mark.parametrize("suffix", ["bin", "gguf", "pt"])
def test_other_formats_are_sampled_by_place(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model.{suffix}"
    data = bytearray(5 * STRIDE_BYTES)
    digests = set()
    for place in range(0, len(data), STRIDE_BYTES):
        data[place] = 1
        file.write_bytes(data)
        digests.add(weights_digest(str(file)))  # a file is given as it is, as for GGUF
    assert len(digests) == 5 and weights_digest(str(tmp_path)) in digests


def test_no_weights_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no weight files"):
        weights_digest(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="nobody/nothing"):
        weights_digest("nobody/nothing")


def test_a_hundred_gb_take_two_seconds(tmp_path: Path) -> None:
    """On a warm disk: the second time. 20 files, 2,000 tensors; holes are read as memory is."""
    for number in range(20):
        size, count = 5_000_000_000, 100
        ends = [size // count * index for index in range(count + 1)]
        spans = zip(ends[:-1], ends[1:], strict=True)
        header = {
            f"{number}.{first}": {
                "dtype": "U8",
                "shape": [end - first],
                "data_offsets": [first, end],
            }
            for first, end in spans
        }
        text = json.dumps(header).encode()
        with (tmp_path / f"model-{number:05}.safetensors").open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + size)
    first = weights_digest(str(tmp_path))
    began = time.perf_counter()
    assert weights_digest(str(tmp_path)) == first
    took = time.perf_counter() - began
    print(f"digest of 100 GB: {took:.2f} s")
    assert took < 2


def test_an_adapter_reloaded_in_place(folder: Path) -> None:
    def lora(number: int, load_inplace: bool) -> LoRARequest:
        return LoRARequest(
            lora_name="a", lora_int_id=number, lora_path=str(folder), load_inplace=load_inplace
        )

    before, loaded = adapter_digest(lora(1, True)), adapter_digest(lora(2, False))
    assert before == loaded
    (folder / "adapter_config.json").write_text('{"lora_alpha": 32}')
    assert adapter_digest(lora(1, True)) != before  # vLLM loads it again
    assert adapter_digest(lora(2, False)) == loaded  # vLLM does not
    assert adapter_digest(lora(3, False)) == adapter_digest(lora(1, True))


def test_an_adapter_is_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = []
    monkeypatch.setattr("vllm_names.weights_digest", lambda path: reads.append(path) or "digest")
    for _ in range(3):
        for number, inplace in ((71, True), (72, False)):
            adapter_digest(LoRARequest("a", number, str(folder), load_inplace=inplace))
    assert len(reads) == 2


# --------------------------------------------------------------------------------------------------
# Requests


def make_request(
    tokens: list[int] | None = None, pictures: dict[int, tuple[str, int]] | None = None, **fields
):
    """pictures: offset -> (identifier, length)."""
    features = [
        SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=offset, length=length))
        for offset, (name, length) in (pictures or {}).items()
    ]
    plain = {
        "request_id": "r",
        "lora_request": None,
        "cache_salt": None,
        "kv_transfer_params": None,
    }
    return SimpleNamespace(all_token_ids=tokens or [], mm_features=features, **{**plain, **fields})


def shared(one: list[int], other: list[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one)
    )


def test_a_picture_stands_in_its_own_ids() -> None:
    tokens = [*range(2000), *[IMAGE] * 100, *range(300)]
    cat, dog, cat_again = (
        named_tokens(make_request(tokens, {2000: (name, 100)}), 2400)
        for name in ("cat", "dog", "cat")
    )
    assert cat == cat_again and shared(cat, dog) == 2000
    assert [at for at in range(2400) if cat[at] != tokens[at]] == list(range(2000, 2100))
    assert not set(cat[2000:2100]) & set(dog[2000:2100])
    assert all(2**60 <= one < 2**63 for one in cat[2000:2100])


@pytest.mark.parametrize("num_tokens", [0, 9, 10, 11, 14, 15, 16, 30, 40])
def test_a_prefix_that_ends_before_in_or_after_pictures(num_tokens: int) -> None:
    request = make_request(list(range(40)), {10: ("cat", 5), 30: ("dog", 5)})
    prefix = named_tokens(request, num_tokens)
    assert prefix == named_tokens(request, 40)[:num_tokens] and len(prefix) == num_tokens


def test_two_pictures_in_a_row_are_not_one_of_both_lengths() -> None:
    tokens = [IMAGE] * 20
    assert named_tokens(
        make_request(tokens, {0: ("cat", 10), 10: ("cat", 10)}), 20
    ) != named_tokens(make_request(tokens, {0: ("cat", 20)}), 20)


def test_a_second_turn_that_adds_a_picture_shares_the_first() -> None:
    first = make_request([*range(600)], {100: ("cat", 50)})
    second = make_request([*range(700)], {100: ("cat", 50), 650: ("dog", 20)})
    assert shared(named_tokens(first, 600), named_tokens(second, 600)) == 600


def test_what_tags_tell_apart(folder: Path) -> None:
    lora = LoRARequest("a", 81, str(folder))
    requests = [
        make_request(),
        make_request(lora_request=lora),
        make_request(cache_salt="a"),
        make_request(kv_transfer_params={"lmcache.tag.user": "a"}),
        make_request(kv_transfer_params={"lmcache.tag.user": "b"}),
        make_request(kv_transfer_params={"lmcache.tag.team": "a"}),
        make_request(kv_transfer_params={"lmcache.tag.user": "a", "lmcache.tag.team": "a"}),
        make_request(
            kv_transfer_params={"lmcache.tag.user": "@%\n" * 200}
        ),  # any text, of any length
    ]
    tags = [request_tags(request, epoch) for epoch in ("", "e") for request in requests]
    assert tags[0] is None and len({json.dumps(one) for one in tags}) == len(tags)
    assert max(len(str(one)) for one in tags) < 50


def test_tags_in_another_order_and_other_parameters_are_the_same() -> None:
    one = {"lmcache.tag.user": "a", "lmcache.tag.team": 1, "do_remote_prefill": False}
    other = {"lmcache.tag.team": "1", "lmcache.tag.user": "a", "lmcache.skip_save": True}
    assert request_tags(make_request(kv_transfer_params=one), "") == request_tags(
        make_request(kv_transfer_params=other), ""
    )


@pytest.mark.parametrize(
    "params, saved, warned",
    [
        (None, True, ""),
        ({}, True, ""),
        ({"lmcache.skip_save": True}, False, ""),
        ({"lmcache.skip_save": False, "lmcache.tag.user": "a", "do_remote_decode": True}, True, ""),
        ({"lmcache.skip_save": "yes"}, False, "'yes' is neither true nor false"),
        ({"lmcache.skip_safe": True}, True, "lmcache.skip_safe is not known"),
        ({"lmcache.tags.user": "a"}, True, "lmcache.tags.user is not known"),
    ],
)
def test_skip_save_and_what_is_not_known(
    params, saved: bool, warned: str, caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    logger = logging.getLogger("vllm.lmcache_connector")
    logger.addHandler(caplog.handler)  # vLLM's loggers do not hand on to the root
    try:
        assert is_saved(make_request(kv_transfer_params=params)) is saved
    finally:
        logger.removeHandler(caplog.handler)
    assert warned in caplog.text and bool(warned) == bool(caplog.text)
