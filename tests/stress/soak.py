"""The long runs: many clients, evictions, faults, churn, every byte checked. `make soak`; a failure
is exit status 1.

    $ python tests/stress/soak.py    # some 17 minutes: 60 s each, churn 10 minutes
    $ python tests/stress/soak.py --seconds 5 --churn-seconds 20        # shorter
    $ python tests/stress/soak.py --only mixed_clients --seconds 300    # one of them

test_soak_short.py runs each for a few seconds.
"""

import argparse
import contextlib
import hashlib
import logging
import os
import random
import signal
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for the script: where toys.py is
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # and the four modules

import psutil
import torch
from toys import (
    CHUNK,
    CHUNK_BYTES,
    D,
    H,
    ServerProcess,
    client_of,
    config,
    connected,
    metadata,
    new_engine,
    request,
    running_server,
    wait_for,
)

from engine import LMCacheEngine
from lookup import LMCacheLookupClient, LMCacheLookupServer
from remote_server import ClientCommand, RemoteClient

Going = Callable[[], bool]  # whether a worker is to go on
Worker = Callable[[Counter, Going], None]  # counts what it does


def work(workers: list[Worker], seconds: float) -> Counter:
    """Each worker in a thread of its own until the time is over or one has failed. The sum of what
    they counted."""
    end, failures, figures = time.monotonic() + seconds, [], [Counter() for _ in workers]

    def going() -> bool:
        return time.monotonic() < end and not failures

    def run(worker: Worker, figure: Counter) -> None:
        try:
            worker(figure, going)
        except BaseException as error:
            failures.append(error)

    threads = [
        threading.Thread(target=run, args=pair) for pair in zip(workers, figures, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return sum(figures, Counter())


# --------------------------------------------------------------------------------------------------
# Payloads that prove themselves: the digest of the key and the rest, then the rest


def make_payload(key: str, size: int, start: bytes = b"") -> bytes:
    body = start + os.urandom(size)
    return hashlib.sha256(key.encode() + body).digest() + body


def check_payload(key: str, data: bytes | bytearray, count: Counter) -> memoryview:
    """Its body; an AssertionError where one byte is another's."""
    view = memoryview(data)
    assert hashlib.sha256(key.encode() + view[32:]).digest() == view[:32], (
        f"{key}: {len(data)} wrong bytes"
    )
    count["bytes checked"] += len(data)
    return view[32:]


def url_of(server: ServerProcess) -> str:
    return f"lm://127.0.0.1:{server.port}"


# --------------------------------------------------------------------------------------------------
# The remote server


def mixed_clients(seconds: float, clients: int = 32) -> Counter:
    """All commands and faults from many clients. The budget holds it all: no client's own keys are
    ever lost."""
    kept: dict[str, bytes] = {}  # key -> the value that the server has acknowledged

    def client_worker(number: int) -> Worker:
        own = [f"own-{number}-{index}" for index in range(8)]
        dice = random.Random(number)

        def fault(port: int, key: str) -> None:
            """Half a PUT over a key that is there, a negative length, an unknown command, noise;
            then it leaves."""
            half = request(ClientCommand.PUT, key, 50_000) + bytes(dice.randrange(50_000))
            broken = [
                half[: dice.randrange(1, len(half))],
                request(ClientCommand.PUT, key, -5),
                request(77, key),
            ]
            broken += [
                request(ClientCommand.PUT, key, 2**31 - 1) + b"x" * 99,
                dice.randbytes(dice.randrange(400)),
            ]
            with connected(port) as sock, contextlib.suppress(ConnectionError):
                sock.sendall(dice.choice(broken))

        def one(client: RemoteClient, count: Counter) -> None:
            key, shared, act = dice.choice(own), f"shared-{dice.randrange(16)}", dice.random()
            if act < 0.3:
                kept[key] = make_payload(key, dice.choice([0, 1, 1000, 30_000, 60_000]))
                client.put(key, kept[key])
            elif act < 0.6:
                found = client.get(key)
                assert (found and found[1]) == kept.get(key), f"{key} is lost, or another version"
                if found:
                    check_payload(key, found[1], count)
            elif act < 0.7:
                assert client.exists(key) == (key in kept)
            elif act < 0.8:
                client.put(shared, make_payload(shared, dice.randrange(60_000)))
            elif act < 0.95:
                if found := client.get(shared):
                    check_payload(shared, found[1], count)
            elif act < 0.97:
                assert set(client.list_keys()) >= {key for key in own if key in kept}
            else:
                client.flush()
                fault(client.port, key)
                count["faults injected"] += 1
            count["operations"] += 1

        def worker(count: Counter, going: Going) -> None:
            while going():
                with RemoteClient(url_of(server), 30.0) as client:  # a new connection now and then
                    for _ in range(500):
                        if going():
                            one(client, count)
                    client.flush()

        return worker

    with ServerProcess("--max-gib", "0.25") as server:
        total = work([client_worker(number) for number in range(clients)], seconds)
        with RemoteClient(url_of(server), 30.0) as client:
            for key, value in kept.items():
                assert (client.get(key) or (None, None))[1] == value, f"{key} is lost"
            assert wait_for(lambda: client.stats()["clients"] == 1)
        total["keys kept, all found at the end"] = len(kept)
        assert server.stop() == 0 and "Traceback" not in server.log
    return total


def one_key(seconds: float) -> Counter:
    """Two writers and a reader on one key: each read is wholly one version, and no writer's
    versions go backwards."""

    def writer(number: int) -> Worker:
        def worker(count: Counter, going: Going) -> None:
            with client_of(server) as client:
                while going():
                    count["writes"] += 1
                    start = struct.pack("<BI", number, count["writes"])
                    client.put("key", make_payload("key", random.randrange(300_000), start))

        return worker

    def reader(count: Counter, going: Going) -> None:
        last = [0, 0]
        with client_of(server) as client:
            while going():
                if found := client.get("key"):
                    number, version = struct.unpack_from(
                        "<BI", check_payload("key", found[1], count)
                    )
                    assert version >= last[number], "an old version came back"
                    last[number] = version
                    count["reads"] += 1

    with running_server(max_bytes=2 << 20) as server:
        return work([writer(0), writer(1), reader], seconds)


def sigterm(seconds: float) -> Counter:
    """Under load: exit status 0 within 2 s, and the port can be used again at once."""
    stopping = threading.Event()

    def worker(count: Counter, going: Going) -> None:
        with RemoteClient(url_of(server), 5.0, retries=0) as client:
            while going():
                key = f"key-{random.randrange(20)}"
                try:
                    client.put(key, make_payload(key, 200_000))
                    if found := client.get(key):
                        check_payload(key, found[1], count)
                except OSError:
                    assert stopping.is_set(), "refused before it was asked to stop"
                    return
                count["operations"] += 1

    def stopper(count: Counter, going: Going) -> None:
        with RemoteClient(url_of(server), 5.0) as client:
            load = wait_for(lambda: client.stats()["hits"] > 100 * seconds, 60)
        assert load, "no load"
        stopping.set()
        began = time.monotonic()
        server.process.terminate()
        assert wait_for(lambda: "INFO stopped" in server.log, 2.0)
        count["ms to stop"] = int(1000 * (time.monotonic() - began))
        assert server.process.wait(10) == 0 and "Traceback" not in server.log
        count["ms to exit"] = int(
            1000 * (time.monotonic() - began)
        )  # torch takes its time to unload

    with ServerProcess() as server:
        total = work([worker] * 8 + [stopper], 120)
        server.stop()
        with running_server(port=server.port) as again, client_of(again) as client:
            assert client.health() and client.list_keys() == []
    return total


# --------------------------------------------------------------------------------------------------
# Engines: prompts that share prefixes, KV that follows from the prefix, a range of slots for each
# thread

PROMPTS = [
    [group] * CHUNK * 2 + [100 * group + member] * CHUNK * 2
    for group in range(8)
    for member in range(5)
]
DISTINCT_CHUNKS = 8 * 2 + 8 * 5 * 2
TOKENS = 4 * CHUNK  # in each prompt


@cache
def prefix_kv(prefix: tuple[int, ...]) -> torch.Tensor:
    """The KV of a prefix's last chunk, of one layer: [2, T, H, D]."""
    return torch.rand(2, CHUNK, H, D, generator=torch.Generator().manual_seed(hash(prefix) % 2**31))


def prompt_kv(prompt: list[int]) -> torch.Tensor:
    return torch.cat(
        [prefix_kv(tuple(prompt[:end])) for end in range(CHUNK, len(prompt) + 1, CHUNK)], dim=1
    )


def use_engine(engine: LMCacheEngine, number: int, slowest_sec: float = 10.0) -> Worker:
    """Stores, looks up, pins and retrieves through two slot ranges of its own; what comes back is
    what was stored."""
    dice, source, target = random.Random(number), [*range(number * 32, number * 32 + TOKENS)], []
    target = [slot + TOKENS for slot in source]

    def pages(slots: list[int]) -> list[torch.Tensor]:  # of [2, T, H, D], views
        return [layer.flatten(1, 2)[:, slots[0] : slots[0] + TOKENS] for layer in engine.pages]

    def worker(count: Counter, going: Going) -> None:
        while going():
            prompt, act, began = dice.choice(PROMPTS), dice.random(), time.monotonic()
            if act < 0.35:
                for view in pages(source):
                    view.copy_(prompt_kv(prompt))
                engine.store(prompt, slot_mapping=source)
            elif act < 0.6:
                hits = engine.lookup(prompt, lookup_id=f"{number}", pin=act < 0.5)
                assert hits in range(0, TOKENS + 1, CHUNK)
            elif act < 0.65:
                engine.lookup_unpin(f"{number}")
            else:
                for view in pages(target):
                    view.fill_(-1.0)
                written = engine.retrieve(prompt, slot_mapping=target)  # [T]
                hits = int(written.sum())
                assert bool(written[:hits].all()) and hits % CHUNK == 0
                expected = torch.full((2, TOKENS, H, D), -1.0)
                expected[:, :hits] = prompt_kv(prompt)[:, :hits]
                assert all(torch.equal(view, expected) for view in pages(target)), "wrong KV"
                count["bytes checked"] += hits * CHUNK_BYTES // CHUNK
                count["tokens hit"] += hits
            assert time.monotonic() - began < slowest_sec, "a call took too long"
            count["operations"] += 1
        engine.lookup_unpin(f"{number}")

    return worker


def check_at_rest(engine: LMCacheEngine) -> None:
    """When nobody is at work: nothing is in use, and the arena's sum is that of the chunks."""
    engine.flush()
    wait_for(lambda: not engine.stats()["in_use"])  # of what the outbox holds
    stats = engine.stats()
    assert stats["in_use"] == stats["pins"] == 0, "a use that nobody gives back"
    assert stats["bytes_used"] == stats["chunks"] * CHUNK_BYTES <= stats["max_bytes"]
    assert stats["faults"] == 0


def check_all_at_remote(url: str) -> int:
    """A new engine finds every prompt at the remote; how many bytes it checked."""
    count: Counter = Counter()
    with RemoteClient(url, 30.0) as remote, new_engine(256, remote) as other:
        for prompt in PROMPTS:
            assert int(other.retrieve(prompt, slot_mapping=[*range(TOKENS)]).sum()) == TOKENS, (
                "a prompt is lost"
            )
            assert all(
                torch.equal(layer.flatten(1, 2)[:, :TOKENS], prompt_kv(prompt))
                for layer in other.pages
            )
            count["bytes"] += TOKENS * CHUNK_BYTES // CHUNK
        assert other.stats()["remote_errors"] == 0
    return count["bytes"]


def store_all(engine: LMCacheEngine) -> None:
    for prompt in PROMPTS:
        for layer in engine.pages:
            layer.flatten(1, 2)[:, :TOKENS] = prompt_kv(prompt)
        engine.store(prompt, slot_mapping=[*range(TOKENS)])


def shared_engine(seconds: float, threads: int = 6) -> Counter:
    """Store, retrieve and lookup from several threads on one engine; its remote has all of it at
    the end."""
    with running_server() as server, client_of(server) as remote, new_engine(256, remote) as engine:
        total = work([use_engine(engine, number) for number in range(threads)], seconds)
        store_all(engine)  # what chance has left out
        check_at_rest(engine)
        stats = engine.stats()
        assert stats["evictions"] == stats["remote_errors"] == stats["remote_dropped"] == 0
        total["bytes checked"] += check_all_at_remote(f"lm://127.0.0.1:{server.port}")
    return total


def eviction(seconds: float) -> Counter:
    """Engine and remote both hold half of what is used: eviction against GET, retrieve and lookup,
    all at once."""

    def getter(number: int) -> Worker:
        def worker(count: Counter, going: Going) -> None:
            with client_of(server) as client:
                while going():
                    key = f"raw-{random.randrange(40)}"
                    if random.random() < 0.4:
                        client.put(key, make_payload(key, random.randrange(4000)))
                    elif found := client.get(key):
                        check_payload(key, found[1], count)
                    count["operations"] += 1

        return worker

    def asker(count: Counter, going: Going) -> None:
        with LMCacheLookupClient(config(), metadata()) as client:
            while going():
                assert client.lookup(random.choice(PROMPTS), "asker") in range(0, TOKENS + 1, CHUNK)
                engine.lookup_unpin("asker")
                count["operations"] += 1

    with contextlib.ExitStack() as stack:
        server = stack.enter_context(
            running_server(max_bytes=DISTINCT_CHUNKS * CHUNK_BYTES // 2 + 40 * 1000)
        )
        engine = stack.enter_context(
            new_engine(DISTINCT_CHUNKS // 2, stack.enter_context(client_of(server)))
        )
        stack.enter_context(LMCacheLookupServer(engine, metadata()))
        total = work(
            [use_engine(engine, number) for number in range(5)] + [getter(0), getter(1), asker],
            seconds,
        )
        engine.lookup_unpin("asker")
        check_at_rest(engine)
        total["evictions"] = engine.stats()["evictions"] + server.stats()["evictions"]
        assert total["evictions"] > 0 and engine.stats()["remote_errors"] == 0
    return total


def shared_lookup_client(seconds: float, threads: int = 8) -> Counter:
    """One lookup client in 8 threads: each is told the count of its own prompt, every time."""

    def asker(number: int) -> Worker:
        prompt, held = [1000 + number] * TOKENS, CHUNK * (number % 5)

        def worker(count: Counter, going: Going) -> None:
            if held:
                engine.store(prompt[:held], slot_mapping=[*range(held)])
            while going():
                assert (
                    client.lookup(prompt, f"{number}") == held == client.lookup_cache(f"{number}")
                )
                engine.lookup_unpin(f"{number}")
                count["operations"] += 1

        return worker

    slow = config(lookup_timeout_ms=30_000)
    with (
        new_engine() as engine,
        LMCacheLookupServer(engine, metadata()),
        LMCacheLookupClient(slow, metadata()) as client,
    ):
        total = work([asker(number) for number in range(threads)], seconds)
        check_at_rest(engine)
    return total


def remote_killed(seconds: float, threads: int = 4) -> Counter:
    """SIGKILL and restart of the remote under an engine at work: misses, no wrong byte, nobody
    waits; then it heals."""
    servers = [ServerProcess()]
    port = servers[0].port

    def killer(count: Counter, going: Going) -> None:
        while going():
            asked = servers[-1]
            with RemoteClient(f"lm://127.0.0.1:{port}") as client:  # in the middle of its work
                wait_for(lambda: client.stats()["hits"] > 20 or not going(), 5.0)
            asked.stop(signal.SIGKILL)
            servers.append(ServerProcess(port=port))
            count["faults injected"] += 1

    try:
        with (
            RemoteClient(f"lm://127.0.0.1:{port}", 2.0) as remote,
            new_engine(DISTINCT_CHUNKS // 2, remote) as engine,
        ):
            total = work(
                [use_engine(engine, number) for number in range(threads)] + [killer], seconds
            )
            total["remote errors, counted"] = engine.stats()["remote_errors"]
            assert wait_for(engine.flush, 60), (
                "it does not come back"
            )  # left alone for 30 s at most
            for first in range(
                0, len(PROMPTS), 4
            ):  # a few at a time: they wait for the remote in the engine's memory
                engine.clear()
                for prompt in PROMPTS[first : first + 4]:
                    for layer in engine.pages:
                        layer.flatten(1, 2)[:, :TOKENS] = prompt_kv(prompt)
                    engine.store(prompt, slot_mapping=[*range(TOKENS)])
                    assert engine.flush()
            check_at_rest(engine)
            total["bytes checked"] += check_all_at_remote(f"lm://127.0.0.1:{port}")
    finally:
        for server in servers:
            server.__exit__()
    return total


# --------------------------------------------------------------------------------------------------
# Memory


def churn(seconds: float, allowed_mib: float = 16.0) -> Counter:
    """Keys and prompts that never come again, twice the capacity and more: memory is where it was
    after a tenth."""
    budget, size = 32 << 20, 100_000
    numbers = iter(range(2**62))

    def putter(count: Counter, going: Going) -> None:
        with RemoteClient(url_of(server), 30.0) as client:
            while going():
                key = f"key-{next(numbers)}"
                client.put(key, make_payload(key, random.randrange(2 * size)))
                if found := client.get(key):  # another may have evicted it
                    check_payload(key, found[1], count)
                count["operations"] += 1

    def prompter(count: Counter, going: Going) -> None:
        while going():
            number = next(numbers)
            prompt = [number] * TOKENS
            engine.store(prompt, slot_mapping=[*range(TOKENS)])
            hits = engine.lookup(prompt, lookup_id=f"{number}", pin=True)
            assert (
                hits
                == TOKENS
                == int(engine.retrieve(prompt, slot_mapping=[*range(64, 64 + TOKENS)]).sum())
            )
            engine.lookup_unpin(f"{number}")
            assert all(torch.equal(layer[:, 16:20], layer[:, :4]) for layer in engine.pages)
            count["bytes checked"] += 4 * CHUNK_BYTES
            count["operations"] += 1
            time.sleep(
                0.001
            )  # leaves the others a turn: this one runs on this process's interpreter alone

    def memory() -> list[float]:
        """MiB resident: the server's, and ours with the engine's and the clients'."""
        return [
            psutil.Process(pid).memory_info().rss / 2**20
            for pid in (server.process.pid, os.getpid())
        ]

    with ServerProcess("--max-gib", str(budget / 2**30)) as server, new_engine(512) as engine:
        workers = [putter] * 3 + [prompter]
        total = work(workers, seconds / 10)
        with RemoteClient(url_of(server)) as client:
            while not (client.stats()["evictions"] and engine.stats()["evictions"]):
                total += work(workers, seconds / 10)  # until all of the budget has been used once
        after_one = memory()
        total += work(workers, seconds * 9 / 10)
        for name, before, after in zip(("server", "engine"), after_one, memory(), strict=True):
            total[f"KiB, {name}, after a tenth"], total[f"KiB, {name}, at the end"] = (
                int(before * 1024),
                int(after * 1024),
            )
            assert after - before < allowed_mib, (
                f"the {name} grew from {before:.1f} to {after:.1f} MiB"
            )
        with RemoteClient(url_of(server)) as client:
            stats = client.stats()
        assert stats["bytes_used"] <= budget
        total["evictions"] = stats["evictions"] + engine.stats()["evictions"]
    return total


# --------------------------------------------------------------------------------------------------

RUNS = [
    mixed_clients,
    one_key,
    eviction,
    shared_lookup_client,
    shared_engine,
    remote_killed,
    sigterm,
    churn,
]


def main() -> int:
    parser = argparse.ArgumentParser(description="The long runs; exit status 1 where one failed.")
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="for each run (default %(default)s)"
    )
    parser.add_argument(
        "--churn-seconds", type=float, default=600.0, help="for churn (default %(default)s)"
    )
    parser.add_argument("--only", choices=[run.__name__ for run in RUNS], help="one run alone")
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # the faults are ours
    failed, total = [], Counter()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        for run in RUNS:
            if args.only not in (None, run.__name__):
                continue
            print(f"{run.__name__:22}", end="", flush=True)
            try:
                figures = run(args.churn_seconds if run is churn else args.seconds)
            except Exception as error:
                print(f"FAILED: {error!r}", flush=True)
                failed.append(run.__name__)
                continue
            total += Counter(
                {name: figures[name] for name in ("operations", "faults injected", "bytes checked")}
            )
            print("  ".join(f"{name} {value:,}" for name, value in figures.items()), flush=True)
    print(f"{'all':22}" + "  ".join(f"{name} {value:,}" for name, value in total.items()))
    print(f"FAILED: {', '.join(failed)}" if failed else "nothing lost, no wrong byte, nobody stuck")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
