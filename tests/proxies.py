"""A wire between a client and a server that a test can cut, or make slow."""

import contextlib
import socket
import threading
import time
from types import TracebackType

PIECE_BYTES = 16 << 10


class Proxy:
    """127.0.0.1:`proxy.port` leads to 127.0.0.1:`target`, at no more than bytes_per_sec for all
    connections together, each way."""

    def __init__(self, target: int, bytes_per_sec: float | None = None):
        self.target, self.pace = target, bytes_per_sec
        self.accepted = self.moved = 0  # connections; bytes, both ways
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._locks = threading.Lock(), threading.Lock()  # one a direction: they share its pace
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(0.02)
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, function, *arguments) -> None:
        thread = threading.Thread(target=function, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            with contextlib.suppress(OSError):
                near = self._listener.accept()[0]
                near.settimeout(None)
                far = socket.create_connection(("127.0.0.1", self.target), 5.0)
                far.settimeout(None)
                if self.pace is not None:  # little of it on its way
                    for sock in (near, far):
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, PIECE_BYTES)
                        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, PIECE_BYTES)
                self._pairs.append((near, far))
                self.accepted += 1
                self._start(self._pump, near, far, self._locks[0])
                self._start(self._pump, far, near, self._locks[1])

    def _pump(self, source: socket.socket, target: socket.socket, lock) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(PIECE_BYTES):
                if self.pace is not None:
                    with lock:
                        time.sleep(len(data) / self.pace)
                self.moved += len(data)
                target.sendall(data)
        for sock in (source, target):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Ends every connection, as a wire that is pulled."""
        for sock in (sock for pair in self._pairs for sock in pair):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> "Proxy":
        return self

    def __exit__(
        self, kind: type | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed = True
        self.cut()
        for thread in self._threads:
            thread.join(5)
        self._listener.close()
        for sock in (sock for pair in self._pairs for sock in pair):
            sock.close()
