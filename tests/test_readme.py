"""The snippets of README.md and docs/ run as they are shown, the commands and tests that they name
exist, and the defaults are the code's."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from engine import LMCacheEngineConfig

ROOT = Path(__file__).resolve().parent.parent
TEXTS = {path.name: path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
SNIPPETS = [
    (name, snippet)
    for name, text in TEXTS.items()
    for snippet in re.findall(r"```python\n(.*?)```", text, re.DOTALL)
]
PRINTED = ["512 512", "512", "True", "524288 [True, False]"]  # by the README's, one a module


def test_there_is_a_snippet_for_each_module() -> None:
    assert [name for name, _ in SNIPPETS[:5]].count("README.md") == len(PRINTED)


@pytest.mark.parametrize("number", range(len(SNIPPETS)))
def test_snippet_runs_and_prints_what_it_says(number: int, ipc_folder: Path) -> None:
    run = subprocess.run(
        [sys.executable, "-c", SNIPPETS[number][1]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    if number < len(PRINTED):
        assert run.stdout.strip() == PRINTED[number]


@pytest.mark.parametrize("name", TEXTS)
def test_make_targets_exist(name: str) -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in set(re.findall(r"(?:^    |^    \$ |`)make ([a-z-]+)", TEXTS[name], re.MULTILINE)):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"`make {target}`"


def names_of(body: list[ast.stmt], before: str = "") -> set[str]:
    """The functions and classes of a test file, those in a class as `Class::test`."""
    found = set()
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(before + node.name)
        if isinstance(node, ast.ClassDef):
            found |= names_of(node.body, f"{node.name}::")
    return found


def test_named_tests_exist() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)?::([\w:]+)`", TEXTS["COMPARED.md"])
    assert len(named) > 50, "docs/COMPARED.md names the tests that show what it says"
    path = ""
    for stated, name in named:
        path = stated or path  # `::test_x` alone is in the file that was named last
        assert name in names_of(ast.parse((ROOT / path).read_text()).body), f"{path}::{name}"


@pytest.mark.parametrize("name", TEXTS)
def test_named_files_exist(name: str) -> None:
    for path in re.findall(
        r"\b(?:tests|bench|docs|examples|requirements)/[\w/]+\.\w+", TEXTS[name]
    ):
        assert (ROOT / path).exists(), path


def test_config_defaults() -> None:
    config = LMCacheEngineConfig()
    part = TEXTS["README.md"].partition("## Configuration")[2]
    table = re.findall(r"^\| ([\w, ]+) \| ([^|]+) \|", part, re.MULTILINE)
    assert len(table) > 6
    for names, defaults in table[1:]:
        for name, default in zip(names.split(", "), defaults.strip().split(", "), strict=True):
            assert str(getattr(config, name)).removesuffix(".0") == default.removesuffix(".0"), name
