"""`store verify`, `gc`, `export`, `import`, through the command line."""

import hashlib
import json
import os
import subprocess
import sys
import time

import pytest
import yaml

from forge_core.cli import Parser
from forge_core.store import Store, cli
from forge_core.store.names import MOVED, lock_files, named

DAY = 86400


def main(argv):
    parser = Parser("forge_core", "")
    cli.register(parser)
    return parser.main(argv)


class Checkout:
    def __init__(self, root, store):
        self.root, self.store = root, store
        (root / "build/manifests").mkdir(parents=True)
        self.locked, self.debs = [], []

    def object(self, text, *, days=0.0):
        source = self.store.root / "partial" / "source"
        source.write_text(text)
        path = self.store.path(self.store.add_file(source, move=True))
        os.utime(path, (time.time() - days * DAY,) * 2)
        return path

    def derived(self, kind, key, text, *, days=0.0):
        source = self.store.root / "partial" / "source"
        source.write_text(text)
        made = self.store.derived_put(kind, key, source, {"n": 1}, move=True)
        os.utime(made.path, (time.time() - days * DAY,) * 2)
        return made.path

    def wheel(self, text, name, *, present=True, days=0.0):
        self.locked.append({"name": name, "file": f"{name}-1.whl"} | stated(text))
        self.write()
        return self.object(text, days=days) if present else None

    def deb(self, text, name):
        item = {"name": name, "version": "1", "architecture": "amd64"} | stated(text)
        self.debs.append(item)
        self.write()
        return item

    def write(self, profile="rehearsal"):
        data = {
            "schema": 1,
            "wheels": {"runtime": self.locked},
            "debs": {"runtime": self.debs},
            "sources": {"s": {"patches": [{"file": "0001.patch", "sha256": "f" * 64}]}},
        }
        (self.root / f"build/manifests/{profile}.lock.yaml").write_text(yaml.safe_dump(data))


def stated(text):
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "size": len(text)}


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    monkeypatch.setenv("FORGE_ROOT", str(tmp_path / "checkout"))
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    made = Checkout(tmp_path / "checkout", Store.open())
    made.write()
    return made


@pytest.fixture
def run(capsys):
    def call(*argv):
        code = main(["store", *map(str, argv)])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def flip(path):
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)


# verify


def test_verify_of_a_sound_store(checkout, run):
    checkout.object("abc")
    code, out, err = run("verify", "--json")
    assert code == 0
    assert json.loads(out) == {"store": str(checkout.store.root), "objects": 1, "size": 3, "wrong": []}
    assert "1 objects, 3 B, 0 wrong" in err


def test_verify_names_and_deletes_what_is_wrong(checkout, run):
    wheel = checkout.wheel("wheel bytes", "numpy")
    made = checkout.derived("rootfs", "k1", "root")
    sound = checkout.object("sound", days=3)
    stranger = sound.parent / "notes.txt"
    stranger.write_text("?")
    before = sound.stat().st_mtime
    flip(wheel)
    flip(made)
    code, out, err = run("verify", "--json")
    assert code == 5
    wrong = json.loads(out)["wrong"]
    assert len(wrong) == 3
    assert any("numpy-1.whl" in line for line in wrong)
    assert any("rootfs k1" in line for line in wrong)
    assert "numpy-1.whl" in err
    assert not wheel.exists() and not made.exists() and not stranger.exists()
    assert sound.stat().st_mtime == before  # a look is no use
    assert run("verify")[0] == 0


def test_verify_outside_a_checkout(checkout, run, monkeypatch, tmp_path):
    monkeypatch.delenv("FORGE_ROOT")
    monkeypatch.chdir(tmp_path)
    checkout.object("abc")
    code, _, err = run("verify")
    assert code == 0
    assert "outside a checkout" in err


# gc


def test_gc_keeps_what_a_lock_names_and_what_was_used_lately(checkout, run):
    locked = checkout.wheel("locked", "numpy", days=400)
    recent = checkout.object("of another clone", days=29)
    old = checkout.object("old", days=31)
    code, out, _ = run("gc", "--json")
    data = json.loads(out)
    assert code == 0
    assert locked.exists() and recent.exists() and not old.exists()
    assert (data["objects"], data["freed"], data["kept"]) == (1, 3, 2)
    assert not old.parent.exists() or old.parent == locked.parent or old.parent == recent.parent


def test_gc_drops_derived_things_with_their_entries(checkout, run):
    old = checkout.derived("wheel", "old", "old wheel", days=31)
    new = checkout.derived("wheel", "new", "new wheel")
    checkout.store.note_put("image", "old", {"digest": "x"})
    os.utime(checkout.store.entry("image", "old"), (time.time() - 31 * DAY,) * 2)
    checkout.store.note_put("image", "new", {"digest": "y"})
    assert run("gc")[0] == 0
    assert not old.exists() and new.exists()
    assert not checkout.store.entry("wheel", "old").exists()
    assert checkout.store.derived_get("wheel", "new")
    assert checkout.store.note_get("image", "old") is None
    assert checkout.store.note_get("image", "new")


def test_gc_dry_run_drops_nothing(checkout, run):
    old = checkout.object("old", days=31)
    (checkout.store.root / "partial" / "base-x").mkdir()
    (checkout.store.root / "partial" / "base-x" / "file").write_text("12345")
    code, out, err = run("gc", "--dry-run", "--json")
    assert code == 0
    assert json.loads(out)["freed"] == 8
    assert "would be freed" in err
    assert old.exists() and (checkout.store.root / "partial/base-x/file").exists()


def test_gc_older_than_nought_drops_all_that_no_lock_names(checkout, run):
    locked, other = checkout.wheel("locked", "numpy"), checkout.object("other")
    assert run("gc", "--older-than", "0")[0] == 0
    assert locked.exists() and not other.exists()


def test_gc_drops_stale_partials_and_scratch(checkout, run):
    partial = checkout.store.root / "partial"
    item = checkout.wheel("to come", "numpy", present=False)
    assert item is None
    wanted = partial / checkout.locked[0]["sha256"]
    for name, days in ((wanted.name, 400), ("a" * 64, 31), ("b" * 64, 1), ("add-x", 0)):
        (partial / name).write_text("part")
        os.utime(partial / name, (time.time() - days * DAY,) * 2)
    (partial / "wheel-x/deep").mkdir(parents=True)
    (checkout.store.root / "locks" / f"fetch-{'a' * 64}.lock").touch()
    assert run("gc")[0] == 0
    assert sorted(p.name for p in partial.iterdir()) == sorted([wanted.name, "b" * 64])
    assert [p.name for p in (checkout.store.root / "locks").iterdir()] == ["in-use"]


def test_gc_keeps_what_stands_in_for_a_moved_package(checkout, run):
    old = checkout.deb("locked deb", "bash")
    now = {"name": "bash", "version": "2", "architecture": "amd64"} | stated("new deb")
    new = checkout.object("new deb", days=400)
    checkout.store.note_put(MOVED, "k", {"moves": [[old, now]]})
    os.utime(checkout.store.entry(MOVED, "k"), (1, 1))
    assert run("gc")[0] == 0
    assert new.exists()
    assert checkout.store.note_get(MOVED, "k")


def test_gc_refuses_beside_a_running_build_but_may_be_asked(checkout, run):
    old = checkout.object("old", days=31)
    scratch = checkout.store.root / "partial" / "image-x"
    scratch.write_text("of the build")
    script = "from forge_core.store import Store; Store.open(); print('here', flush=True); input()"
    child = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout.readline()
        code, _, err = run("gc")
        assert code == 3
        assert f"in use (processes: {child.pid})" in err
        assert old.exists() and scratch.exists()
        code, out, _ = run("gc", "--dry-run", "--json")
        assert code == 0
        assert json.loads(out)["freed"] == 3
    finally:
        child.communicate("\n", timeout=20)
    assert run("gc")[0] == 0
    assert not old.exists() and not scratch.exists()


def test_gc_stops_at_a_lock_it_cannot_read(checkout, run):
    old = checkout.object("old", days=31)
    (checkout.root / "build/manifests/rehearsal.lock.yaml").write_text("wheels: [")
    code, _, err = run("gc")
    assert code == 2
    assert "rehearsal.lock.yaml cannot be read" in err
    assert old.exists()


def test_gc_needs_a_checkout(checkout, run, monkeypatch, tmp_path):
    monkeypatch.delenv("FORGE_ROOT")
    monkeypatch.chdir(tmp_path)
    assert run("gc")[0] == 3


def test_usage(run, checkout):
    for argv in (["gc", "--older-than", "-1"], ["gc", "--derived"], ["verify", "x"], ["export"], [], ["burn"]):
        with pytest.raises(SystemExit) as caught:
            main(["store", *argv])
        assert caught.value.code == 2


def test_options_may_stand_before_the_action(checkout, run):
    checkout.object("abc")
    assert json.loads(run("--json", "verify")[1])["objects"] == 1


# export and import


def test_a_carried_folder_serves_another_store(checkout, run, tmp_path, monkeypatch):
    wheel = checkout.wheel("wheel bytes", "numpy")
    checkout.object("not locked")
    checkout.derived("rootfs", "k1", "root")
    folder = tmp_path / "carry"
    code, out, _ = run("export", folder, "--profile", "rehearsal", "--json")
    assert code == 0
    assert json.loads(out) == {"folder": str(folder), "objects": 1, "size": 11, "new": 1, "entries": 0}
    assert json.loads(run("export", folder, "--derived", "--json")[1])["new"] == 1
    index = json.loads((folder / "forge-store.json").read_text())
    assert sorted(item["name"] for item in index["objects"]) == ["numpy-1.whl", "rootfs k1"]

    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "other"))
    code, out, _ = run("import", folder, "--json")
    assert code == 0
    assert json.loads(out)["new"] == 2
    other = Store.open()
    assert other.get(wheel.name).read_text() == "wheel bytes"
    assert other.derived_get("rootfs", "k1").meta == {"n": 1}
    assert json.loads(run("import", folder, "--json")[1])["new"] == 0


def test_an_incomplete_export_is_refused(checkout, run, tmp_path):
    checkout.wheel("wheel bytes", "numpy", present=False)
    code, _, err = run("export", tmp_path / "carry")
    assert code == 3
    assert "1 of 1 inputs" in err and "numpy-1.whl" in err
    assert not (tmp_path / "carry/forge-store.json").exists()


def test_export_of_an_unknown_profile(checkout, run, tmp_path):
    code, _, err = run("export", tmp_path / "carry", "--profile", "nope")
    assert code == 2
    assert "profiles with a lock: rehearsal" in err


def test_export_takes_what_stands_in_for_a_moved_package(checkout, run, tmp_path, monkeypatch):
    old = checkout.deb("locked deb", "bash")
    now = {"name": "bash", "version": "2", "architecture": "amd64"} | stated("new deb")
    new = checkout.object("new deb")
    checkout.store.note_put(MOVED, "k", {"moves": [[old, now]]})
    assert run("export", tmp_path / "carry")[0] == 0
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "other"))
    assert run("import", tmp_path / "carry")[0] == 0
    assert Store.open().has(new.name)
    assert Store.open().note_get(MOVED, "k") == {"moves": [[old, now]]}


def test_export_of_a_flipped_byte(checkout, run, tmp_path):
    flip(checkout.wheel("wheel bytes", "numpy"))
    code, _, err = run("export", tmp_path / "carry")
    assert code == 5
    assert "numpy-1.whl" in err
    assert not list((tmp_path / "carry/objects").iterdir())


def test_a_second_export_repairs_the_folder(checkout, run, tmp_path):
    wheel = checkout.wheel("wheel bytes", "numpy")
    folder = tmp_path / "carry"
    run("export", folder)
    (folder / "objects" / wheel.name).write_text("wheel b?tes")
    assert json.loads(run("export", folder, "--json")[1])["new"] == 1
    assert (folder / "objects" / wheel.name).read_text() == "wheel bytes"


def test_import_verifies_every_byte(checkout, run, tmp_path, monkeypatch):
    bad, good = checkout.wheel("bad bytes", "bad"), checkout.wheel("good bytes", "good")
    folder = tmp_path / "carry"
    run("export", folder)
    flip(folder / "objects" / bad.name)
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "other"))
    code, _, err = run("import", folder)
    assert code == 5
    assert "bad-1.whl: sha256 is" in err
    assert Store.open().has(good.name) and not Store.open().has(bad.name)
    (folder / "objects" / bad.name).unlink()
    (folder / "objects" / bad.name).symlink_to("/etc/passwd")
    code, _, err = run("import", folder)
    assert code == 3
    assert "bad-1.whl" in err


def test_import_heals_a_damaged_store(checkout, run, tmp_path):
    wheel = checkout.wheel("wheel bytes", "numpy")
    run("export", tmp_path / "carry")
    flip(wheel)
    assert run("import", tmp_path / "carry")[0] == 0
    assert checkout.store.get(wheel.name)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"schema_version": 2, "objects": []}',
        '{"objects": [{"sha256": "../../etc", "name": "x", "size": 1}]}',
        '{"objects": [], "entries": [{"kind": "..", "key": "x", "data": {}}]}',
        '{"objects": [], "entries": [{"kind": "a", "key": "../x", "data": {}}]}',
        '{"objects": [], "entries": [{"kind": "a", "key": "x", "data": {"sha256": "../x"}}]}',
    ],
)
def test_import_of_what_is_no_export(checkout, run, tmp_path, text):
    assert run("import", tmp_path)[0] == 2
    (tmp_path / "forge-store.json").write_text(text)
    assert run("import", tmp_path)[0] == 2


def test_the_locks_of_this_repository_can_be_read():
    found = named(lock_files())
    assert len(found) > 200
    assert all(len(item.sha256) == 64 and item.size > 0 and "unnamed" not in item.name for item in found.values())
