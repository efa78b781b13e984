"""Limits of the service: slow clients, many clients, long answers, keys, a changed file, and its end."""

import asyncio
import contextlib
import json
import resource
import select
import shutil
import signal
import socket
import threading
import time

import pytest

from dpcert.runs.open import open_run
from dpcert.serve import server
from dpcert.serve.guard import ApiKey
from dpcert.serve.settings import Asked, Limits
from tests.serve.client import SHA256, STORED, Served, call, raw, require_right, status_of
from tests.serve.hostile import request

KEY = "correct-horse-battery-staple"


@contextlib.contextmanager
def in_a_thread(*, n=10_000, key=None, run=STORED, **limits):
    """The same server with other limits, in a thread of this process: cheaper to start. Yields its port."""
    ready = threading.Event()
    with server.bound("127.0.0.1", 0) as listener:
        built = server.prepared(
            open_run(run),
            sigma=None,
            n0=100,
            asked=Asked(n, 0.001),
            limits=Limits(**limits),
            key=None if key is None else ApiKey(key),
            gallery=False,
            ready=lambda workers: ready.set(),
        )
        port = listener.getsockname()[1]
        thread = threading.Thread(target=built.run, args=([listener],))
        thread.start()
        try:
            assert ready.wait(60)
            yield port
        finally:
            built.should_exit = True
            thread.join(60)
            assert not thread.is_alive()


def closes(connection: socket.socket, seconds: float = 60) -> bool:
    """Whether the service closes the connection, whatever it sends before."""
    connection.settimeout(seconds)
    with contextlib.suppress(ConnectionError):
        while connection.recv(65536):
            pass
    return True


def test_slow_clients_are_cut_and_others_are_served_meanwhile(body):
    head = request("POST", "/predict?n=10", b"", "application/json", f"Content-Length: {len(body)}")
    starts = [b"", b"GET /hea", head[:-2], head + body[:50].encode(), b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /he"]
    starts.append(request("POST", "/predict", b"fffffff\r\nx", "application/json", "Transfer-Encoding: chunked"))
    with in_a_thread(reading_seconds=1.0) as port, contextlib.ExitStack() as stack:
        slow = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in starts]
        for connection, start in zip(slow, starts, strict=True):
            connection.sendall(start)
        assert call(port, "POST", "/predict?n=10", body).status == 200
        assert all(closes(connection) for connection in slow)
        late = raw(port, head, body[:50].encode())
        assert status_of(late) == 408 and b'"error"' in late
        assert call(port, "GET", "/health").status == 200


def test_a_client_that_does_not_read_is_cut(body):
    """Its answers fill the buffers of both sides, and the service does not wait for it for ever."""
    with in_a_thread(n=100_000, reading_seconds=0.5, seconds=1.0) as port:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        with connection:
            connection.connect(("127.0.0.1", port))
            one = request("GET", "/openapi.json", b"", None, "Connection: keep-alive")
            connection.settimeout(0.5)
            with contextlib.suppress(TimeoutError, ConnectionError):
                for _ in range(2000):
                    connection.sendall(one)
            end = time.monotonic() + 60
            while _is_open(connection):
                assert time.monotonic() < end
                time.sleep(0.05)
        assert call(port, "GET", "/health").status == 200


def _is_open(connection: socket.socket) -> bool:
    try:
        connection.sendall(b"\r\n")
    except TimeoutError:
        return True
    except ConnectionError:
        return False
    return True


def test_an_answer_that_takes_too_long_is_ended(body):
    with in_a_thread(n=10**7, seconds=0.2) as port:
        answer = call(port, "POST", "/predict", body)
        assert answer.status == 504 and "time limit" in answer.json["error"]
        lines = [json.loads(line) for line in call(port, "POST", "/votes", body).body.splitlines()]
        assert set(lines[-1]) == {"error"} and all(set(line) == {"votes", "cast"} for line in lines[:-1])
        require_right(call(port, "POST", "/predict?n=100", body).json, n=100)


def test_a_full_queue_refuses_and_short_requests_pass_long_ones(body):
    """One long request and a short one share a worker; two long ones fill the queue, until their clients leave."""
    sent = request("POST", "/votes", body.encode(), "application/json", "Connection: keep-alive")
    with in_a_thread(n=10**8, queue=2, seconds=600.0) as port, socket.create_connection(("127.0.0.1", port)) as first:
        first.sendall(sent)
        assert b'"cast"' in first.recv(65536) + first.recv(65536)  # it has begun, and would take an hour
        require_right(call(port, "POST", "/predict?n=100", body).json, n=100)
        with socket.create_connection(("127.0.0.1", port)) as second:
            second.sendall(sent)
            assert second.recv(65536)
            full = call(port, "POST", "/predict?n=100", body)
            assert full.status == 503 and full.headers["retry-after"] == "1" and "too many" in full.json["error"]
            assert call(port, "GET", "/health").status == 200
        first.close()
        end = time.monotonic() + 60
        while call(port, "POST", "/predict?n=100", body).status == 503:  # the votes of clients that have gone are not cast
            assert time.monotonic() < end
            time.sleep(0.01)


def test_a_thousand_parallel_clients_get_an_answer_or_503(service, body):
    """All at once: never another status, never a closed connection, and the service stays healthy."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 4096 <= hard or hard == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (4096, hard))
    sent = request("POST", "/predict?n=1", body.encode())

    async def client() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        writer.write(sent)
        answer = await reader.read(-1)
        writer.close()
        return answer

    async def everyone() -> list[bytes]:
        return await asyncio.gather(*(client() for _ in range(1000)))

    before = service.resident_mb()
    answers = asyncio.run(asyncio.wait_for(everyone(), 200))
    statuses = [status_of(answer) for answer in answers]
    assert set(statuses) <= {200, 503} and statuses.count(200) >= 64
    for answer in answers:
        found = json.loads(answer.partition(b"\r\n\r\n")[2])
        require_right(found, n=1) if status_of(answer) == 200 else require_error(found)
    service.wait_until_idle()
    assert service.resident_mb() - before < 150 and service.call("GET", "/health").status == 200


def require_error(content: dict) -> None:
    assert set(content) == {"error"}


def test_bodies_in_memory_are_bounded():
    """Uploads that stop before their last byte are kept in memory, 64 of the largest at a time; the others get 503."""
    head = request("POST", "/predict?n=10", b"", "image/png", f"Content-Length: {1 << 20}")
    with in_a_thread(reading_seconds=100.0) as port, contextlib.ExitStack() as stack:
        uploads = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(70)]
        for upload in uploads:
            upload.sendall(head + bytes((1 << 20) - 1))
        end, refused = time.monotonic() + 60, set()
        while len(refused) < 6:
            assert time.monotonic() < end
            refused |= set(select.select(uploads, [], [], 1.0)[0])
        assert {status_of(upload.recv(65536)) for upload in refused} == {503}
        assert call(port, "GET", "/health").status == 200


def test_the_key_is_asked_for_everywhere_but_the_page_and_health(body):
    with in_a_thread(key=KEY) as port:
        for method, path in (
            ("POST", "/predict?n=10"),
            ("POST", "/votes"),
            ("GET", "/model"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/x"),
        ):
            for given in (
                None,
                "",
                "Bearer",
                "Bearer ",
                f"Bearer {KEY}x",
                f"Bearer {KEY[:-1]}",
                f"Basic {KEY}",
                KEY,
                "Bearer \xff",
            ):
                headers = {} if given is None else {"Authorization": given}
                answer = call(port, method, path, body if method == "POST" else None, **headers)
                assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer", (path, given)
        assert call(port, "GET", "/health").status == 200 and call(port, "GET", "/page/x").status == 404
        require_right(call(port, "POST", "/predict?n=10", body, Authorization=f"Bearer {KEY}").json, n=10)
        assert call(port, "GET", "/model", Authorization=f"bearer {KEY}").status == 200


def test_the_service_answers_with_the_model_that_it_loaded(own_run, body):
    """Whatever happens to the file: replaced by another model, overwritten in place, removed."""
    model, other = own_run / "model.safetensors", STORED.parent / "mnist-dpsgd" / "model.safetensors"
    with in_a_thread(run=own_run) as port:

        def state() -> str:
            health = call(port, "GET", "/health").json
            assert health["model_sha256"] == SHA256
            answer = call(port, "POST", "/predict?n=200", body).json
            require_right(answer, n=200)
            assert answer["class"] == 7
            return health["model_file"]

        assert state() == "same"
        shutil.copy(other, own_run / "next")
        (own_run / "next").replace(model)
        assert state() == "changed"
        model.write_bytes((STORED / "model.safetensors").read_bytes())
        assert state() == "same"
        model.unlink()
        assert state() == "missing"
        model.symlink_to(STORED / "model.safetensors")
        assert state() == "changed"


def test_the_digest_is_of_the_bytes_that_were_loaded(own_run, monkeypatch):
    """Another process replaces the file right after it was read; before, the digest was of a second reading."""
    from dpcert.runs import open as opening

    model, read = own_run / "model.safetensors", opening.read_file

    def read_and_replace(path):
        data = read(path)
        if path == model:
            shutil.copy(STORED.parent / "mnist-dpsgd" / "model.safetensors", own_run / "next")
            (own_run / "next").replace(model)
        return data

    monkeypatch.setattr(opening, "read_file", read_and_replace)
    run = open_run(own_run)
    assert run.model_sha256 == SHA256
    with pytest.raises(ValueError, match="changed while it was opened"):
        server.prepared(
            run,
            sigma=None,
            n0=100,
            asked=Asked(100, 0.001),
            limits=Limits(),
            key=None,
            gallery=False,
            ready=lambda workers: None,
        )


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_it_finishes_what_it_has_begun_and_exits_with_130(number, body):
    with Served("--no-gallery", "--n", "30000") as service:
        with socket.create_connection(("127.0.0.1", service.port)) as connection:
            connection.sendall(request("POST", "/votes", body.encode()))
            received = connection.recv(65536)
            while b'"cast"' not in received:
                received += connection.recv(65536)
            service.process.send_signal(number)
            while part := connection.recv(65536):
                received += part
        last = received.replace(b"\r\n", b"\n").splitlines()
        require_right(json.loads(next(line for line in reversed(last) if line.startswith(b'{"class"'))), n=30_000)
        assert service.stop() == 130
        assert "Traceback" not in service.log() and "resume with" in service.log().splitlines()[-1]
        with pytest.raises(ConnectionError):
            call(service.port, "GET", "/health")


def test_a_request_that_outlasts_the_grace_is_told_so(body):
    """The service ends although an answer would take an hour, and says so to its client."""
    answers = []
    with in_a_thread(n=10**8, seconds=3600.0, grace_seconds=1.0) as port:
        waiting = threading.Thread(target=lambda: answers.append(call(port, "POST", "/predict", body)))
        waiting.start()
        end = time.monotonic() + 60
        while b"dpcert_requests_in_progress 1" not in call(port, "GET", "/metrics").body:
            assert time.monotonic() < end
    waiting.join(60)
    assert answers[0].status == 503 and answers[0].headers["retry-after"] and "stops" in answers[0].json["error"]
