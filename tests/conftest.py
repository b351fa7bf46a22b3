"""What all tests share: the profiles of the fuzz tests, an ipc folder of their own, and a check
that nothing leaks."""

import gc
import os
import signal
import stat
import threading
from collections import Counter
from pathlib import Path

import pytest
import zmq
from hypothesis import HealthCheck, settings
from toys import wait_for

from lookup import context_of

# `short` is what `make test` runs, `long` what `make fuzz` runs.
PROFILE = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
settings.register_profile("short", max_examples=100, derandomize=True, database=None, **PROFILE)
settings.register_profile("long", max_examples=2000, **PROFILE)
settings.load_profile("short")

OTHERS = ["leaks_ok", "interop", "demo"]  # tests with third-party code, which may leak


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "leaks_ok: may leave threads, file descriptors and socket files behind"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    context_of(os.getpid()).socket(
        zmq.PAIR
    ).close()  # the process keeps this one: its files are no leak


def _threads() -> set[threading.Thread]:
    return set(threading.enumerate())


def _files() -> Counter[str]:
    """Open file descriptors by what they are: the number of sockets, of pipes, of each file."""
    found: Counter[str] = Counter()
    for number in os.listdir("/proc/self/fd"):
        try:
            found[os.readlink(f"/proc/self/fd/{number}").split("[")[0]] += 1
        except FileNotFoundError:  # that of the listing itself
            continue
    return found


def _socket_files(folder: Path) -> set[str]:
    return {str(path) for path in folder.rglob("*") if stat.S_ISSOCK(path.lstat().st_mode)}


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest, tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """After every test: no thread, file descriptor or socket file more than before. Opt out with
    @mark.leaks_ok."""
    if any(request.node.get_closest_marker(name) for name in OTHERS):
        yield
        return
    threads, files = _threads(), _files()
    yield
    assert wait_for(lambda: _threads() <= threads, 5.0), f"threads left: {_threads() - threads}"
    if not wait_for(lambda: _files() <= files, 0.5):
        # An exception that was caught, or logged, holds the frames it came through, and files.
        caplog.get_records("call").clear()
        gc.collect()
        assert wait_for(lambda: _files() <= files, 2.0), f"files left open: {_files() - files}"
    assert not (left := _socket_files(tmp_path)), f"socket files left: {left}"


@pytest.fixture
def ipc_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for socket files, not made yet."""
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", str(tmp_path / "ipc"))
    return tmp_path / "ipc"
