"""Downloads against a real server on loopback that cuts, forgets, lies and refuses."""

import hashlib
import http.server
import importlib
import os
import threading
import time

import httpx
import pytest
import stamina
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from forge_build.fetch.client import new_client
from forge_build.fetch.download import Download, download
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store

# `forge_build.fetch.download` is the function by attribute, the module by name.
module = importlib.import_module("forge_build.fetch.download")
DATA = os.urandom(300_000)


class Step:
    """Records what a step would show."""

    def __init__(self):
        self.seen = []

    def progress(self, done, total, *, unit="", note=""):
        self.seen.append((done, total, note))


@pytest.fixture(autouse=True, scope="module")
def quick():
    proxies = {name: os.environ.pop(name) for name in list(os.environ) if name.upper().endswith("_PROXY")}
    # no waits between attempts
    stamina.set_testing(True, attempts=5, cap=True)
    yield
    stamina.set_testing(False)
    os.environ.update(proxies)


@pytest.fixture(scope="module")
def running():
    with HTTPServer(host="127.0.0.1", threaded=True) as made:
        yield made


@pytest.fixture
def server(running):
    running.clear()
    return running


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    return Store.open()


@pytest.fixture(scope="module")
def client():
    with new_client() as made:
        yield made


def sha(data):
    return hashlib.sha256(data).hexdigest()


def whole(data, asked=None):
    """A server as it should be."""

    def answer(request: Request) -> Response:
        if asked is not None:
            asked.append(request.headers.get("Range"))
        response = Response(data)
        response.make_conditional(request, accept_ranges=True, complete_length=len(data))
        return response

    return answer


def cut(data, piece, asked):
    """A server that ends every answer early."""

    def answer(request: Request) -> Response:
        asked.append(request.headers.get("Range"))
        start = int(request.range.ranges[0][0]) if request.range else 0
        rest = data[start:]
        headers = {"Content-Length": str(len(rest))}
        if request.range:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        return Response(iter([rest[:piece]]), status=206 if request.range else 200, headers=headers)

    return answer


def wanted(server, data=DATA, name="a.whl"):
    return Download(name, server.url_for(f"/{name}"), sha(data), len(data))


def bring(server, store, client, handler, data=DATA):
    server.expect_request("/a.whl").respond_with_handler(handler)
    step = Step()
    download([wanted(server, data)], store, client, step)
    assert store.get(sha(data)).read_bytes() == data
    assert not list((store.root / "partial").iterdir())
    return step


def partial(store, data=DATA):
    return store.root / "partial" / sha(data)


def test_many_at_once(server, store, client):
    files = {f"f{n}.whl": os.urandom(1000 * n) for n in range(1, 20)}
    running, most = [], []

    def slow(request: Request) -> Response:
        running.append(1)
        most.append(len(running))
        time.sleep(0.02)
        running.pop()
        return Response(files[request.path[1:]])

    for name in files:
        server.expect_request(f"/{name}").respond_with_handler(slow)
    step = Step()
    download([wanted(server, data, name) for name, data in files.items()], store, client, step)
    assert all(store.get(sha(data)).read_bytes() == data for data in files.values())
    assert 2 <= max(most) <= module.PARALLEL
    total = sum(map(len, files.values()))
    assert step.seen[-1][:2] == (total, total)


def test_what_was_there_is_resumed(server, store, client):
    partial(store).write_bytes(DATA[:100_000])
    asked = []
    step = bring(server, store, client, whole(DATA, asked))
    assert asked == ["bytes=100000-"]
    assert all(done <= total for done, total, _ in step.seen)


def test_a_server_without_ranges_sends_all_again(server, store, client):
    partial(store).write_bytes(DATA[:100_000])
    bring(server, store, client, lambda request: Response(DATA))


def test_a_whole_partial_needs_no_server(store, client):
    partial(store).write_bytes(DATA)
    download([Download("a.whl", "http://127.0.0.1:9/a.whl", sha(DATA), len(DATA))], store, client, Step())
    assert store.has(sha(DATA))


@pytest.mark.parametrize("torn", [b"\0" * 100_000, b"\0" * len(DATA), b"\0" * (len(DATA) + 5)])
def test_a_torn_partial_is_no_integrity_error(server, store, client, torn):
    partial(store).write_bytes(torn)
    bring(server, store, client, whole(DATA))


def test_a_range_of_another_file_is_not_appended(server, store, client):
    partial(store).write_bytes(DATA[:100_000])

    def other(request: Request) -> Response:
        if request.range:
            return Response(DATA[5:], status=206, headers={"Content-Range": f"bytes 5-{len(DATA) - 1}/{len(DATA)}"})
        return Response(DATA)

    bring(server, store, client, other)


def test_an_unsatisfiable_range_starts_again(server, store, client):
    partial(store).write_bytes(DATA[:100_000])
    bring(server, store, client, lambda request: Response(DATA) if not request.range else Response(status=416))


def test_a_connection_that_breaks_again_and_again_but_gets_on(server, store, client, monkeypatch):
    monkeypatch.setattr(module, "_GETS_ON", 10_000)
    asked = []
    step = bring(server, store, client, cut(DATA, 20_000, asked))
    assert len(asked) == 15
    assert asked[:3] == [None, "bytes=20000-", "bytes=40000-"]
    assert max(done for done, _, _ in step.seen) == len(DATA)


def test_a_connection_that_breaks_at_once_is_given_up(server, store, client):
    asked = []
    with pytest.raises(EnvironmentFailure, match=r"a\.whl: 127\.0\.0\.1 cannot be reached: peer closed") as caught:
        bring(server, store, client, cut(DATA, 0, asked))
    assert caught.value.exit_code == 3
    assert len(asked) == 5
    assert not store.has(sha(DATA))


class Old(http.server.BaseHTTPRequestHandler):
    """HTTP/1.0 without a length: the first answer ends early."""

    protocol_version = "HTTP/1.0"
    answers = 0

    def do_GET(self):
        Old.answers += 1
        self.send_response(200)
        self.end_headers()
        self.wfile.write(DATA[:1000] if Old.answers == 1 else DATA)

    def log_message(self, *args):
        pass


def test_an_answer_without_length_that_ends_early_is_asked_for_again(store, client):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Old) as old:
        thread = threading.Thread(target=old.serve_forever, args=(0.02,))
        thread.start()
        address = f"http://127.0.0.1:{old.server_address[1]}/a.whl"
        try:
            download([Download("a.whl", address, sha(DATA), len(DATA))], store, client, Step())
        finally:
            old.shutdown()
            thread.join()
    assert Old.answers == 2
    assert store.get(sha(DATA))


def test_other_bytes_are_deleted_and_named(server, store, client):
    other = bytes([DATA[0] ^ 1]) + DATA[1:]
    with pytest.raises(IntegrityError) as caught:
        bring(server, store, client, whole(other))
    assert caught.value.exit_code == 5
    for part in ("a.whl", "127.0.0.1", sha(other), sha(DATA)):
        assert part in caught.value.message
    assert not store.has(sha(DATA)) and not store.has(sha(other))
    assert not list((store.root / "partial").iterdir())


def test_a_login_page_is_not_asked_for_again(server, store, client):
    asked = []
    with pytest.raises(IntegrityError, match=r"would send 17 bytes, the lock names 300000") as caught:
        bring(server, store, client, whole(b"<html>Log in</ht>", asked))
    assert asked == [None]
    assert "login page" in caught.value.hint
    assert not list((store.root / "partial").iterdir())


def test_a_server_that_does_not_stop_does_not_fill_the_disk(server, store, client):
    def endless(request: Request) -> Response:
        return Response(iter([b"x" * 70_000] * 1000))

    with pytest.raises(IntegrityError):
        bring(server, store, client, endless)
    assert not list((store.root / "partial").iterdir())


@pytest.mark.parametrize(
    ("status", "hint"), [(401, "netrc"), (403, "forbids"), (404, "store import"), (407, "HTTPS_PROXY"), (451, None)]
)
def test_refusals_are_told_apart_and_not_repeated(server, store, client, status, hint):
    asked = []

    def refuse(request: Request) -> Response:
        asked.append(1)
        return Response(status=status)

    with pytest.raises(EnvironmentFailure, match=rf"a\.whl: 127\.0\.0\.1 answers {status}") as caught:
        bring(server, store, client, refuse)
    assert len(asked) == 1
    assert hint is None or hint in caught.value.hint


def test_a_busy_server_is_asked_again(server, store, client):
    answers = [503, 429, 500]
    bring(server, store, client, lambda request: Response(status=answers.pop()) if answers else Response(DATA))


def test_nobody_at_home(store, client):
    with pytest.raises(EnvironmentFailure, match=r"a\.whl: 127\.0\.0\.1 cannot be reached") as caught:
        download([Download("a.whl", "http://127.0.0.1:9/a.whl", sha(DATA), len(DATA))], store, client, Step())
    assert "--offline" in caught.value.hint


def test_one_failure_ends_the_others_and_leaves_them_resumable(server, store, client):
    big = os.urandom(3_000_000)

    def slow(request: Request) -> Response:
        def pieces():
            for start in range(0, len(big), 100_000):
                yield big[start : start + 100_000]
                time.sleep(0.1)

        return Response(pieces(), headers={"Content-Length": str(len(big))})

    def missing(request: Request) -> Response:
        time.sleep(0.5)
        return Response(status=404)

    server.expect_request("/big.whl").respond_with_handler(slow)
    server.expect_request("/a.whl").respond_with_handler(missing)
    began = time.monotonic()
    with pytest.raises(EnvironmentFailure, match="answers 404"):
        download([wanted(server), wanted(server, big, "big.whl")], store, client, Step())
    assert time.monotonic() - began < 2.9
    assert not store.has(sha(big))
    left = partial(store, big).read_bytes()
    assert left and big.startswith(left)


def test_an_integrity_error_outweighs_a_missing_file(server, store, client):
    server.expect_request("/a.whl").respond_with_handler(whole(b"x" * len(DATA)))
    server.expect_request("/b.whl").respond_with_data(status=404)
    barrier = threading.Barrier(2)
    real = module._bring

    def together(*args):
        barrier.wait(5)
        try:
            real(*args)
        finally:
            barrier.wait(5)

    module._bring = together
    try:
        with pytest.raises(IntegrityError):
            download([wanted(server, b"y" * 10, "b.whl"), wanted(server)], store, client, Step())
    finally:
        module._bring = real


def test_two_builds_bring_one_object_once(server, store, client):
    asked = []

    def slow(request: Request) -> Response:
        asked.append(1)
        time.sleep(0.6)
        return Response(DATA)

    server.expect_request("/a.whl").respond_with_handler(slow)
    steps = [Step(), Step()]
    builds = [
        threading.Thread(target=download, args=([wanted(server)], Store(store.root), client, step)) for step in steps
    ]
    [b.start() for b in builds]
    [b.join() for b in builds]
    assert len(asked) == 1
    assert store.get(sha(DATA))
    assert any("waiting for another process that brings a.whl" in note for step in steps for _, _, note in step.seen)


def test_a_local_file_is_copied_and_held_to_its_hash(store, client, tmp_path):
    file = tmp_path / "a.whl"
    file.write_bytes(DATA)
    download([Download("a.whl", file, sha(DATA), len(DATA))], store, client, Step())
    assert store.has(sha(DATA)) and file.exists()
    with pytest.raises(IntegrityError, match=str(file)):
        download([Download("a.whl", file, sha(b"x"), 1)], store, client, Step())
    file.unlink()
    with pytest.raises(EnvironmentFailure, match="is gone"):
        download([Download("a.whl", file, sha(b"x"), 1)], store, client, Step())


def test_a_real_step_takes_it(server, store, client):
    server.expect_request("/a.whl").respond_with_handler(whole(DATA))
    with Console(quiet=True).step("download") as step:
        download([wanted(server), wanted(server)], store, client, step)
    assert store.has(sha(DATA))


def test_redirects_are_followed(server, store, client):
    server.expect_request("/moved.whl").respond_with_data(DATA)
    bring(server, store, client, lambda r: Response(status=302, headers={"Location": "/moved.whl"}))


def test_credentials_never_reach_a_message(store, client):
    address = httpx.URL("http://user:hunter2@127.0.0.1:9/a.whl")
    with pytest.raises(EnvironmentFailure) as caught:
        download([Download("a.whl", str(address), sha(DATA), len(DATA))], store, client, Step())
    assert "hunter2" not in caught.value.message
