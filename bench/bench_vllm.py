"""bench_vllm.py - time to first token in a real vLLM on the CPU, side by side in one run:
interleaved rounds, medians.

    $ make bench-vllm       # about 10 minutes; a table, and bench-out/bench_vllm.json

Each way is a vLLM process of its own, all pinned to core 0, the remote server on the others. In
each round each process gets prompts that it has never seen, of about 500, 1,700 and 3,500 tokens,
and then the same again:

    vLLM                  cold without a connector, then vLLM's own prefix cache
    KVOffloadConnector    cold with our connector, then from the worker's store (vLLM's own cache
                          off), then, the store emptied, from remote_server.py
    the same, in place    the same, with a server that has --dir: its memory is read where it is
    ExampleConnector      vLLM's own example, files in a folder of /dev/shm
    LMCacheMPConnector    LMCache 0.5.6 in multiprocess mode, with --lmcache: the folder that has it

Machines are noisy: only the ratios within a run count. Nothing else may run on these cores.
"""

import argparse
import contextlib
import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "serving")]

from llm_process import LLMProcess  # noqa: E402
from remotes import RemoteServer  # noqa: E402

LENGTHS = (500, 1700, 3500)  # tokens
HITS = 3  # of each kind, for each cold prompt
VLLM, OURS, IN_PLACE, EXAMPLE, LMCACHE = (
    "vLLM",
    "KVOffloadConnector",
    "the same, in place",
    "ExampleConnector",
    "LMCacheMPConnector",
)
SETTINGS = {"dtype": "bfloat16", "max_model_len": 4096, "kv_cache_memory_bytes": 1 << 30}
# way -> what its median is to be at most, as a multiple of another way's
TARGETS = {
    (OURS, "cold"): [(1.03, (VLLM, "cold"))],
    (OURS, "worker's store"): [(1.15, (VLLM, "own prefix cache"))],
    (OURS, "remote server"): [(1.30, (VLLM, "own prefix cache"))],
}


@contextlib.contextmanager
def lmcache_server(site_packages: str):
    """LMCache's own server process, in this interpreter with that folder; yields its port."""
    ports = []
    for _ in range(2):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": site_packages, "LMCACHE_TRACK_USAGE": "false"}
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1",
        "--port", str(ports[0]), "--http-port", str(ports[1]), "--chunk-size", "128",
        "--l1-size-gb", "2", "--eviction-policy", "LRU",
        "--supported-transfer-mode", "engine_driven", "--disable-observability",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", ports[0])):
                break
            time.sleep(0.1)
        yield ports[0]
    finally:
        process.terminate()
        process.wait(30)


def measure(llm: LLMProcess, way: str, prompt: list[int]) -> dict[tuple[str, str], list[dict]]:
    """The prompt cold, then from each cache that this process has."""

    def ask() -> dict:
        return llm.generate([prompt], max_tokens=2)[0]

    results = {(way, "cold"): [ask()]}
    if way == VLLM:
        results[way, "own prefix cache"] = [ask() for _ in range(HITS)]
    elif way in (OURS, IN_PLACE):
        results[way, "worker's store"] = [ask() for _ in range(HITS)]
        results[way, "remote server"] = []
        for _ in range(HITS):
            llm.call("flush")
            llm.call("clear")
            results[way, "remote server"].append(ask())
    else:
        time.sleep(0.5)  # its store may still be under way
        results[way, "hit"] = [ask() for _ in range(HITS)]
    return results


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Time to first token: no cache, vLLM's own, ours, others'."
    )
    parser.add_argument("model", type=Path, help="a model folder, see examples/make_model.py")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--lmcache",
        metavar="DIR",
        type=os.path.abspath,
        help="a site-packages folder with lmcache 0.5.6",
    )
    args = parser.parse_args()
    rng = random.Random(0)
    samples = defaultdict(list)  # (way, cache, length) -> seconds
    cached = {}  # the same -> tokens that came from a cache
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        files = stack.enter_context(tempfile.TemporaryDirectory(dir="/dev/shm"))
        cores = os.sched_getaffinity(0)
        os.sched_setaffinity(
            0, cores - {0} or cores
        )  # vLLM has core 0, the servers have the others
        remote = stack.enter_context(RemoteServer(max_gib=2))
        example = {"kv_connector": EXAMPLE, "kv_role": "kv_both",
                   "kv_connector_extra_config": {"shared_storage_path": files}}  # fmt: skip
        shared = stack.enter_context(RemoteServer(2, f"{files}/store"))
        ways = {VLLM: {"enable_prefix_caching": True}}
        for way, url in ((OURS, remote.url), (IN_PLACE, shared.url)):
            ways[way] = {
                "enable_prefix_caching": False,
                "connector": {"chunk_size": 128, "max_local_cpu_size": 1, "remote_url": url},
            }
        ways |= {EXAMPLE: {"enable_prefix_caching": False, "kv_transfer_config": example}}
        if args.lmcache:
            port = stack.enter_context(lmcache_server(args.lmcache))
            extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
            transfer = {
                "kv_connector": LMCACHE,
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
            ways[LMCACHE] = {
                "enable_prefix_caching": False,
                "kv_transfer_config": transfer,
                "path": args.lmcache,
            }
        os.sched_setaffinity(0, cores)
        processes = {
            way: stack.enter_context(
                LLMProcess(args.model, folder / f"{way}.log", **SETTINGS, **settings)
            )
            for way, settings in ways.items()
        }
        for way, llm in processes.items():
            measure(
                llm, way, [rng.randrange(1000, 40_000) for _ in range(600)]
            )  # the first request is always slow
        for number in range(args.rounds):
            for length in LENGTHS:
                for way in rng.sample(list(processes), len(processes)):
                    prompt = [rng.randrange(1000, 40_000) for _ in range(length)]
                    for (_, cache), answers in measure(processes[way], way, prompt).items():
                        samples[way, cache, length] += [answer["ttft"] for answer in answers]
                        cached[way, cache, length] = min(answer["cached"] for answer in answers)
            print(
                f"round {number + 1} of {args.rounds}, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
                flush=True,
            )
    return report(samples, cached, args.rounds)


def report(samples: dict, cached: dict, rounds: int) -> int:
    medians = {key: statistics.median(values) for key, values in samples.items()}
    print(
        f"time to first token in seconds, median of {rounds} cold and {rounds * HITS} warm "
        f"requests; SmolLM2-135M in bfloat16,\n"
        f"{os.cpu_count()} cores, {cpu_name()}, one of them for vLLM\n"
    )
    print(f"{'':40}" + "".join(f"{f'{length:,} tokens':>18}" for length in LENGTHS))
    missed = 0
    for way, cache in dict.fromkeys(key[:2] for key in samples):
        cells = []
        for length in LENGTHS:
            mark = ""
            for factor, other in TARGETS.get((way, cache), []):
                ratio = medians[way, cache, length] / medians[*other, length]
                missed += ratio > factor
                mark = f" ({ratio:.2f}{'' if ratio <= factor else ' !'})"
            cells.append(f"{medians[way, cache, length]:.3f}{mark}")
        print(f"{f'{way}, {cache}':40}" + "".join(f"{cell:>18}" for cell in cells))
    print("\nin brackets: as a multiple of vLLM's own, cold or prefix cache")
    print("tokens from the cache: " + "; ".join(
        f"{way}, {cache} " + " ".join(f"{cached[way, cache, length]:,}" for length in LENGTHS)
        for way, cache in dict.fromkeys(key[:2] for key in samples)
        if cache != "cold"))  # fmt: skip
    out = ROOT / "bench-out"
    out.mkdir(exist_ok=True)
    rows = [{"way": way, "cache": cache, "tokens": length, "seconds": values}
            for (way, cache, length), values in samples.items()]  # fmt: skip
    (out / "bench_vllm.json").write_text(json.dumps(rows, indent=1))
    return 1 if missed else 0


def cpu_name() -> str:
    with contextlib.suppress(OSError, IndexError):
        names = [
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ]
        return names[0].split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


if __name__ == "__main__":
    sys.exit(main())
