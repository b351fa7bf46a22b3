"""eviction.py - which policy keeps what comes again: block hits on a recorded trace.

    $ python bench/eviction.py conversation_trace.jsonl.gz       # a line a policy, a column a room
    $ python bench/eviction.py TRACE.jsonl --mixes --plot docs/figures/eviction.png

A trace has one JSON object a line, as Mooncake publishes them (kvcache-ai/Mooncake, directory
FAST25-release/traces): timestamp, input_length, output_length, and hash_ids, the prompt's blocks of
512 tokens, each named by its whole prefix.

A request's leading blocks that are there are hits, and are in use until it ends; the others are
then new, and take the room of blocks that nobody uses. At the end all of them are idle again, the
tail used first, so that the head goes last. The last line is Belady's: the hits of a store that
knows the future, and throws away what comes again last.

Not here: time, since policies are told of uses and not of the clock; and answers, which are stored
once they are part of a prompt.
"""

import argparse
import gzip
import heapq
import itertools
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from engine import POLICIES, ChunkStore

ROOMS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000)  # blocks
MIX_ROOMS = (300, 1_000, 2_000, 4_000)
CHUNK_BYTES = 64  # a payload that costs nothing: only names matter here
BLOCK_TOKENS = 512

Request = list[int]  # a prompt's blocks, the head first

# -------------------------------------------------------------------------------------------------
# Replays


def replay(policy: str, room: int, requests: Iterable[Request]) -> int:
    """Blocks that a ChunkStore had when they were asked for."""
    hits = 0
    with ChunkStore("cpu", room * CHUNK_BYTES, policy, warm_bytes=0) as store:
        for blocks in requests:
            here = store.acquire_each(blocks, [BLOCK_TOKENS] * len(blocks))
            missing = [index for index, chunk in enumerate(here) if chunk is None]
            hits += missing[0] if missing else len(blocks)
            new = store.reserve_many([CHUNK_BYTES] * len(missing))
            # fewer than are missing, where the room is too small
            for index, chunk in zip(missing, new, strict=False):
                chunk.meta = BLOCK_TOKENS
                here[index] = store.commit(blocks[index], chunk, keep=True)
            store.release(filter(None, here))
    return hits


def belady(room: int, requests: list[Request]) -> int:
    """Hits of a store that knows the future: the block that comes again last is the next to go."""
    never = len(requests)
    next_uses: list[list[int]] = [[] for _ in requests]
    next_use: dict[int, int] = {}
    for turn in reversed(range(len(requests))):
        next_uses[turn] = [next_use.get(block, never) for block in requests[turn]]
        next_use.update(dict.fromkeys(requests[turn], turn))
    present: dict[int, int] = {}  # block -> the request that uses it next
    queue: list[tuple[int, int, int]] = []  # (-next use, -depth, block)
    hits = 0
    for turn, blocks in enumerate(requests):
        hits += next((i for i, block in enumerate(blocks) if block not in present), len(blocks))
        for depth, block in enumerate(blocks):
            present[block] = next_uses[turn][depth]
            heapq.heappush(queue, (-present[block], -depth, block))
        while len(present) > room:
            when, _, block = heapq.heappop(queue)
            if present.get(block) == -when:  # else it was used since, and is in the queue again
                del present[block]
    return hits


# -------------------------------------------------------------------------------------------------
# Traffic: read from a trace, or made up from a seed


def read_trace(path: Path) -> list[Request]:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line)["hash_ids"] for line in lines]


def prompt(start: int, blocks: int) -> Request:
    return list(range(start * 1_000, start * 1_000 + blocks))


def users(count: int, rng: random.Random) -> Iterator[Request]:
    """2,000 users, few of them busy, up to ten blocks each, all under one system prompt."""
    system = prompt(0, 20)
    for _ in range(count):
        yield system + prompt(1 + int(2_000 * rng.random() ** 2), 2 * rng.randrange(1, 6))


def chats(count: int, rng: random.Random, live: int = 60) -> Iterator[Request]:
    """Chats that grow by a few blocks a turn and end after seven turns or so."""
    fresh, open_chats = itertools.count(), []
    for _ in range(count):
        if len(open_chats) < live:
            open_chats.append(list(islice(fresh, rng.randrange(2, 20))))
        turn = rng.randrange(len(open_chats))
        open_chats[turn] = open_chats[turn] + list(islice(fresh, rng.randrange(1, 6)))
        yield open_chats.pop(turn) if rng.random() < 0.15 else open_chats[turn]


def floods(count: int, rng: random.Random) -> Iterator[Request]:
    """Chats; in every second 500 requests, four of five are prompts that come once."""
    talk = chats(count, rng, live=40)
    for turn in range(count):
        once = turn // 500 % 2 and rng.random() < 0.8
        yield prompt(10**6 + turn, 30) if once else next(talk)


def shifting(count: int, rng: random.Random) -> Iterator[Request]:
    """300 documents, some of them popular; every 20 requests the oldest one makes way."""
    for turn in range(count):
        yield prompt(turn // 20 + int(300 * rng.random() ** 3), 8)


def jumps(count: int, rng: random.Random) -> Iterator[Request]:
    """150 documents, and after each 1,000 requests 150 others."""
    for turn in range(count):
        yield prompt(turn // 1_000 * 1_000 + rng.randrange(150), 10)


def scan(count: int, rng: random.Random) -> Iterator[Request]:
    """The same 300 documents in the same order over and over: LRU has room for all or no hit."""
    for turn in range(count):
        yield prompt(turn % 300, 8)


def twice(count: int, rng: random.Random) -> Iterator[Request]:
    """Each prompt comes twice, 80 others in between: to keep what came twice is a waste of room."""
    for turn in range(count // 2):
        yield prompt(turn, 10)
        if turn >= 80:
            yield prompt(turn - 80, 10)


def popular(count: int, rng: random.Random) -> Iterator[Request]:
    """4,000 documents, the n-th asked for in proportion to 1/n."""
    for document in rng.choices(range(4_000), [1 / (n + 1) for n in range(4_000)], k=count):
        yield prompt(document, 8)


MIXES = (users, chats, floods, shifting, jumps, scan, twice, popular)

# -------------------------------------------------------------------------------------------------
# Tables and plot


def shares(requests: list[Request], rooms: tuple[int, ...]) -> dict[str, list[float]]:
    """Per cent of all blocks that were hits, by policy, and Belady's at last."""
    blocks = sum(map(len, requests))
    found = {policy: [replay(policy, room, requests) for room in rooms] for policy in POLICIES}
    found["belady"] = [belady(room, requests) for room in rooms]
    return {name: [100 * hits / blocks for hits in row] for name, row in found.items()}


def show(title: str, rooms: tuple[int, ...], rows: dict[str, list[float]]) -> None:
    print(f"\n{title[:40]:40} {' '.join(f'{room:7,}' for room in rooms)}")
    for name, row in rows.items():
        print(f"{name:>40} {' '.join(f'{share:6.1f}%' for share in row)}", flush=True)


def plot(path: Path, rows: dict[str, list[float]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for (name, row), style in zip(rows.items(), ("o-", "s-", "k--"), strict=False):
        axes.plot(ROOMS, row, style, label=name)
    axes.set_xscale("log")
    axes.set_xticks(ROOMS, [f"{room:,}" for room in ROOMS])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.set(xlabel="room, blocks of 512 tokens", ylabel="blocks hit, %")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--mixes", action="store_true", help="made-up traffic too")
    parser.add_argument("--plot", type=Path, metavar="FILE")
    options = parser.parse_args()
    rows = shares(read_trace(options.trace), ROOMS)
    show(options.trace.name, ROOMS, rows)
    if options.plot:
        plot(options.plot, rows)
    for mix in MIXES if options.mixes else ():
        show(mix.__name__, MIX_ROOMS, shares(list(mix(6_000, random.Random(1))), MIX_ROOMS))


if __name__ == "__main__":
    main()
