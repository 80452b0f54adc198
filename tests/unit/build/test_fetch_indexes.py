"""Where wheels are looked for, and how we get there: settings, pages, proxies, certificates, credentials."""

import base64
import http.server
import json
import os
import ssl
import subprocess
import threading
from pathlib import Path

import pytest
import stamina
from pypi_simple import PYPI_SIMPLE_ENDPOINT
from pytest_httpserver import HTTPServer
from werkzeug import Request, Response

from forge_build import manifest as manifests
from forge_build.fetch import indexes, settings
from forge_build.fetch.indexes import Places, anywhere, candidates, new_client, offers, places, variable
from forge_build.manifest import Index
from forge_core.errors import EnvironmentFailure, UsageError

A, B = "a" * 64, "b" * 64


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    """Nothing of this machine's settings."""
    for name in list(os.environ):
        if name.upper().endswith("_PROXY") or name.startswith(("PIP_", "UV_", "FORGE_INDEX")):
            monkeypatch.delenv(name)
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("HOME", str(tmp_path))
    stamina.set_testing(True, attempts=3, cap=True)
    yield
    stamina.set_testing(False)


@pytest.fixture(scope="module")
def running():
    with HTTPServer(host="127.0.0.1", threaded=True) as made:
        yield made


@pytest.fixture
def server(running):
    running.clear()
    return running


@pytest.fixture(scope="module")
def manifest():
    return manifests.load("rehearsal")


# settings


def test_the_default_index_needs_no_setting(manifest):
    assert places(manifest, None) == Places((), (PYPI_SIMPLE_ENDPOINT,))
    assert candidates(manifest, None) == [PYPI_SIMPLE_ENDPOINT]


@pytest.mark.parametrize("name", ["PIP_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX_URL"])
def test_the_default_index_is_the_one_the_user_is_told(manifest, monkeypatch, name):
    monkeypatch.setenv(name, "https://mirror.test/simple")
    assert places(manifest, None).indexes == ("https://mirror.test/simple",)


def test_a_file_of_pip_counts_after_the_environment(manifest, monkeypatch, tmp_path):
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://file.test/simple\nfind-links =\n    /wheels\n    ~/more\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(file))
    assert places(manifest, None).indexes == ("https://file.test/simple",)
    assert settings.folders() == (Path("/wheels"), tmp_path / "more")
    monkeypatch.setenv("PIP_INDEX_URL", "https://env.test/simple")
    assert places(manifest, None).indexes == ("https://env.test/simple",)


def test_the_users_own_file_of_pip(manifest, monkeypatch, tmp_path):
    monkeypatch.delenv("PIP_CONFIG_FILE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "config/pip").mkdir(parents=True)
    (tmp_path / "config/pip/pip.conf").write_text("[install]\nextra-index-url = https://own.test/simple\n")
    assert "https://own.test/simple" in settings.extra_indexes()


def test_a_broken_file_of_pip_is_named(manifest, monkeypatch, tmp_path):
    (tmp_path / "pip.conf").write_text("index-url = x\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(EnvironmentFailure, match=r"pip\.conf"):
        places(manifest, None)


def test_a_named_index_is_the_environments_then_the_manifests_then_the_users(manifest, monkeypatch):
    assert variable("pytorch-cpu") == "FORGE_INDEX_PYTORCH_CPU"
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels file:///more%20wheels https://elsewhere.test/flat.html")
    monkeypatch.setenv("UV_INDEX", "torch=https://extra.test/whl https://plain.test/?a=b")
    assert places(manifest, "pytorch-cpu") == Places(
        (Path("/wheels"), Path("/more wheels")), ("https://extra.test/whl", "https://plain.test/?a=b")
    )
    named = manifest.model_copy(update={"indexes": {"pytorch-cpu": Index(packages=("torch",), url="https://m.test/")}})
    assert places(named, "pytorch-cpu") == Places((), ("https://m.test/",))
    monkeypatch.setenv("FORGE_INDEX_PYTORCH_CPU", "https://env.test/whl")
    assert places(named, "pytorch-cpu") == Places((), ("https://env.test/whl",))
    monkeypatch.setenv("FORGE_INDEX_PYTORCH_CPU", "/my/wheels")
    assert places(named, "pytorch-cpu") == Places((Path("/my/wheels"),), ())


def test_uv_separates_folders_by_commas(monkeypatch):
    monkeypatch.setenv("UV_FIND_LINKS", "/one,/two")
    assert settings.folders() == (Path("/one"), Path("/two"))


def test_an_index_the_manifest_does_not_name(manifest):
    with pytest.raises(UsageError, match="no such index"):
        places(manifest, "nope")


def test_by_hash_every_place_will_do(manifest, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "https://extra.test/simple")
    assert anywhere(manifest, None) == Places((Path("/wheels"),), (PYPI_SIMPLE_ENDPOINT, "https://extra.test/simple"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert anywhere(manifest, None) == Places((Path("/wheels"),), ())


# pages


def page(*files):
    links = "".join(f'<a href="{href}">{name}</a>\n' for name, href in files)
    return f"<!DOCTYPE html><html><body>{links}</body></html>"


def test_a_folder_offers_its_wheels(tmp_path):
    for name in ("My_Pkg-1.0-py3-none-any.whl", "my_pkg_extra-1.0-py3-none-any.whl", "my_pkg-1.0.tar.gz"):
        (tmp_path / name).write_bytes(b"12")
    with new_client() as client:
        (offer,) = offers(client, Places((tmp_path,), ()), "my-pkg")
    assert (offer.file, offer.location, offer.size) == (
        "My_Pkg-1.0-py3-none-any.whl",
        tmp_path / "My_Pkg-1.0-py3-none-any.whl",
        2,
    )
    assert len(indexes.file_sha256_of_offer(offer)) == 64


def test_json_pages(server):
    data = {
        "meta": {"api-version": "1.1"},
        "name": "x",
        "versions": ["1"],
        "files": [
            {"filename": "x-1-py3-none-any.whl", "url": "../../f/x.whl", "hashes": {"sha256": A}, "size": 5},
            {"filename": "x-1.tar.gz", "url": "x.tar.gz", "hashes": {}, "size": 5},
        ],
    }
    server.expect_request("/simple/x/").respond_with_data(
        json.dumps(data), content_type="application/vnd.pypi.simple.v1+json"
    )
    with new_client() as client:
        (offer,) = offers(client, Places((), (server.url_for("/simple"),)), "X")
    assert (offer.sha256, offer.size, offer.location) == (A, 5, server.url_for("/f/x.whl"))


def test_html_pages(server):
    server.expect_request("/simple/x/").respond_with_data(
        page(("x-1-py3-none-any.whl", f"x-1-py3-none-any.whl#sha256={B}"), ("x-2-py3-none-any.whl", "x-2.whl")),
        content_type="text/html",
    )
    with new_client() as client:
        first, second = offers(client, Places((), (server.url_for("/simple/"),)), "x")
    assert first.sha256 == B
    assert first.location == server.url_for("/simple/x/x-1-py3-none-any.whl")
    assert second.sha256 is None


def test_an_index_of_files(tmp_path):
    (tmp_path / "x").mkdir()
    (tmp_path / "x/index.html").write_text(page(("x-1-py3-none-any.whl", "x-1-py3-none-any.whl")))
    with new_client() as client:
        (offer,) = offers(client, Places((), (tmp_path.as_uri(),)), "x")
        assert offer.location == tmp_path / "x/x-1-py3-none-any.whl"
        assert offers(client, Places((), (tmp_path.as_uri(),)), "y") == []


def test_an_unknown_package_has_no_offers(server):
    server.expect_request("/simple/x/").respond_with_data(status=404)
    with new_client() as client:
        assert offers(client, Places((), (server.url_for("/simple"),)), "x") == []


@pytest.mark.parametrize(
    ("body", "kind"),
    [("hello", "text/plain"), ("{", "application/json"), ('{"meta": {"api-version": "9.0"}}', "application/json")],
)
def test_what_is_no_index(server, body, kind):
    server.expect_request("/simple/x/").respond_with_data(body, content_type=kind)
    with new_client() as client, pytest.raises(EnvironmentFailure, match="does not answer as a package index"):
        offers(client, Places((), (server.url_for("/simple"),)), "x")


def test_refusals_of_an_index(server):
    server.expect_request("/simple/x/").respond_with_data(status=403)
    with new_client() as client, pytest.raises(EnvironmentFailure, match=r"x: the index at 127\.0\.0\.1 answers 403"):
        offers(client, Places((), (server.url_for("/simple"),)), "x")


def test_a_busy_index_is_asked_again(server):
    answers = [503, 502]

    def busy(request: Request) -> Response:
        return Response(status=answers.pop()) if answers else Response(page(), content_type="text/html")

    server.expect_request("/simple/x/").respond_with_handler(busy)
    with new_client() as client:
        assert offers(client, Places((), (server.url_for("/simple"),)), "x") == []


def test_an_index_that_is_not_there():
    with (
        new_client() as client,
        pytest.raises(EnvironmentFailure, match=r"index page of x: 127\.0\.0\.1 cannot be reached"),
    ):
        offers(client, Places((), ("http://127.0.0.1:9/simple",)), "x")


# the way there


def echo(request: Request) -> Response:
    return Response(request.headers.get("Authorization", "none"))


def basic(text):
    return "Basic " + base64.b64encode(text.encode()).decode()


def test_credentials_of_the_address_and_of_netrc(server, tmp_path):
    server.expect_request("/who").respond_with_handler(echo)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login net password rc\n")
    (tmp_path / ".netrc").chmod(0o600)
    with new_client() as client:
        assert client.get(server.url_for("/who")).text == basic("net:rc")
        address = server.url_for("/who").replace("http://", "http://me:p%40ss@")
        assert client.get(address).text == basic("me:p@ss")
        assert client.get(server.url_for("/who").replace("127.0.0.1", "localhost")).text == "none"


def test_credentials_are_not_given_to_another_host(server, tmp_path):
    target = server.url_for("/who").replace("127.0.0.1", "localhost")
    server.expect_request("/go").respond_with_data(status=302, headers={"Location": target})
    server.expect_request("/who").respond_with_handler(echo)
    with new_client() as client:
        assert client.get(server.url_for("/go").replace("http://", "http://me:secret@")).text == "none"


def test_a_netrc_that_cannot_be_read(tmp_path):
    (tmp_path / ".netrc").write_text("nonsense here\n")
    with pytest.raises(EnvironmentFailure, match=r"\.netrc cannot be read"):
        new_client()


def test_a_proxy_is_used(server, monkeypatch):
    seen = []

    def proxy(request: Request) -> Response:
        seen.append(request.host)
        return Response(page(), content_type="text/html")

    server.expect_request("/simple/x/").respond_with_handler(proxy)
    monkeypatch.setenv("HTTP_PROXY", server.url_for("/"))
    with new_client() as client:
        offers(client, Places((), ("http://index.invalid/simple",)), "x")
    assert seen == ["index.invalid"]


class Guard(http.server.BaseHTTPRequestHandler):
    """A proxy that wants credentials."""

    def do_CONNECT(self):
        self.send_error(407)

    def log_message(self, *args):
        pass


def test_a_proxy_that_refuses_the_tunnel(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Guard) as guard:
        thread = threading.Thread(target=guard.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{guard.server_address[1]}")
        try:
            with (
                new_client() as client,
                pytest.raises(EnvironmentFailure, match=r"through to index\.invalid: 407") as e,
            ):
                offers(client, Places((), ("https://index.invalid/simple",)), "x")
        finally:
            guard.shutdown()
            thread.join()
    assert "HTTPS_PROXY is set" in e.value.hint


def test_a_dead_proxy_is_suspected(monkeypatch):
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:9")
    with new_client() as client, pytest.raises(EnvironmentFailure, match="cannot be reached") as caught:
        offers(client, Places((), ("https://index.invalid/simple",)), "x")
    assert "HTTPS_PROXY is set" in caught.value.hint


def test_a_proxy_of_an_unknown_kind(monkeypatch):
    monkeypatch.setenv("ALL_PROXY", "carrier-pigeon://here")
    with pytest.raises(EnvironmentFailure, match="proxy of the environment cannot be used"):
        new_client()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    """A certificate for 127.0.0.1 that only itself vouches for."""
    folder = tmp_path_factory.mktemp("ca")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -keyout key.pem -out ca.pem"
    )
    subject = ["-subj", "/CN=private CA", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*command.split(), *subject], check=True, capture_output=True, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def private(authority):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority / "ca.pem", authority / "key.pem")
    with HTTPServer(host="127.0.0.1", ssl_context=context, threaded=True) as made:
        made.expect_request("/simple/x/").respond_with_data(page(), content_type="text/html")
        yield made


def test_an_untrusted_certificate_is_told_apart(private):
    with (
        new_client() as client,
        pytest.raises(EnvironmentFailure, match=r"certificate of 127\.0\.0\.1 is not trusted") as e,
    ):
        offers(client, Places((), (private.url_for("/simple"),)), "x")
    assert "SSL_CERT_FILE" in e.value.hint


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "PIP_CERT", "CURL_CA_BUNDLE", "pip.conf"])
def test_a_private_authority_is_trusted_where_pip_does(private, authority, monkeypatch, tmp_path, name):
    bundle = str(authority / "ca.pem")
    if name == "pip.conf":
        (tmp_path / "pip.conf").write_text(f"[global]\ncert = {bundle}\n")
        monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    else:
        monkeypatch.setenv(name, bundle)
    with new_client() as client:
        assert offers(client, Places((), (private.url_for("/simple"),)), "x") == []


@pytest.mark.parametrize("text", [None, "no certificate"])
def test_a_bundle_that_cannot_be_read(monkeypatch, tmp_path, text):
    bundle = tmp_path / "ca.pem"
    if text:
        bundle.write_text(text)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(bundle))
    with pytest.raises(EnvironmentFailure, match=r"REQUESTS_CA_BUNDLE names .*ca\.pem"):
        new_client()
