"""lmcache_peer.py - the real LMCache 0.3.14, made to run on a CPU and to leave nothing behind: the
tests' other end.

Each context manager gives one part of the installed package `lmcache`, and closes what it opened,
threads, sockets and socket files, also where LMCache itself would leave them:

    engine(...)          its LMCacheEngine over pages in CPU memory, and a remote at `remote_url`
    connector(port)      its TCP client LMCServerConnector, with the event loop that it needs
    server_process()     its `python -m lmcache.v1.server HOST PORT cpu`; gives the port
    lookup_client(...), lookup_servers([(engine, metadata), ...]), offload_server(engine, rank)
"""

# ruff: noqa: F401  # most of these imports are for the tests
import asyncio
import contextlib
import hashlib
import multiprocessing
import os
import pathlib
import socket
import subprocess
import sys
import threading
import uuid
from unittest import mock

os.environ["LMCACHE_TRACK_USAGE"] = "false"
os.environ.setdefault("LMCACHE_LOG_LEVEL", "CRITICAL")

import cbor2
import torch
import zmq
from torch.overrides import TorchFunctionMode

with mock.patch(
    "torch.cuda.is_available", lambda: False
):  # as on a host without a GPU, whatever this one has
    from lmcache.utils import CacheEngineKey, LayerCacheEngineKey, parse_cache_key
    from lmcache.v1 import token_database
    from lmcache.v1.cache_engine import LMCacheEngine
    from lmcache.v1.config import LMCacheEngineConfig
    from lmcache.v1.gpu_connector import GPUConnectorInterface
    from lmcache.v1.lookup_client.lmcache_lookup_client import (
        LMCacheLookupClient,
        LMCacheLookupServer,
    )
    from lmcache.v1.memory_management import MemoryFormat
    from lmcache.v1.metadata import LMCacheMetadata
    from lmcache.v1.offload_server.message import OffloadMsg, OffloadRetMsg
    from lmcache.v1.offload_server.zmq_server import ZMQOffloadServer
    from lmcache.v1.pin_monitor import PinMonitor
    from lmcache.v1.protocol import (
        DTYPE_TO_INT,
        INT_TO_DTYPE,
        INT_TO_LOCATION,
        ClientCommand,
        ClientMetaMessage,
        ServerMetaMessage,
        ServerReturnCode,
    )
    from lmcache.v1.rpc_utils import get_zmq_rpc_path_lmcache as rpc_path
    from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector
    from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend


def config(**fields):
    """LMCache's config: small chunks and memory. py_enable_gc, or its engine would turn Python's
    collector off."""
    return LMCacheEngineConfig.from_defaults(
        **{"max_local_cpu_size": 0.01, "py_enable_gc": True, **fields}
    )


CHUNK, BLOCKS, BLOCK_SIZE = 4, 8, 4  # tokens, and a paged cache of 32 slots


def world(ranks=1, mla=False, dtype=torch.float32):
    """The facts of each rank, for their LMCacheMetadata and for ours; model name and engine id are
    nobody else's."""
    nobody_else = uuid.uuid4().hex
    facts = {"model_name": f"org/{nobody_else[:8]}", "engine_id": nobody_else}
    facts |= {"world_size": ranks, "local_world_size": ranks}
    facts |= {
        "kv_dtype": dtype,
        "use_mla": mla,
        "kv_shape": (2, 1, CHUNK, 1, 16) if mla else (2, 2, CHUNK, 2, 8),
    }
    facts |= {"chunk_size": CHUNK, "kv_connector_extra_config": {"lmcache_rpc_port": 10}}
    return [facts | {"worker_id": rank, "local_worker_id": rank} for rank in range(ranks)]


def pages(facts):
    """A paged KV cache full of noise: L of [2, B, N, H, D], with MLA of [B, N, D]."""
    num_layers, _, _, heads, head_dim = facts["kv_shape"]
    shape = (
        (BLOCKS, BLOCK_SIZE, head_dim)
        if facts["use_mla"]
        else (2, BLOCKS, BLOCK_SIZE, heads, head_dim)
    )
    noise = torch.randint(
        0, 256, (num_layers, *shape[:-1], head_dim * facts["kv_dtype"].itemsize), dtype=torch.uint8
    )
    return [*noise.view(facts["kv_dtype"])]


def layout(facts):
    return "BNC" if facts["use_mla"] else "2BNHD"


def at(kv, slots):
    """The KV at these slots as a chunk's bytes: [K, L, T, H*D], taken without any code of the two
    engines."""
    slots_axis = BLOCKS * BLOCK_SIZE
    rows = [
        layer.view(torch.uint8).view(layer.dim() // 2, slots_axis, -1) for layer in kv
    ]  # L of [K, B*N, H*D bytes]
    return torch.stack([layer[:, slots] for layer in rows], dim=1)


def spans(database, tokens):
    """Hashes and lengths of the chunks, from a token database of theirs or of ours."""
    arguments = {"make_key": False} if isinstance(database, token_database.TokenDatabase) else {}
    found = [*database.process_tokens(tokens, **arguments)]
    return [span[2] for span in found], [end - start for start, end, _ in found]


def sha256_cbor(parts):
    """What LMCache would take from vLLM, where that is installed."""
    return hashlib.sha256(cbor2.dumps(parts, canonical=True)).digest()


def hash_with_sha256_cbor(database, monkeypatch, seed="0"):
    """Makes a token database of theirs hash as it does beside vLLM, PYTHONHASHSEED being seed."""
    monkeypatch.setattr(token_database, "NONE_HASH", sha256_cbor(seed))
    monkeypatch.setattr(database, "hash_func", sha256_cbor)


# --------------------------------------------------------------------------------------------------
# The engine


class OnCPU(TorchFunctionMode):
    """LMCache asks for "cuda" in store(hashes=...) and in MLA's broadcast, whatever the host: here
    it gets the CPU."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        args = ["cpu" if isinstance(arg, str) and arg.startswith("cuda") else arg for arg in args]
        return func(*args, **(kwargs | {"device": "cpu"} if "device" in kwargs else kwargs))


class CPUEngine(LMCacheEngine):
    def store(self, *args, **kwargs):
        with OnCPU():
            return super().store(*args, **kwargs)

    def retrieve(self, *args, **kwargs):
        with OnCPU():
            return super().retrieve(*args, **kwargs)

    def flush(self, key):
        """Returns when the remote has every chunk stored so far: puts and this question share one
        connection."""
        return self.storage_manager.storage_backends["RemoteBackend"].connection.exists_sync(key)


class PagedConnector(GPUConnectorInterface):
    """Copies between chunks [K, L, T, H*D] and pages, L of [2, B, N, H, D] or of MLA's [B, N, D];
    slot = block * N + i.

    As bytes, for torch cannot index every dtype.
    """

    # MLA makes a CUDA stream where there is no such attribute; torch.cuda.stream(None) is a no-op.
    load_stream = None

    def __init__(self, kvcaches):
        self.kvcaches = kvcaches

    def _pairs(self, memory_obj, start, end, kvcaches=None, slot_mapping=None, **_):
        chunk = memory_obj.tensor.view(torch.uint8)  # [K, L, T, H*D bytes]
        for layer, pages in enumerate(self.kvcaches if kvcaches is None else kvcaches):
            rows = pages.view(torch.uint8).view(
                chunk.shape[0], -1, chunk.shape[3]
            )  # [K, B*N, H*D bytes]
            yield chunk[:, layer], rows, slot_mapping[start:end]

    def from_gpu(self, memory_obj, start, end, **kwargs):
        for part, rows, slots in self._pairs(memory_obj, start, end, **kwargs):
            part.copy_(rows[:, slots])

    def to_gpu(self, memory_obj, start, end, **kwargs):
        for part, rows, slots in self._pairs(memory_obj, start, end, **kwargs):
            rows[:, slots] = part

    def batched_from_gpu(self, memory_objs, starts, ends, **kwargs):
        for job in zip(memory_objs, starts, ends, strict=True):
            self.from_gpu(*job, **kwargs)

    def batched_to_gpu(self, memory_objs, starts, ends, **kwargs):
        for job in zip(memory_objs, starts, ends, strict=True):
            self.to_gpu(*job, **kwargs)

    def get_shape(self, num_tokens):
        raise NotImplementedError("only layer-wise stores ask for it")


@contextlib.contextmanager
def engine(config, metadata, kvcaches=()):
    with mock.patch("torch.cuda.is_available", lambda: False):
        kind = (
            token_database.SegmentTokenDatabase
            if config.enable_blending
            else token_database.ChunkedTokenDatabase
        )
        database, pages = kind(config, metadata), PagedConnector(kvcaches)
        start_method = multiprocessing.get_start_method(allow_none=True)
        made = CPUEngine(
            config, metadata, database, pages, lambda *_: None, lambda value, _: value
        )  # nobody to tell
        multiprocessing.set_start_method(
            start_method, force=True
        )  # LMCache changes it for the whole process
        made.post_init()
        try:
            yield made
        finally:
            made.close()
            made.storage_manager.loop.close()
            PinMonitor.DestroyInstance()


# --------------------------------------------------------------------------------------------------
# TCP


class Connector:
    """LMCache's TCP client, its coroutines called from here."""

    def __init__(self, port, metadata):
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(
            target=self.loop.run_forever, name="lmcache-loop", daemon=True
        )
        self.thread.start()
        self.memory = LocalCPUBackend(config(chunk_size=metadata.chunk_size), metadata)
        self.peer = LMCServerConnector("127.0.0.1", port, self.loop, self.memory)
        self.exists_sync = self.peer.exists_sync

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    def put(self, key, data, shape, dtype, fmt):
        chunk = self.memory.allocate(torch.Size(shape), dtype, fmt)
        memoryview(chunk.byte_array).cast("B")[:] = data
        self._call(self.peer.put(key, chunk))
        chunk.ref_count_down()

    def get(self, key):
        """(shape, dtype, fmt, bytes), or None."""
        chunk = self._call(self.peer.get(key))
        if chunk is None:
            return None
        try:
            return (
                tuple(chunk.get_shape()),
                chunk.get_dtype(),
                chunk.get_memory_format(),
                bytes(chunk.byte_array),
            )
        finally:
            chunk.ref_count_down()

    def exists(self, key):
        return self._call(self.peer.exists(key))

    def close(self):
        self._call(self.peer.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()
        self.memory.close()


@contextlib.contextmanager
def connector(port, metadata):
    with (
        mock.patch("torch.cuda.is_available", lambda: False),
        contextlib.closing(Connector(port, metadata)) as made,
    ):
        yield made


@contextlib.contextmanager
def server_process():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "lmcache.v1.server", "127.0.0.1", str(port), "cpu"]
    env = {**os.environ, "LMCACHE_LOG_LEVEL": "INFO", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, env=env, stderr=subprocess.STDOUT, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            said = []
            while not said or "Server started" not in said[-1]:  # it listens before it says so
                said.append(process.stdout.readline())
                assert said[-1], f"LMCache's server did not start: {''.join(said)}"
            yield port
        finally:
            process.kill()


# --------------------------------------------------------------------------------------------------
# ZMQ


@contextlib.contextmanager
def lookup_client(config, metadata):
    client = LMCacheLookupClient(config, metadata)
    try:
        yield client
    finally:
        client.close()


@contextlib.contextmanager
def lookup_servers(engines_and_metadata):
    """One a rank. A server looks up only every second whether it is to stop, or after a message: it
    gets a bad one."""
    with contextlib.ExitStack() as stack:
        for engine, metadata in engines_and_metadata:
            server = LMCacheLookupServer(engine, metadata)
            port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
            path = rpc_path(metadata.engine_id, "lookup", port, metadata.worker_id)
            stack.callback(_end, server, path, b"not a lookup")
        yield


@contextlib.contextmanager
def offload_server(engine, rank, path):
    server = ZMQOffloadServer(engine, rank)
    try:
        yield server
    finally:
        _end(
            server, path, b"\x83\xa6hashes\x90\xacslot_mapping\x90\xa7offsets\x90"
        )  # an offload of nothing


def _end(server, path, last_message):
    server.running = False
    with zmq.Context() as context, context.socket(zmq.REQ) as sock:
        sock.set(zmq.LINGER, 0)
        sock.connect(f"ipc://{path}")
        sock.send(last_message)
        server.thread.join(5)
    assert not server.thread.is_alive()
    server.socket.close(0)
    server.ctx.term()
    pathlib.Path(path).unlink()
