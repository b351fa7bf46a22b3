"""examples/tp_demo.py, started as its docstring says, and judged by what it prints."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from toys import ROOT

pytestmark = pytest.mark.demo
TIMEOUT_SEC = 180  # some 10 times what it takes


def run_demo(ranks: int, ipc_folder: Path) -> tuple[int, str, str]:
    env = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    env |= {"VLLM_RPC_BASE_PATH": str(ipc_folder)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    process = subprocess.Popen(
        [*command, str(ranks), "examples/tp_demo.py"],
        cwd=ROOT,
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=TIMEOUT_SEC)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return process.returncode, out, err


def test_ranks_that_evicted_differently_give_the_same_answer(tmp_path):
    status, out, err = run_demo(2, tmp_path)
    assert status == 0, f"{out}\n{err}"
    found = re.findall(r"ranks have \[(\d+), (\d+)\], scheduler says (\d+) of (\d+) tokens", out)
    assert [tuple(map(int, numbers)) for numbers in found] == [
        (0, 0, 0, 85),  # rank 0, rank 1, the scheduler: the smallest, the prompt
        (80, 80, 80, 85),
        (0, 0, 0, 53),
        (80, 32, 32, 85),  # 3 chunks of the second prompt took the place of the tail of the first
        (80, 0, 0, 85),
    ]
    answers = re.findall(r"answer +\[(.+)\], as by the whole model: (\w+)", out)
    assert [same for _, same in answers] == ["True"] * 5
    first = [answer for answer, _ in answers if answer != answers[2][0]]
    assert len(first) == 4 and len({*first}) == 1


def test_another_number_of_ranks_is_refused(tmp_path):
    status, _, err = run_demo(1, tmp_path)
    assert status != 0 and "needs 2 ranks, not 1" in err
