"""Judging what was seen in the image: pure, from values to findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from forge_build.image_check import tool_chain
from forge_build.image_check.tool_chain import ToolChain
from forge_build.manifest import AllowedConflict, AllowedFile
from forge_core.model import Finding

_CONFLICT = re.compile(
    r"^(?P<package>\S+) \S+ (?:requires (?P<missing>[^\s,]+), which is not installed"
    r"|has requirement (?P<other>[A-Za-z0-9._-]+))"
)


@dataclass(frozen=True)
class Expected:
    """What the image must be."""

    python: str
    """Major.minor."""
    versions: Mapping[str, str]
    """Distribution -> version: the lock's and those made here."""
    records: Mapping[str, str]
    """Distribution -> digest of its wheel's RECORD (`wheels.record_digest`)."""
    stand_ins: Mapping[str, str]
    """Path below site-packages -> sha256 of every file that no wheel brings."""
    user: str
    """`uid:gid`."""
    environment: Mapping[str, str]
    labels: Mapping[str, str]
    allowed_conflicts: Sequence[AllowedConflict]
    allowed_files: Sequence[AllowedFile]
    entry: Sequence[str]
    """The entry point."""
    health: Sequence[str]
    """The health check's command."""
    start_period: int
    """Of the health check, seconds."""
    tool_chain: ToolChain | None
    """None: the image shall have none."""

    @property
    def command(self) -> str:
        """What the entry point starts, for people."""
        return " ".join(self.entry).partition(" -- ")[2]


@dataclass(frozen=True)
class ImageReport:
    """What the check saw."""

    checks: dict[str, str]
    """Check -> what it saw, for people and the record; only those without a fault."""
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """No finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


def judge(seen: Mapping[str, Any], config: Mapping[str, Any], expected: Expected) -> ImageReport:
    """Judge what the script saw inside and the image's config as the engine tells it."""
    record = seen["record"]
    rows: list[tuple[str, str, list[Finding]]] = [
        ("user", f"uid {seen['user'][0]}, gid {seen['user'][1]}", _user(seen["user"], config, expected)),
        ("config", _config_says(config, expected), _config(config, expected)),
        ("python", seen["python"], _python(seen["python"], expected.python)),
        ("versions", f"{len(seen['versions'])} distributions, as locked", _versions(seen["versions"], expected)),
        (
            "files",
            f"{record['files']} installed files equal the RECORD of {len(record['records'])} wheels",
            _files(record, expected),
        ),
        ("pip check", f"{len(seen['pip_check'])} complaints, all allowed with a reason", _conflicts(seen, expected)),
        ("imports", ", ".join(seen["imports"]), _attempts("import", seen["imports"])),
        ("command line", f"{expected.command} --help ends with 0", _command(seen["command"], expected)),
    ]
    if expected.tool_chain is not None:
        rows += tool_chain.judge(seen["tool_chain"], expected.tool_chain, expected.allowed_files)
    for name, outcome in seen["modules"].items():
        rows.append(
            (f"loader {name}", outcome["detail"], _loader(name, outcome, seen["copies"].get(name, []), expected.python))
        )
    passed = {name: text for name, text, findings in rows if not any(f.severity == "error" for f in findings)}
    return ImageReport(passed, tuple(finding for _, _, findings in rows for finding in findings))


def _user(user: Sequence[int], config: Mapping[str, Any], expected: Expected) -> list[Finding]:
    found = []
    if 0 in user:
        found.append(Finding(kind="user", where="image", message="runs as root"))
    if config.get("User") != expected.user or ":".join(map(str, user)) != expected.user:
        message = f"the image names {config.get('User')!r} and runs as {user[0]}:{user[1]}, not as {expected.user}"
        found.append(Finding(kind="user", where="image", message=message))
    return found


def _config(config: Mapping[str, Any], expected: Expected) -> list[Finding]:
    environment = dict(entry.partition("=")[::2] for entry in config.get("Env") or ())
    found = [
        *_differences("environment", expected.environment, environment),
        *_differences("label", expected.labels, config.get("Labels") or {}),
    ]
    for field in ("Entrypoint", "Healthcheck", "StopSignal"):
        if not config.get(field):
            found.append(Finding(kind="config", where=field, message="the image has none"))
    if config.get("Entrypoint") and config["Entrypoint"] != list(expected.entry):
        found.append(Finding(kind="config", where="Entrypoint", message=f"another command: {config['Entrypoint']}"))
    health = config.get("Healthcheck") or {}
    if health and health.get("Test") != ["CMD", *expected.health]:
        found.append(Finding(kind="config", where="Healthcheck", message=f"another command: {health.get('Test')}"))
    if health and health.get("StartPeriod") != expected.start_period * 10**9:
        message = (
            f"intended a start period of {expected.start_period} s, found {health.get('StartPeriod', 0) / 1e9:g} s"
        )
        found.append(Finding(kind="config", where="Healthcheck", message=message))
    return found


def _config_says(config: Mapping[str, Any], expected: Expected) -> str:
    entry = " ".join(config.get("Entrypoint") or ())
    return f"{entry}; {len(expected.environment)} variables and {len(expected.labels)} labels as intended"


def _differences(kind: str, wanted: Mapping[str, str], found: Mapping[str, str]) -> Iterable[Finding]:
    for name, value in sorted(wanted.items()):
        if found.get(name) != value:
            shown = repr(found[name]) if name in found else "not at all"
            yield Finding(kind=kind, where=name, message=f"intended {value!r}, found {shown}")


def _python(found: str, wanted: str) -> list[Finding]:
    if found.split(".")[:2] == wanted.split("."):
        return []
    return [Finding(kind="python", where="image", message=f"Python {found}, the manifest's wheels are for {wanted}")]


def _versions(installed: Sequence[Sequence[str]], expected: Expected) -> list[Finding]:
    found: dict[str, str] = {}
    rows = []
    for name, version in installed:
        if name in found:
            message = f"installed twice: {found[name]} and {version}"
            rows.append(Finding(kind="version", where=name, message=message))
        found[name] = version
    for name in sorted(expected.versions.keys() | found.keys()):
        locked, there = expected.versions.get(name, "not at all"), found.get(name, "not at all")
        if locked != there:
            rows.append(Finding(kind="version", where=name, message=f"locked {locked}, installed {there}"))
    return rows


def _files(record: Mapping[str, Any], expected: Expected) -> list[Finding]:
    told = [
        # "DISTRIBUTION: PATH: what is wrong", "DISTRIBUTION: no RECORD", "PATH: one and another"
        *(("file-changed", text.split(": ")[-2 if text.count(": ") == 1 else 1], text) for text in record["wrong"]),
        *(("file-claimed-twice", text.split(": ")[0], text) for text in record["clashes"]),
    ]
    rows = [
        Finding(kind=kind, where=path, message=text)
        for kind, path, text in told
        if not any(fnmatchcase(path, one.path) for one in expected.allowed_files)
    ]
    for name in sorted(expected.records.keys() | record["records"].keys()):
        if expected.records.get(name) != record["records"].get(name):
            message = "the installed RECORD is not that of the wheel in the store: something else was installed over it"
            rows.append(Finding(kind="record", where=name, message=message))
    for path in sorted(record["unowned"].keys() | expected.stand_ins.keys()):
        wanted, found = expected.stand_ins.get(path), record["unowned"].get(path)
        if wanted is None:
            rows.append(Finding(kind="file-unknown", where=path, message=f"{path}: no wheel and no stand-in brings it"))
        elif found != wanted:
            message = f"{path}: the stand-in's file is {'another' if found else 'missing, or belongs to a wheel'}"
            rows.append(Finding(kind="stand-in", where=path, message=message))
    return rows


def _conflicts(seen: Mapping[str, Any], expected: Expected) -> list[Finding]:
    known = {(a.package, requirement) for a in expected.allowed_conflicts for requirement in a.requirements}
    used, rows = set(), []
    for line in seen["pip_check"]:
        match = _CONFLICT.match(line)
        pair = (_normal(match["package"]), _normal(match["missing"] or match["other"])) if match else ("", line)
        if pair in known:
            used.add(pair)
        else:
            rows.append(Finding(kind="dependency-conflict", where=pair[0] or "pip check", message=line))
    for pair in sorted(known - used):
        message = f"the allowed conflict with {pair[1]} no longer occurs: take it out of the manifest"
        rows.append(Finding(kind="stale-allowance", where=pair[0], message=message, severity="warning"))
    return rows


def _attempts(kind: str, outcomes: Mapping[str, Any]) -> list[Finding]:
    return [Finding(kind=kind, where=name, message=o["detail"]) for name, o in outcomes.items() if not o["ok"]]


def _command(outcome: Mapping[str, Any], expected: Expected) -> list[Finding]:
    if outcome["status"] == 0:
        return []
    last = (outcome["tail"].strip().splitlines() or ["no output"])[-1]
    message = f"ends with {outcome['status']}: {last}"
    return [Finding(kind="command-line", where=f"{expected.command} --help", message=message)]


def _loader(name: str, outcome: Mapping[str, Any], copies: Sequence[str], python: str) -> list[Finding]:
    if not outcome["ok"]:
        return [Finding(kind="loader", where=name, message=outcome["detail"])]
    if len(copies) != 1 or not outcome["detail"].endswith(f"/lib/python{python}/site-packages/{copies[0]}"):
        message = f"loaded {outcome['detail']}, while site-packages has {', '.join(copies) or 'none'}"
        return [Finding(kind="loader", where=name, message=message)]
    return []


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
