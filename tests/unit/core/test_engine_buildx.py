"""What buildx is asked, and what is made of what it says; a script stands in for buildx and repeats recorded output."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from forge_core.engine import Engine, buildx
from forge_core.engine import probe as probing
from forge_core.errors import EnvironmentFailure, ExitCode, ForgeError, Refused, UsageError

FAILED_STEP = """\
#1 [internal] load build definition from Dockerfile
#1 transferring dockerfile: 120B done
#1 DONE 0.0s
#5 [builder 2/3] RUN echo fine
#5 0.100 fine
#5 CACHED
#6 [builder 3/3] RUN make
#6 0.101 compiling a.cu
#6 0.200 a.cu(12): error: identifier "x" is undefined
#6 0.201
#6 0.202 1 error detected in the compilation of "a.cu".
#6 ERROR: process "/bin/sh -c make" did not complete successfully: exit code: 2
------
 > [builder 3/3] RUN make:
0.101 compiling a.cu
------
ERROR: failed to build: failed to solve: process "/bin/sh -c make" did not complete successfully: exit code: 2
"""


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    """An engine whose buildx repeats what SAYS holds, records its arguments and writes what is asked for."""
    script = tmp_path / "docker-buildx"
    script.write_text(
        "#!/bin/sh\n"
        f'printf "%s\\n" "$@" >{tmp_path}/argv; env >{tmp_path}/env\n'
        "while [ $# -gt 0 ]; do\n"
        f'  case $1 in --metadata-file) [ -e {tmp_path}/metadata ] && cat {tmp_path}/metadata >"$2";;\n'
        "    --output) dest=${2##*dest=}; dest=${dest%%,*}; echo half >$dest;; esac\n"
        "  shift\n"
        "done\n"
        f"cat {tmp_path}/says; exit $(cat {tmp_path}/code)\n"
    )
    script.chmod(0o755)
    (tmp_path / "code").write_text("0")
    (tmp_path / "says").write_text("")
    return Engine(
        client=Mock(),
        address="unix:///x.sock",
        buildx=(str(script),),
        buildx_version="0.29.1",
        version="28.5.2",
        store="containerd",
        id="e",
        owned=False,
        remote=False,
        env={"DOCKER_HOST": "unix:///x.sock"},
    )


def build(engine: Engine, folder: Path, **more: object) -> buildx.BuildResult:
    (folder / "Dockerfile").touch()
    settings: dict[str, object] = {
        "dockerfile": folder / "Dockerfile",
        "context": folder,
        "output": f"type=oci,dest={folder}/out/image.tar,rewrite-timestamp=true",
        "epoch": 17,
        "log": folder / "log",
    }
    return buildx.build(engine, **(settings | more))  # type: ignore[arg-type]


def fails(engine: Engine, folder: Path, says: str) -> ForgeError:
    (folder / "says").write_text(says)
    (folder / "code").write_text("1")
    with pytest.raises(ForgeError) as caught:
        build(engine, folder)
    assert list((folder / "out").iterdir()) == [], "half-written output is gone"
    return caught.value


def test_what_is_asked(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "metadata").write_text(
        json.dumps({"containerimage.digest": "sha256:a", "containerimage.config.digest": "sha256:b"})
    )
    lines: list[str] = []
    (tmp_path / "says").write_text("#5 CACHED\n#6 0.1 hello\n")
    result = build(
        engine,
        tmp_path,
        target="runtime",
        contexts={"wheels": tmp_path / "w"},
        args={"B": "2", "A": "1"},
        on_line=lines.append,
        no_cache=True,
    )
    assert (result.digest, result.config_digest, result.cached_steps) == ("sha256:a", "sha256:b", 1)
    assert lines == ["#5 CACHED", "#6 0.1 hello"]
    assert (tmp_path / "out/image.tar").read_text() == "half\n"
    argv = (tmp_path / "argv").read_text().splitlines()
    for wanted in ("--provenance=false", "--sbom=false", "--network=none", "--progress=plain", "--no-cache"):
        assert wanted in argv
    pairs = list(itertools.pairwise(argv))
    for pair in (
        ("--builder", "default"),
        ("--target", "runtime"),
        ("--build-context", f"wheels={tmp_path}/w"),
        ("--build-arg", "A=1"),
        ("--build-arg", "SOURCE_DATE_EPOCH=17"),
    ):
        assert pair in pairs
    assert "DOCKER_HOST=unix:///x.sock" in (tmp_path / "env").read_text()


def test_an_export_without_a_digest(engine: Engine, tmp_path: Path) -> None:
    result = build(engine, tmp_path)
    with pytest.raises(EnvironmentFailure, match=r"containerimage\.digest"):
        _ = result.digest


def test_a_failed_step(engine: Engine, tmp_path: Path) -> None:
    error = fails(engine, tmp_path, FAILED_STEP)
    assert isinstance(error, Refused) and isinstance(error, buildx.StepFailed)
    assert error.step == "[builder 3/3] RUN make"
    assert error.details[0] == 'a.cu(12): error: identifier "x" is undefined'
    assert error.log == tmp_path / "log"


@pytest.mark.parametrize(
    ("says", "kind", "code", "text"),
    [
        (
            "#6 [2/2] RUN x\n#6 0.1 cp: error writing 'x': No space left on device\n"
            '#6 ERROR: process "x" did not complete successfully: exit code: 1\n',
            EnvironmentFailure,
            3,
            "no space left",
        ),
        ("ERROR: failed to copy to tar: write /x: no space left on device\n", EnvironmentFailure, 3, "no space left"),
        (
            "#6 [2/2] RUN x\n#6 0.1 compiling\n"
            '#6 ERROR: process "x" did not complete successfully: exit code: 137\nERROR: failed to solve\n',
            EnvironmentFailure,
            3,
            "memory",
        ),
        (
            "ERROR: Cannot connect to the Docker daemon at unix:///x.sock. Is the docker daemon running?\n",
            EnvironmentFailure,
            3,
            "went away",
        ),
        (
            "#6 [2/2] RUN sleep\n#6 ERROR: failed to receive status: rpc error: code = Unavailable desc = error"
            " reading from server: EOF\nERROR: failed to build: rpc error: code = Unavailable\n",
            EnvironmentFailure,
            3,
            "went away",
        ),
        ("ERROR: failed to solve: dockerfile parse error on line 1: unknown instruction: X\n", UsageError, 2, "parse"),
        ("ERROR: something nobody has seen\n", EnvironmentFailure, 3, "nobody has seen"),
    ],
)
def test_causes_are_told_apart(
    engine: Engine, tmp_path: Path, says: str, kind: type[ForgeError], code: int, text: str
) -> None:
    error = fails(engine, tmp_path, says)
    assert type(error) is kind and error.exit_code == ExitCode(code) and text in error.message


def test_an_old_output_is_kept_when_the_build_fails(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/image.tar").write_text("whole")
    (tmp_path / "code").write_text("1")
    with pytest.raises(ForgeError):
        build(engine, tmp_path)
    assert [p.read_text() for p in (tmp_path / "out").iterdir()] == ["whole"]


def test_first_errors_without_any_are_the_last_lines() -> None:
    assert buildx.first_errors([f"line {i}" for i in range(40)])[-1] == "line 39"
    assert buildx.first_errors([]) == ()


@pytest.mark.parametrize(
    ("says", "hint"),
    [
        (
            "ERROR: failed to build: OCI exporter is not supported for the docker driver.\n"
            "Switch to a different driver, or turn on the containerd image store, and try again.\n",
            "containerd-snapshotter",
        ),
        ("unknown flag: --provenance\n", "BuildKit 0.13"),
        ("ERROR: failed to solve: unknown option rewrite-timestamp\n", "BuildKit 0.13"),
    ],
)
def test_the_probe_says_what_to_change(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, hint: str
) -> None:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    (tmp_path / "says").write_text(says)
    (tmp_path / "code").write_text("1")
    with pytest.raises(EnvironmentFailure) as caught:
        probing.probe(engine)
    assert hint in (caught.value.hint or "")
    assert not (tmp_path / "store" / probing.FILE_NAME).exists()


def test_the_probe_refuses_two_digests(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    digests = iter(("sha256:a", "sha256:b", "sha256:c", "sha256:c"))
    monkeypatch.setattr(probing, "_build", lambda *_: next(digests))
    with pytest.raises(EnvironmentFailure, match="two digests"):
        probing.probe(engine)
    assert probing.probe(engine) is False, "a refusal is not remembered"
    assert probing.probe(engine) is True
    monkeypatch.setenv("FORGE_BUILDER", "other")
    digests = iter(("sha256:c", "sha256:c"))
    assert probing.probe(engine) is False, "another builder is another engine"


def test_the_probe_builds_from_files_of_two_times(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    def fake(engine: Engine, *, context: Path, **_: object) -> Mock:
        seen.append((context / "file").stat().st_mtime)
        return Mock(digest="sha256:a")

    monkeypatch.setenv("FORGE_STORE", str(tmp_path / "store"))
    monkeypatch.setattr(probing.buildx, "build", fake)
    probing.probe(engine)
    assert len(set(seen)) == 2
