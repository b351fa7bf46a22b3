"""Fixtures for the tests that need a real vLLM: `make test-vllm`. Plain `make test` leaves this
folder out."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from remotes import RemoteServer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["*.py"]


@pytest.fixture(scope="session")
def model() -> Path:
    folder = Path(os.environ.get("VLLM_TEST_MODEL") or Path(sys.prefix) / "smollm2")
    assert (folder / "config.json").exists(), f"no model in {folder}: use make test-vllm"
    return folder


@pytest.fixture(scope="session")
def text(model: Path) -> list[int]:
    """20,000 tokens of real text: this project's own source."""
    from tokenizers import Tokenizer

    source = "".join((ROOT / f"{name}.py").read_text() for name in ("engine", "remote_server"))
    return Tokenizer.from_file(str(model / "tokenizer.json")).encode(source).ids[:20_000]


@pytest.fixture(scope="module")
def remote() -> Iterator[RemoteServer]:
    with RemoteServer() as server:
        yield server
