"""The stage: verified from the store, brought from anywhere, base packages that moved."""

import hashlib
import os

import pytest
import stamina
from pytest_httpserver import HTTPServer

from forge_build import fetch as module
from forge_build import manifest as manifests
from forge_build.fetch import fetch
from forge_build.fetch.debian import Located
from forge_build.lock import Lock, LockedDeb, LockedWheel
from forge_core.console import Console
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store

MANIFEST = manifests.load("rehearsal")


def sha(data):
    return hashlib.sha256(data).hexdigest()


def wheel(name, data, index=None):
    return LockedWheel(
        name=name, version="1", file=f"{name}-1-py3-none-any.whl", sha256=sha(data), size=len(data), index=index
    )


def deb(name, data, version="1"):
    return LockedDeb(name=name, version=version, architecture="amd64", sha256=sha(data), size=len(data))


class Line:
    """A manifest, a lock, an index and a distribution, all ours."""

    def __init__(self, server, tmp_path):
        self.server = server
        self.folder = tmp_path / "wheels"
        self.folder.mkdir()
        self.manifest = MANIFEST
        self.wheels = {"runtime": [], "builder": []}
        self.debs = {"runtime": [], "builder": []}
        self.store = Store.open()
        self.mirror = {}
        self.asked = []

    def index(self, name, data, *, stated=None, served=None):
        """Have the index offer a wheel."""
        made = wheel(name, data)
        link = f'<a href="/files/{made.file}#sha256={stated or made.sha256}">{made.file}</a>'
        self.server.expect_request(f"/simple/{name}/").respond_with_data(link, content_type="text/html")
        self.server.expect_request(f"/files/{made.file}").respond_with_data(served or data)
        return made

    def offer_deb(self, item, data):
        """Have the distribution offer a package."""
        self.mirror[item.name] = item
        self.server.expect_request(f"/debian/{item.file}").respond_with_data(data)
        return item

    def locate(self, base, debs, folder):
        self.asked.append(tuple(d.name for d in debs))
        urls, moved = {}, {}
        for item in debs:
            now = self.mirror.get(item.name)
            url = self.server.url_for(f"/debian/{now.file}") if now else ""
            if now == item:
                urls[item] = url
            else:
                moved[item] = (now, url) if now else None
        return Located(urls, moved)

    @property
    def lock(self):
        return Lock(
            schema_version=1,
            profile="rehearsal",
            manifest="0" * 64,
            wheels={use: tuple(items) for use, items in self.wheels.items()},
            debs={use: tuple(items) for use, items in self.debs.items()},
        )

    def fetch(self, *, offline=False, kind="rehearsal"):
        manifest = self.manifest.model_copy(update={"kind": kind})
        return fetch(manifest, self.lock, self.store, offline=offline, console=Console(verbose=True))


@pytest.fixture(scope="module")
def running():
    with HTTPServer(host="127.0.0.1", threaded=True) as made:
        yield made


@pytest.fixture
def line(running, tmp_path, monkeypatch):
    for name in list(os.environ):
        if name.upper().endswith("_PROXY") or name.startswith(("PIP_", "UV_", "FORGE_INDEX")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    stamina.set_testing(True, attempts=2, cap=True)
    running.clear()
    monkeypatch.setenv("PIP_INDEX_URL", running.url_for("/simple"))
    made = Line(running, tmp_path)
    monkeypatch.setattr(module.debian, "locate", made.locate)
    yield made
    stamina.set_testing(False)


def requests(line):
    return len(line.server.log)


def test_cold_warm_offline(line, capsys):
    line.wheels["runtime"] = [line.index("one", b"1" * 1000), line.index("two", b"2")]
    line.wheels["builder"] = [line.wheels["runtime"][0]]
    bash = line.offer_deb(deb("bash", b"bash"), b"bash")
    line.debs = {"runtime": [bash], "builder": [bash]}
    inputs = line.fetch()
    assert inputs.path(sha(b"2")).read_bytes() == b"2"
    assert inputs.debs == {"runtime": (bash,), "builder": (bash,)}
    assert inputs.deviations == ()
    assert set(inputs.wheels) == {sha(b"1" * 1000), sha(b"2")}
    assert "3 files" in capsys.readouterr().err
    before = requests(line)
    assert line.fetch() == inputs
    assert line.fetch(offline=True) == inputs
    assert requests(line) == before and len(line.asked) == 1


def test_offline_lists_what_is_missing(line):
    line.wheels["runtime"] = [line.index("one", b"1" * 1000), line.index("two", b"22")]
    line.debs["runtime"] = [deb("bash", b"bash")]
    with pytest.raises(EnvironmentFailure, match=r"3 of 3 inputs \(1 kB\) are not in") as caught:
        line.fetch(offline=True)
    assert caught.value.details == (
        "bash_1_amd64.deb (4 B)",
        "one-1-py3-none-any.whl (1 kB)",
        "two-1-py3-none-any.whl (2 B)",
    )
    assert "store import" in caught.value.hint
    assert requests(line) == 0 and not line.asked


def test_a_flipped_byte_stops_before_anything_uses_it(line):
    line.wheels["runtime"] = [line.index("one", b"1" * 1000)]
    bash = line.offer_deb(deb("bash", b"bash"), b"bash")
    line.debs["runtime"] = [bash]
    line.fetch()
    for sha256 in (sha(b"1" * 1000), bash.sha256):
        path = line.store.path(sha256)
        path.chmod(0o644)
        path.write_bytes(b"X" + path.read_bytes()[1:])
    with pytest.raises(IntegrityError) as caught:
        line.fetch(offline=True)
    said = " ".join([caught.value.message, *caught.value.details])
    assert "one-1-py3-none-any.whl" in said and "bash_1_amd64.deb" in said
    assert not line.store.has(bash.sha256)
    line.fetch()  # the way out


def test_what_arrives_is_held_to_the_lock(line):
    line.wheels["runtime"] = [line.index("one", b"1" * 1000, served=b"2" * 1000)]
    with pytest.raises(IntegrityError, match=r"one-1-py3-none-any\.whl"):
        line.fetch()
    assert not line.store.has(sha(b"1" * 1000))


def test_an_index_that_states_another_hash(line):
    line.wheels["runtime"] = [line.index("one", b"1", stated="a" * 64), wheel("gone", b"g")]
    line.server.expect_request("/simple/gone/").respond_with_data(status=404)
    with pytest.raises(IntegrityError, match=r"the lock names sha256 .* but there is \(127\.0\.0\.1: aaaa") as caught:
        line.fetch()
    assert any("gone-1" in detail for detail in caught.value.details)


def test_all_that_cannot_be_found_is_reported_at_once(line):
    line.wheels["runtime"] = [wheel("x", b"x"), wheel("y", b"y")]
    for name in "xy":
        line.server.expect_request(f"/simple/{name}/").respond_with_data(status=404)
    with pytest.raises(EnvironmentFailure) as caught:
        line.fetch()
    said = " ".join([caught.value.message, *caught.value.details])
    assert "x-1-py3" in said and "y-1-py3" in said and "looked in: 127.0.0.1" in said


def test_a_named_index_is_asked_for_by_its_variable(line, monkeypatch):
    line.wheels["runtime"] = [wheel("torch", b"t", index="pytorch-cpu")]
    with pytest.raises(EnvironmentFailure) as caught:
        line.fetch()
    assert "FORGE_INDEX_PYTORCH_CPU" in caught.value.hint
    (line.folder / "torch-1-py3-none-any.whl").write_bytes(b"t")
    monkeypatch.setenv("FORGE_INDEX_PYTORCH_CPU", str(line.folder))
    line.fetch()
    assert line.store.has(sha(b"t"))


def test_a_folder_of_other_bytes_is_passed_over(line, monkeypatch):
    line.wheels["runtime"] = [line.index("one", b"1")]
    (line.folder / "one-1-py3-none-any.whl").write_bytes(b"a build of my own")
    monkeypatch.setenv("PIP_FIND_LINKS", str(line.folder))
    line.fetch()
    assert line.store.has(sha(b"1"))


def test_a_folder_serves_where_no_index_answers(line, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_FIND_LINKS", line.folder.as_uri())
    line.wheels["runtime"] = [wheel("one", b"1")]
    with pytest.raises(EnvironmentFailure, match="cannot be reached"):
        line.fetch()
    (line.folder / "one-1-py3-none-any.whl").write_bytes(b"1")
    line.fetch()


def test_a_second_index_serves_where_the_first_does_not_answer(line, monkeypatch):
    line.wheels["runtime"] = [line.index("one", b"1")]
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", os.environ["PIP_INDEX_URL"])
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    line.fetch()


# base packages that moved


def test_a_rehearsal_goes_on_with_what_the_distribution_has(line, capsys):
    old, new = deb("bash", b"old"), deb("bash", b"new", "2")
    same = line.offer_deb(deb("dash", b"dash"), b"dash")
    line.debs = {"runtime": [old, same], "builder": [old]}
    line.offer_deb(new, b"new")
    inputs = line.fetch()
    assert inputs.debs == {"runtime": (new, same), "builder": (new,)}
    (deviation,) = inputs.deviations
    assert (deviation.kind, deviation.subject) == ("base-moved", "bash")
    assert "locked 1 " in deviation.detail and "distribution has 2 " in deviation.detail
    assert "moved: bash: locked 1" in capsys.readouterr().err
    assert line.store.get(new.sha256).read_bytes() == b"new"
    before = requests(line)
    assert line.fetch(offline=True) == inputs
    assert line.fetch() == inputs
    assert requests(line) == before


def test_a_package_that_moves_again(line):
    old, new, newer = deb("bash", b"old"), deb("bash", b"new", "2"), deb("bash", b"newer", "3")
    line.debs["runtime"] = [old]
    line.offer_deb(new, b"new")
    line.fetch()
    line.offer_deb(newer, b"newer")
    # what is in the store stays in use: an unchanged build is the same build
    assert line.fetch().debs["runtime"] == (new,)
    line.store.path(new.sha256).unlink()
    inputs = line.fetch()
    assert inputs.debs["runtime"] == (newer,)
    assert "locked 1 " in inputs.deviations[0].detail and "has 3 " in inputs.deviations[0].detail
    assert line.fetch(offline=True) == inputs


def test_the_locked_package_wins_when_it_comes_back(line):
    old, new = deb("bash", b"old"), deb("bash", b"new", "2")
    line.debs["runtime"] = [old]
    line.offer_deb(new, b"new")
    line.fetch()
    source = line.folder / "old"
    source.write_bytes(b"old")
    line.store.add_file(source)
    inputs = line.fetch(offline=True)
    assert inputs.debs["runtime"] == (old,) and inputs.deviations == ()


def test_production_stops_before_it_downloads(line):
    line.wheels["runtime"] = [line.index("one", b"1")]
    line.debs["runtime"] = [deb("bash", b"old"), deb("dash", b"old dash")]
    line.offer_deb(deb("bash", b"new", "2"), b"new")
    line.offer_deb(deb("dash", b"new dash", "2"), b"new dash")
    with pytest.raises(EnvironmentFailure, match="2 base packages have moved on") as caught:
        line.fetch(kind="production")
    assert caught.value.exit_code == 3
    assert [d.split(":")[0] for d in caught.value.details] == ["bash", "dash"]
    assert "nox -s lock -- --profile rehearsal --upgrade" in caught.value.hint
    assert not line.store.has(sha(b"1")) and not line.store.has(sha(b"new"))


def test_production_does_not_take_what_a_rehearsal_took(line):
    line.debs["runtime"] = [deb("bash", b"old")]
    line.offer_deb(deb("bash", b"new", "2"), b"new")
    line.fetch()
    with pytest.raises(EnvironmentFailure, match="1 base packages have moved on"):
        line.fetch(kind="production")
    with pytest.raises(EnvironmentFailure, match="1 base packages have moved on"):
        line.fetch(kind="production", offline=True)


@pytest.mark.parametrize("kind", ["rehearsal", "production"])
def test_a_package_that_is_gone(line, kind):
    line.debs["runtime"] = [deb("bash", b"old")]
    with pytest.raises(EnvironmentFailure, match="gone from the distribution") as caught:
        line.fetch(kind=kind)
    assert caught.value.details == ("bash_1_amd64.deb",)


@pytest.mark.parametrize("text", ["{", "[]", '{"moves": 3}', '{"moves": [[1, 2]]}', '{"moves": [[{"name": "x"}, {}]]}'])
def test_a_torn_note_of_moves_says_nothing(line, text):
    old, new = deb("bash", b"old"), deb("bash", b"new", "2")
    line.debs["runtime"] = [old]
    line.offer_deb(new, b"new")
    inputs = line.fetch()
    (note,) = (line.store.root / "derived/moved").iterdir()
    note.write_text(text)
    assert line.fetch() == inputs
