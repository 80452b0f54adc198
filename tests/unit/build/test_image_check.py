from __future__ import annotations

import base64
import copy
import hashlib
import importlib.util
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from forge_build import image_check
from forge_build.image_check.judge import Expected
from forge_build.manifest import AllowedConflict, AllowedFile
from forge_core.cli import project_root
from forge_core.errors import IntegrityError

SITE = "/opt/sglang/lib/python3.11/site-packages"
KERNEL = "flashinfer_jit_cache/jit_cache/fp4/fp4.so"

EXPECTED = Expected(
    python="3.11",
    versions={"torch": "2.13.0+cpu", "sglang": "0.5.23"},
    records={"torch": "t" * 64, "sglang": "s" * 64},
    stand_ins={"sgl_kernel/__init__.py": "k" * 64},
    user="10001:10001",
    environment={"HF_HUB_OFFLINE": "1"},
    labels={"org.opencontainers.image.title": "A title"},
    allowed_files=(AllowedFile(path="lib/known*.py", reason="two wheels leave it there"),),
    allowed_conflicts=(
        AllowedConflict(
            package="sglang", requirements=("torch", "build", "flashinfer-python"), reason="known and meant"
        ),
    ),
    entry=("tini", "-s", "--", "sglang", "serve"),
    health=("true",),
    start_period=600,
    tool_chain=None,
)
CONFIG: dict[str, Any] = {
    "User": "10001:10001",
    "Env": ["PATH=/opt/sglang/bin:/bin", "HF_HUB_OFFLINE=1"],
    "Labels": {"org.opencontainers.image.title": "A title", "more": "is fine"},
    "Entrypoint": ["tini", "-s", "--", "sglang", "serve"],
    "Healthcheck": {"Test": ["CMD", "true"], "StartPeriod": 600 * 10**9},
    "StopSignal": "SIGTERM",
}
SEEN: dict[str, Any] = {
    "user": [10001, 10001],
    "python": "3.11.2",
    "versions": [["sglang", "0.5.23"], ["torch", "2.13.0+cpu"]],
    "record": {
        "files": 12,
        "wrong": [],
        "clashes": [],
        "records": {"torch": "t" * 64, "sglang": "s" * 64},
        "unowned": {"sgl_kernel/__init__.py": "k" * 64},
    },
    "copies": {"fp4": [KERNEL]},
    "pip_check": [
        "sglang 0.5.23 has requirement torch==2.14.1, but you have torch 2.13.0+cpu.",
        "sglang 0.5.23 requires build, which is not installed.",
        "sglang 0.5.23 has requirement flashinfer_python[cu13]==0.7.2, but you have flashinfer-python 0.6.5.",
    ],
    "imports": {"torch": {"ok": True, "detail": "x"}},
    "command": {"status": 0, "tail": ""},
    "modules": {"fp4": {"ok": True, "detail": f"{SITE}/{KERNEL}"}},
}


def test_an_image_as_intended_passes() -> None:
    report = image_check.judge(SEEN, CONFIG, EXPECTED)
    assert report.ok
    assert report.findings == ()
    assert report.checks["loader fp4"] == f"{SITE}/{KERNEL}"
    assert report.checks["files"] == "12 installed files equal the RECORD of 2 wheels"
    assert len(report.checks) == 9


Change = Callable[[dict[str, Any], dict[str, Any]], None]


def test_files_that_are_known_to_be_at_odds_are_no_fault() -> None:
    seen = copy.deepcopy(SEEN)
    seen["record"]["clashes"] = ["lib/known1.py: one and two"]
    seen["record"]["wrong"] = ["torch: lib/known1.py: other bytes than its wheel's RECORD"]
    assert image_check.judge(seen, CONFIG, EXPECTED).ok
    seen["record"]["wrong"].append("torch: lib/else.py: other bytes than its wheel's RECORD")
    assert [f.where for f in image_check.judge(seen, CONFIG, EXPECTED).findings] == ["lib/else.py"]


@pytest.mark.parametrize(
    ("kind", "where", "check", "change"),
    [
        ("user", "image", "user", lambda s, c: s.update(user=[0, 0])),
        ("user", "image", "user", lambda s, c: s.update(user=[10001, 0])),
        ("user", "image", "user", lambda s, c: c.update(User="")),
        ("environment", "HF_HUB_OFFLINE", "config", lambda s, c: c.update(Env=["HF_HUB_OFFLINE=0"])),
        ("environment", "HF_HUB_OFFLINE", "config", lambda s, c: c.update(Env=None)),
        ("label", "org.opencontainers.image.title", "config", lambda s, c: c.update(Labels=None)),
        ("config", "Entrypoint", "config", lambda s, c: c.update(Entrypoint=None)),
        ("config", "Entrypoint", "config", lambda s, c: c.update(Entrypoint=["sglang", "serve"])),
        ("config", "Healthcheck", "config", lambda s, c: c.pop("Healthcheck")),
        ("config", "Healthcheck", "config", lambda s, c: c["Healthcheck"].update(Test=["CMD", "false"])),
        ("config", "Healthcheck", "config", lambda s, c: c["Healthcheck"].update(StartPeriod=30 * 10**9)),
        ("python", "image", "python", lambda s, c: s.update(python="3.12.1")),
        ("python", "image", "python", lambda s, c: s.update(python="3.1.1")),
        ("version", "torch", "versions", lambda s, c: s["versions"].pop()),
        ("version", "torch", "versions", lambda s, c: s["versions"][1].__setitem__(1, "2.14.1")),
        ("version", "torch", "versions", lambda s, c: s["versions"].append(["torch", "2.13.0+cpu"])),
        ("version", "more", "versions", lambda s, c: s["versions"].append(["more", "1"])),
        ("file-changed", "a.py", "files", lambda s, c: s["record"]["wrong"].append("torch: a.py: other bytes")),
        ("file-changed", "torch", "files", lambda s, c: s["record"]["wrong"].append("torch: no RECORD")),
        ("file-claimed-twice", "a.py", "files", lambda s, c: s["record"]["clashes"].append("a.py: one and two")),
        ("record", "sglang", "files", lambda s, c: s["record"]["records"].update(sglang="x" * 64)),
        ("record", "sglang", "files", lambda s, c: s["record"]["records"].pop("sglang")),
        ("file-unknown", "extra.py", "files", lambda s, c: s["record"]["unowned"].update({"extra.py": "e" * 64})),
        ("stand-in", "sgl_kernel/__init__.py", "files", lambda s, c: s["record"]["unowned"].clear()),
        (
            "stand-in",
            "sgl_kernel/__init__.py",
            "files",
            lambda s, c: s["record"]["unowned"].update({"sgl_kernel/__init__.py": "e" * 64}),
        ),
        (
            "dependency-conflict",
            "sglang",
            "pip check",
            lambda s, c: s["pip_check"].append("sglang 0.5.23 requires numpy, which is not installed."),
        ),
        (
            "dependency-conflict",
            "torch",
            "pip check",
            lambda s, c: s["pip_check"].append("torch 2.13.0 requires build, which is not installed."),
        ),
        (
            "dependency-conflict",
            "pip check",
            "pip check",
            lambda s, c: s["pip_check"].append("torch 2.13.0 is not supported on this platform"),
        ),
        ("import", "torch", "imports", lambda s, c: s["imports"].update(torch={"ok": False, "detail": "no"})),
        ("command-line", "sglang serve --help", "command line", lambda s, c: s["command"].update(status=1)),
        ("loader", "fp4", "loader fp4", lambda s, c: s["modules"].update(fp4={"ok": False, "detail": "no libcudart"})),
        ("loader", "fp4", "loader fp4", lambda s, c: s["copies"]["fp4"].append("other/fp4.so")),
        ("loader", "fp4", "loader fp4", lambda s, c: s["modules"].update(fp4={"ok": True, "detail": "/tmp/fp4.so"})),
    ],
)
def test_each_fault_is_named_and_its_check_not_claimed(kind: str, where: str, check: str, change: Change) -> None:
    seen, config = copy.deepcopy(SEEN), copy.deepcopy(CONFIG)
    change(seen, config)
    report = image_check.judge(seen, config, EXPECTED)
    assert not report.ok
    assert (kind, where) in {(f.kind, f.where) for f in report.findings}
    assert check not in report.checks
    assert len(report.checks) == 8


def test_an_allowance_that_is_no_longer_needed_is_only_a_warning() -> None:
    seen = copy.deepcopy(SEEN)
    del seen["pip_check"][1]
    report = image_check.judge(seen, CONFIG, EXPECTED)
    assert report.ok
    (finding,) = report.findings
    assert (finding.kind, finding.where, finding.severity) == ("stale-allowance", "sglang", "warning")
    assert "build" in finding.message
    assert len(report.checks) == 9


# -- the script that runs inside ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inside() -> ModuleType:
    path = project_root() / "build" / "inside" / "image_check.py"
    spec = importlib.util.spec_from_file_location("inside_image_check", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(path: str, data: bytes) -> str:
    value = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{path},sha256={value},{len(data)}\n"


def install(site: Path, name: str, files: dict[str, bytes], *, claimed: dict[str, bytes] | None = None) -> None:
    """As pip leaves a wheel: its files, a RECORD with notes of the installer's own."""
    info = f"{name}-1.dist-info"
    files = files | {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n".encode()}
    notes = {f"{info}/INSTALLER": b"pip\n", f"{info}/REQUESTED": b""}
    for path, data in (files | notes).items():
        (site / path).parent.mkdir(parents=True, exist_ok=True)
        (site / path).write_bytes(data)
    text = "".join(row(path, data) for path, data in (files | notes | (claimed or {})).items())
    text += row(f"../../../bin/{name}", b"#!/opt/sglang/bin/python")
    (site / info / "RECORD").write_text(text + f"{info}/RECORD,,\n")
    (site.parents[2] / "bin").mkdir(exist_ok=True)
    (site.parents[2] / "bin" / name).write_bytes(b"#!/opt/sglang/bin/python")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "lib" / "python3.11" / "site-packages"
    folder.mkdir(parents=True)
    return folder


def test_whole_installations_are_seen_as_such(inside: ModuleType, site: Path) -> None:
    install(site, "one", {"one/__init__.py": b"", "shared/__init__.py": b""})
    install(site, "two", {"two.py": b"2", "shared/__init__.py": b""})
    (site / "stand_in.py").write_bytes(b"mine")
    found = inside.files(site)
    assert found["wrong"] == found["clashes"] == []
    assert found["files"] == 12
    assert found["unowned"] == {"stand_in.py": hashlib.sha256(b"mine").hexdigest()}
    assert found["records"].keys() == {"one", "two"}


def test_changed_missing_and_twice_claimed_files_are_seen(inside: ModuleType, site: Path) -> None:
    install(site, "one", {"kernel.so": b"one", "gone.py": b"x"})
    install(site, "two", {"kernel.so": b"two"})
    (site / "gone.py").unlink()
    found = inside.files(site)
    assert sorted(found["wrong"]) == [
        "one: gone.py: No such file or directory",
        "one: kernel.so: other bytes than its wheel's RECORD",
    ]
    assert len(found["clashes"]) == 1
    assert found["clashes"][0].startswith("kernel.so: ")


def test_an_installed_record_and_its_wheels_are_told_in_the_same_words(
    inside: ModuleType, site: Path, tmp_path: Path
) -> None:
    """Else a later installation that brought its own RECORD would look right."""
    install(site, "My_Pkg", {"my_pkg/__init__.py": b""})
    wheel = tmp_path / "wheel.whl"

    def write(changed: bytes) -> None:
        info = "My_Pkg-1.dist-info"
        metadata = b"Metadata-Version: 2.1\nName: My_Pkg\nVersion: 1\n"
        record = row("My_Pkg-1.data/platlib/my_pkg/__init__.py", changed) + row(f"{info}/METADATA", metadata)
        record += row("My_Pkg-1.data/scripts/My_Pkg", b"#!python") + f"{info}/RECORD,,\n"
        # some builders leave an installer's note in the wheel; pip writes its own
        record += row(f"{info}/INSTALLER", b"another")
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{info}/RECORD", record)

    write(b"")
    assert image_check.record_digest(wheel) == ("my-pkg", inside.files(site)["records"]["my-pkg"])
    write(b"other")
    assert image_check.record_digest(wheel)[1] != inside.files(site)["records"]["my-pkg"]


def test_a_file_that_is_no_wheel_is_an_integrity_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"nothing")
    with pytest.raises(IntegrityError, match="no wheel"):
        image_check.record_digest(tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "b", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(IntegrityError, match="one RECORD"):
        image_check.record_digest(tmp_path / "b")


def test_the_answer_survives_what_is_written_in_between(
    inside: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, site: Path
) -> None:
    install(site, "one", {f"one/{number}.py": bytes([number]) for number in range(200)})
    (site / "loose.txt").write_text("x")
    monkeypatch.setattr(inside.sysconfig, "get_path", lambda name: str(site))
    monkeypatch.setattr(inside, "pip_check", lambda: ["x" * 9000])
    assert (
        inside.main('{"imports": ["json"], "command": ["true"], "modules": {}, "cuda": "13.0", "tool_chain": null}')
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) < 16_000, "an engine splits longer lines"
    assert lines[-1] == "forge-image-check-end"
    assert sum(line.startswith("forge-image-check ") for line in lines) >= 3
