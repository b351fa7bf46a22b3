"""The README's snippets run as they are shown, its commands exist, and its defaults are the code's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import LMCacheEngineConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
PRINTED = [
    "512 512",
    "RemoteMeta(length=524288, fmt=1, dtype=3, shape=(2, 4, 256, 128)) 524288 [True, False]",
    "512 512",
    "True",
]


def test_there_is_a_snippet_for_each_module() -> None:
    assert len(SNIPPETS) == len(PRINTED) == 4


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_and_prints_what_it_says(number: int, ipc_folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SNIPPETS[number]], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout.strip()) == (0, PRINTED[number]), run.stderr


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"README names `make {target}`"


def test_named_tests_exist() -> None:
    names = set(re.findall(r"\b(test_\w+)\b(?!\.py)", README))
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    assert names, "the README names the tests that show what it promises"
    for name in names:
        assert f"def {name}(" in sources or (ROOT / "tests" / f"{name}.py").exists(), f"README names {name}"


def test_config_defaults() -> None:
    config = LMCacheEngineConfig()
    table = re.findall(r"^\| (\w+) \| ([^|]+) \|", README[README.index("## Configuration") :], re.MULTILINE)
    for name, default in table:
        if name not in ("field", "lookup_server_worker_ids"):
            assert str(getattr(config, name)).removesuffix(".0") == default.strip().removesuffix(".0"), name
