"""The CI examples: what they retry, what they hand over, what they keep. Their form is linted by `nox -s lint`."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from forge_core import record
from forge_core.errors import ExitCode
from forge_validate import junit, promote, receipt
from forge_validate.options import LABEL

ROOT = Path(__file__).parents[2]
GITHUB = yaml.safe_load((ROOT / "docs/examples/github-actions.yml").read_text())
GITLAB = yaml.safe_load((ROOT / "docs/examples/gitlab-ci.yml").read_text())


def step(job: str, name: str) -> dict[str, Any]:
    (found,) = [s for s in GITHUB["jobs"][job]["steps"] if s["name"] == name]
    return dict(found)


def stub(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


@pytest.mark.parametrize(
    ("codes", "ends", "calls"),
    [
        ([0], 0, 1),
        ([1], 1, 1),
        ([2], 2, 1),
        ([4], 4, 1),
        ([5], 5, 1),
        ([130], 130, 1),
        ([3, 0], 0, 2),
        ([3, 1], 1, 2),
        ([3, 3, 0], 0, 3),
        ([3, 3, 5], 5, 3),
        ([3, 3, 3], 3, 3),
    ],
)
def test_only_the_environment_is_retried(codes: list[int], ends: int, calls: int, tmp_path: Path) -> None:
    chosen = step("validate", "Validate and promote")
    assert chosen["shell"] == "sh"
    # The codes end with one that must not be asked for: a call too many ends with 99.
    (tmp_path / "codes").write_text("".join(f"{code}\n" for code in [*codes, 99]))
    stub(
        tmp_path / ".venv/bin/nox",
        'echo "$@" >> calls\ncode=$(head -n 1 codes)\nsed -i 1d codes\nexit "$code"',
    )
    stub(tmp_path / "bin/sleep", 'echo "$1" >> pauses')
    (tmp_path / "step.sh").write_text(chosen["run"])
    given = {k: str(v) for k, v in chosen["env"].items() if "${{" not in str(v)}
    done = subprocess.run(
        ["sh", "-e", "step.sh"],  # as GitHub runs `shell: sh`
        cwd=tmp_path,
        env=given | {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "PROFILE": "sm120", "MODEL": "/models/a b"},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == ends, done.stdout + done.stderr
    called = (tmp_path / "calls").read_text().splitlines()
    expected = "-s validate -- --profile sm120 --model /models/a b --record work/sm120/handed-over/build-record.json"
    assert called == [expected] * calls
    pauses = (tmp_path / "pauses").read_text().splitlines() if calls > 1 else []
    assert pauses == [given["PAUSE_S"]] * (calls - 1)


def test_gitlab_retries_the_same() -> None:
    attempts = step("validate", "Validate and promote")["env"]["ATTEMPTS"]
    assert GITLAB["default"]["retry"] == {"max": attempts - 1, "exit_codes": [ExitCode.ENVIRONMENT]}
    assert not any("retry" in GITLAB[job] for job in ("build", "validate"))


def test_the_record_crosses_and_nothing_else() -> None:
    handed = step("build", "Hand over the record")["with"]
    assert handed["path"] == "work/${{ env.PROFILE }}/" + record.FILE_NAME
    assert handed["if-no-files-found"] == "error"
    taken = [s["with"] for s in GITHUB["jobs"]["validate"]["steps"] if "download-artifact" in s.get("uses", "")]
    assert [t["name"] for t in taken] == [handed["name"]]
    assert GITLAB["build"]["artifacts"] == {"paths": [f"work/$PROFILE/{record.FILE_NAME}"]}


def test_results_are_kept_whatever_the_outcome() -> None:
    keep = step("validate", "Keep receipt, JUnit and logs")
    assert keep["if"] == "always()"
    kept = {Path(line).name for line in keep["with"]["path"].split("\n") if line}
    names = {receipt.FILE_NAME, promote.FILE_NAME, "exchanges", "logs"}
    assert kept == names | {junit.FILE_NAME}
    artifacts = GITLAB["validate"]["artifacts"]
    assert artifacts["when"] == "always"
    assert {Path(path).name for path in artifacts["paths"]} == names
    assert artifacts["reports"] == {"junit": f"work/$PROFILE/{junit.FILE_NAME}"}


def test_least_privilege_and_one_run_at_a_time() -> None:
    assert GITHUB["permissions"] == {}
    assert [job["permissions"] for job in GITHUB["jobs"].values()] == [{"contents": "read"}] * 2
    assert GITHUB["concurrency"]["cancel-in-progress"] is False
    assert "pull_request" not in str(GITHUB[True])  # `on`, to YAML 1.1


def test_a_cancelled_run_is_cleaned_up_by_our_label() -> None:
    assert f'--filter "label={LABEL}=$PROFILE"' in step("validate", "Remove the server of a cancelled run")["run"]


def test_the_table_of_exit_codes_is_ours() -> None:
    rows = re.findall(r"^\| (\d+) \| .* \| (no|yes, twice) \|$", (ROOT / "docs/ci.md").read_text(), re.MULTILINE)
    assert {int(code): retried for code, retried in rows} == {
        code: "yes, twice" if code is ExitCode.ENVIRONMENT else "no" for code in ExitCode
    }


def test_one_version_of_nox() -> None:
    files = ["README.md", ".ci/run", "docs/examples/github-actions.yml", "docs/examples/gitlab-ci.yml"]
    found = {name: set(re.findall(r"nox\[uv\]==[\d.]+", (ROOT / name).read_text())) for name in files}
    assert len(set.union(*found.values())) == 1 and all(found.values()), found
