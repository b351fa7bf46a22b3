"""offload_server.py - "store these slots of your pages": a scheduler asks the worker that has them.

It follows LMCache 0.3.14 (v1/offload_server/zmq_server.py); either end can be LMCache's.

    $ python offload_server.py      # a worker with a toy paged cache, and a client

    ZMQOffloadClient  --REQ, ipc://...port+rank-->  ROUTER  ZMQOffloadServer -> engine.store

Two messages, both msgpack maps: OffloadMsg asks, OffloadRetMsg answers. The socket file, the thread
and the wire are lookup.py's IpcServer and IpcClient.

Not here: who decides what to offload, and when the pages may be used again (not before the reply or
the timeout: what its client has given up is not stored later).
"""

import contextlib
import os
import tempfile
import time

import msgspec

from lookup import HASHES, LENGTHS, IpcClient, IpcServer, rpc_path, to_msgpack


class OffloadMsg(msgspec.Struct, omit_defaults=True):
    """The request (LMCache offload_server/message.py, whose fields are the first three)."""

    hashes: HASHES  # one a chunk
    slot_mapping: list[int]  # one a token
    offsets: LENGTHS  # tokens in each chunk
    deadline: float | None = None  # sec, CLOCK_MONOTONIC of this host: then the client has given up


class OffloadRetMsg(msgspec.Struct):
    """The reply."""

    success: bool


def offload_path(engine_id, tp_rank):
    """The socket file of a rank's offload server. Its port: LMCACHE_OFFLOAD_RPC_PORT of the
    environment, else 100."""
    text = os.environ.get("LMCACHE_OFFLOAD_RPC_PORT", "100")
    try:
        return rpc_path(engine_id or "default", "offload", int(text), tp_rank)
    except ValueError as error:
        raise ValueError(f"LMCACHE_OFFLOAD_RPC_PORT {text!r} must be an int") from error


class ZMQOffloadServer(IpcServer):
    """Stores what it is asked to, in a thread of its own; a bad request is answered False."""

    refusal = to_msgpack(OffloadRetMsg(False))

    def __init__(self, lmcache_engine, tp_rank):
        self.engine = lmcache_engine
        path = offload_path(lmcache_engine.metadata.engine_id, tp_rank)
        super().__init__(path, "offload-server")

    def answer(self, frames) -> bytes:
        (frame,) = frames
        message = msgspec.msgpack.decode(frame, type=OffloadMsg)
        return to_msgpack(OffloadRetMsg(self.offload(**msgspec.structs.asdict(message))))

    def offload(self, hashes, slot_mapping, offsets, deadline=None) -> bool:
        """Stores chunks out of the paged cache: all of them, those already there included, or none
        and False.

        hashes: one a chunk; offsets: the tokens in each; slot_mapping: one slot a token,
        sum(offsets) of them; deadline: of time.monotonic(), after which nothing is stored.
        """
        try:
            self.engine.store(
                hashes=hashes, slot_mapping=slot_mapping, offsets=offsets, deadline=deadline
            )
        except Exception as error:
            self._log(type(error).__name__, "offload refused: %r", error)
            return False
        return True


class ZMQOffloadClient(IpcClient):
    """Asks a rank's offload server. timeout_ms is for one request."""

    def __init__(self, engine_id, tp_rank, timeout_ms=10_000):
        super().__init__([offload_path(engine_id, tp_rank)], timeout_ms)

    def offload(self, hashes, slot_mapping, offsets) -> bool:
        """True when all of it is stored; False, and a warning, where the server refuses or gives no
        answer in time, and then nothing of it will be."""
        deadline = time.monotonic() + self.timeout_ms / 1000
        try:
            message = OffloadMsg([*hashes], [*slot_mapping], [*offsets], deadline)
            request = to_msgpack(message)
        except (TypeError, OverflowError) as error:
            raise ValueError(f"hashes, slots, offsets must be ints of 64 bits: {error}") from error
        try:
            (reply,) = self.ask([request], deadline)
            success = msgspec.msgpack.decode(reply, type=OffloadRetMsg).success
        except (OSError, msgspec.MsgspecError) as error:
            self._log("failed", "offload failed: %s", error)
            return False
        if not success:
            self._log(
                "refused", "offload of %d chunks refused; its server's log says why", len(hashes)
            )
        return success


def main():
    """A client offloads 4 chunks, the same again, and a slot that is not there."""
    from engine import toy_engine  # the demo's alone

    with contextlib.ExitStack() as stack:
        os.environ["VLLM_RPC_BASE_PATH"] = stack.enter_context(tempfile.TemporaryDirectory())
        engine = stack.enter_context(toy_engine()[0])
        server = stack.enter_context(ZMQOffloadServer(engine, 0))
        print(f"worker: 4,096 slots of KV, listens on {server.path}")
        hashes = [name for _, _, name in engine.token_database.process_tokens(range(1024))]
        client = stack.enter_context(ZMQOffloadClient("demo", 0))
        for last in (1023, 1023, 4096):  # stored, there already, and what is not in the pages
            stored = client.offload(hashes, [*range(1023), last], [256] * 4)
            print(f"client: 4 chunks out of slots 0..1022 and {last}: {stored}")
        print(f"worker: holds {engine.stats()['chunks']} chunks")


if __name__ == "__main__":
    main()
