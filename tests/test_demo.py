"""The demos, as a newcomer runs them: each a process of its own, judged by its exit code and by
what it prints."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection

import psutil
import pytest
from toys import ROOT

sys.path.insert(0, str(ROOT / "examples"))
import llm_demo

pytestmark = pytest.mark.demo
MODULE_TIMEOUT_SEC, DEMO_TIMEOUT_SEC = 180, 1200  # some 10 times what they take on two idle cores


@contextmanager
def started(*command: str) -> Iterator[subprocess.Popen]:
    """`python COMMAND` in the repository's root; nothing of it outlives the test."""
    process = subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def run(timeout_sec: float, *command: str) -> str:
    """What it prints; exit code 0 is demanded."""
    with started(*command) as process:
        out, err = process.communicate(timeout=timeout_sec)
        assert process.returncode == 0, f"{command}: exit code {process.returncode}\n{out}\n{err}"
    assert "Traceback" not in err, err
    return out


def story_of(out: str) -> dict[str, str]:
    """Number of a step -> what it says."""
    return dict(re.findall(r"^(\d)\. (.*(?:\n    .*)*)", out, re.MULTILINE))


def test_llm_demo() -> None:
    out = run(DEMO_TIMEOUT_SEC, "examples/llm_demo.py")
    story = story_of(out)
    assert [*story] == list("12345678"), out
    assert "loading the model ..." in story["2"] and "loading the model ..." in story["5"]
    assert "0 of 2,100 tokens hit" in story["3"]
    assert "8 chunks of 256 tokens" in story["4"] and "94,371,840 bytes in 8 chunks" in story["4"]
    assert (
        "2,048 of 2,100 tokens hit" in story["6"]
        and "94,371,840 bytes of KV came back" in story["6"]
    )
    assert "1,280 of 2,100 tokens hit" in story["7"]
    assert " 0 of 2,100 tokens hit" in story["8"]
    assert "identical  yes" in story["6"] and "identical  yes" in story["7"]
    answers = [re.search(r"answer +(.*)", story[number]).group(1) for number in "36"]  # type: ignore[union-attr]
    assert answers[0] == answers[1] and len(answers[0]) > 20
    assert story["6"].count(" s to the first token") == 2  # how much sooner is for a benchmark
    assert re.search(r"speed-up +[\d.]+ times", story["6"])


def test_llm_demo_ends_when_a_worker_dies() -> None:
    with started("examples/llm_demo.py") as process:
        for line in process.stdout:  # type: ignore[union-attr]
            if "loading the model" in line:
                break
        for child in psutil.Process(process.pid).children():
            child.kill()
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "worker A died, exit code -9" in err, out + err
    assert "Traceback" not in err


def test_llm_demo_ends_when_it_is_terminated() -> None:
    with started("examples/llm_demo.py") as process:
        for line in process.stdout:  # type: ignore[union-attr]
            if "loading the tokenizer" in line:
                break
        children = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and err.strip() == "terminated", out + err
    assert not psutil.wait_procs(children, timeout=10)[1]


def _dies(pipe: Connection) -> None:
    pipe.send("first")
    os._exit(3)


def _hangs(pipe: Connection) -> None:
    pipe.send("first")
    time.sleep(600)


def test_a_child_that_dies_or_hangs() -> None:
    with (
        pytest.raises(SystemExit, match="a child died, exit code 3"),
        llm_demo.Child("a child", _dies) as child,
    ):
        assert child.receive() == "first"
        child.order("anything")
    with (
        pytest.raises(SystemExit, match="a child gave no answer within 0 s"),
        llm_demo.Child("a child", _hangs) as child,
    ):
        assert child.receive() == "first"
        child.receive(0.1)
    assert not child.process.is_alive()


def test_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit, match="make demo"):
        llm_demo.find_weights()


MODULE_DEMOS = {  # lines of what each prints, as patterns
    "engine.py": [
        r"store     1280 tokens: 1280 newly stored",
        r"lookup    the same prompt: 1280 of 1280 tokens hit",
        r"lookup    640 tokens, then others: 512 hit",
        r"retrieve  into other pages: 1280 tokens copied back, equal: True",
        r"evict     after two more, 512 of 1280 hit: its tail went",
    ],
    "offload_server.py": [
        r"worker: 4,096 slots of KV, listens on \S+_offload_\S+",
        r"client: 4 chunks out of slots 0..1022 and 1023: True",
        r"client: 4 chunks out of slots 0..1022 and 1023: True",
        r"client: 4 chunks out of slots 0..1022 and 4096: False",
        r"worker: holds 4 chunks",
    ],
    "lookup.py": [
        r"worker 0: holds 1024 tokens, listens on \S+_lookup_\S+",
        r"worker 1: holds 512 tokens, listens on \S+_lookup_\S+",
        r"scheduler: 1500 tokens: 512 hit on every rank",
        r"scheduler: 1500 tokens: 0 hit on every rank",
        r"scheduler: 100 tokens: 0 hit on every rank",
    ],
    "remote_server.py --demo": [
        r"put, get   RemoteMeta\(length=2097152, fmt=1, dtype=4, shape=\(2, 8, 256, 128\)\): "
        r"equal True",
        r"evict      .*\[False, False, True, True, True, True\]",
    ],
    "examples/walkthrough.py": [
        r"worker 1: 24 tokens, 0 of them cached, sum 218",
        r"worker 1: 22 tokens, 16 of them cached, sum 208",
        r"worker 2: 25 tokens, 24 of them cached, sum 226",
    ],
}


@pytest.mark.parametrize("command", MODULE_DEMOS)
def test_module_demo(command: str) -> None:
    out = run(MODULE_TIMEOUT_SEC, *command.split())
    lines = out.splitlines()
    for pattern in MODULE_DEMOS[command]:  # in this order
        while lines and not re.fullmatch(pattern, lines[0]):
            lines.pop(0)
        assert lines, f"{pattern!r} is not in what {command} prints:\n{out}"
