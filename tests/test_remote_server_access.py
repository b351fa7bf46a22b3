"""Who gets in, and what an operator sees: mutual TLS, the warning, --stats, exit statuses, bad
arguments."""

import contextlib
import logging
import mmap
import os
import re
import socket
import ssl
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from proxies import Proxy
from toys import (
    ServerProcess,
    client_of,
    connected,
    read,
    request,
    running_server,
    silent_server,
    wait_for,
)

import remote_server
from remote_server import ClientCommand, RemoteClient, tls_context

MIB = 1 << 20
KEY = "m@1@0@abc@half"

# -- certificates


@pytest.fixture(scope="session")
def pem(tmp_path_factory):
    """Made by the openssl command: a CA, a server and a client that it signed; another CA and a
    stranger."""
    folder, new = (
        tmp_path_factory.mktemp("pem"),
        "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes",
    )

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    def sign(name, ca):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,IP:::1")
        openssl(*f"req {new} -subj /CN={name} -keyout {name}.key -out x".split())
        request = "x509 -req -in x -days 2 -extfile names"
        openssl(*f"{request} -CA {ca}.pem -CAkey {ca}.key -out {name}.pem".split())

    for ca in ("ca", "other"):
        openssl(*f"req -x509 {new} -subj /CN={ca} -days 2 -keyout {ca}.key -out {ca}.pem".split())
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        sign(name, ca)
    return folder


def context(pem, name, ca="ca", server_side=False):
    return tls_context(
        str(pem / f"{name}.pem"), str(pem / f"{name}.key"), str(pem / f"{ca}.pem"), server_side
    )


def tls_client(server, tls, host="127.0.0.1", **more):
    return RemoteClient(f"lms://{host}:{server.port}", tls=tls, **more)


@pytest.fixture
def server(pem):
    with running_server(
        tls=context(pem, "server", server_side=True), max_bytes=16 * MIB, stall_timeout_sec=1.0
    ) as made:
        yield made


@pytest.fixture
def client(server, pem):
    with tls_client(server, context(pem, "client"), timeout_sec=2) as made:
        yield made


# -- TLS


@pytest.mark.parametrize("size", [0, 1, 16384, 8 * MIB])
def test_the_right_client(client, size):
    data = os.urandom(size)
    client.put(KEY, data)
    assert client.get(KEY)[1] == data and client.get("none") is None
    assert (
        client.exists_many([KEY, "none"]) == [True, False]
        and client.list_keys() == [KEY]
        and client.health()
    )


def test_many_threads_and_clients(server, pem):
    def work(number):
        with tls_client(server, context(pem, "client"), timeout_sec=2) as client:
            for round_ in range(10):
                client.put(f"{number}", bytes([number, round_]) * 50_000)
                assert client.get(f"{number}")[1] == bytes([number, round_]) * 50_000

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))


@pytest.mark.parametrize("who", ["nobody", "a stranger", "plain", "HTTP"])
def test_who_does_not_get_in(server, client, pem, who, caplog):
    """A missing certificate, one of another CA, no TLS at all: refused, with a log line; others are
    served."""
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    bare.load_verify_locations(pem / "ca.pem")
    if who == "plain":
        wrong = client_of(server, timeout_sec=2.0)
    elif who == "HTTP":
        with connected(server.port) as sock:
            sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert read(sock, 1) == b""
        wrong = None
    else:
        wrong = tls_client(
            server, bare if who == "nobody" else context(pem, "stranger"), timeout_sec=2.0
        )
    if wrong is not None:
        with wrong:
            for act in (lambda: wrong.get(KEY), wrong.flush, lambda: wrong.exists(KEY)):
                with pytest.raises(OSError):
                    act()
            with contextlib.suppress(
                OSError
            ):  # there is no reply to a put, so that it may not be told
                wrong.put(KEY, b"evil")
            assert not wrong.health()
    assert wait_for(lambda: "dropped" in caplog.text or "left" in caplog.text)
    assert client.list_keys() == [] and "Traceback" not in caplog.text


@pytest.mark.parametrize("fault", ["another CA", "another name"])
def test_a_client_does_not_talk_to_a_server_that_it_cannot_verify(server, pem, fault):
    tls = context(pem, "client", ca="other" if fault == "another CA" else "ca")
    with tls_client(server, tls, "localhost" if fault == "another name" else "127.0.0.1") as client:
        with pytest.raises(ConnectionError, match="certificate verify failed"):
            client.put(KEY, b"secret")
    assert server.stats()["chunks"] == 0


def test_a_tls_client_of_a_plain_server(pem):
    with (
        running_server(stall_timeout_sec=0.3) as server,
        tls_client(server, context(pem, "client"), timeout_sec=2) as client,
    ):
        began = time.monotonic()
        with pytest.raises(OSError):
            client.get(KEY)
        assert time.monotonic() - began < 3.0


def test_slow_handshakes_stall_nobody_and_are_dropped(server, client):
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connected(server.port)) for _ in range(20)]
        for sock in slow[::2]:
            sock.sendall(b"\x16\x03\x01")  # the beginning of a ClientHello
        began = time.monotonic()
        client.put(KEY, b"x")
        assert client.get(KEY)[1] == b"x"
        assert time.monotonic() - began < server.stall_timeout_sec
        assert all(read(sock, 1) == b"" for sock in slow)


def test_idle_between_requests_is_fine(server, client):
    client.put(KEY, b"x")
    client.flush()
    time.sleep(3 * server.stall_timeout_sec)  # not readiness: this is what is tested
    assert client.get(KEY)[1] == b"x" and server.stats()["clients"] == 1


def test_a_connection_that_the_server_closed_is_made_again(server, pem):
    """A put into a dead connection would be lost without a word: it is noticed before."""
    with Proxy(server.port) as wire:
        url = f"lms://127.0.0.1:{wire.port}"
        with RemoteClient(url, tls=context(pem, "client"), timeout_sec=2) as client:
            client.put(KEY, b"x")
            client.flush()
            wire.cut()
            assert wait_for(lambda: not server.stats()["clients"])
            client.put(KEY, b"y")
            client.flush()
            assert client.get(KEY)[1] == b"y"


def test_a_broken_stream_is_a_broken_connection(client):
    """SSLError is no ConnectionError to Python, but to us: the request is sent again."""
    client.put(KEY, b"x")
    faults = [ssl.SSLEOFError(8, "EOF occurred in violation of protocol")]
    filled = []

    def fill(_index, meta, receive):
        if faults:
            raise faults.pop()
        filled.append(receive(memoryview(bytearray(meta.length))))

    client.get_many([KEY], fill)
    assert len(filled) == 1 and not faults


def test_in_place_and_a_whole_prefix_over_tls(pem, tmp_path):
    """The questions come encrypted, the bytes by the memory that both have."""
    tls = context(pem, "server", server_side=True)
    with running_server(tls=tls, folder=tmp_path / "store") as server:
        with tls_client(server, context(pem, "client")) as client:
            client.put("a", b"a" * 1000)
            client.put("b", b"b" * 1000)
            assert client.leading(["a", "b", "c"]) == 2
            held = client.hold_many(["b", "c", "a"])
            assert [found and bytes(found[1].tolist()[:1]) for found in held] == [b"b", None, b"a"]
            client.let_go()
            assert server.stats()["in_use"] == 0


@pytest.mark.parametrize("sent", [0, 500])
def test_stalled_in_the_middle_of_a_put(server, pem, sent):
    with socket.create_connection(("127.0.0.1", server.port)) as plain:
        with context(pem, "client").wrap_socket(plain, server_hostname="127.0.0.1") as sock:
            sock.settimeout(5.0)
            sock.sendall(request(ClientCommand.PUT, KEY, 1000) + bytes(sent))
            assert sock.recv(1) == b""
            stats = {"clients": 0, "bytes_used": 0, "in_use": 0}
            assert wait_for(lambda: server.stats() | stats == server.stats())


def test_closing_a_client_in_the_middle_of_a_get_hands_over_no_cipher_text(client):
    """SSLSocket.shutdown would make its reader go on as if it were a plain socket."""
    client.put(KEY, bytes(8 * MIB))
    client.flush()  # the other thread has a connection of its own
    entered, closed = threading.Event(), threading.Event()
    data = bytearray(8 * MIB)

    def fill(_index, meta, receive):
        receive(memoryview(data)[:1000])
        entered.set()
        closed.wait(5)
        for start in range(1000, 8 * MIB, 1000):
            receive(memoryview(data)[start : start + 1000])

    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(client.get_many, [KEY], fill)
        assert entered.wait(5)
        threading.Timer(0.1, closed.set).start()
        client.close()
        with pytest.raises(OSError):
            call.result(5)
    assert data == bytes(8 * MIB)


def test_closing_a_server_under_load(server, pem):
    began = threading.Barrier(4)

    def work(number):
        with (
            tls_client(server, context(pem, "client"), retries=0) as client,
            contextlib.suppress(OSError),
        ):
            client.flush()
            began.wait(10)
            while True:
                client.put(f"{number}", bytes([number]) * 300_000)
                found = client.get(f"{number}")
                assert found is None or found[1] == bytes([number]) * 300_000

    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(work, number) for number in range(3)]
        began.wait(10)
        closing = time.monotonic()
        server.close()
        assert time.monotonic() - closing < 2.0
        for future in futures:
            future.result(10)


@pytest.mark.parametrize("missing", ["cert", "key", "ca"])
def test_files_that_cannot_be_used(pem, missing):
    files = {
        "cert": str(pem / "server.pem"),
        "key": str(pem / "server.key"),
        "ca": str(pem / "ca.pem"),
    }
    for wrong in (str(pem / "none"), str(pem / "names")):
        with pytest.raises(ValueError, match="TLS files"):
            tls_context(**files | {missing: wrong}, server_side=True)


def test_lms_needs_a_context_and_lm_takes_none(pem):
    for url, tls in (("lms://h:1", None), ("lm://h:1", context(pem, "client"))):
        with pytest.raises(ValueError, match="tls context"):
            RemoteClient(url, tls=tls)


# -- the script


def tls_arguments(pem, name):
    return [
        "--tls-cert",
        str(pem / f"{name}.pem"),
        "--tls-key",
        str(pem / f"{name}.key"),
        "--tls-ca",
        str(pem / "ca.pem"),
    ]


FIGURES = [
    "chunks",
    "bytes_used",
    "max_bytes",
    "hits",
    "misses",
    "evictions",
    "rejected",
    "clients",
]


def test_stats_of_a_server_that_is_well(capsys):
    """What an operator sees: each figure on a line of its own, and exit status 0."""
    with running_server() as server, client_of(server) as client:
        client.put(KEY, bytes(1000))
        client.get(KEY)
        client.get("none")
        assert remote_server.main(["--stats", "127.0.0.1", str(server.port)]) == 0
    figures = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert {name: int(figures[name]) for name in FIGURES} == dict(
        chunks=1,
        bytes_used=1024,
        max_bytes=4 * MIB,
        hits=1,
        misses=1,
        evictions=0,
        rejected=0,
        clients=2,
    )


def test_stats_for_prometheus(capsys):
    """A line `lmcache_NAME VALUE` for each figure."""
    with running_server() as server, client_of(server) as client:
        client.put(KEY, bytes(1000))
        client.flush()
        assert remote_server.main(["--stats", "--prometheus", "127.0.0.1", f"{server.port}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(re.fullmatch(r"lmcache_[a-z_]+ \d+", line) for line in lines)
    figures = dict(line.split() for line in lines)
    assert figures["lmcache_chunks"] == "1" and figures["lmcache_bytes_used"] == "1024"
    assert {f"lmcache_{name}" for name in [*FIGURES, "in_use"]} <= {*figures}


def test_clear_and_delete_by_command(capsys):
    """LM#1660, LM#1692. Exit status 1 where there is nothing to delete."""
    with running_server() as server, client_of(server) as client:
        for key in "abc":
            client.put(key, b"x")
        client.flush()
        where = ["127.0.0.1", f"{server.port}"]
        assert remote_server.main([*where, "--delete", "b"]) == 0
        assert client.list_keys() == ["a", "c"]
        assert remote_server.main([*where, "--delete", "b"]) == 1
        assert remote_server.main([*where, "--clear"]) == 0
        assert client.list_keys() == []
    assert remote_server.main([*where, "--clear"]) == 1
    assert "127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["lru", "slru"])
def test_eviction_by_command(policy):
    with ServerProcess("--eviction", policy) as server:
        with RemoteClient(f"lm://127.0.0.1:{server.port}") as client:
            client.put(KEY, b"x")
            assert client.get(KEY)[1] == b"x"
        assert server.stop() == 0


# -- memory


def test_a_fresh_server_takes_memory_as_it_is_needed():
    """The default budget of 5 GiB, in a container of 1 GiB, idle: well below it."""
    with ServerProcess("--max-gib", "5") as server:
        assert "budget 5 GiB" in server.log and "device cpu" in server.log
        process, before = psutil.Process(server.process.pid), -1
        while (now := process.memory_info().rss) != before:  # until it has warmed what it wants
            before = now
            time.sleep(0.5)
        assert now < 800 << 20, f"{now >> 20} MiB"
        assert server.stop() == 0


LIMIT = "the budget is above "


@pytest.mark.parametrize("limit, warned", [((1 << 20) - 1, 1), (1 << 20, 0), (1 << 40, 0)])
def test_the_warning_of_a_budget_above_the_memory(limit, warned, caplog, monkeypatch):
    """One line, at the start; it serves nevertheless."""
    assert run_main(monkeypatch, caplog, "127.0.0.1", "0", "--max-gib", str(1 / 1024),
                    limit=limit) == 0  # fmt: skip
    assert sum(LIMIT in record.message for record in caplog.records) == warned


def test_the_memory_limit_is_the_machines_or_the_cgroups():
    assert 64 << 20 <= remote_server.memory_limit() <= psutil.virtual_memory().total


@pytest.mark.parametrize("gib, text", [("0.001", "0.001"), ("0.0625", "0.0625")])
def test_the_budget_is_said_in_gib(gib, text, caplog, monkeypatch):
    assert run_main(monkeypatch, caplog, "127.0.0.1", "0", "--max-gib", gib) == 0
    assert f", device cpu, budget {text} GiB" in caplog.text


def run_main(monkeypatch, caplog, *arguments, limit=1 << 40):
    """main() with a server that ends at once."""
    monkeypatch.setattr(remote_server.LMCacheServer, "run", lambda self: None)
    monkeypatch.setattr(remote_server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    monkeypatch.setattr(remote_server, "memory_limit", lambda: limit)
    caplog.set_level(logging.INFO)
    return remote_server.main(arguments)


def test_stats_through_tls(server, pem, capsys):
    arguments = ["--stats", "127.0.0.1", str(server.port)]
    assert remote_server.main([*arguments, *tls_arguments(pem, "client")]) == 0
    assert "max_bytes" in capsys.readouterr().out
    assert remote_server.main([*arguments, *tls_arguments(pem, "stranger")]) == 1
    assert remote_server.main(arguments) == 1


def test_stats_where_nothing_or_nothing_of_ours_listens(capsys):
    """Exit status 1 within the timeout, and the reason: a health check."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    assert remote_server.main(["--stats", "127.0.0.1", port]) == 1
    assert f"lm://127.0.0.1:{port}: " in capsys.readouterr().err
    with silent_server() as port:
        began = time.monotonic()
        assert remote_server.main(["--stats", "127.0.0.1", str(port)]) == 1
        assert time.monotonic() - began < 4.0
    with silent_server(bytes(36)) as port:
        assert remote_server.main(["--stats", "127.0.0.1", str(port)]) == 1


BAD = [
    ["127.0.0.1"], ["127.0.0.1", "x"], ["127.0.0.1", "0", "tpu"], ["127.0.0.1", "0", "cuda:77"],
    ["127.0.0.1", "70000"], ["127.0.0.1", "0", "--max-gib", "0"],
    ["127.0.0.1", "0", "--max-gib", "nan"], ["127.0.0.1", "0", "--max-gib", "-1"],
    ["127.0.0.1", "0", "--max-clients", "0"], ["127.0.0.1", "0", "--stall-sec", "0"],
    ["127.0.0.1", "0", "--stall-sec", "nan"], ["1.2.3.4", "0"], ["no.host.invalid", "0"],
    ["127.0.0.1", "0", "--tls-cert", "x"],
    ["127.0.0.1", "0", "--tls-cert", "x", "--tls-key", "y", "--tls-ca", "z"],
    ["127.0.0.1", "0", "--max-gib", "1000000"],
]  # fmt: skip


@pytest.mark.parametrize("arguments", BAD, ids=" ".join)
def test_arguments_that_cannot_be(arguments, capsys):
    """Exit status 2, and one line that says which; no traceback."""
    with pytest.raises(SystemExit) as exit_:
        remote_server.main(arguments)
    assert exit_.value.code == 2 and "error: " in capsys.readouterr().err.splitlines()[-1]


def test_no_memory_for_the_store(monkeypatch, capsys):
    def fail(*_, **__):
        raise OSError("out of memory")

    monkeypatch.setattr(mmap, "mmap", fail)
    with pytest.raises(SystemExit) as exit_:
        remote_server.main(["127.0.0.1", "0"])
    assert exit_.value.code == 2 and "out of memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "host, tls, warned",
    [
        ("0.0.0.0", False, 1),
        ("::", False, 1),
        ("127.0.0.1", False, 0),
        ("::1", False, 0),
        ("0.0.0.0", True, 0),
    ],
)
def test_the_warning_on_an_address_that_others_reach(host, tls, warned, pem, caplog, monkeypatch):
    """Once, in plain words, where there is no TLS."""
    monkeypatch.setattr(remote_server.LMCacheServer, "run", lambda self: None)
    monkeypatch.setattr(remote_server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **_: None)
    caplog.set_level(logging.INFO)
    assert (
        remote_server.main(
            [host, "0", "--max-gib", "0.001", *(tls_arguments(pem, "server") if tls else [])]
        )
        == 0
    )
    assert (
        sum(
            "anyone who reaches this port can read and write the cache" in r.message
            for r in caplog.records
        )
        == warned
    )
    where = f"[{host}]" if ":" in host else host
    assert f"listening on {'lms' if tls else 'lm'}://{where}:" in caplog.text
