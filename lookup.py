"""lookup.py - what a prompt's chunks are called, which to forget first, and who has them.

A prompt is cut into chunks of 256 tokens. Chunk i is named by a hash of chunk i-1's hash and its
own tokens, so that a name stands for a whole prefix: two prompts share chunks exactly as far as
they begin with the same tokens. A scheduler asks the worker of every rank how many leading tokens
it has, and the smallest answer counts.

It follows LMCache 0.3.14 (utils.py, config.py, metadata.py, token_database.py, rpc_utils.py and
lookup_client/lmcache_lookup_client.py); either end of the wire can be LMCache's.

    $ python lookup.py      # two workers that hold different amounts, a scheduler that asks both

    scheduler process                                         worker process, one a rank
    LMCacheLookupClient  --REQ, ipc://...port+rank-->  ROUTER LMCacheLookupServer -> engine.lookup
                         <--4 bytes: hit tokens------

Read it from top to bottom: names (a chunk's key, config, metadata), tokens to chunk hashes, what to
forget, the ipc pair that offload_server.py uses too, and last the lookup pair.

| thread | socket | what wakes it |
|---|---|---|
| of a lookup or offload server | its ROUTER | a request; else it looks every 0.1 s for its end |
| that calls a client | REQ sockets, one a rank | the reply; else every 0.1 s deadline and close |

Not here: the KV itself (engine.py), and unpinning over the wire (there is no such message: the
worker calls engine.lookup_unpin(lookup_id), and a pin that is forgotten times out).
"""

import ctypes
import difflib
import fcntl
import functools
import hashlib
import importlib
import json
import logging
import os
import socket
import stat
import sys
import tempfile
import threading
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate, chain, islice
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
import zmq
from msgspec import Meta

logger = logging.getLogger("lmcache.lookup")
to_msgpack = msgspec.msgpack.encode

# --------------------------------------------------------------------------------------------------
# Names: dtypes, formats, and the key of a chunk

DTYPE_TO_TEXT = {  # the dtype's name in a key (LMCache utils.py)
    torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float",
    torch.float64: "double", torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16",
    torch.int32: "int32", torch.int64: "int64", torch.bool: "bool",
    torch.float8_e4m3fn: "fp8_e4m3fn", torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2: "fp8_e5m2", torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
}  # fmt: skip
TEXT_TO_DTYPE = {text: dtype for dtype, text in DTYPE_TO_TEXT.items()}

DTYPE_TO_INT = {  # its number on the wire (LMCache protocol.py; 1 is a second number for float16)
    None: 0, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4, torch.float64: 5,
    torch.uint8: 6, torch.float8_e4m3fn: 7, torch.float8_e5m2: 8,
}  # fmt: skip


class MemoryFormat(IntEnum):
    """How a chunk's bytes are laid out (LMCache memory_management.py; EC_TD, HS_TD are 0.5.6's)."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, L, T, H*D], what this engine writes
    KV_T2D = 2  # [T, 2, H*D]
    KV_2TD = 3  # [2, T, H*D]
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA_FMT = 6  # [1, L, T, D], what this engine writes for an MLA model
    EC_TD = 7
    HS_TD = 8


class RemoteMeta(NamedTuple):
    """What a remote server knows of a chunk: its bytes, and how they are laid out."""

    length: int  # bytes
    fmt: int  # MemoryFormat
    dtype: int  # DTYPE_TO_INT
    shape: tuple[int, ...]  # 4 ints


MAX_KEY_BYTES = 150  # the key field of a request header
TAG = "lmcache.tag."  # what the entries of request_configs that name a chunk begin with
ChunkHash = int | bytes  # 64-bit int, signed or unsigned, or a digest of 9 bytes or more


@dataclass(frozen=True)
class CacheEngineKey:
    """A chunk's name on one rank: `model@world_size@worker_id@hash@dtype[@layer_id][@tag%value]...`

    >>> CacheEngineKey("llama", 2, 1, 0xABC, torch.half, {"lmcache.tag.user": "ann"}).to_string()
    'llama@2@1@abc@half@user%ann'

    request_configs: its `lmcache.tag.NAME` entries become tags, in their order; the rest names
    nothing. to_string and from_string are each other's inverse; what the separators, or the padding
    of a request header, would turn into another key is a ValueError.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: ChunkHash
    dtype: torch.dtype
    request_configs: dict[str, Any] | None = field(default=None, compare=False)
    layer_id: int | None = None
    tags: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self):
        if self.dtype not in DTYPE_TO_TEXT:
            raise ValueError(f"dtype {self.dtype!r} has no name in a key: {list(TEXT_TO_DTYPE)}")
        configs = (self.request_configs or {}).items()
        tags = ((name.removeprefix(TAG), f"{v}") for name, v in configs if name.startswith(TAG))
        object.__setattr__(self, "tags", tuple(tags))

    def to_string(self) -> str:
        layer = "" if self.layer_id is None else f"@{self.layer_id}"
        tags = "".join(f"@{name}%{value}" for name, value in self.tags)
        start = f"{self.model_name}@{self.world_size}@{self.worker_id}@{hash_hex(self.chunk_hash)}"
        text = f"{start}@{DTYPE_TO_TEXT[self.dtype]}{layer}{tags}"
        unclear = any("%" in name for name, _ in self.tags) or "\n" in text
        if unclear or text.count("@") > 4 + bool(layer) + len(self.tags):
            raise ValueError(f"key {text!r}: no '@' or newline in names, tags; no '%' in tag names")
        if text != text.strip():
            raise ValueError(f"key {text!r}: white space at an end is lost in a request's padding")
        check_hashes([self.chunk_hash], [1])
        if (size := len(text.encode())) > MAX_KEY_BYTES:
            raise ValueError(f"key {text!r} has {size} bytes; {MAX_KEY_BYTES} fit in a request")
        return text

    @classmethod
    def from_string(cls, text: str) -> "CacheEngineKey":
        parts = text.split("@")
        if len(parts) < 5 or parts[4] not in TEXT_TO_DTYPE:
            raise ValueError(f"key {text!r} is not model@world@worker@hash@dtype[@layer][@tags]")
        model_name, world_size, worker_id, digits, dtype, *rest = parts
        layer_id = int(rest.pop(0)) if rest and rest[0].isdecimal() else None
        tags = {f"{TAG}{name}": v for name, _, v in (tag.partition("%") for tag in rest)}
        try:  # an int has at most a sign and 16 digits, a digest 18 or more
            chunk_hash = bytes.fromhex(digits) if len(digits) > 17 else int(digits, 16)
            key = cls(model_name, int(world_size), int(worker_id), chunk_hash,
                      TEXT_TO_DTYPE[dtype], tags, layer_id)  # fmt: skip
            canonical = key.to_string()
        except ValueError as error:
            raise ValueError(f"key {text!r}: {error}") from error
        if canonical != text:  # "01" for 1, an upper-case hash, a tag twice: another key comes back
            raise ValueError(f"key {text!r} is not canonical: it would be written {canonical!r}")
        return key


def hash_hex(chunk_hash):
    return chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}"


HASHES = list[int | Annotated[bytes, Meta(min_length=9)]]  # 8 bytes would have an int's key text
LENGTHS = list[Annotated[int, Meta(ge=1, le=2**31)]]  # tokens in each chunk, LMCache's "offsets"


class Chunks(msgspec.Struct):  # what may come off a wire; a Struct's types are looked at once
    hashes: HASHES
    offsets: LENGTHS


def check_hashes(hashes, offsets):
    """ValueError for what could not have come off a wire as chunk hashes and lengths in tokens."""
    try:
        msgspec.convert({"hashes": hashes, "offsets": offsets}, Chunks)
        to_msgpack(hashes)  # holds ints in -2**63..2**64-1
        if len(hashes) != len(offsets):
            raise ValueError(f"{len(hashes)} and {len(offsets)} of them")
    except (msgspec.MsgspecError, ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"hashes {hashes!r:.99}, offsets {offsets!r:.99}: {error}") from error


# --------------------------------------------------------------------------------------------------
# Configuration, and who we are

# Fields of LMCache 0.3.14's config that have no use here; a file or an environment may hold them.
LMCACHE_FIELDS = """reserve_local_cpu_size local_disk max_local_disk_size remote_serde use_layerwise
save_decode_cache blend_recompute_ratios blend_thresholds blend_check_layers blend_min_tokens
enable_p2p p2p_host p2p_init_ports p2p_lookup_ports enable_controller lmcache_instance_id
controller_pull_url controller_reply_url lmcache_worker_ports lmcache_worker_ids
lmcache_worker_heartbeat_delay_time lmcache_worker_heartbeat_time enable_pd pd_role pd_buffer_size
pd_buffer_device pd_peer_host pd_peer_init_port pd_peer_alloc_port pd_proxy_host pd_proxy_port
transfer_channel nixl_backends nixl_buffer_size nixl_buffer_device gds_path cufile_buffer_size
audit_actual_remote_url internal_api_server_host blocking_timeout_secs external_lookup_client
py_enable_gc cache_policy numa_mode enable_async_loading internal_api_server_enabled
internal_api_server_port_start priority_limit internal_api_server_include_index_list
internal_api_server_socket_path_prefix runtime_plugin_locations storage_plugins
remote_storage_plugins min_retrieve_tokens hit_miss_ratio enable_scheduler_bypass_lookup
script_allowed_imports enable_lazy_memory_allocator lazy_memory_initial_ratio
lazy_memory_expand_trigger_ratio lazy_memory_step_ratio lazy_memory_safe_size
enable_chunk_statistics chunk_statistics_auto_start_statistics
chunk_statistics_auto_exit_timeout_hours chunk_statistics_auto_exit_target_unique_chunks
chunk_statistics_strategy enable_kv_events use_gpu_connector_v3 pin_check_interval_sec
remote_config_url app_id""".split()  # noqa: SIM905  # one thing to skip in reading


def _convert(name, wanted, value):
    """`value`, maybe an environment variable's text, as a field of type `wanted`, or ValueError."""
    try:
        if value == "null":
            value = None
        if name == "lookup_server_worker_ids" and isinstance(value, str):  # "0,3" or "[0, 3]"
            value = [part.strip() for part in value.strip("[] ").split(",") if part.strip()]
        if name == "extra_config" and isinstance(value, str):
            value = msgspec.json.decode(value)
        return msgspec.convert(value, wanted, strict=False)
    except msgspec.MsgspecError as error:
        raise ValueError(f"config field {name} = {value!r}: {error}") from error


class LMCacheEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine or a lookup client, bounds checked; a bad value or an unknown name
    raises ValueError. What only LMCache has a use for is one warning."""

    chunk_size: Annotated[int, Meta(ge=1, le=2**20)] = 256  # tokens
    local_cpu: bool = True  # False: nothing is kept here, straight between the remote and the pages
    max_local_cpu_size: Annotated[float, Meta(gt=0, le=2**20)] = 5.0  # GiB of chunks, on any device
    lookup_timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 3000
    pre_caching_hash_algorithm: Literal["sha256", "builtin", "sha256_cbor"] = "sha256"
    save_unfull_chunk: bool = False
    enable_blending: bool = False  # segments between separators, see SegmentTokenDatabase
    blend_special_str: str = " # # "
    remote_url: str | None = None  # lm://host:port, see remote_server.connect_remote
    lookup_server_worker_ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None  # (): all ranks
    extra_config: dict[str, Any] | None = None
    pin_timeout_sec: Annotated[float, Meta(gt=0, le=1e9)] = 300.0
    eviction_policy: str = "slru"  # a name in POLICIES

    def __post_init__(self):
        for info in msgspec.structs.fields(self):
            value = _convert(info.name, info.type, getattr(self, info.name))
            msgspec.structs.force_setattr(self, info.name, value)

    @classmethod
    def from_defaults(cls, **values: Any):
        if unused := sorted(set(values) & set(LMCACHE_FIELDS)):
            logger.warning("config fields that have no use here: %s", ", ".join(unused))
        if unknown := sorted(set(values) - set(cls.__struct_fields__) - set(LMCACHE_FIELDS)):
            raise ValueError(f"unknown config field {unknown}; allowed: {cls.__struct_fields__}")
        return cls(**{name: value for name, value in values.items() if name not in unused})

    @classmethod
    def from_file(cls, path: str | os.PathLike):
        """A .json, .toml, .yaml or .yml file whose top level holds the fields."""
        return cls.from_defaults(**cls._read(Path(path)))

    @classmethod
    def from_env(cls, **over: Any):
        """The file named by LMCACHE_CONFIG_FILE, over it LMCACHE_<FIELD>, over both `over`."""
        file, values = os.environ.get("LMCACHE_CONFIG_FILE"), {}
        if file:
            values = cls._read(Path(file))
        known = [*cls.__struct_fields__, *LMCACHE_FIELDS]
        for name in filter(lambda name: name.startswith("LMCACHE_"), os.environ):
            field_name = name.removeprefix("LMCACHE_").lower()
            if field_name in known:
                values[field_name] = os.environ[name]
            elif near := difflib.get_close_matches(field_name, known, 1, 0.8):
                logger.warning("%s is no config field; is LMCACHE_%s meant?", name, near[0].upper())
        return cls.from_defaults(**values | over)

    @staticmethod
    def _read(path):
        yaml = msgspec.yaml
        decoders = {".json": msgspec.json, ".toml": msgspec.toml, ".yaml": yaml, ".yml": yaml}
        if path.suffix not in decoders:
            raise ValueError(f"config file {path}: its name must end in one of {list(decoders)}")
        try:
            values = decoders[path.suffix].decode(path.read_bytes())
            return msgspec.convert({} if values is None else values, dict[str, Any])
        except ImportError as error:
            raise ValueError(f"config file {path}: YAML needs the package PyYAML") from error
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"config file {path}: {error}") from error

    def get_lookup_server_worker_ids(self, use_mla: bool, world_size: int) -> list[int]:
        """Ranks that run a lookup server: as configured, else all; with MLA, where all hold the
        same, rank 0."""
        ids = self.lookup_server_worker_ids
        if ids is None:
            ids = (0,) if use_mla else ()
        if any(rank >= world_size for rank in ids):
            raise ValueError(f"lookup_server_worker_ids = {ids}: world_size is {world_size}")
        return list(ids) or list(range(world_size))


@dataclass(frozen=True)
class LMCacheMetadata:
    """The serving engine's facts (LMCache metadata.py). kv_shape: (L, K, chunk_size, H, D), of this
    rank's shard; K is 2, keys and values, or 1 with MLA. chunk_size: kv_shape's, if it is given."""

    model_name: str
    world_size: int
    local_world_size: int
    worker_id: int
    local_worker_id: int
    kv_dtype: torch.dtype
    kv_shape: tuple[int, int, int, int, int]
    use_mla: bool = False
    role: str | None = None
    served_model_name: str | None = None
    chunk_size: int | None = None
    engine_id: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None

    def __post_init__(self):
        shape = self.kv_shape
        if not 0 <= self.worker_id < self.world_size:
            raise ValueError(f"worker_id {self.worker_id} must be in 0..{self.world_size - 1}")
        if self.kv_dtype not in DTYPE_TO_TEXT:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is not one of {list(DTYPE_TO_TEXT)}")
        if len(shape) != 5 or any(not isinstance(n, int) or n < 1 for n in shape):
            raise ValueError(f"kv_shape {shape!r} must be 5 positive ints: L, K, chunk_size, H, D")
        if shape[1] != (1 if self.use_mla else 2):
            raise ValueError(f"kv_shape {shape}: K is 1 with MLA, else 2; use_mla = {self.use_mla}")
        if self.chunk_size not in (None, shape[2]):
            raise ValueError(f"chunk_size {self.chunk_size} is not kv_shape[2], {shape[2]}")
        object.__setattr__(self, "chunk_size", shape[2])

    def check_chunk_size(self, config: LMCacheEngineConfig):
        if self.chunk_size != config.chunk_size:
            raise ValueError(
                f"config.chunk_size {config.chunk_size} is not metadata's, {self.chunk_size}"
            )


# --------------------------------------------------------------------------------------------------
# Small things that all four modules use


class RareLog:
    """Warnings of one kind, at most one a second: who misbehaves must not fill the log."""

    def __init__(self, log):
        self._log, self._last = log, {}  # kind -> when last logged

    def __call__(self, kind, text, *values, traceback=False):
        now = monotonic()
        if now - self._last.get(kind, -1.0) >= 1.0:
            self._last[kind] = now
            self._log.warning(text, *values, exc_info=traceback)


class Closing:
    """`with` for what has a close()."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Service(threading.Thread):
    """A daemon thread that calls step() until close(); step() returns within 0.1 s, and what it
    raises is logged."""

    def __init__(self, name, step, finish=lambda: None):
        super().__init__(name=name, daemon=True)
        self._step, self._finish, self._stop_asked = step, finish, threading.Event()
        self._log = RareLog(logger)
        self.start()

    def run(self):
        while not self._stop_asked.is_set():
            try:
                self._step()
            except Exception:
                self._log("step", "%s: a step failed; going on", self.name, traceback=True)
                self._stop_asked.wait(0.05)  # a step that always fails must not fill a core
        self._finish()  # closes the thread's own sockets: none is touched from two threads

    def close(self, timeout_sec=2.0):
        self._stop_asked.set()
        if self is not threading.current_thread():
            self.join(timeout_sec)


class PerThread(threading.local):
    """What each thread of each process has for itself: a connection is never shared, so it needs no
    lock, nobody waits for another's request, and a fork leaves parent and child one each."""

    pid = 0

    def is_new(self):
        """True once in each thread, and in a forked process once more."""
        before, self.pid = self.pid, os.getpid()
        return before != self.pid


# --------------------------------------------------------------------------------------------------
# Tokens to chunk hashes

Tokens = Sequence[int] | torch.Tensor
Span = tuple[int, int, ChunkHash]  # start, end, hash of one chunk


def bytes_of(tensor):
    """The memory of a contiguous CPU tensor as bytes (without numpy torch has no buffer protocol).
    Keep the tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def pack_tokens(tokens):
    """Token ids as 8 bytes each, int64, little-endian on every machine that torch runs on."""
    if isinstance(tokens, torch.Tensor):
        floats = tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool
        if tokens.dim() != 1 or floats:
            raise ValueError(f"tokens must be 1-D integers, not {tokens.dtype} {[*tokens.shape]}")
        ids = tokens.detach().to("cpu", torch.int64).contiguous()
        return memoryview(bytes(bytes_of(ids)))
    try:
        if isinstance(tokens, (str, bytes, bytearray)):  # array() would take them for raw memory
            raise TypeError(type(tokens).__name__)
        with suppress(OverflowError):  # of a negative id; else "Q" takes a third of "q"'s time
            ids = array("Q", tokens).tobytes()
            if ids[7::8].isascii():  # all below 2**63
                return memoryview(ids)
        return memoryview(array("q", tokens).tobytes())
    except (TypeError, OverflowError) as error:
        raise ValueError(f"tokens must be a sequence of signed 64-bit integers: {error}") from error


class TokenDatabase:
    """Cuts a prompt into chunks and names each by a hash. `pre_caching_hash_algorithm` is one of

    sha256       (default) a chunk's digest is sha256(previous digest + token ids of 8 bytes each,
                 little-endian), its hash the first 8 bytes. The same in every process, on every
                 Python, for list, tuple, array and tensor. Segments start from b"segment".
    builtin      LMCache's default, hash((previous, tuple(ids), None)), from 0 as where vLLM is not
                 installed. Only Python 3.12 and newer give the same in two processes, and -1 and -2
                 are one token to it.
    sha256_cbor  vLLM's, sha256 over canonical CBOR; needs the package cbor2 and, as in vLLM, a
                 PYTHONHASHSEED.
    """

    def __init__(self, config, metadata=None):
        self.chunk_size = self.mask_step = config.chunk_size  # a mask ends between chunks
        self.save_unfull_chunk = config.save_unfull_chunk
        self._root = 0  # LMCache's NONE_HASH without vLLM
        if config.pre_caching_hash_algorithm == "sha256":
            self._root, self._hash = b"", self._hash_sha256
        elif config.pre_caching_hash_algorithm == "builtin":
            if sys.version_info < (3, 12):
                raise ValueError(
                    "pre_caching_hash_algorithm = 'builtin' differs between processes before "
                    "Python 3.12: hash(None) is an address there. Use 'sha256' or 'sha256_cbor'."
                )
            self._hash = functools.partial(self._hash_tuple, hash)
        else:
            seed = os.environ.get("PYTHONHASHSEED", "random")
            if seed == "random":
                raise ValueError(
                    "pre_caching_hash_algorithm = 'sha256_cbor' starts from PYTHONHASHSEED, which "
                    "is not set: vLLM starts at random then. Set the same number everywhere."
                )
            try:  # the user's choice, not one of our requirements
                dumps = importlib.import_module("cbor2").dumps
            except ImportError as error:
                raise ValueError("'sha256_cbor' needs the package cbor2") from error
            digest_of = lambda parts: hashlib.sha256(dumps(parts, canonical=True)).digest()  # noqa: E731
            self._root, self._hash = digest_of(seed), functools.partial(self._hash_tuple, digest_of)

    @staticmethod
    def _hash_sha256(previous, ids):
        digest = hashlib.sha256(previous + ids).digest()
        return digest, int.from_bytes(digest[:8], "big")

    @staticmethod
    def _hash_tuple(function, previous, ids):
        return (value := function((previous, tuple(ids.cast("q")), None))), value

    def process_tokens(self, tokens=None, hashes=None, offsets=None, mask=None):
        """(start, end, hash) of each chunk, from tokens, or from hashes and offsets (each chunk's
        LENGTH in tokens). mask: BoolTensor [T], False for a prefix of whole chunks that is left
        out, then True."""
        if (tokens is None) == (hashes is None):
            raise ValueError("give either tokens, or hashes and offsets")
        if tokens is not None:
            spans = self._spans(tokens)
        else:
            check_hashes(hashes, offsets)
            ends = accumulate(offsets)
            spans = [(end - n, end, name) for end, n, name in zip(ends, offsets, hashes)]  # noqa: B905
        total = len(tokens) if tokens is not None else sum(offsets)
        skipped = self.count_skipped(mask, total)
        return [span for span in spans if span[0] >= skipped]

    def count_skipped(self, mask, num_tokens):
        """How many tokens the mask leaves out."""
        if mask is None:
            return 0
        mask = torch.as_tensor(mask, dtype=torch.bool).cpu()  # [T]
        if mask.shape != (num_tokens,):
            raise ValueError(f"mask has shape {[*mask.shape]}, but there are {num_tokens} tokens")
        skipped = num_tokens - int(mask.sum())
        if not bool(mask[skipped:].all()):
            raise ValueError("mask must be False for a prefix and True after it")
        if skipped % self.mask_step:
            raise ValueError(f"mask leaves out {skipped} tokens, chunk_size is {self.chunk_size}")
        return skipped

    def _spans(self, tokens):
        raise NotImplementedError

    def _hash_chunks(self, ids, bounds, root, chained):
        """Hashes ids[start:end] for each bound, on top of the one before, or each on the root."""
        previous, spans = root, []
        for start, end in bounds:
            value, name = self._hash(previous, ids[8 * start : 8 * end])
            spans.append((start, end, name))
            previous = value if chained else root
        return spans


class ChunkedTokenDatabase(TokenDatabase):
    """Chunks of chunk_size tokens; a hash chains on the one before: it names the whole prefix.

    >>> database = ChunkedTokenDatabase(LMCacheEngineConfig(chunk_size=4))
    >>> database.process_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])
    [(0, 4, 8350237632718489709), (4, 8, 15475240699223031541)]

    The last 9 is not a full chunk: it is left out unless save_unfull_chunk is set.
    """

    def _spans(self, tokens):
        total, size = len(tokens), self.chunk_size
        bounds = [(start, start + size) for start in range(0, total - size + 1, size)]
        if self.save_unfull_chunk and total % size:
            bounds.append((total - total % size, total))
        return self._hash_chunks(pack_tokens(tokens), bounds, self._root, chained=True)


class SegmentTokenDatabase(TokenDatabase):
    """Blending: segments between separators, the separators left out, hashes not chained (any order
    hits).

    The separator is config.blend_special_str as token ids. A tokenizer is the serving engine's, so
    the ids come in config.extra_config["blend_special_token_ids"], e.g.
    `tokenizer.encode(" # # ")[1:]` (LMCache drops the first).
    """

    def __init__(self, config, metadata=None):
        super().__init__(config, metadata)
        ids = (config.extra_config or {}).get("blend_special_token_ids")
        try:
            self.sep_tokens = msgspec.convert(ids, Annotated[list[int], Meta(min_length=1)])
        except msgspec.MsgspecError as error:
            raise ValueError(
                "enable_blending needs extra_config['blend_special_token_ids'], the token ids of "
                f"blend_special_str = {config.blend_special_str!r}; got {ids!r}: {error}"
            ) from error
        self.mask_step = 1  # a mask ends anywhere
        # Not the root of chunks: one remote may serve engines of both kinds.
        self._root = b"segment" if config.pre_caching_hash_algorithm == "sha256" else None

    def _spans(self, tokens):
        packed = pack_tokens(tokens)
        ids, size = packed.cast("q").tolist(), len(self.sep_tokens)
        bounds, start, at = [], 0, 0
        while at <= len(ids) - size:
            if ids[at : at + size] == self.sep_tokens:
                bounds.append((start, at))
                start = at = at + size
            else:
                at += 1
        bounds.append((start, len(ids)))
        bounds = [(start, end) for start, end in bounds if start < end]
        return self._hash_chunks(packed, bounds, self._root, chained=False)


def make_token_database(config, metadata):
    kind = SegmentTokenDatabase if config.enable_blending else ChunkedTokenDatabase
    return kind(config, metadata)


class Prompt:
    """The chunks of one prompt: what they are called in a store, and which tokens are theirs.
    ends: where the first 0, 1, 2... chunks end."""

    def __init__(self, keys, lengths, ends, num_tokens):
        self.keys, self.lengths, self._ends, self.num_tokens = keys, lengths, ends, num_tokens
        self.masked = 0  # leading chunks that a mask leaves out

    @functools.cached_property
    def slices(self):
        """Of the prompt's T tokens, each chunk's."""
        return [slice(end - n, end) for end, n in zip(self._ends[1:], self.lengths, strict=True)]

    def end_of(self, count):
        """How many leading tokens the first `count` chunks stand for."""
        return self._ends[count]


class ChunkNames:
    """What the chunks of prompts are called on one rank: in its own store by the bare hash, or
    (hash, tags) where a request has some; at a remote by the text of a CacheEngineKey."""

    def __init__(self, config, metadata):
        metadata.check_chunk_size(config)
        self.config, self.metadata = config, metadata
        self.token_database = make_token_database(config, metadata)
        self.save_only_first_rank = metadata.use_mla and bool(
            (config.extra_config or {}).get("save_only_first_rank", True)
        )
        num_layers, num_kv, _, heads, head_dim = metadata.kv_shape
        self._axes = num_kv, num_layers, heads * head_dim  # K, L, H*D
        self.token_bytes = num_kv * num_layers * heads * head_dim * metadata.kv_dtype.itemsize
        longest = self._key(2**64 - 1, None).to_string()  # what does not fit fails now
        self._tags_at, self._end = len(longest), "@" + DTYPE_TO_TEXT[metadata.kv_dtype]
        self._start = longest.removesuffix("f" * 16 + self._end)  # model@world_size@worker_id@

    def of(self, tokens, hashes, offsets, mask, request_configs):
        """The chunks of tokens, or of hashes and lengths; ValueError where they are none."""
        tags = self._tags(request_configs)
        if tokens is None and hashes is not None:  # no spans: 512 chunks take 0.1 ms this way
            check_hashes(hashes, offsets)
            names, ends = hashes, [*accumulate(offsets, initial=0)]
            prompt = Prompt(names, offsets, ends, ends[-1])
        else:
            spans = self.token_database.process_tokens(tokens, hashes, offsets)
            names, lengths = [span[2] for span in spans], [end - start for start, end, _ in spans]
            prompt = Prompt(names, lengths, [0, *(span[1] for span in spans)], len(tokens))
        if tags:
            prompt.keys = [(name, tags) for name in names]
        if mask is not None:
            skipped = self.token_database.count_skipped(mask, prompt.num_tokens)
            prompt.masked = sum(tokens.start < skipped for tokens in prompt.slices)
        return prompt

    def fits(self, index, lengths):
        """Whether chunk `index` of these lengths is one that an engine like this would store."""
        full, length = self.config.chunk_size, lengths[index]
        tail = self.config.save_unfull_chunk and index == len(lengths) - 1 and length < full
        return length == full or tail or self.config.enable_blending

    def text(self, key):
        """The name at a remote of what has this name in our own store."""
        chunk_hash, tags = key if isinstance(key, tuple) else (key, "")
        return f"{self._start}{hash_hex(chunk_hash)}{self._end}{tags}"

    def meta(self, num_tokens):
        """How a remote knows a chunk of so many tokens."""
        num_kv, num_layers, width = self._axes
        fmt = MemoryFormat.KV_MLA_FMT if self.metadata.use_mla else MemoryFormat.KV_2LTD
        dtype, shape = DTYPE_TO_INT[self.metadata.kv_dtype], (num_kv, num_layers, num_tokens, width)
        return RemoteMeta(num_tokens * self.token_bytes, fmt, dtype, shape)

    def _key(self, chunk_hash, request_configs):
        meta, alone = self.metadata, self.save_only_first_rank  # then rank 0 speaks for all
        world_size, worker_id = (1, 0) if alone else (meta.world_size, meta.worker_id)
        return CacheEngineKey(
            meta.model_name, world_size, worker_id, chunk_hash, meta.kv_dtype, request_configs
        )

    def _tags(self, configs):
        """The tags as they end a key, `@name%value`...: part of a chunk's name."""
        if not configs:
            return ""
        if not isinstance(configs, dict) or any(type(name) is not str for name in configs):
            raise ValueError(f"request_configs must be a dict with str keys, not {configs!r}")
        return self._key(2**64 - 1, configs).to_string()[self._tags_at :]


# --------------------------------------------------------------------------------------------------
# What to forget: the order in which idle chunks go


class LRU:
    """The least recently used goes first. A policy knows keys only; a store asks it, locked.

    A chunk in use is not in the order, so that a thousand pins cost no search, and what is let go
    of was used just now: a request that pins, retrieves, stores and unpins is one use."""

    def __init__(self):
        self._order = OrderedDict()  # idle keys

    def added(self, key):
        """New, and in use."""

    def take(self, keys):
        """These idle ones, of a prompt's the head first, are in use from now on."""
        for key in keys:
            del self._order[key]

    def used(self, keys):
        """In use until now: idle, the last of them the last to go."""
        for key in keys:
            self._order[key] = None

    def removed(self, key, evicted):
        """Gone; evicted: to make room, else because somebody said so."""
        self._order.pop(key, None)

    def victims(self):
        """The idle ones, the first to go first."""
        return iter(self._order)


class SLRU(LRU):
    """Segmented LRU: what is used again, and not at once, outlives its turn.

    Such a use is proof: an eighth of the room in new keys, or more, after the last that counted
    (what a request does is one use), of a key that is held or whose name is remembered. When a
    proven key's turn comes, LRU would drop it; here it is kept, up to a share of the room. A hit
    that LRU had missed raises the share, a miss that LRU had hit lowers it: see docs/BENCH.md."""

    def __init__(self):
        super().__init__()
        self._kept = OrderedDict()  # idle, too: key -> _clock when its turn came
        self._counted = {}  # key, idle or in use -> _clock at the last use that counted
        self._proven = {}  # key -> None
        self._gone = {}  # hash(key), smaller than a key, of one evicted -> _rounded then
        # The clock counts what came into LRU's room: new keys, and kept ones that are used.
        self._clock, self._rounded, self._share = 0, 0, 0.1

    def added(self, key):
        self._clock += 1
        if not self._clock % 8:  # one int for eight names: they are to be small
            self._rounded = self._clock
        self._counted[key] = self._clock
        if (left := self._gone.pop(hash(key), None)) is not None:
            self._proven[key] = None
            self._adapt(-(self._clock - left <= len(self._kept)))

    def take(self, keys):
        counted, before = self._counted, self._clock - len(self._counted) / 8
        if keys and counted[keys[-1]] < before:  # who uses a tail uses all before it
            self._proven.update(dict.fromkeys(keys))  # those before it have to outlive it
            counted.update(dict.fromkeys(keys, self._clock))
        order = self._order
        for key in keys:
            try:
                del order[key]
            except KeyError:
                self._clock += 1
                self._adapt(self._clock - self._kept.pop(key) > len(self._kept))

    def _adapt(self, lead):
        self._share = min(0.97, max(0.1, self._share + 2 * lead / len(self._counted)))

    def removed(self, key, evicted):
        for each in (self._order, self._kept, self._counted, self._proven):
            each.pop(key, None)
        if evicted:
            self._gone[hash(key)] = self._rounded
            if len(self._gone) > 5 * len(self._counted):
                self._gone = dict(islice(self._gone.items(), len(self._counted), None))

    def victims(self):
        order, kept, proven = self._order, self._kept, self._proven
        while next(iter(order), None) in proven:  # LRU would drop it now
            kept[order.popitem(last=False)[0]] = self._clock
        oldest = chain(kept, filter(proven.__contains__, order))
        room = int(self._share * len(self._counted)) - len(kept)
        yield from islice(oldest, max(0, -room))
        for key in order:
            if room > 0 and key in proven:
                room -= 1
            else:  # a proven one would be kept, and the oldest goes for it
                yield next(oldest) if key in proven else key
        yield from oldest


POLICIES = {"lru": LRU, "slru": SLRU}  # config.eviction_policy, remote_server.py --eviction

# --------------------------------------------------------------------------------------------------
# One ipc server and one ipc client: a ROUTER on a socket file, and REQ sockets that ask it

MAX_MESSAGE_BYTES = 64 << 20  # 6 million tokens; a larger frame ends its sender's connection
POLL_MS = 100  # how soon a thread that waits for a message sees that it is to stop


@functools.cache
def context_of(process_id):
    """One for all clients and servers of a process, never terminated; a forked one has its own.

    Where scheduler and worker are one process (vLLM without tensor parallelism), both ends of the
    socket then have one I/O thread: two thread switches less a lookup, 30 of 180 us. It is not
    zmq.Context.instance(), whose owner may terminate it and would wait for our sockets.
    """
    return zmq.Context()


def rpc_path(engine_id, service, port, rank):
    """The socket file of a rank's server, the same text at both ends (LMCache rpc_utils.py).

    A path over 107 bytes does not fit a socket address: then its name becomes a digest of the whole
    path, and where even that is too long in its folder, it lies in /tmp/vllm_rpc.
    """
    base = os.environ.get("VLLM_RPC_BASE_PATH") or "/tmp/vllm_rpc"
    number = f"{port}{rank}" if isinstance(port, str) else port + rank
    path = f"{base}/engine_{engine_id}_service_{service}_lmcache_rpc_port_{number}"
    digest = hashlib.sha256(path.encode()).hexdigest()[:32]
    for candidate in (path, f"{base}/{digest}", f"/tmp/vllm_rpc/{digest}"):
        if len(candidate.encode()) <= 107:
            break
    return candidate


def check_rpc_folder(folder):
    """PermissionError for a folder in which somebody else could put a socket in place of ours: one
    that is not our own, unless it is sticky and root's as /tmp is, or one that others may write."""
    info, link = os.stat(folder), os.lstat(folder)
    own = {info.st_uid, link.st_uid} == {os.getuid()}
    by_group = info.st_mode & stat.S_IWGRP and info.st_gid != os.getgid()
    strangers = by_group or info.st_mode & stat.S_IWOTH
    sticky = info.st_mode & stat.S_ISVTX and info.st_uid == 0
    if not sticky and (not own or strangers):
        raise PermissionError(
            f"folder {folder} must be ours (uid {os.getuid()}) and no other's to write; "
            f"it is uid {info.st_uid}'s, mode {stat.S_IMODE(info.st_mode):o}"
        )


def make_rpc_folder(path):
    """Makes the folder of a socket file, where it is not there, for us alone (0700); its name."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    check_rpc_folder(folder)
    return folder


def socket_file(path):
    """The inode of a server's socket file; OSError where it is not there, or not certainly ours."""
    check_rpc_folder(os.path.dirname(path))
    info = os.lstat(path)
    if info.st_uid != os.getuid() or not stat.S_ISSOCK(info.st_mode):
        raise PermissionError(f"{path} is not a socket of ours (uid {info.st_uid}'s)")
    return info.st_ino


@contextmanager
def locked(path, timeout_sec=2.0, how=fcntl.LOCK_EX):
    """One process or thread at a time: of two servers that start at once on one path, the second
    sees the first. OSError where somebody keeps the lock: others may hold it, too."""
    number, deadline = os.open(path, os.O_RDONLY), monotonic() + timeout_sec
    try:
        while True:
            try:
                fcntl.flock(number, how | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if monotonic() > deadline:
                    raise OSError(f"{path} is locked by another process") from error
                sleep(0.01)
        yield number
    finally:
        fcntl.flock(number, fcntl.LOCK_UN)  # of a process forked meanwhile, too
        os.close(number)


def bind_ipc(server, path):
    """Binds to a socket file of our own: OSError where a server is alive on it; a stale one is
    taken over."""
    with locked(make_rpc_folder(path)):
        with socket.socket(socket.AF_UNIX) as probe, suppress(FileNotFoundError):
            if not stat.S_ISSOCK(os.stat(path).st_mode):
                raise FileExistsError(f"{path} is there and is not a socket")
            try:
                probe.settimeout(1.0)
                probe.connect(path)
            except ConnectionRefusedError:
                os.unlink(path)  # stale: its server is gone
            else:  # subtle: libzmq itself would take the path from a living server and say nothing
                raise OSError(f"a server is alive on {path}")
        try:
            server.bind(f"ipc://{path}")
        except zmq.ZMQError as error:
            raise OSError(f"cannot bind {path}: {error}") from error


class IpcServer(Closing):
    """A socket file and a thread that answers what comes: every request gets exactly one reply,
    answer()'s, or `refusal` where that raises.

    OSError where another server is alive on the path, or the folder is not ours alone."""

    refusal = b""

    def __init__(self, path, name):
        self.path, self._log = path, RareLog(logger)
        with ExitStack() as undo:
            self._socket = context_of(os.getpid()).socket(zmq.ROUTER)
            undo.callback(self._socket.close)
            self._socket.linger = 0
            self._socket.rcvtimeo = POLL_MS
            self._socket.sndtimeo = 0  # who does not read its replies is not waited for
            self._socket.maxmsgsize = MAX_MESSAGE_BYTES
            self._socket.router_mandatory = 1  # a reply to a peer that is gone is an error
            bind_ipc(self._socket, path)
            # Before the close: nobody finds a server that is about to go.
            undo.callback(Path(path).unlink, missing_ok=True)
            self._service = Service(name, self._step, lambda: self._opened.close())
            self._opened = undo.pop_all()

    def answer(self, frames):
        raise NotImplementedError

    def undelivered(self, frames):
        """The peer had given up before the answer came: what it asked for, nobody knows of."""

    def _step(self):
        try:
            frames = self._socket.recv_multipart()
        except zmq.Again:
            return
        # The envelope: our peer's identity, those of proxies between, and the empty delimiter; it
        # goes back as it came.
        end = frames.index(b"", 1) + 1 if b"" in frames[1:] else len(frames)
        try:
            reply = self.answer(frames[end:])
        except Exception as error:  # whatever it is, our peer waits for an answer
            self._log(type(error).__name__, "%s refused a request: %r", self._service.name, error)
            reply = self.refusal
        try:
            self._socket.send_multipart([*frames[:end], reply])
        except zmq.ZMQError:
            self.undelivered(frames[end:])

    def close(self):
        """Ends the thread and takes the socket file away. Idempotent."""
        self._service.close()


class IpcClient(Closing):
    """Asks the servers on some paths, all at once. Safe to share between threads and to use after a
    fork: each thread has sockets of its own."""

    def __init__(self, paths, timeout_ms):
        if timeout_ms < 1:
            raise ValueError(f"timeout_ms {timeout_ms} must be 1 or more")
        self.paths, self.timeout_ms, self._log = paths, timeout_ms, RareLog(logger)
        self._own = PerThread()  # .sockets: path -> (inode, socket)
        self._closed = False

    def ask(self, frames, deadline):
        """Every server's reply, a frame each. OSError where one of them does not come by the
        deadline (monotonic()), is something else, or the client is closed."""
        try:
            sockets = [self._connected(path, deadline) for path in self.paths]
            for sock in sockets:
                sock.send_multipart(frames)
            return [self._receive(sock, deadline) for sock in sockets]
        except BaseException as error:
            self._drop()  # a late reply comes to a socket that is gone, never to another
            if isinstance(error, zmq.ZMQError):
                raise OSError(f"{self.paths}: {error}") from error
            raise

    def _connected(self, path, deadline):
        """This thread's socket to the server that is there now, or is by the deadline."""
        if self._own.is_new():
            self._own.sockets = {}
        found = self._own.sockets
        while not self._closed:
            try:
                inode = socket_file(path)
                break
            except FileNotFoundError as error:
                if monotonic() + 0.01 > deadline:
                    raise TimeoutError(f"no server at {path}") from error
                sleep(0.01)
        else:
            raise OSError("this client is closed")
        known, sock = found.get(path, (0, None))
        if inode == known:
            return sock
        sock = context_of(os.getpid()).socket(zmq.REQ)  # for the first, or another server
        found[path] = inode, sock
        sock.linger = sock.sndtimeo = 0
        sock.rcvtimeo = min(self.timeout_ms, POLL_MS)
        sock.reconnect_ivl = 20  # ms
        sock.connect(f"ipc://{path}")
        return sock

    def _receive(self, sock, deadline):
        while monotonic() < deadline and not self._closed:
            try:
                frame = sock.recv(copy=False)
            except zmq.Again:
                continue
            if frame.more:
                raise OSError("a reply of several frames")
            return frame.bytes
        raise TimeoutError(f"no answer within {self.timeout_ms} ms from one of {self.paths}")

    def _drop(self):
        """Closes this thread's sockets."""
        if not self._own.is_new():
            for _, sock in self._own.sockets.values():
                sock.close()
        self._own.sockets = {}

    def close(self):
        """Calls in flight fail within 0.1 s. Idempotent."""
        self._closed = True
        self._drop()  # the other threads' go with their threads


# --------------------------------------------------------------------------------------------------
# The lookup server, in each worker

MAX_STATUS = 4096  # lookups remembered for lookup_cache()


def lookup_path(metadata, rank):
    """The socket file of a rank's lookup server. Its port:
    kv_connector_extra_config["lmcache_rpc_port"], else 0."""
    port = (metadata.kv_connector_extra_config or {}).get("lmcache_rpc_port", 0)
    if not metadata.engine_id:
        raise ValueError(f"metadata.engine_id {metadata.engine_id!r}: the socket's name needs one")
    if not isinstance(port, (int, str)):
        raise ValueError(f"lmcache_rpc_port {port!r} must be an int or a str")
    return rpc_path(metadata.engine_id, "lookup", port, rank)


class LMCacheLookupServer(IpcServer):
    """Answers lookups from an engine, in a thread of its own; a bad request is answered 0.

    Request frames (hashes): [msgpack list of chunk hashes, msgpack list of chunk lengths,
    lookup_id, JSON configs or b""]. Blending: [msgpack list of token ids, lookup_id, configs].
    lmcache_engine: what has lookup(...) -> int, lookup_unpin(id) and config.enable_blending."""

    refusal = bytes(4)

    def __init__(self, lmcache_engine, metadata):
        self.engine = lmcache_engine
        types = Chunks.__annotations__
        if lmcache_engine.config.enable_blending:
            types = {"tokens": list[int]}
        self._decode = {name: msgspec.msgpack.Decoder(each).decode for name, each in types.items()}
        super().__init__(lookup_path(metadata, metadata.worker_id), "lookup-server")

    def answer(self, frames) -> bytes:
        *request, lookup_id, configs = frames
        decoded = {
            name: decode(frame)
            for (name, decode), frame in zip(self._decode.items(), request, strict=True)
        }
        decoded["request_configs"] = json.loads(configs) if configs else None
        hits = self.engine.lookup(**decoded, lookup_id=lookup_id.decode(), pin=True)
        return hits.to_bytes(4, "big")

    def undelivered(self, frames):
        if len(frames) > 1:
            self.engine.lookup_unpin(frames[-2].decode())


# --------------------------------------------------------------------------------------------------
# The lookup client, in the scheduler


class LMCacheLookupClient(IpcClient):
    """Asks the lookup server of every rank; the smallest answer counts, for KV is of use only where
    all have it.

    config.lookup_timeout_ms is for a whole lookup, all ranks together; whatever fails is 0 hits and
    a warning."""

    def __init__(self, config, metadata):
        metadata.check_chunk_size(config)
        self.config = config
        ranks = config.get_lookup_server_worker_ids(metadata.use_mla, metadata.world_size)
        self.token_database = None
        if not config.enable_blending:
            self.token_database = make_token_database(config, metadata)
        self._status = OrderedDict()  # lookup_id -> hit tokens
        super().__init__([lookup_path(metadata, rank) for rank in ranks], config.lookup_timeout_ms)

    def lookup(self, token_ids, lookup_id, request_configs=None) -> int:
        """How many leading tokens of the prompt every rank has, pinned there under lookup_id.

        ValueError for what is not a prompt (see TokenDatabase), a lookup_id or request_configs.
        """
        deadline = monotonic() + self.timeout_ms / 1000
        frames = self._frames(token_ids, lookup_id, request_configs)
        self._status.pop(lookup_id, None)
        if not frames:
            return 0
        try:
            replies = self.ask(frames, deadline)
            if any(len(reply) != 4 for reply in replies):
                raise OSError(f"replies {replies!r:.99} are not of 4 bytes each")
        except OSError as error:
            self._log("failed", "lookup failed, 0 hits: %s", error)
            return 0
        counts = [int.from_bytes(reply, "big") for reply in replies]
        hits = min(counts)
        if hits != max(counts):
            self._log("differ", "ranks have %s hit tokens: the smallest counts", counts)
        self._status[lookup_id] = hits
        while len(self._status) > MAX_STATUS:
            self._status.popitem(last=False)
        return hits

    def lookup_cache(self, lookup_id) -> int:
        """The answer to an earlier lookup, or -1."""
        return self._status.get(lookup_id, -1)

    def clear_lookup_status(self, lookup_id):
        self._status.pop(lookup_id, None)

    def supports_producer_reuse(self) -> bool:
        return True

    def _frames(self, token_ids, lookup_id, configs):
        """The request, or nothing where there is nothing to ask."""
        try:
            tail = [lookup_id.encode(), json.dumps(configs).encode() if configs else b""]
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"lookup_id {lookup_id!r} must be a str, request_configs {configs!r} JSON: {error}"
            ) from error
        if self.token_database is None:
            ids = pack_tokens(token_ids).cast("q").tolist()
            return [to_msgpack(ids), *tail] if ids else []
        spans = self.token_database.process_tokens(token_ids)
        hashes, lengths = [name for _, _, name in spans], [end - start for start, end, _ in spans]
        try:
            return [to_msgpack(hashes), to_msgpack(lengths), *tail] if spans else []
        except (TypeError, OverflowError) as error:  # of a token database of the user's own
            raise ValueError(f"hashes must be ints of 64 bits or bytes: {error}") from error


# --------------------------------------------------------------------------------------------------
# The demo


def main():
    """Two workers with 1,024 and 512 tokens of a prompt of 1,500; the scheduler asks both."""
    from engine import toy_engine  # the demo's alone: engine.py imports this file

    prompt = list(range(1500))
    with ExitStack() as stack:
        os.environ["VLLM_RPC_BASE_PATH"] = stack.enter_context(tempfile.TemporaryDirectory())
        for rank, held in enumerate((1024, 512)):
            engine = stack.enter_context(toy_engine(2, rank)[0])
            engine.store(prompt[:held], slot_mapping=range(held))
            server = stack.enter_context(LMCacheLookupServer(engine, engine.metadata))
            print(f"worker {rank}: holds {held} tokens, listens on {server.path}")
        client = stack.enter_context(LMCacheLookupClient(engine.config, engine.metadata))
        for ids in (prompt, prompt[::-1], prompt[:100]):
            print(f"scheduler: {len(ids)} tokens: {client.lookup(ids, 'a')} hit on every rank")


if __name__ == "__main__":
    main()
