"""Tokens to chunk hashes: where the chunks are, what names them, and that every process agrees."""

import doctest
import hashlib
import os
import struct
import subprocess
import sys
from array import array

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toys import ROOT, config, metadata

import engine
import lookup
from engine import (
    ChunkedTokenDatabase,
    LMCacheEngineConfig,
    SegmentTokenDatabase,
    check_hashes,
    make_token_database,
)

IDS = st.integers(0, 2**32 - 1) | st.integers(-(2**63), 2**63 - 1)


def spans(tokens, mask=None, **changes):
    return ChunkedTokenDatabase(config(**changes)).process_tokens(tokens, mask=mask)


def hashes(tokens, **changes):
    return [span[2] for span in spans(tokens, **changes)]


def test_by_hand():
    """sha256(previous digest + ids of 8 bytes each), its first 8 bytes; and the example in the
    docstring."""
    first = hashlib.sha256(struct.pack("<4q", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4q", 5, 6, 7, 8)).digest()
    wanted = [(0, 4, int.from_bytes(first[:8], "big")), (4, 8, int.from_bytes(second[:8], "big"))]
    assert spans([1, 2, 3, 4, 5, 6, 7, 8, 9]) == wanted
    assert wanted == [(0, 4, 8350237632718489709), (4, 8, 15475240699223031541)]
    for module in (lookup, engine):
        assert doctest.testmod(module).failed == 0


@given(st.lists(IDS, max_size=20))
def test_list_tuple_array_and_tensor_agree(tokens):
    """LM#1139, LM#2511."""
    wanted = spans(tokens, save_unfull_chunk=True)
    for other in (tuple(tokens), array("q", tokens), torch.tensor(tokens, dtype=torch.int64)):
        assert spans(other, save_unfull_chunk=True) == wanted


@given(st.lists(IDS, min_size=4, max_size=30), st.integers(0, 30), IDS)
def test_a_hash_names_its_whole_prefix(tokens, at, other):
    changed = [*tokens]
    changed[at := at % len(tokens)] = other
    before, after = hashes(tokens), hashes(changed)
    for index in range(len(before)):
        assert (before[index] == after[index]) == (
            tokens[: (index + 1) * 4] == changed[: (index + 1) * 4]
        )
    assert hashes(tokens[: len(tokens) // 2]) == before[: len(tokens) // 2 // 4]  # whatever follows


def test_minus_one_is_not_minus_two():
    """LMCache's default takes the two for one token, for hash(-1) == hash(-2)."""
    assert hashes([-1] * 4) != hashes([-2] * 4)


@pytest.mark.parametrize("seed", [None, "1"])
def test_another_process_agrees(seed):
    """LM#2136, LM#2979: whatever PYTHONHASHSEED says."""
    code = "from engine import *; d = ChunkedTokenDatabase(LMCacheEngineConfig(chunk_size=4))\n"
    code += (
        "print([span[2] for span in d.process_tokens(list(range(16)) + [-1] * 4 + [2**40] * 4)])"
    )
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    env |= {} if seed is None else {"PYTHONHASHSEED": seed}
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    assert printed.stdout.strip() == str(hashes([*range(16), *[-1] * 4, *[2**40] * 4]))


@pytest.mark.parametrize(
    "count, full, unfull", [(0, [], []), (3, [], [3]), (4, [4], [4]), (9, [4, 8], [4, 8, 9])]
)
def test_where_chunks_end(count, full, unfull):
    assert [end for _, end, _ in spans([7] * count)] == full
    assert [end for _, end, _ in spans([7] * count, save_unfull_chunk=True)] == unfull


@pytest.mark.parametrize("kept", [0, 1, 2, 3])
def test_a_mask_leaves_out_whole_chunks(kept):
    tokens, mask = list(range(12)), torch.arange(12) >= 4 * kept
    assert spans(tokens, mask) == spans(tokens)[kept:]


@pytest.mark.parametrize(
    "mask",
    [
        torch.arange(12) >= 3,
        torch.arange(12) < 4,
        torch.ones(11, dtype=torch.bool),
        torch.ones(3, 4, dtype=torch.bool),
    ],
    ids=["part of a chunk", "a suffix", "too short", "two axes"],
)
def test_masks_that_cannot_be(mask):
    with pytest.raises(ValueError, match="mask"):
        spans(list(range(12)), mask)


@pytest.mark.parametrize(
    "tokens", [[1.5] * 4, ["a"] * 4, "abcd", b"abcd", [2**64] * 4, [None] * 4, torch.ones(4),
               torch.ones(2, 2).int(),
               torch.ones(4, dtype=torch.bool)], ids=repr,
)  # fmt: skip
def test_what_are_no_tokens(tokens):
    with pytest.raises(ValueError, match="tokens"):
        spans(tokens)


def test_either_tokens_or_hashes():
    database = ChunkedTokenDatabase(config())
    for arguments in ({}, {"tokens": [1], "hashes": [1], "offsets": [1]}):
        with pytest.raises(ValueError, match="either"):
            database.process_tokens(**arguments)
    digest = bytes(range(9))
    assert database.process_tokens(hashes=[7, digest], offsets=[4, 2]) == [
        (0, 4, 7),
        (4, 6, digest),
    ]


@pytest.mark.parametrize(
    "some, lengths",
    [([1, 2], [4]), ([1], None), (None, [1]), ("a", [1]), ([2**64], [4]), ([-(2**63) - 1], [4]),
     ([1.0], [4]),
     ([True], [4]), ([b""], [4]), ([bytes(8)], [4]), ([None], [4]), ([1], [0]), ([1], [-4]),
     ([1], [4.0]), ([1], [True])],
)  # fmt: skip
def test_hashes_that_cannot_be(some, lengths):
    """LM#2997, VA#13602: from 2**64 on a ValueError."""
    with pytest.raises(ValueError, match=r"hashes|offsets"):
        check_hashes(some, lengths)


def test_hashes_that_can_be():
    check_hashes([0, -(2**63), 2**63, 2**64 - 1, bytes(32), bytes(9)], [1, 2, 3, 4, 5, 6])
    check_hashes([], [])


# -- segments


def segments(tokens, separator=(9, 9)):
    extra = {"blend_special_token_ids": list(separator)}
    database = make_token_database(config(enable_blending=True, extra_config=extra), metadata())
    assert isinstance(database, SegmentTokenDatabase)
    return database.process_tokens(tokens)


@pytest.mark.parametrize(
    "tokens, bounds",
    [([], []), ([1], [(0, 1)]), ([9, 9], []), ([1, 2, 9, 9, 3], [(0, 2), (4, 5)]),
     ([9, 9, 1, 9, 9], [(2, 3)]),
     ([1, 9, 2], [(0, 3)]), ([1, 9, 9, 9, 2], [(0, 1), (3, 5)]),
     ([1, 9, 9, 9, 9, 2], [(0, 1), (5, 6)])],
)  # fmt: skip
def test_segments_lie_between_separators(tokens, bounds):
    """A prompt shorter than the separator is one segment, an empty one none; LMCache raises on
    both."""
    assert [span[:2] for span in segments(tokens)] == bounds


def test_segments_hit_in_any_order():
    one, two = segments([1, 2, 3, 9, 9, 4, 5])
    assert [span[2] for span in segments(torch.tensor([4, 5, 9, 9, 1, 2, 3]))] == [two[2], one[2]]


@pytest.mark.parametrize(
    "extra", [None, {}, {"blend_special_token_ids": []}, {"blend_special_token_ids": "##"}]
)
def test_blending_needs_the_ids_of_its_separator(extra):
    with pytest.raises(ValueError, match="blend_special_token_ids"):
        make_token_database(config(enable_blending=True, extra_config=extra), metadata())


# -- the other algorithms


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="hash(None) is a constant there")
def test_builtin_is_refused_where_processes_would_not_agree():
    with pytest.raises(ValueError, match="hash\\(None\\)"):
        ChunkedTokenDatabase(LMCacheEngineConfig(pre_caching_hash_algorithm="builtin"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="refused there")
def test_builtin():
    first = hash((0, (1, 2, 3, 4), None))
    wanted = [first, hash((first, (5, 6, 7, 8), None))]
    assert hashes(torch.arange(1, 9), pre_caching_hash_algorithm="builtin") == wanted


def test_sha256_cbor_needs_a_seed(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        hashes([1, 2, 3, 4], pre_caching_hash_algorithm="sha256_cbor")


def test_sha256_cbor(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    try:
        import cbor2
    except ImportError:
        with pytest.raises(ValueError, match="cbor2"):
            hashes([1, 2, 3, 4], pre_caching_hash_algorithm="sha256_cbor")
        return
    root = hashlib.sha256(cbor2.dumps("0", canonical=True)).digest()
    wanted = hashlib.sha256(cbor2.dumps((root, (1, 2, 3, 4), None), canonical=True)).digest()
    assert hashes([1, 2, 3, 4], pre_caching_hash_algorithm="sha256_cbor") == [wanted]
