"""vllm_demo.py - a long prompt to a real vLLM server, twice, and once more after its restart.

    $ make demo-vllm                                # in its own virtual environment
    $ python examples/vllm_demo.py MODEL_FOLDER     # the same, in yours

    openai client  --HTTP, streaming-->  vLLM's API server
                                         + examples/vllm_connector.py  <--TCP-->  remote_server.py

vLLM's own prefix cache is off, so that each hit is ours: the second request finds the KV in the
worker's store, the first after the restart in the remote server, which stays. The exit status is 0
if the hits are as expected, both are faster, and both give the same answer. (Against the first
answer nothing is held: in bfloat16 another prefill shape rounds differently, with vLLM's own prefix
cache too.)
"""

import argparse
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI

ROOT = Path(__file__).resolve().parent.parent
SOURCE_CHARS = 9000  # of this project's source in the prompt: about 2,700 tokens


@contextlib.contextmanager
def remote_server() -> Iterator[str]:
    """remote_server.py in a process of its own; its url."""
    command = [sys.executable, str(ROOT / "remote_server.py"), "127.0.0.1", "0", "--max-gib", "2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        found = None
        while not found:
            if not (line := process.stderr.readline()):
                raise SystemExit("the remote server did not start")
            found = re.search(r"lm://127.0.0.1:\d+", line)
        yield found[0]
    finally:
        process.terminate()
        process.wait()


@contextlib.contextmanager
def vllm_server(model: Path, remote_url: str, folder: Path) -> Iterator[OpenAI]:
    """vLLM's OpenAI-compatible server with our connector, stopped at the end as a user would; a
    client for it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    transfer = {
        "kv_connector": "KVOffloadConnector",
        "kv_connector_module_path": "vllm_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"max_local_cpu_size": 1, "remote_url": remote_url},
    }
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server",
        "--model", str(model), "--served-model-name", "smollm2",
        "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "bfloat16", "--max-model-len", "4096",
        "--enforce-eager", "--no-enable-prefix-caching", "--enable-prompt-tokens-details",
        "--kv-cache-memory-bytes", str(1 << 30), "--kv-transfer-config", json.dumps(transfer),
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}:{ROOT / 'examples'}",
        "VLLM_RPC_BASE_PATH": str(folder),
        "VLLM_CPU_OMP_THREADS_BIND": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    log = folder / "vllm.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=output)
    try:
        began = time.monotonic()
        while True:
            with (
                contextlib.suppress(OSError),
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health"),
            ):
                break
            if process.poll() is not None or time.monotonic() - began > 300:
                raise SystemExit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.5)
        print(f"vLLM is up after {time.monotonic() - began:.0f} s", flush=True)
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
        ask(client, "Hello.")  # the first request of a fresh server is slow whatever it asks
        yield client
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)


def ask(client: OpenAI, question: str) -> tuple[float, int, str]:
    """Seconds to the first token, prompt tokens that came from a cache, and the answer."""
    began = time.perf_counter()
    stream = client.chat.completions.create(
        model="smollm2",
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
    )
    first, cached, answer = 0.0, 0, ""
    for event in stream:
        if event.choices and event.choices[0].delta.content:
            first = first or time.perf_counter() - began
            answer += event.choices[0].delta.content
        if event.usage is not None and event.usage.prompt_tokens_details is not None:
            cached = event.usage.prompt_tokens_details.cached_tokens or 0
    return first, cached, answer


def main() -> int:
    parser = argparse.ArgumentParser(
        description="A long prompt to a vLLM server, twice, and after its restart."
    )
    parser.add_argument("model", type=Path, help="a model folder, see examples/make_model.py")
    model = parser.parse_args().model
    source = (ROOT / "remote_server.py").read_text()[:SOURCE_CHARS]
    question = f"{source}\n\nWhat does this program do? Answer in one sentence."

    def show(name: str, result: tuple[float, int, str]) -> tuple[float, int, str]:
        print(
            f"{name:32} first token after {result[0]:5.2f} s, {result[1]:5,} tokens from the cache",
            flush=True,
        )
        return result

    with tempfile.TemporaryDirectory() as folder, remote_server() as url:
        with vllm_server(model, url, Path(folder)) as client:
            cold = show("a long prompt", ask(client, question))
            warm = show("the same again", ask(client, question))
        print("vLLM is stopped, and started again", flush=True)
        with vllm_server(model, url, Path(folder)) as client:
            after = show("the same after the restart", ask(client, question))
    print(f"the answer: {after[2]!r}")
    good = (
        cold[1] == 0
        and warm[1] == after[1] > 0
        and max(warm[0], after[0]) < cold[0] / 2
        and warm[2] == after[2]
    )
    print("as expected" if good else f"NOT as expected: {cold}, {warm}, {after}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
