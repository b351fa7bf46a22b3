"""engine.py - a KV cache engine: chunks of a paged KV cache, named by their whole prefix, stored and found again.

It follows LMCache 0.3.14 (cache_engine.py, token_database.py, memory_management.py, utils.CacheEngineKey): same names,
same key text, same chunk format. Read it from top to bottom; one prompt goes this way:

    tokens -> TokenDatabase -> (start, end, hash) -> ChunkStore -> chunk [K, L, T, H*D] -> PagedKVCache -> the pages

    $ python engine.py      # store, lookup, partial hit, retrieve, evict on a toy paged cache

Shapes, one alphabet in all four modules: L layers, T tokens, H KV heads, D head_dim, B blocks, N slots in a block
(slot = block * N + offset), K = 2 (keys and values) or 1 (MLA's one latent).

Not here: sockets (lookup.py, offload_server.py and remote_server.py have them, and import this file), layer-wise
pipelining, compression, disk. It is longer than its siblings, for it holds what all four share: keys, config, hashes,
the chunk store, the paged layouts, and last the engine itself.
"""

import bisect
import contextlib
import ctypes
import fcntl
import hashlib
import importlib
import logging
import math
import mmap
import os
import re
import stat
import sys
import threading
import time
from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import accumulate, repeat
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import torch
from msgspec import Meta

logger = logging.getLogger("lmcache.engine")

# ---------------------------------------------------------------------------------------------------------------------
# Names: dtypes, formats, and the key of a chunk

DTYPE_TO_TEXT = {  # the dtype's name in a key (LMCache utils.py)
    torch.float16: "half", torch.bfloat16: "bfloat16", torch.float32: "float", torch.float64: "double",
    torch.int8: "int8", torch.uint8: "uint8", torch.int16: "int16", torch.int32: "int32", torch.int64: "int64",
    torch.bool: "bool", torch.float8_e4m3fn: "fp8_e4m3fn", torch.float8_e4m3fnuz: "fp8_e4m3fnuz",
    torch.float8_e5m2: "fp8_e5m2", torch.float8_e5m2fnuz: "fp8_e5m2fnuz",
}  # fmt: skip
TEXT_TO_DTYPE = {text: dtype for dtype, text in DTYPE_TO_TEXT.items()}

DTYPE_TO_INT = {  # the dtype's number on the wire (LMCache protocol.py; 1 is a second number for float16)
    None: 0, torch.float16: 2, torch.bfloat16: 3, torch.float32: 4, torch.float64: 5, torch.uint8: 6,
    torch.float8_e4m3fn: 7, torch.float8_e5m2: 8,
}  # fmt: skip


class MemoryFormat(IntEnum):
    """How a chunk's bytes are laid out (LMCache memory_management.py; EC_TD and HS_TD came with 0.5.6)."""

    UNDEFINED = 0
    KV_2LTD = 1  # [2, L, T, H*D], what this engine writes
    KV_T2D = 2  # [T, 2, H*D]
    KV_2TD = 3  # [2, T, H*D]
    BINARY = 4
    BINARY_BUFFER = 5
    KV_MLA_FMT = 6  # [1, L, T, D], what this engine writes for an MLA model
    EC_TD = 7
    HS_TD = 8


MAX_KEY_BYTES = 150  # the key field of a request header
ChunkHash = int | bytes  # 64-bit int, signed or unsigned, or a digest


@dataclass(frozen=True)
class CacheEngineKey:
    """The name of one chunk on one rank: `model@world_size@worker_id@hash@dtype[@layer_id][@tag%value]...`.

    >>> CacheEngineKey("llama", 2, 1, 0xABC, torch.bfloat16, {"lmcache.tag.user": "ann"}).to_string()
    'llama@2@1@abc@bfloat16@user%ann'

    request_configs: its `lmcache.tag.NAME` entries become tags, in their order; the rest does not name a chunk.
    to_string and from_string are each other's inverse; what the separators, or the padding of a request header, would
    turn into another key is a ValueError.
    """

    model_name: str
    world_size: int
    worker_id: int
    chunk_hash: ChunkHash
    dtype: torch.dtype
    request_configs: dict[str, Any] | None = field(default=None, compare=False)
    layer_id: int | None = None
    tags: tuple[tuple[str, str], ...] = field(init=False)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_TO_TEXT:
            raise ValueError(f"dtype {self.dtype!r} has no name in a key; allowed: {list(TEXT_TO_DTYPE)}")
        configs = self.request_configs or {}
        prefix = "lmcache.tag."
        tags = tuple((name[len(prefix) :], f"{value}") for name, value in configs.items() if name.startswith(prefix))
        object.__setattr__(self, "tags", tags)

    @property
    def chunk_hash_hex(self) -> str:
        return self.chunk_hash.hex() if isinstance(self.chunk_hash, bytes) else f"{self.chunk_hash:x}"

    def to_string(self) -> str:
        layer = [] if self.layer_id is None else [str(self.layer_id)]
        parts = [self.model_name, str(self.world_size), str(self.worker_id), self.chunk_hash_hex]
        parts += [DTYPE_TO_TEXT[self.dtype], *layer, *(f"{name}%{value}" for name, value in self.tags)]
        text = "@".join(parts)
        if any("@" in part or "\n" in part for part in parts) or any("%" in name for name, _ in self.tags):
            raise ValueError(f"key {text!r}: names and tags cannot hold '@' or a newline, nor a tag's name '%'")
        if text != text.strip():
            raise ValueError(f"key {text!r}: white space at an end is lost in the padding of a request")
        if isinstance(self.chunk_hash, int) and not -(2**63) <= self.chunk_hash < 2**64:
            raise ValueError(f"key {text!r}: an int hash must be in -2**63..2**64-1")
        if len(text.encode()) > MAX_KEY_BYTES:
            raise ValueError(f"key {text!r} has {len(text.encode())} bytes; at most {MAX_KEY_BYTES} fit in a request")
        return text

    @classmethod
    def from_string(cls, text: str) -> "CacheEngineKey":
        parts = text.split("@")
        if len(parts) < 5 or parts[4] not in TEXT_TO_DTYPE:
            raise ValueError(f"key {text!r} is not model@world_size@worker_id@hash@dtype[@layer_id][@tag%value]...")
        model_name, world_size, worker_id, digits, dtype, *rest = parts
        layer_id = int(rest.pop(0)) if rest and rest[0].isdecimal() else None
        if any("%" not in tag for tag in rest):
            raise ValueError(f"key {text!r}: {rest} must be tags of the form name%value")
        tags = {f"lmcache.tag.{name}": value for name, _, value in (tag.partition("%") for tag in rest)}
        # An int has at most 16 digits and no leading zero; all else is the hex of a `bytes` hash.
        as_int = re.fullmatch(r"0|-?[1-9a-f][0-9a-f]{0,15}", digits)
        try:
            chunk_hash = int(digits, 16) if as_int else bytes.fromhex(digits)
            key = cls(model_name, int(world_size), int(worker_id), chunk_hash, TEXT_TO_DTYPE[dtype], tags, layer_id)
        except ValueError as error:
            raise ValueError(f"key {text!r}: {error}") from error
        if key.to_string() != text:  # "01" for 1, an upper-case hash, a tag twice: would come back as another key
            raise ValueError(f"key {text!r} is not in canonical form: it would be written {key.to_string()!r}")
        return key


# ---------------------------------------------------------------------------------------------------------------------
# Configuration, and who we are


def _convert(name: str, wanted: Any, value: Any) -> Any:
    """`value`, maybe the text of an environment variable, as a field of type `wanted`; ValueError names the field."""
    try:
        if name == "lookup_server_worker_ids" and isinstance(value, str):
            value = [part for part in value.strip("[] ").split(",") if part.strip()]  # "0,3" or "[0, 3]"
        if name == "extra_config" and isinstance(value, str):
            value = msgspec.json.decode(value)
        return msgspec.convert(value, wanted, strict=False)
    except msgspec.MsgspecError as error:
        raise ValueError(f"config field {name} = {value!r}: {error}") from error


class LMCacheEngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine or a lookup client, bounds checked; a bad value or an unknown name raises ValueError."""

    chunk_size: Annotated[int, Meta(ge=1, le=2**20)] = 256  # tokens
    max_local_cpu_size: Annotated[float, Meta(gt=0, le=2**20)] = 5.0  # GiB of chunks, whatever the device
    lookup_timeout_ms: Annotated[int, Meta(ge=1, le=3_600_000)] = 3000
    pre_caching_hash_algorithm: Literal["sha256", "builtin", "sha256_cbor"] = "sha256"
    save_unfull_chunk: bool = False
    enable_blending: bool = False  # segments between separators, see SegmentTokenDatabase
    blend_special_str: str = " # # "
    remote_url: str | None = None  # lm://host:port
    lookup_server_worker_ids: tuple[Annotated[int, Meta(ge=0)], ...] | None = None  # () means all ranks
    extra_config: dict[str, Any] | None = None
    pin_timeout_sec: Annotated[float, Meta(gt=0, le=1e9)] = 300.0

    def __post_init__(self) -> None:
        for info in msgspec.structs.fields(self):
            value = _convert(info.name, info.type, getattr(self, info.name))
            msgspec.structs.force_setattr(self, info.name, value)

    @classmethod
    def from_defaults(cls, **values: Any) -> "LMCacheEngineConfig":
        unknown = sorted(set(values) - set(cls.__struct_fields__))
        if unknown:
            raise ValueError(f"unknown config field {unknown}; allowed: {list(cls.__struct_fields__)}")
        return cls(**values)

    @classmethod
    def from_file(cls, path: str | os.PathLike) -> "LMCacheEngineConfig":
        """Reads a .json or .toml file whose top level holds the fields."""
        return cls.from_defaults(**cls._read(Path(path)))

    @classmethod
    def from_env(cls) -> "LMCacheEngineConfig":
        """The file named by LMCACHE_CONFIG_FILE, if any, and over it each field from LMCACHE_<FIELD>."""
        file = os.environ.get("LMCACHE_CONFIG_FILE")
        values = cls._read(Path(file)) if file else {}
        for name in cls.__struct_fields__:
            if (text := os.environ.get(f"LMCACHE_{name.upper()}")) is not None:
                values[name] = text
        return cls.from_defaults(**values)

    @staticmethod
    def _read(path: Path) -> dict[str, Any]:
        decoders: dict[str, Callable] = {".json": msgspec.json.decode, ".toml": msgspec.toml.decode}
        if path.suffix not in decoders:
            raise ValueError(f"config file {path}: the name must end in one of {list(decoders)}")
        try:
            values = decoders[path.suffix](path.read_bytes())
        except (msgspec.MsgspecError, ValueError) as error:
            raise ValueError(f"config file {path}: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(
                f"config file {path}: the top level must be a table of fields, not {type(values).__name__}"
            )
        return values

    def get_lookup_server_worker_ids(self, use_mla: bool, world_size: int) -> list[int]:
        """Ranks that run a lookup server: as configured, else all; with MLA, where all ranks hold the same, rank 0."""
        ids = self.lookup_server_worker_ids
        if ids is None:
            ids = (0,) if use_mla else ()
        if any(rank >= world_size for rank in ids):
            raise ValueError(f"lookup_server_worker_ids = {list(ids)}: ranks must be below world_size = {world_size}")
        return list(ids) or list(range(world_size))


@dataclass(frozen=True)
class LMCacheMetadata:
    """The serving engine's facts (LMCache metadata.py). kv_shape: (L, K, chunk_size, H, D), of this rank's shard."""

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
    chunk_size: int = 256
    engine_id: str | None = None
    kv_connector_extra_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.worker_id < self.world_size:
            raise ValueError(f"worker_id {self.worker_id} must be in 0..world_size-1, world_size is {self.world_size}")
        if self.kv_dtype not in DTYPE_TO_TEXT:
            raise ValueError(f"kv_dtype {self.kv_dtype!r} is not one of {list(DTYPE_TO_TEXT)}")
        if len(self.kv_shape) != 5 or any(not isinstance(n, int) or n < 1 for n in self.kv_shape):
            raise ValueError(f"kv_shape {self.kv_shape!r} must be five positive ints: (L, K, chunk_size, H, D)")
        if self.kv_shape[1] != (1 if self.use_mla else 2):
            raise ValueError(f"kv_shape {self.kv_shape}: K must be 1 with MLA and else 2; use_mla is {self.use_mla}")


def rpc_path(engine_id: str, service: Literal["lookup", "offload"], port: int | str, rank: int) -> str:
    """The socket file of a rank's lookup or offload server, the same text at both ends (LMCache rpc_utils.py).

    A path over 107 bytes does not fit a socket address: then its name becomes a digest of the whole path, and where
    even that is too long in its folder, it lies in /tmp/vllm_rpc.
    """
    base = os.environ.get("VLLM_RPC_BASE_PATH") or "/tmp/vllm_rpc"
    number = f"{port}{rank}" if isinstance(port, str) else port + rank
    path = f"{base}/engine_{engine_id}_service_{service}_lmcache_rpc_port_{number}"
    digest = hashlib.sha256(path.encode()).hexdigest()[:32]
    for candidate in (path, f"{base}/{digest}", f"/tmp/vllm_rpc/{digest}"):
        if len(candidate.encode()) <= 107:
            break
    return candidate


def make_rpc_folder(path: str) -> None:
    """Makes the folder of a socket file for us alone (0700); one that somebody else owns is a PermissionError."""
    folder = os.path.dirname(path)
    os.makedirs(folder, mode=0o700, exist_ok=True)
    info = os.stat(folder)
    shared = info.st_mode & stat.S_ISVTX and info.st_uid == 0  # /tmp itself: nobody can touch another's files there
    if info.st_uid != os.getuid() and not shared:
        raise PermissionError(f"ipc folder {folder} belongs to uid {info.st_uid}, not to us (uid {os.getuid()})")


@contextlib.contextmanager
def locked(folder: str) -> Iterator[None]:
    """One process or thread at a time: of two servers that start at once on one path, the second sees the first."""
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX)
        yield
    finally:
        os.close(number)


class RemoteMeta(NamedTuple):
    """What a remote server knows of a chunk: its bytes, and how they are laid out."""

    length: int  # bytes
    fmt: int  # MemoryFormat
    dtype: int  # DTYPE_TO_INT
    shape: tuple[int, ...]  # 4 ints


class RareLog:
    """Warnings of one kind, at most one a second: a peer that misbehaves in a loop must not fill the log."""

    def __init__(self, log: logging.Logger):
        self._log, self._last = log, {}  # type: ignore[var-annotated]  # kind -> when last logged

    def __call__(self, kind: str, text: str, *values: Any, traceback: bool = False) -> None:
        now = time.monotonic()
        if now - self._last.get(kind, -1.0) >= 1.0:
            self._last[kind] = now
            self._log.warning(text, *values, exc_info=traceback)


class Service(threading.Thread):
    """A daemon thread that calls step() until close(); step() returns within 0.1 s and whatever it raises is logged."""

    def __init__(self, name: str, step: Callable[[], None], finish: Callable[[], None] = lambda: None):
        super().__init__(name=name, daemon=True)
        self._step, self._finish, self._stop_asked = step, finish, threading.Event()
        self._log = RareLog(logger)
        self.start()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            try:
                self._step()
            except Exception:
                self._log("step", "%s: a step failed; going on", self.name, traceback=True)
                self._stop_asked.wait(0.05)  # a step that always fails must not fill a core
        self._finish()  # closes the thread's own sockets: no socket is touched from two threads

    def close(self, timeout_sec: float = 2.0) -> None:
        self._stop_asked.set()
        if self is not threading.current_thread():
            self.join(timeout_sec)


# ---------------------------------------------------------------------------------------------------------------------
# Tokens to chunk hashes

Tokens = Sequence[int] | torch.Tensor
Span = tuple[int, int, ChunkHash]  # start, end, hash of one chunk


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor as bytes (without numpy torch has no buffer protocol). Keep the tensor."""
    size = tensor.numel() * tensor.element_size()
    if size == 0:
        return memoryview(b"")
    return memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")


def _pack(tokens: Tokens) -> tuple[Any, int]:
    """Token ids as little-endian bytes, and the bytes each takes: 4 where all fit uint32, else 8 (int64)."""
    if isinstance(tokens, torch.Tensor):
        if tokens.dim() != 1 or tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
            raise ValueError(f"tokens must be a 1-D tensor of integers, not {tokens.dtype} of shape {[*tokens.shape]}")
        ids = tokens.detach().to("cpu", torch.int64).contiguous()
        parts = ids.split(16_384)  # subtle: so small that torch does not wake threads, which costs more than the work
        narrow = all(int(part.min()) >= 0 and int(part.max()) < 2**32 for part in parts if len(part))
        if narrow:
            parts = [part.to(torch.int32) for part in parts]  # keeps the low 32 bits: uint32's
        return b"".join(map(bytes_of, parts)), 4 if narrow else 8
    if isinstance(tokens, (str, bytes, bytearray)):  # array() would take them for raw memory
        raise ValueError(f"tokens must be a sequence of integers, not {type(tokens).__name__}")
    for code in "Iq":
        try:
            return memoryview(array(code, tokens)).cast("B"), 4 if code == "I" else 8
        except OverflowError:
            continue
        except TypeError as error:
            raise ValueError(f"tokens must be a sequence of integers: {error}") from error
    raise ValueError("tokens must fit in 64 bits, signed")


def int_tuple(tokens: Tokens) -> tuple[int, ...]:
    _pack(tokens)  # ValueError for what has no ids
    return tuple(tokens.tolist() if isinstance(tokens, torch.Tensor) else map(int, tokens))


class TokenDatabase:
    """Cuts a prompt into chunks and names each by a hash. `pre_caching_hash_algorithm` is one of

    sha256       (default) the chunk's digest is sha256(previous digest + token ids), its hash the first 8 bytes. The
                 same in every process, on every Python, for list, tuple, array and tensor. Ids are 4 bytes each,
                 little-endian; a chunk with an id outside uint32 takes the byte `q` and 8 bytes each instead.
    builtin      LMCache's default, hash((previous, tuple(ids), None)), from 0 as where vLLM is not installed. Only
                 Python 3.12 and newer give the same in two processes, and -1 and -2 are one token to it.
    sha256_cbor  vLLM's, sha256 over canonical CBOR; needs the package cbor2 and, as in vLLM, a PYTHONHASHSEED.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata | None = None):
        self.chunk_size = config.chunk_size
        self.save_unfull_chunk = config.save_unfull_chunk
        self.algorithm = config.pre_caching_hash_algorithm
        self._root: Any = 0  # LMCache's NONE_HASH without vLLM
        if self.algorithm == "builtin":
            if sys.version_info < (3, 12):
                raise ValueError(
                    "pre_caching_hash_algorithm = 'builtin' cannot be shared between processes before Python 3.12: "
                    "hash(None) is an address there, whatever PYTHONHASHSEED says. Use 'sha256' or 'sha256_cbor'."
                )
            self._hash: Callable[[Any], ChunkHash] = hash
        elif self.algorithm == "sha256_cbor":
            seed = os.environ.get("PYTHONHASHSEED", "random")
            if seed == "random":
                raise ValueError(
                    "pre_caching_hash_algorithm = 'sha256_cbor' starts from PYTHONHASHSEED, which is not set: what "
                    "vLLM starts from then is random, or depends on its version. Set the same number everywhere."
                )
            try:
                dumps = importlib.import_module("cbor2").dumps  # the user's choice, not one of our requirements
            except ImportError as error:
                raise ValueError("pre_caching_hash_algorithm = 'sha256_cbor' needs the package cbor2") from error
            self._hash = lambda parts: hashlib.sha256(dumps(parts, canonical=True)).digest()
            self._root = self._hash(seed)

    def process_tokens(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
    ) -> list[Span]:
        """(start, end, hash) of each chunk, from tokens, or from hashes and offsets (each chunk's LENGTH in tokens).

        mask: BoolTensor [T], False for a prefix of whole chunks that is left out, then True.
        """
        if (tokens is None) == (hashes is None):
            raise ValueError("give either tokens, or hashes and offsets")
        if tokens is not None:
            spans = self._spans(tokens)
        else:
            check_hashes(hashes, offsets)  # type: ignore[arg-type]
            ends = list(accumulate(offsets))  # type: ignore[arg-type]
            spans = [(end - n, end, value) for end, n, value in zip(ends, offsets, hashes, strict=True)]  # type: ignore
        return spans if mask is None else spans[self.count_masked(spans, mask, _total(tokens, offsets)) :]

    def count_masked(self, spans: list[Span], mask: torch.Tensor | None, num_tokens: int) -> int:
        """How many of these chunks the mask leaves out."""
        skipped = self._skipped(mask, num_tokens)
        return sum(span[0] < skipped for span in spans) if skipped else 0

    def _skipped(self, mask: torch.Tensor | None, num_tokens: int) -> int:
        if mask is None:
            return 0
        mask = torch.as_tensor(mask, dtype=torch.bool).cpu()  # [T]
        if mask.shape != (num_tokens,):
            raise ValueError(f"mask has shape {[*mask.shape]}, but there are {num_tokens} tokens")
        skipped = num_tokens - int(mask.sum())
        if not bool(mask[skipped:].all()):
            raise ValueError("mask must be False for a prefix and True after it")
        return skipped

    def _spans(self, tokens: Tokens) -> list[Span]:
        raise NotImplementedError

    def _hash_chain(self, tokens: Tokens, bounds: Sequence[tuple[int, int]], chained: bool) -> list[Span]:
        """Hashes tokens[start:end] for each bound, each on top of the one before, or each alone."""
        previous = self._root
        spans: list[Span] = []
        if self.algorithm != "sha256":
            ids = int_tuple(tokens)
            for start, end in bounds:
                chunk_hash = self._hash((previous if chained else None, ids[start:end], None))
                spans.append((start, end, chunk_hash))
                previous = chunk_hash
            return spans
        packed, width = _pack(tokens)
        sha256, digest = hashlib.sha256, b""
        for start, end in bounds:
            if width == 4:
                chunk = packed[start * 4 : end * 4]
            else:  # subtle: each chunk for itself, so that one huge id does not rename the chunks before it
                chunk, chunk_width = _pack(tokens[start:end])
                digest += b"q" if chunk_width == 8 else b""
            digest = sha256(digest + chunk).digest()
            spans.append((start, end, int.from_bytes(digest[:8], "big")))
            if not chained:
                digest = b""
        return spans


def check_hashes(hashes: Sequence[ChunkHash], offsets: Sequence[int] | None) -> None:
    """ValueError for what is not a request by hashes and lengths: it comes off a wire. 512 chunks take 50 us."""
    if not isinstance(hashes, (list, tuple)) or not isinstance(offsets, (list, tuple)) or len(hashes) != len(offsets):
        raise ValueError(f"hashes and offsets must be two lists of one length, not {hashes!r:.99} and {offsets!r:.99}")
    ints = hashes if set(map(type, hashes)) == {int} else [value for value in hashes if type(value) is int]
    others = [] if ints is hashes else [value for value in hashes if type(value) is not int]
    if any(type(value) is not bytes or not value for value in others):
        raise ValueError(f"chunk hashes must be ints or non-empty bytes, not {others!r:.99}")
    try:
        array("Q", ints)  # the quickest way to see that all are in 0..2**64-1
    except OverflowError:
        if min(ints) < -(2**63) or max(ints) >= 2**64:
            raise ValueError(
                f"chunk hashes must be in -2**63..2**64-1, these reach from {min(ints)} to {max(ints)}"
            ) from None
    if offsets and (set(map(type, offsets)) != {int} or min(offsets) < 1):
        raise ValueError(f"offsets must be lengths of chunks in tokens, ints of 1 or more, not {offsets!r:.99}")


class ChunkedTokenDatabase(TokenDatabase):
    """Chunks of chunk_size tokens; a hash chains on the one before, so that it names the whole prefix.

    >>> ChunkedTokenDatabase(LMCacheEngineConfig(chunk_size=4)).process_tokens([1, 2, 3, 4, 5, 6, 7, 8, 9])
    [(0, 4, 14958615928728313947), (4, 8, 5674439469042975057)]

    The last 9 is not a full chunk: it is left out unless save_unfull_chunk is set.
    """

    def _spans(self, tokens: Tokens) -> list[Span]:
        total, size = len(tokens), self.chunk_size
        full = total - total % size
        bounds = [(start, start + size) for start in range(0, full, size)]
        if self.save_unfull_chunk and full < total:
            bounds.append((full, total))
        return self._hash_chain(tokens, bounds, chained=True)

    def _skipped(self, mask: torch.Tensor | None, num_tokens: int) -> int:
        skipped = super()._skipped(mask, num_tokens)
        if skipped % self.chunk_size:
            raise ValueError(f"mask leaves out {skipped} tokens, not a multiple of chunk_size = {self.chunk_size}")
        return skipped


class SegmentTokenDatabase(TokenDatabase):
    """Blending: segments between separators, the separators left out, hashes not chained (any order hits).

    The separator is config.blend_special_str as token ids. A tokenizer is the serving engine's, so the ids come in
    config.extra_config["blend_special_token_ids"], e.g. `tokenizer.encode(" # # ")[1:]` (LMCache drops the first).
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata | None = None):
        super().__init__(config, metadata)
        ids = (config.extra_config or {}).get("blend_special_token_ids")
        if not isinstance(ids, (list, tuple)) or not ids or any(type(token) is not int for token in ids):
            raise ValueError(
                "enable_blending needs extra_config['blend_special_token_ids'], the token ids of "
                f"blend_special_str = {config.blend_special_str!r}, a non-empty list of ints; got {ids!r}"
            )
        self.sep_tokens = list(ids)

    def _spans(self, tokens: Tokens) -> list[Span]:
        ids = list(int_tuple(tokens))
        bounds, start, at = [], 0, 0
        while at <= len(ids) - len(self.sep_tokens):
            if ids[at : at + len(self.sep_tokens)] == self.sep_tokens:
                bounds.append((start, at))
                at = start = at + len(self.sep_tokens)
            else:
                at += 1
        bounds.append((start, len(ids)))
        return self._hash_chain(ids, [bound for bound in bounds if bound[0] < bound[1]], chained=False)


def make_token_database(config: LMCacheEngineConfig, metadata: LMCacheMetadata) -> TokenDatabase:
    return (SegmentTokenDatabase if config.enable_blending else ChunkedTokenDatabase)(config, metadata)


# ---------------------------------------------------------------------------------------------------------------------
# The chunk store: one arena of memory, carved into chunks

ALIGN_BYTES = 64  # a cache line; also a multiple of every dtype's size
HUGE_PAGE_BYTES = 2 << 20
WARM_BYTES = 128 << 20  # a fresh page costs 4 to 10 times a copy: touch this much ahead of need
MADV_POPULATE_WRITE = 23  # linux/mman.h since 5.14: map the pages without changing what they hold
_LIBC = ctypes.CDLL(None)  # its madvise lets go of the GIL, mmap.madvise does not
STAGING_BYTES = 4 << 20  # one of two pinned buffers between a socket and the GPU


def parse_device(device: str | torch.device) -> torch.device:
    """`cpu`, `cuda` or `cuda:N`, where there is one; else a ValueError that says which devices there are."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    allowed = ["cpu"] + ["cuda"] * bool(count) + [f"cuda:{index}" for index in range(count)]
    if str(device) not in allowed:
        raise ValueError(f"device {str(device)!r} is not here; this host has {', '.join(allowed)}")
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device(device)


class Arena:
    """max_bytes of memory on one device, handed out and taken back in pieces; only offsets, no memory, pass through.

    Free pieces lie in bins by size, neighbours are merged, the smallest piece that fits is taken: for a cache, where
    nearly all chunks have one size, that is the piece given back last, still warm.
    """

    def __init__(self, size: int):
        self.size, self.top, self.used = size, 0, 0  # [top, size) was never handed out
        self._starts: dict[int, int] = {}  # a free piece: offset -> size
        self._ends: dict[int, int] = {}  # the same pieces: end -> offset
        self._bins: dict[int, dict[int, None]] = {}  # size -> its offsets, in order
        self._sizes: list[int] = []  # the bins' sizes, sorted

    def take(self, size: int) -> int | None:
        """The offset of `size` bytes, or None where no free piece is that large."""
        at = bisect.bisect_left(self._sizes, size)
        if at < len(self._sizes):
            offset = next(reversed(self._bins[self._sizes[at]]))
            whole = self._unlink(offset)
            if whole > size:
                self._link(offset + size, whole - size)
        elif self.size - self.top >= size:
            offset, self.top = self.top, self.top + size
        else:
            return None
        self.used += size
        return offset

    def give_back(self, offset: int, size: int) -> None:
        self.used -= size
        if (before := self._ends.get(offset)) is not None:
            size += self._unlink(before)
            offset = before
        if offset + size in self._starts:
            size += self._unlink(offset + size)
        if offset + size == self.top:
            self.top = offset
        else:
            self._link(offset, size)

    def _link(self, offset: int, size: int) -> None:
        self._starts[offset], self._ends[offset + size] = size, offset
        if size not in self._bins:
            self._bins[size] = {}
            bisect.insort(self._sizes, size)
        self._bins[size][offset] = None

    def _unlink(self, offset: int) -> int:
        size = self._starts.pop(offset)
        del self._ends[offset + size], self._bins[size][offset]
        if not self._bins[size]:
            del self._bins[size]
            del self._sizes[bisect.bisect_left(self._sizes, size)]
        return size


class Chunk:
    """A chunk's place in the store. Its life, and who may touch its memory:

    reserved   reserve()               key None, refs 1    the one who reserved it writes; nobody else sees it
    in use     commit(), acquire()     key set,  refs > 0  readers only; never evicted. A pin is such a use
    idle       release(), unpin()      key set,  refs 0    anyone may acquire() it; evicted when room is needed
    replaced   commit() under its key  key None, refs > 0  its last readers finish, then its memory is free
    """

    __slots__ = ("key", "offset", "nbytes", "meta", "refs")

    def __init__(self, offset: int, nbytes: int):
        self.key: Any = None
        self.offset, self.nbytes = offset, nbytes
        self.meta: Any = None  # what its owner knows of it: the engine's token count, the server's reply header
        self.refs = 1


class ChunkStore:
    """Chunks of any size within max_bytes on `cpu`, `cuda` or `cuda:N`: reserve, fill, commit; LRU, pins; thread-safe.

    A key is anything hashable. warm_bytes: fresh memory is touched that far ahead of need. On a CUDA host the memory of
    a `cpu` store is pinned, so that copies need no detour.
    """

    def __init__(self, device: str | torch.device, max_bytes: int, warm_bytes: int = WARM_BYTES):
        self.device = parse_device(device)
        if max_bytes < 1:
            raise ValueError(f"max_bytes {max_bytes} must be 1 or more")
        self.max_bytes = int(max_bytes)
        self._arena = Arena(self.max_bytes // ALIGN_BYTES * ALIGN_BYTES or ALIGN_BYTES)
        self._map: mmap.mmap | None = None
        self._registered = False
        self._staging = threading.local()
        self._warm_bytes, self._warm_end, self._warm_lock = warm_bytes, 0, threading.Lock()
        self._warmer = threading.Thread()  # none yet
        self._closed = False
        try:
            self._memory = self._allocate(self._arena.size)  # uint8 [size]
        except (OSError, RuntimeError, MemoryError, ValueError, OverflowError) as error:
            raise MemoryError(f"no room for a chunk store of {max_bytes} bytes on {self.device}: {error}") from error
        self._view = memoryview(self._map) if self._map is not None else None
        self._lock = threading.Lock()
        self._chunks: OrderedDict[Any, Chunk] = OrderedDict()  # key -> Chunk, least recently used first
        self._pins: OrderedDict[str, tuple[float, list[Chunk]]] = OrderedDict()  # lookup_id -> (deadline, chunks)
        self.counters: Counter[str] = Counter()
        self._log = RareLog(logger)
        if self.device.type == "cuda" or self._registered:
            self._warm_end = self._arena.size  # the GPU's, or pinned: touched
        self._warm_ahead()

    # -- memory

    def _allocate(self, size: int) -> torch.Tensor:
        if self.device.type == "cuda":
            return torch.empty(size, dtype=torch.uint8, device=self.device)
        self._map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                self._map.madvise(mmap.MADV_HUGEPAGE)
            except OSError:  # a kernel without huge pages: only slower
                logger.debug("no huge pages on this kernel")
        memory = torch.frombuffer(self._map, dtype=torch.uint8)
        if torch.cuda.is_available():
            error = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), size, 0)
            if int(error) != 0:
                raise MemoryError(f"cudaHostRegister of {size} bytes failed with error {int(error)}")
            self._registered = True
        return memory

    def warm(self, end: int, wait_for_quiet: bool = False) -> None:
        """Touches fresh memory up to `end`, in small steps that several threads may share.

        wait_for_quiet: while somebody takes memory and enough is ready, pauses, for both want the same cores.
        """
        memory = self._memory  # stays mapped while we hold it
        top = self._arena.top
        while not self._closed:
            if wait_for_quiet and top != self._arena.top and self._warm_end - self._arena.top > WARM_BYTES // 2:
                top = self._arena.top
                time.sleep(0.05)
                continue
            with self._warm_lock:
                start = self._warm_end
                if start >= min(end, self._arena.size):
                    return
                size = min(HUGE_PAGE_BYTES, self._arena.size - start)
                _LIBC.madvise(ctypes.c_void_p(memory.data_ptr() + start), ctypes.c_size_t(size), MADV_POPULATE_WRITE)
                self._warm_end += size  # subtle: also where the kernel is too old for it; then pages come at first use

    def _warm_ahead(self) -> None:
        """Keeps fresh memory touched ahead of the arena's top, in a short-lived thread, outside any request."""
        end = min(self._arena.size, self._arena.top + self._warm_bytes)
        if self._warm_end < end - self._warm_bytes // 2 and not self._warmer.is_alive():
            self._warmer = threading.Thread(target=self._warm_behind, args=(end,), daemon=True, name="warm")
            with contextlib.suppress(RuntimeError):  # no more threads: pages come at first use, only slower
                self._warmer.start()

    def _warm_behind(self, end: int) -> None:
        with contextlib.suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, 0, 19)  # subtle: of this thread alone, on Linux; requests come first
        self.warm(end, wait_for_quiet=True)

    def bytes_of(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's memory, uint8 [nbytes], on the store's device. Not a copy."""
        return self._memory[chunk.offset : chunk.offset + chunk.nbytes]

    def fill(self, chunk: Chunk, receive: Callable[[memoryview], Any]) -> None:
        """Fills a reserved chunk: receive(view) is called for one piece after another and must write all of it."""
        if self._view is not None:
            receive(self._view[chunk.offset : chunk.offset + chunk.nbytes])
            return
        target = self.bytes_of(chunk)
        for index, start in enumerate(range(0, chunk.nbytes, STAGING_BYTES)):
            buffer, copied, stream = self._stage(index)
            copied.synchronize()  # its last copy to the device is done, the buffer is ours
            piece = buffer[: min(STAGING_BYTES, chunk.nbytes - start)]
            receive(bytes_of(piece))
            with torch.cuda.stream(stream):
                target[start : start + len(piece)].copy_(piece, non_blocking=True)
                copied.record(stream)
        if chunk.nbytes:
            stream.synchronize()  # nothing is committed before its last byte is there

    def pieces(self, chunk: Chunk) -> Iterable[memoryview]:
        """The bytes of a chunk in use, piece by piece; each piece is valid until the next is asked for."""
        if self._view is not None:
            return (self._view[chunk.offset : chunk.offset + chunk.nbytes],)
        return self._pieces_from_gpu(chunk)

    def _pieces_from_gpu(self, chunk: Chunk) -> Iterator[memoryview]:
        source = self.bytes_of(chunk)
        starts = range(0, chunk.nbytes, STAGING_BYTES)

        def copy(index: int) -> tuple[torch.Tensor, torch.cuda.Event]:
            buffer, copied, stream = self._stage(index)
            piece = buffer[: min(STAGING_BYTES, chunk.nbytes - starts[index])]
            with torch.cuda.stream(stream):
                piece.copy_(source[starts[index] : starts[index] + len(piece)], non_blocking=True)
                copied.record(stream)
            return piece, copied

        ahead = [copy(index) for index in range(min(1, len(starts)))]
        for index in range(len(starts)):  # while one piece is sent, the next is copied
            piece, copied = ahead.pop()
            if index + 1 < len(starts):
                ahead.append(copy(index + 1))
            copied.synchronize()
            yield bytes_of(piece)

    def _stage(self, index: int) -> tuple[torch.Tensor, torch.cuda.Event, torch.cuda.Stream]:
        """One of this thread's two pinned buffers, the event of its last copy, and the thread's stream."""
        local = self._staging
        if not hasattr(local, "stream"):
            local.stream = torch.cuda.Stream(self.device)
            local.buffers = [torch.empty(STAGING_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
            local.events = [torch.cuda.Event() for _ in range(2)]
        return local.buffers[index % 2], local.events[index % 2], local.stream

    # -- a chunk's life

    def reserve(self, nbytes: int) -> Chunk | None:
        """Memory for a chunk, evicting the least recently used where needed; None where too much is in use."""
        size = _aligned(nbytes)
        with self._lock:
            if size > self._arena.size:
                self.counters["rejected"] += 1
                return None
            self._expire_pins()
            while (offset := self._arena.take(size)) is None:
                if not self._evict_one():
                    self.counters["rejected"] += 1
                    return None
            if self._warm_end < self._arena.size:
                self._warm_ahead()
        return Chunk(offset, nbytes)

    def commit(self, key: Any, chunk: Chunk, keep: bool = False) -> Chunk:
        """Makes a reserved and filled chunk visible, at once and whole, over whatever `key` named before.

        Answers the chunk that `key` names now, in use until release(). keep: where a chunk of the same meta is there
        already, that one stays, and the new one is dropped.
        """
        with self._lock:
            old = self._chunks.get(key)
            if keep and old is not None and old.meta == chunk.meta:
                self._free(chunk)
                old.refs += 1
                return old
            if old is not None:
                self._drop(old)
            chunk.key = key
            self._chunks[key] = chunk
            return chunk

    def abandon(self, chunk: Chunk) -> None:
        """Gives back a reserved chunk that will not be committed."""
        with self._lock:
            self._free(chunk)

    def acquire(self, key: Any) -> Chunk | None:
        """The chunk, in use until release(), and the most recently used now; None where there is none."""
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                self.counters["misses"] += 1
                return None
            self.counters["hits"] += 1
            chunk.refs += 1
            self._chunks.move_to_end(key)
            return chunk

    def acquire_prefix(self, keys: Sequence[Any], metas: Sequence[Any]) -> list[Chunk]:
        """The leading chunks that are there with these metas, all in use until release().

        The head becomes the most recently used, the tail least, so that a prefix loses its tail first.
        """
        with self._lock:
            self._expire_pins()
            found = list(map(self._chunks.get, keys))
            count = 0
            for chunk, meta in zip(found, metas, strict=True):
                if chunk is None or chunk.meta != meta:
                    break
                chunk.refs += 1
                count += 1
            del found[count:]
            deque(map(self._chunks.move_to_end, reversed(keys[:count])), maxlen=0)  # a loop over a call, at C's speed
        return found  # type: ignore[return-value]  # no None is left

    def hold(self, chunk: Chunk) -> None:
        """One more use of a chunk in use, with a release() of its own."""
        with self._lock:
            chunk.refs += 1

    def release(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            self._release(chunks)

    def contains(self, key: Any) -> bool:
        with self._lock:
            if key not in self._chunks:
                return False
            self._chunks.move_to_end(key)
            return True

    def remove(self, key: Any) -> bool:
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is not None:
                self._drop(chunk)
            return chunk is not None

    def clear(self) -> None:
        """Drops every chunk and every pin; what is in use stays readable until released."""
        with self._lock:
            while self._pins:
                self._release(self._pins.popitem()[1][1])
            for chunk in list(self._chunks.values()):
                self._drop(chunk)

    def keys(self) -> list[Any]:
        with self._lock:
            return list(self._chunks)

    def pin(self, lookup_id: str, chunks: list[Chunk], timeout_sec: float) -> None:
        """Keeps acquired chunks in use until unpin(lookup_id) or the timeout; a second pin under an id replaces it.

        timeout_sec: the same for all, so that the oldest pin is the first to time out.
        """
        with self._lock:
            self._unpin(lookup_id)
            if chunks:  # a lookup that found nothing leaves nothing
                self._pins[lookup_id] = (time.monotonic() + timeout_sec, chunks)

    def unpin(self, lookup_id: str) -> None:
        with self._lock:
            self._unpin(lookup_id)

    def stats(self) -> dict[str, int]:
        """chunks, bytes_used, max_bytes, pins, pinned_chunks, hits, misses, evictions, rejected."""
        with self._lock:
            self._expire_pins()
            pinned = sum(len(chunks) for _, chunks in self._pins.values())
            counted = {name: self.counters[name] for name in ("hits", "misses", "evictions", "rejected")}
            sizes = {"chunks": len(self._chunks), "bytes_used": self._arena.used, "max_bytes": self.max_bytes}
            return sizes | {"pins": len(self._pins), "pinned_chunks": pinned} | counted

    def close(self) -> None:
        """Drops all, takes nothing more, and gives up the memory, unless a chunk is in use still. Idempotent."""
        with self._lock:
            self._closed, self._arena.size = True, 0  # subtle: so nothing fits any more
        if self._warmer.is_alive():  # subtle: let go of by a daemon thread at exit, torch's memory aborts the process
            self._warmer.join(2.0)
        self.clear()
        if self._registered:
            self._registered = False
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
        if not self._arena.used:
            self._memory, self._map = torch.empty(0, dtype=torch.uint8), None
            self._view = None if self._view is None else memoryview(b"")

    # -- under the lock

    def _free(self, chunk: Chunk) -> None:
        self._arena.give_back(chunk.offset, _aligned(chunk.nbytes))

    def _drop(self, chunk: Chunk) -> None:
        del self._chunks[chunk.key]
        chunk.key = None
        if not chunk.refs:
            self._free(chunk)

    def _release(self, chunks: Iterable[Chunk]) -> None:
        for chunk in chunks:
            chunk.refs -= 1
            if chunk.key is None and not chunk.refs:
                self._free(chunk)

    def _evict_one(self) -> bool:
        for _ in range(len(self._chunks)):
            chunk = next(iter(self._chunks.values()))
            if not chunk.refs:
                self._drop(chunk)
                self.counters["evictions"] += 1
                return True
            self._chunks.move_to_end(chunk.key)  # in use, so used just now: the next search need not pass it again
        return False

    def _unpin(self, lookup_id: str) -> None:
        if lookup_id in self._pins:
            self._release(self._pins.pop(lookup_id)[1])

    def _expire_pins(self) -> None:
        while self._pins:
            lookup_id, (deadline, chunks) = next(iter(self._pins.items()))
            if deadline > time.monotonic():
                return
            self._log("pin", "pin of lookup %s timed out: %d chunks released", lookup_id, len(chunks))
            self._unpin(lookup_id)


def _aligned(nbytes: int) -> int:
    return -(-max(nbytes, 1) // ALIGN_BYTES) * ALIGN_BYTES


# ---------------------------------------------------------------------------------------------------------------------
# Paged KV caches, in whatever layout the serving engine has them


class PagedKVCache:
    """The L layer tensors of a paged KV cache, their layout named in letters, one a layer axis in order:

    "2BNHD"  vLLM flash-attn            "B2NHD"  FlashInfer                "BNC"  MLA
    "BHNC"   newer vLLM, C = 2*D        "SHD"    SGLang, S = B*N slots, kvcaches is [keys, values], L tensors each

    Letters: 2 keys then values, B, N, H, D, S; C is what is left of H and D and, in "BHNC", of 2 before D.
    Whatever the layout, KV is read and written through planes [B, N, H, D], views of the same memory, one for each of
    keys and values of each layer. Slots that fill whole blocks move as whole blocks, twice as fast.
    """

    def __init__(self, kvcaches: Sequence[Any], layout: str, metadata: LMCacheMetadata):
        self.num_layers, self.num_kv, _, self.heads, self.head_dim = metadata.kv_shape
        self.layout, self.dtype = layout, metadata.kv_dtype
        if "S" in layout and self.num_kv == 2 and len(kvcaches) == 2 and not isinstance(kvcaches[0], torch.Tensor):
            layers = [list(pair) for pair in zip(*kvcaches, strict=True)]  # [L][2]
        else:
            layers = [[tensor] for tensor in kvcaches]
        if len(layers) != self.num_layers:
            raise ValueError(f"kvcaches has {len(layers)} layers, kv_shape says {self.num_layers}")
        self.wide = self._widest(layers)
        planes = [self._planes(index, tensors) for index, tensors in enumerate(layers)]  # [L][K] of [B, N, H, D]
        ordered = [planes[layer][kv] for kv in range(self.num_kv) for layer in range(self.num_layers)]  # [K*L]
        first = ordered[0]
        if any(plane.shape != first.shape or plane.device != first.device for plane in ordered):
            raise ValueError("kvcaches: all layers must have the same shape and device")
        self.num_blocks, self.block_size = first.shape[:2]
        self.device = first.device
        self.num_slots = self.num_blocks * self.block_size
        self._planes_ = ordered
        self._slot_rows = _merge(ordered, (self.num_slots, -1))  # K*L of [B*N, H*D], or None
        self._block_rows = _merge(ordered, (self.num_blocks, -1)) or ordered  # of [B, N*H*D], or the planes as they are

    def _widest(self, layers: list[list[torch.Tensor]]) -> torch.dtype:
        """The widest dtype that the KV can be seen as: bytes move the same, in fewer and larger steps."""
        flat = [tensor for tensors in layers for tensor in tensors]
        for layer, tensor in enumerate(flat):
            if (found := getattr(tensor, "dtype", type(tensor))) != self.dtype:
                raise ValueError(f"kvcaches[{layer}] is {found}, metadata.kv_dtype is {self.dtype}")
        row_bytes = self.head_dim * self.dtype.itemsize
        for wide in (torch.complex128, torch.int64, torch.int32, torch.int16):  # the first is the only one of 16 bytes
            if row_bytes % wide.itemsize == 0 and wide.itemsize >= self.dtype.itemsize:
                if any(tensor.data_ptr() % wide.itemsize for tensor in flat):
                    continue
                try:
                    for tensor in flat:
                        tensor.view(wide)
                    return wide
                except RuntimeError:  # an offset or a stride that is not a multiple
                    continue
        return torch.uint8 if self.dtype.itemsize == 1 else self.dtype

    def _planes(self, layer: int, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The K planes [B, N, H, D] of one layer, from one tensor with both or from two."""
        axes = self.layout.replace("S", "B")
        dim = self.head_dim * self.dtype.itemsize // self.wide.itemsize  # D in elements of self.wide
        rest = {"D": dim, "H": self.heads, "2": self.num_kv}
        missing = [letter for letter in "2HD" if letter not in axes]  # what C stands for, or of size 1
        if len(tensors) == 2:
            missing.remove("2")
        planes: list[torch.Tensor] = []
        for tensor in tensors:
            try:
                view, letters = tensor.view(self.wide), axes
                if view.dim() != len(axes):
                    raise ValueError(f"{view.dim()} axes")
                if letters.endswith("C"):
                    view = view.unflatten(-1, [rest[letter] for letter in missing])
                    letters = letters[:-1] + "".join(missing)
                for letter in "2NH":
                    if letter not in letters:
                        view, letters = view.unsqueeze(0), letter + letters
                view = view.permute([letters.index(letter) for letter in "2BNHD"])  # [K or 1, B, N, H, D]
                if view.shape[3:] != (self.heads, dim) or view.shape[0] * len(tensors) != self.num_kv:
                    raise ValueError("another H, D or K")
            except (RuntimeError, ValueError, KeyError, IndexError) as error:
                raise ValueError(
                    f"kvcaches of layer {layer}: shape {[*tensor.shape]} is not {self.layout!r} with K={self.num_kv}, "
                    f"H={self.heads}, D={self.head_dim} ({error})"
                ) from error
            planes += view.unbind(0)
        return planes

    def check_slots(self, slots: torch.Tensor) -> None:
        """slots: int64 [T] on the CPU; one that is not in the cache is a ValueError."""
        if slots.numel() and (int(slots.min()) < 0 or int(slots.max()) >= self.num_slots):
            bad = slots[(slots < 0) | (slots >= self.num_slots)][0].item()
            raise ValueError(f"slot {bad} is not in the paged cache; allowed: 0..{self.num_slots - 1}")

    def gather(self, jobs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """For each (slots, chunk): the KV at slots (int64 [T], CPU) into chunk, [K, L, T, H*D] as bytes, our device."""
        for plane, index, part in self._steps(jobs):
            torch.ops.aten.index.Tensor_out(plane, index, out=part)  # part = plane[index], and no memory between

    def scatter(self, jobs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """The other way: for each (slots, chunk), the chunk to the slots."""
        for plane, index, part in self._steps(jobs):
            plane[index] = part

    def _steps(self, jobs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple]:
        """Plane by plane, not chunk by chunk: neighbouring reads, or writes, are a quarter faster."""
        for same_plane in zip(*(self._batch(*stack) for stack in _side_by_side(jobs)), strict=True):
            yield from same_plane

    def _batch(self, slots: torch.Tensor, chunks: torch.Tensor) -> Iterator[tuple[torch.Tensor, Any, torch.Tensor]]:
        """slots [C, T], chunks uint8 [C, nbytes]. For each of K*L planes: a tensor, an index, plane[index]'s place."""
        size, planes = self.block_size, self._slot_rows
        index: tuple[torch.Tensor, ...] = (slots,)
        if slots.shape[1] % size == 0:
            blocks = slots.view(len(slots), -1, size)  # [C, T/N, N]
            first = blocks[:, :, :1]
            if bool((blocks == first + torch.arange(size)).all() & (first % size == 0).all()):
                planes, index = self._block_rows, (first[:, :, 0] // size,)
        if planes is None:  # no view has slots as rows
            planes, index = self._planes_, (slots // size, slots % size)
        index = tuple(each.to(self.device) for each in index)
        shape = (len(slots), len(planes), index[0].shape[1], *planes[0].shape[len(index) :])
        parts = chunks.view(self.wide).view(shape).unbind(1)  # K*L of [C, T or T/N, ...]
        return zip(planes, repeat(index), parts, strict=False)


def _side_by_side(jobs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Jobs (slots [T], chunk uint8 [nbytes]) as (slots [C, T], chunks uint8 [C, nbytes]): chunks of one size that lie
    side by side in one memory, as those of a prompt mostly do in a store, move in one step a plane."""
    groups: list[list[tuple[torch.Tensor, torch.Tensor]]] = []
    for slots, chunk in sorted(jobs, key=lambda job: job[1].data_ptr()):
        first = groups[-1][0][1] if groups else None
        if (
            first is not None
            and len(chunk) == len(first)
            and chunk.data_ptr() == first.data_ptr() + len(groups[-1]) * _aligned(len(first))
            and chunk.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        ):
            groups[-1].append((slots, chunk))
        else:
            groups.append([(slots, chunk)])
    for group in groups:
        first = group[0][1]
        chunks = first.as_strided((len(group), len(first)), (_aligned(len(first)), 1))
        yield torch.stack([slots for slots, _ in group]), chunks


def _merge(planes: list[torch.Tensor], shape: tuple[int, ...]) -> list[torch.Tensor] | None:
    try:
        return [plane.view(shape) for plane in planes]
    except RuntimeError:  # of one of them, the axes are not neighbours in memory
        return None


# ---------------------------------------------------------------------------------------------------------------------
# The engine

REMOTE_BATCH = 128  # chunks asked for in one go
REMOTE_GET_BATCH = 16  # chunks that come back, or leave, in one go
REMOTE_COOLDOWN_SEC = 1.0  # a remote that failed is left alone for so long
ENGINE_COUNTERS = ["stores", "stored_tokens", "lookups", "lookup_tokens", "hit_tokens", "retrieves", "retrieved_tokens"]
ENGINE_COUNTERS += ["faults", "remote_puts", "remote_dropped", "remote_errors", "remote_skipped"]


class LMCacheEngine:
    """Stores, finds and copies back the KV of token prefixes (LMCache cache_engine.py).

    device: where the chunks are kept, `cpu`, `cuda` or `cuda:N`, within config.max_local_cpu_size.
    remote: an object with the interface of remote_server.RemoteClient: exists_many(keys) -> [bool],
        get_many(keys, fill) and put_many(items). Stores go to it in the background; lookup and retrieve fall through
        to it. Whatever it raises is a miss, and it is left alone for a second. It is the caller's to close.
    Safe to share between threads.
    """

    def __init__(self, config: LMCacheEngineConfig, metadata: LMCacheMetadata, device: str = "cpu", remote: Any = None):
        self.config, self.metadata, self.remote = config, metadata, remote
        self.token_database = make_token_database(config, metadata)
        num_layers, num_kv, _, heads, head_dim = metadata.kv_shape
        self._kv_axes = (num_kv, num_layers, heads * head_dim)  # K, L, H*D
        self._token_bytes = math.prod(self._kv_axes) * metadata.kv_dtype.itemsize
        first_only = (config.extra_config or {}).get("save_only_first_rank", metadata.use_mla) and metadata.use_mla
        self.save_only_first_rank = bool(first_only)
        self._paged: PagedKVCache | None = None
        self._lock = threading.Lock()  # of the counters and the outbox
        self._move_lock = threading.Lock()  # of the streams and staging buffers
        self._counters = dict.fromkeys(ENGINE_COUNTERS, 0)
        self._outbox: deque[tuple[str, Chunk]] = deque()  # key text and chunk in use, on their way to the remote
        self._outbox_bytes = 0
        self._dropped_before = 0  # remote_dropped at the last flush
        self._outbox_ready = threading.Condition(self._lock)
        self._remote_down_until = 0.0
        self._closed = False
        self._log = RareLog(logger)
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        text = self._key(2**64 - 1, None).to_string()  # the longest: what does not fit fails now, not at a store
        self._key_end = "@" + DTYPE_TO_TEXT[metadata.kv_dtype]
        self._key_start = text.removesuffix("f" * 16 + self._key_end)  # model@world_size@worker_id@
        if remote is not None and metadata.kv_dtype not in DTYPE_TO_INT:
            raise ValueError(f"kv_dtype {metadata.kv_dtype} has no number on the wire, so there can be no remote")
        self.chunks = ChunkStore(device, int(config.max_local_cpu_size * 2**30))
        self._writer = Service("remote-writer", self._write_remote, self._drop_outbox) if remote is not None else None

    def register_kv_caches(self, kvcaches: Sequence[Any], layout: str) -> None:
        """Names the serving engine's L layer tensors and their layout, see PagedKVCache; ValueError where they differ
        from metadata.kv_shape and kv_dtype."""
        self._paged = PagedKVCache(kvcaches, layout, self.metadata)

    # -- store

    def store(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        mask: torch.Tensor | None = None,
        kvcaches: Sequence[Any] | None = None,
        slot_mapping: torch.Tensor | Sequence[int] | None = None,
        request_configs: dict[str, Any] | None = None,
    ) -> int:
        """Copies the chunks of a prompt that are not here yet out of the paged cache; the tokens newly stored.

        slot_mapping: int [T], the slot of every token of the prompt, those that the mask leaves out too.
        Given tokens, it stores as long a prefix as there is room for, and a fault of ours stores nothing. Given
        hashes, it is all or nothing, and no room is a MemoryError: whoever asks by hash is told (offload_server.py).
        """
        spans = self.token_database.process_tokens(tokens, hashes, offsets)
        masked = self.token_database.count_masked(spans, mask, total := _total(tokens, offsets))
        paged, slots = self._pages_and_slots(kvcaches, slot_mapping, total, spans[masked:])
        keys, lengths = self._keys(spans, suffix := self._tags(request_configs)), _lengths(spans)
        if self._closed and hashes is not None:
            raise RuntimeError("the engine is closed")
        if self._closed or (self.save_only_first_rank and self.metadata.worker_id != 0):
            return 0
        fresh: list[tuple[int, Chunk]] = []  # index of a span that is not here, and its reserved chunk
        held = self.chunks.acquire_prefix(keys, lengths)  # our own head is not evicted to make room for our tail
        try:
            for index in range(max(len(held), masked), len(spans)):
                if here := self.chunks.acquire_prefix(keys[index : index + 1], lengths[index : index + 1]):
                    held += here
                elif (chunk := self.chunks.reserve(lengths[index] * self._token_bytes)) is not None:
                    chunk.meta = lengths[index]
                    fresh.append((index, chunk))
                elif hashes is not None:
                    raise MemoryError(f"no room for chunk {index} of {len(spans)}: {self.chunks.stats()}")
                else:
                    break
            self._move(paged.gather, paged, [(slots[slice(*spans[index][:2])], chunk) for index, chunk in fresh])
        except Exception:
            for _, chunk in fresh:
                self.chunks.abandon(chunk)
            self.chunks.release(held)
            if hashes is not None:
                raise
            self._log("store", "store failed, nothing stored", traceback=True)
            self._count(faults=1)
            return 0
        stored = 0
        for index, chunk in reversed(fresh):  # tail first: whoever sees a chunk can use it
            held.append(now := self.chunks.commit(keys[index], chunk, keep=True))
            if now is chunk:
                stored += lengths[index]
                self._send(spans[index][2], suffix, chunk)
        self.chunks.release(self.chunks.acquire_prefix(keys, lengths))  # the head is the last to be evicted
        self.chunks.release(held)
        self._count(stores=1, stored_tokens=stored)
        return stored

    # -- lookup

    def lookup(
        self,
        tokens: Tokens | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        lookup_id: str | None = None,
        pin: bool = False,
        request_configs: dict[str, Any] | None = None,
    ) -> int:
        """How many leading tokens of a prompt are here or at the remote, up to the first chunk that is neither.

        pin: keeps the chunks that are here until lookup_unpin(lookup_id), or config.pin_timeout_sec at most.
        """
        if pin and not isinstance(lookup_id, str):
            raise ValueError(f"pin=True needs a lookup_id, a str to unpin it by, not {lookup_id!r}")
        suffix = self._tags(request_configs)
        if tokens is None and hashes is not None:  # no spans: 512 chunks take 0.1 ms this way
            check_hashes(hashes, offsets)
            chunk_hashes, lengths, ends = hashes, offsets or (), None
        else:
            spans = self.token_database.process_tokens(tokens, hashes, offsets)
            chunk_hashes, lengths, ends = [span[2] for span in spans], _lengths(spans), [span[1] for span in spans]
        keys = [(chunk_hash, suffix) for chunk_hash in chunk_hashes] if suffix else chunk_hashes
        if self._closed:
            return 0
        found = self.chunks.acquire_prefix(keys, lengths)
        count = len(found)
        if count < len(keys) and self.remote is not None:
            count = self._extend_by_remote(found, keys, lengths, chunk_hashes, suffix)
        if pin and lookup_id is not None:
            self.chunks.pin(lookup_id, found, self.config.pin_timeout_sec)
        else:
            self.chunks.release(found)
        hits = sum(lengths[:count]) if ends is None else ends[count - 1] if count else 0
        self._count(lookups=1, lookup_tokens=_total(tokens, offsets), hit_tokens=hits)
        return hits

    def lookup_unpin(self, lookup_id: str) -> None:
        """Releases what that lookup pinned; an unknown id is a no-op."""
        self.chunks.unpin(lookup_id)

    def _extend_by_remote(
        self, found: list[Chunk], keys: Sequence, lengths: Sequence[int], hashes: Sequence[ChunkHash], suffix: str
    ) -> int:
        """How many leading chunks are there, from len(found) on at the remote too; those here join `found`."""
        size, last = self.config.chunk_size, len(keys) - 1
        for first in range(len(found), len(keys), REMOTE_BATCH):
            batch = range(first, min(first + REMOTE_BATCH, len(keys)))
            texts = [self._key_text(hashes[index], suffix) for index in batch]
            answers = self._ask_remote(partial(self.remote.exists_many, texts[::-1]), [False] * len(batch))
            for index, there in zip(batch, answers[::-1], strict=True):
                here = self.chunks.acquire_prefix(keys[index : index + 1], lengths[index : index + 1])
                found += here
                # The remote does not say how long a chunk is: a length that we would not have stored is not there.
                partial_ok = index == last and self.config.save_unfull_chunk and lengths[index] < size
                fits = lengths[index] == size or partial_ok or self.config.enable_blending
                if not here and not (there and fits):
                    return index
        return len(keys)

    # -- retrieve

    def retrieve(
        self,
        tokens: Tokens | None = None,
        mask: torch.Tensor | None = None,
        hashes: Sequence[ChunkHash] | None = None,
        offsets: Sequence[int] | None = None,
        kvcaches: Sequence[Any] | None = None,
        slot_mapping: torch.Tensor | Sequence[int] | None = None,
        request_configs: dict[str, Any] | None = None,
    ) -> torch.Tensor:
        """Copies the leading chunks of a prompt that are here, or at the remote, into the paged cache.

        slot_mapping: int [T], the slot of every token. Answers a BoolTensor [T], on the CPU, True exactly where KV
        was written. What comes from the remote is kept here too.
        """
        spans = self.token_database.process_tokens(tokens, hashes, offsets)
        masked = self.token_database.count_masked(spans, mask, total := _total(tokens, offsets))
        paged, slots = self._pages_and_slots(kvcaches, slot_mapping, total, spans[masked:])
        keys, lengths = self._keys(spans, suffix := self._tags(request_configs)), _lengths(spans)
        written = torch.zeros(total, dtype=torch.bool)  # [T]
        done, fetched = masked, 0
        while done < len(spans) and not self._closed:
            found = self.chunks.acquire_prefix(keys[done:], lengths[done:])
            if not found:
                found = self._fetch(spans[done : done + REMOTE_GET_BATCH], suffix)
                fetched += len(found)
            batch = spans[done : done + len(found)]
            try:
                jobs = [(slots[start:end], chunk) for (start, end, _), chunk in zip(batch, found, strict=True)]
                self._move(paged.scatter, paged, jobs)
            except Exception:
                self._log("retrieve", "retrieve failed at chunk %d, the rest is a miss", done, traceback=True)
                self._count(faults=1)
                break
            finally:
                self.chunks.release(found)
            if not found:
                break
            for start, end, _ in batch:
                written[start:end] = True
            done += len(found)
        self.chunks.release(self.chunks.acquire_prefix(keys[:done], lengths[:done]))  # evict the head last
        if fetched:  # and there too
            texts = [self._key_text(span[2], suffix) for span in reversed(spans[:done])]
            self._ask_remote(partial(self.remote.exists_many, texts), None)
        self._count(retrieves=1, retrieved_tokens=int(written.sum()))
        return written

    def _fetch(self, spans: Sequence[Span], suffix: str) -> list[Chunk]:
        """The leading ones of these chunks that the remote has, kept here now, and in use."""
        if self.remote is None:
            return []
        got: dict[int, Chunk] = {}

        def fill(index: int, meta: RemoteMeta, receive: Callable[[memoryview], Any]) -> None:
            start, end, chunk_hash = spans[index]
            if meta != self._remote_meta(end - start):
                wanted = self._remote_meta(end - start)
                self._log("other", "remote has another chunk under this key: %s, not %s", meta, wanted)
                return
            chunk = self.chunks.reserve(meta.length)
            if chunk is None:
                return
            chunk.meta = end - start
            try:
                self.chunks.fill(chunk, receive)
            except BaseException:
                self.chunks.abandon(chunk)
                raise
            got[index] = self.chunks.commit(self._keys(spans[index : index + 1], suffix)[0], chunk, keep=True)

        texts = [self._key_text(span[2], suffix) for span in spans]
        self._ask_remote(lambda: self.remote.get_many(texts, fill), None)
        leading = next((index for index in range(len(spans)) if index not in got), len(spans))
        self.chunks.release(chunk for index, chunk in got.items() if index >= leading)
        return [got[index] for index in range(leading)]

    # -- the remote

    def _ask_remote(self, ask: Callable[[], Any], otherwise: Any) -> Any:
        """ask(), or `otherwise` where the remote fails or failed a moment ago: a dead remote is a miss."""
        if time.monotonic() < self._remote_down_until:
            self._count(remote_skipped=1)
            return otherwise
        try:
            return ask()
        except Exception as error:
            if not isinstance(error, ValueError):  # that is a key too long for a request: ours, not the remote's fault
                self._remote_down_until = time.monotonic() + REMOTE_COOLDOWN_SEC
            self._count(remote_errors=1)
            self._log(type(error).__name__, "remote failed, or left alone for a second after that: %r", error)
            return otherwise

    def _send(self, chunk_hash: ChunkHash, suffix: str, chunk: Chunk) -> None:
        """Puts a committed chunk in the outbox, which costs no memory of its own: it holds chunks in use."""
        if self.remote is None:
            return
        text = self._key_text(chunk_hash, suffix)
        too_long = len(text.encode()) > MAX_KEY_BYTES  # with a long `bytes` hash
        with self._outbox_ready:
            # Half of the memory stays evictable.
            if self._closed or too_long or self._outbox_bytes + chunk.nbytes > self.chunks.max_bytes // 2:
                self._counters["remote_dropped"] += 1
                return
            self._outbox_bytes += chunk.nbytes
            self.chunks.hold(chunk)
            self._outbox.append((text, chunk))
            self._outbox_ready.notify()

    def _write_remote(self) -> None:
        with self._outbox_ready:
            if not self._outbox:
                self._outbox_ready.wait(0.1)
            batch = [self._outbox.popleft() for _ in range(min(len(self._outbox), REMOTE_GET_BATCH))]
        if not batch:
            return
        items = ((text, self._remote_meta(chunk.meta), self.chunks.pieces(chunk)) for text, chunk in batch)
        if self._ask_remote(lambda: self.remote.put_many(items) or True, False):
            self._count(remote_puts=len(batch))
        else:
            self._count(remote_dropped=len(batch))
        self.chunks.release(chunk for _, chunk in batch)
        with self._outbox_ready:
            self._outbox_bytes -= sum(chunk.nbytes for _, chunk in batch)
            self._outbox_ready.notify_all()

    def _drop_outbox(self) -> None:
        with self._outbox_ready:
            dropped = [chunk for _, chunk in self._outbox]
            self._outbox.clear()
            self._outbox_bytes -= sum(chunk.nbytes for chunk in dropped)
            self._counters["remote_dropped"] += len(dropped)
            self._outbox_ready.notify_all()
        self.chunks.release(dropped)

    def flush(self, timeout_sec: float = 10.0) -> bool:
        """Waits until the remote has taken what was stored since the last flush; False where it has not all of it."""
        if self.remote is None:
            return True
        with self._outbox_ready:
            emptied = self._outbox_ready.wait_for(lambda: self._outbox_bytes == 0, timeout_sec)
            dropped = self._counters["remote_dropped"] - self._dropped_before
            self._dropped_before += dropped
        return emptied and self._ask_remote(lambda: self.remote.flush() or True, False) and not dropped

    def _remote_meta(self, num_tokens: int) -> RemoteMeta:
        num_kv, num_layers, width = self._kv_axes
        fmt = MemoryFormat.KV_MLA_FMT if self.metadata.use_mla else MemoryFormat.KV_2LTD
        shape = (num_kv, num_layers, num_tokens, width)
        return RemoteMeta(num_tokens * self._token_bytes, fmt, DTYPE_TO_INT[self.metadata.kv_dtype], shape)

    # -- small things

    def _key(self, chunk_hash: ChunkHash, request_configs: dict[str, Any] | None) -> CacheEngineKey:
        meta, alone = self.metadata, self.save_only_first_rank  # then rank 0 speaks for all, whatever the world's size
        world_size, worker_id = (1, 0) if alone else (meta.world_size, meta.worker_id)
        return CacheEngineKey(meta.model_name, world_size, worker_id, chunk_hash, meta.kv_dtype, request_configs)

    def _tags(self, request_configs: dict[str, Any] | None) -> str:
        """The tags as they end a key, `@name%value`...; part of a chunk's name here and at the remote."""
        if not request_configs:
            return ""
        if not isinstance(request_configs, dict) or any(not isinstance(name, str) for name in request_configs):
            raise ValueError(f"request_configs must be a dict with str keys, not {request_configs!r}")
        return self._key(2**64 - 1, request_configs).to_string()[len(self._key_start) + 16 + len(self._key_end) :]

    def _key_text(self, chunk_hash: ChunkHash, suffix: str) -> str:
        digits = chunk_hash.hex() if isinstance(chunk_hash, bytes) else f"{chunk_hash:x}"
        return f"{self._key_start}{digits}{self._key_end}{suffix}"

    @staticmethod
    def _keys(spans: Sequence[Span], suffix: str) -> list[Any]:
        """The chunks' names in our own store: the bare hash, or with the tags."""
        return [(span[2], suffix) for span in spans] if suffix else [span[2] for span in spans]

    def _pages_and_slots(
        self, kvcaches: Sequence[Any] | None, slot_mapping: Any, total: int, spans: Sequence[Span]
    ) -> tuple[PagedKVCache, torch.Tensor]:
        """The paged cache, and the slots as int64 [T] on the CPU; ValueError where one of them cannot be used."""
        paged = self._paged
        if kvcaches is not None:
            default = "BNC" if self.metadata.use_mla else "2BNHD"
            paged = PagedKVCache(kvcaches, paged.layout if paged else default, self.metadata)
        if paged is None:
            raise ValueError("no paged cache: call register_kv_caches first, or give kvcaches")
        if slot_mapping is None:
            raise ValueError("slot_mapping is needed: the slot of each token")
        try:
            slots = torch.as_tensor(slot_mapping).cpu()  # [T]
        except (RuntimeError, TypeError, ValueError, OverflowError) as error:
            raise ValueError(f"slot_mapping must be ints: {error}") from error
        if slots.numel() and (slots.is_floating_point() or slots.is_complex() or slots.dtype == torch.bool):
            raise ValueError(f"slot_mapping must be ints, not {slots.dtype}")
        if slots.shape != (total,):
            raise ValueError(f"slot_mapping has shape {[*slots.shape]}, but there are {total} tokens")
        slots = slots.to(torch.int64)
        if spans:
            paged.check_slots(slots[spans[0][0] : spans[-1][1]])
        return paged, slots

    def _move(self, move: Callable, paged: PagedKVCache, jobs: list[tuple[torch.Tensor, Chunk]]) -> None:
        """Gathers or scatters (slots, chunk) pairs; when it returns, every byte is where it should be."""
        if paged.device.type == "cpu" and self.chunks.device.type == "cpu":
            move([(slots, self.chunks.bytes_of(chunk)) for slots, chunk in jobs])
        elif jobs:
            with self._move_lock:
                self._move_cuda(move, paged, jobs)

    def _move_cuda(self, move: Callable, paged: PagedKVCache, jobs: list[tuple[torch.Tensor, Chunk]]) -> None:
        """The same with a GPU on either side. One device: each chunk straight between pages and store, on one stream.

        Two devices: through two staging chunks beside the pages, on two streams: while one chunk is gathered on
        `near`, the one before is copied on `far`; an event each way keeps a staging chunk from being used too early.
        """
        gathering = move == paged.gather
        device = paged.device if paged.device.type == "cuda" else self.chunks.device
        if self._streams is None:
            self._streams = torch.cuda.Stream(device), torch.cuda.Stream(device)
        near, far = self._streams
        near.wait_stream(torch.cuda.current_stream(device))  # what the caller has queued on the pages comes first
        try:
            if paged.device == self.chunks.device:
                with torch.cuda.stream(near):
                    move([(slots, self.chunks.bytes_of(chunk)) for slots, chunk in jobs])
                return
            size = max(chunk.nbytes for _, chunk in jobs)
            with torch.cuda.stream(near):
                staging = [torch.empty(size, dtype=torch.uint8, device=paged.device) for _ in range(2)]
            far.wait_stream(near)
            used = [torch.cuda.Event() for _ in range(2)]  # of the last step with that buffer
            first, second = (near, far) if gathering else (far, near)
            for index, (slots, chunk) in enumerate(jobs):
                buffer, stored, ready = (
                    staging[index % 2][: chunk.nbytes],
                    self.chunks.bytes_of(chunk),
                    torch.cuda.Event(),
                )
                with torch.cuda.stream(first):
                    first.wait_event(used[index % 2])
                    move([(slots, buffer)]) if gathering else buffer.copy_(stored, non_blocking=True)
                    ready.record(first)
                with torch.cuda.stream(second):
                    second.wait_event(ready)
                    stored.copy_(buffer, non_blocking=True) if gathering else move([(slots, buffer)])
                    used[index % 2].record(second)
        finally:  # also on a fault: no chunk and no buffer is given up with a copy under way
            far.synchronize()
            near.synchronize()

    def _count(self, **amounts: int) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._counters[name] += amount

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the chunk store's figures."""
        with self._lock:
            counted = dict(self._counters)
        return self.chunks.stats() | counted

    def clear(self) -> None:
        """Forgets every chunk and every pin kept here; the remote keeps its own."""
        self.chunks.clear()

    def close(self, timeout_sec: float = 5.0) -> None:
        """Hands what is in the outbox to the remote, within the timeout, and gives up the memory. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._writer is not None:
            if time.monotonic() >= self._remote_down_until:
                self.flush(timeout_sec)
            self._writer.close()
        self.chunks.close()

    def __enter__(self) -> "LMCacheEngine":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _total(tokens: Tokens | None, offsets: Sequence[int] | None) -> int:
    return len(tokens) if tokens is not None else sum(offsets or ())


def _lengths(spans: Sequence[Span]) -> list[int]:
    return [end - start for start, end, _ in spans]


# ---------------------------------------------------------------------------------------------------------------------
# The demo


def main() -> None:
    """A toy model of 2 layers, 2 heads, head_dim 8; a paged cache of 64 blocks of 4 slots; chunks of 16 tokens."""
    num_layers, heads, head_dim, block_size, chunk = 2, 2, 8, 4, 16
    metadata = LMCacheMetadata("toy", 1, 1, 0, 0, torch.float32, (num_layers, 2, chunk, heads, head_dim))
    chunk_bytes = 2 * num_layers * chunk * heads * head_dim * 4
    config = LMCacheEngineConfig(chunk_size=chunk, max_local_cpu_size=8 * chunk_bytes / 2**30)
    pages = [torch.randn(2, 64, block_size, heads, head_dim) for _ in range(num_layers)]  # L of [2, B, N, H, D]
    slots = torch.randperm(64)[:, None] * block_size + torch.arange(block_size)  # [B, N], blocks in any order
    slots = slots.flatten()
    prompt = list(range(100, 180))  # 80 tokens, 5 chunks

    with LMCacheEngine(config, metadata) as engine:
        engine.register_kv_caches(pages, "2BNHD")
        print(f"room for 8 chunks of {chunk} tokens, {chunk_bytes} bytes each")
        print(f"store     {len(prompt)} tokens: {engine.store(prompt, slot_mapping=slots[:80])} newly stored")
        print(f"store     the same again: {engine.store(prompt, slot_mapping=slots[:80])} newly stored")
        print(f"lookup    the same prompt: {engine.lookup(prompt)} of 80 tokens hit")
        changed = prompt[:40] + [7] * 40
        print(f"lookup    40 tokens the same, then others: {engine.lookup(changed)} of 80 hit, 2 whole chunks")
        before = [layer.clone() for layer in pages]
        fresh = slots[160:240]  # other pages, as another request would get
        hit = engine.retrieve(prompt, slot_mapping=fresh)
        same = all(
            torch.equal(layer.flatten(1, 2)[:, fresh], old.flatten(1, 2)[:, slots[:80]])
            for layer, old in zip(pages, before, strict=True)
        )
        print(f"retrieve  into other pages: {int(hit.sum())} tokens copied back, equal to the stored: {same}")
        for first in (1000, 2000):
            engine.store(list(range(first, first + 48)), slot_mapping=slots[:48])
        print(f"evict     after two more prompts of 3 chunks, {engine.lookup(prompt)} of 80 tokens hit: its tail went")
        print(f"stats     {engine.stats()}")
        if not same or int(hit.sum()) != 80:
            sys.exit("the KV that came back is not the KV that was stored")


if __name__ == "__main__":
    main()
