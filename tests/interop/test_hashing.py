"""Chunk hashes that two processes, or we and LMCache 0.3.14, can share:
pre_caching_hash_algorithm."""

import os
import subprocess
import sys
from pathlib import Path

import lmcache_peer as theirs
import pytest
import torch

from engine import ChunkedTokenDatabase, LMCacheEngineConfig, SegmentTokenDatabase

pytestmark = pytest.mark.interop

PROMPT = [
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    23,
    24,
    255,
    256,
    65535,
    65536,
    2**32 - 1,
    2**32,
]  # at CBOR's boundaries too
# What LMCache 0.3.14 beside vLLM 0.32.0 made of PROMPT in chunks of 4, by PYTHONHASHSEED: computed
# there once.
SHA256_CBOR = {
    "0": [
        "c9d58ba695280d69b243e1e0df813136ca9196b286fb1a021e0b2e028ef071cb",
        "24125b23e68883b5c2141db2959d48433fe6bde2f26bd914efad121d154ab2d6",
        "feb3298f419a69698f8b15d9d77d23557deba902b1cea9f3fb51add5e415ba77",
        "04de29be294b77c6a502184ae9bf844ec43e2532676837fbb0514948b1042789",
    ],
    "42": [
        "0a99040f25d8a5f22275b867f403918da98c9d140eaea10f5319d4d1d84429df",
        "c415b4994e9ed1d993bc50f53dc3c4e18c5200f39d1787ce9ba2dacb65221d14",
        "da4425074db4d468f0fd773d76f40019afe50a6fa405df7009e9ab068ee04cd9",
        "feb5e8d345bd85d646f0c9e7938360d45c696a9273075b175d76dd26c849f115",
    ],
}
# Of the segment [1, 2, 3], whatever the seed.
ALONE = "9ca3c050dcab71b7d20d7e21acb28a035ce8f2f5470d3f9724580ec57b7c7da0"

SCRIPT = """
import sys
from engine import ChunkedTokenDatabase, LMCacheEngineConfig
config = LMCacheEngineConfig(chunk_size=4, pre_caching_hash_algorithm=sys.argv[1])
database = ChunkedTokenDatabase(config)
hashes = [span[2] for span in database.process_tokens([int(token) for token in sys.argv[2:]])]
print(*(value.hex() if isinstance(value, bytes) else value for value in hashes))
"""


def in_another_process(algorithm, seed):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONHASHSEED"}
    env |= {"PYTHONHASHSEED": seed} if seed else {}
    command = [sys.executable, "-c", SCRIPT, algorithm, *map(str, PROMPT)]
    root = Path(__file__).parents[2]
    return subprocess.run(command, env=env, cwd=root, capture_output=True, text=True)


def config(algorithm, **fields):
    return LMCacheEngineConfig(chunk_size=4, pre_caching_hash_algorithm=algorithm, **fields)


def test_sha256_cbor_is_vllms_in_another_process():
    assert in_another_process("sha256_cbor", "42").stdout.split() == SHA256_CBOR["42"]


@pytest.mark.parametrize(
    "tokens", [PROMPT, tuple(PROMPT), torch.tensor(PROMPT)], ids=["list", "tuple", "tensor"]
)
@pytest.mark.parametrize("seed", SHA256_CBOR)
def test_sha256_cbor_is_theirs(seed, tokens, monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", seed)
    peer = theirs.token_database.ChunkedTokenDatabase(theirs.config(chunk_size=4), None)
    theirs.hash_with_sha256_cbor(peer, monkeypatch, seed)
    ours = ChunkedTokenDatabase(config("sha256_cbor"))
    assert theirs.spans(ours, tokens) == theirs.spans(peer, PROMPT)
    assert [value.hex() for value in theirs.spans(ours, tokens)[0]] == SHA256_CBOR[seed]


def test_sha256_cbor_of_a_segment_is_vllms(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    fields = {"enable_blending": True, "extra_config": {"blend_special_token_ids": [9]}}
    hashes, _ = theirs.spans(
        SegmentTokenDatabase(config("sha256_cbor", **fields)), [1, 2, 3, 9, 4, 9, 1, 2, 3]
    )
    assert hashes[0] == hashes[2] == bytes.fromhex(ALONE)


def test_sha256_cbor_without_a_seed_is_refused(monkeypatch):
    result = in_another_process("sha256_cbor", None)
    assert result.returncode and "ValueError" in result.stderr and "PYTHONHASHSEED" in result.stderr
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    with pytest.raises(ValueError, match="PYTHONHASHSEED"):
        ChunkedTokenDatabase(config("sha256_cbor"))


def test_sha256_cbor_without_cbor2_is_refused(monkeypatch):
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    monkeypatch.setitem(sys.modules, "cbor2", None)
    with pytest.raises(ValueError, match="cbor2"):
        ChunkedTokenDatabase(config("sha256_cbor"))


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="reproducible from Python 3.12 on")
def test_builtin_is_refused_where_it_cannot_be_shared():
    with pytest.raises(ValueError, match=r"builtin.*3\.12"):
        ChunkedTokenDatabase(config("builtin"))


@pytest.mark.skipif(sys.version_info < (3, 12), reason="not reproducible before Python 3.12")
def test_builtin_is_theirs():
    peer = theirs.token_database.ChunkedTokenDatabase(theirs.config(chunk_size=4), None)
    expected = theirs.spans(peer, PROMPT)
    assert theirs.spans(ChunkedTokenDatabase(config("builtin")), PROMPT) == expected
    for seed in (None, "1"):
        assert in_another_process("builtin", seed).stdout.split() == [*map(str, expected[0])]


def test_the_default_is_the_same_in_another_process():
    expected, _ = theirs.spans(ChunkedTokenDatabase(config("sha256")), PROMPT)
    assert in_another_process("sha256", "1").stdout.split() == [*map(str, expected)]
