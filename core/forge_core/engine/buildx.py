"""Build through BuildKit: one door, always the same deterministic settings, and errors that name the failing step."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forge_core.engine.client import HINT, Engine
from forge_core.errors import EnvironmentFailure, ForgeError, Refused, UsageError
from forge_core.explain import Evidence, LogFinding, explain
from forge_core.process import Completed, run

_GONE = re.compile(
    r"cannot connect to the docker daemon|failed to connect to the docker api|error reading from server"
    r"|code = Unavailable|connection refused|connection reset by peer|closing transport|dial unix",
    re.IGNORECASE,
)
_ERROR_LINE = re.compile(r"(?i)\b(?:fatal error|error|failed|traceback|exception|cannot|undefined|no such file)\b")
_STEP_LINE = re.compile(r"^#(\d+) (?:(?P<time>\d+\.\d+) (?P<said>.*)|(?P<note>.*))$")
_SHOWN = 12
"""Lines of the failing step that an error repeats."""


class StepFailed(Refused):
    """A RUN step ended with another status than 0 (exit 1): the compiler or a check inside says no."""

    def __init__(self, step: str, lines: tuple[str, ...], log: Path, hint: str | None = None) -> None:
        super().__init__(f"the build step `{step}` failed", hint=hint, log=log, details=lines)
        self.step = step


@dataclass(frozen=True)
class BuildResult:
    """What BuildKit says it made."""

    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The metadata file, field for field."""
    cached_steps: int = 0
    """Steps taken from the build cache."""

    @property
    def digest(self) -> str:
        """Digest of the manifest, which a registry pulls by; raises EnvironmentFailure if the exporter names none."""
        return self._named("containerimage.digest")

    @property
    def config_digest(self) -> str:
        """Digest of the image's config (the classic store's image id); raises as `digest` does."""
        return self._named("containerimage.config.digest")

    def _named(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise EnvironmentFailure(f"the build named no {key}", hint="an output of type oci names it; update buildx")
        return value


def build(
    engine: Engine,
    *,
    dockerfile: Path,
    context: Path,
    target: str | None = None,
    contexts: Mapping[str, Path | str] | None = None,
    args: Mapping[str, str] | None = None,
    output: str,
    epoch: int,
    log: Path,
    on_line: Callable[[str], None] | None = None,
    no_cache: bool = False,
    network: str = "none",
    timeout: float | None = None,
) -> BuildResult:
    """Build `target` of `dockerfile` and export it as `output` says (buildx's spelling, e.g. `type=oci,dest=FILE`).

    `contexts` are named contexts, `epoch` is SOURCE_DATE_EPOCH in seconds, `timeout` in seconds. A `dest` appears whole
    or not at all. Raises StepFailed (1) when a step fails, UsageError (2) for a Dockerfile that cannot be read,
    EnvironmentFailure (3) when the disk or the memory is full or the engine went away. An interrupt cancels the build.
    """
    trace = _Trace(on_line)
    with tempfile.TemporaryDirectory(prefix="forge-build-") as scratch, _aside(output) as export:
        metadata = Path(scratch) / "metadata.json"
        argv: list[str | Path] = [*engine.buildx, "build", "--builder", _builder(), "--progress=plain"]
        argv += ["--provenance=false", "--sbom=false", f"--network={network}", "--metadata-file", metadata]
        argv += ["--file", dockerfile, "--output", export, "--build-arg", f"SOURCE_DATE_EPOCH={epoch}"]
        for name, value in sorted((args or {}).items()):
            argv += ["--build-arg", f"{name}={value}"]
        for name, place in sorted((contexts or {}).items()):
            argv += ["--build-context", f"{name}={place}"]
        if target is not None:
            argv += ["--target", target]
        if no_cache:
            argv.append("--no-cache")
        completed = run([*argv, context], env={**engine.env}, log=log, on_line=trace.feed, timeout=timeout, check=False)
        if completed.returncode != 0:
            raise _failure(completed, trace, engine, dockerfile, log)
        found = json.loads(metadata.read_text(encoding="utf-8")) if metadata.is_file() else {}
    return BuildResult(found, trace.cached)


def _builder() -> str:
    # `default` is the engine's own BuildKit whatever `docker buildx use` chose; a classic image store needs another.
    return os.environ.get("FORGE_BUILDER") or "default"


class _Trace:
    """Follows the plain progress: which step said what, and which one failed."""

    def __init__(self, on_line: Callable[[str], None] | None) -> None:
        self._on_line = on_line
        self._names: dict[str, str] = {}
        self._said: dict[str, list[str]] = {}
        self._reasons: dict[str, str] = {}
        self.failed: str | None = None
        self.final = ""
        self.cached = 0

    def feed(self, line: str) -> None:
        """Take one line of output."""
        if match := _STEP_LINE.match(line):
            step, note = match[1], match["note"]
            if match["said"] is not None:
                self._said.setdefault(step, []).append(match["said"])
            elif note.startswith("["):
                self._names.setdefault(step, note)
            elif note == "CACHED":
                self.cached += 1
            elif note.startswith("ERROR:"):
                self.failed, self._reasons[step] = step, note.removeprefix("ERROR:").strip()
        elif line.startswith("ERROR:"):
            self.final = line.removeprefix("ERROR:").strip()
        if self._on_line:
            self._on_line(line)

    @property
    def step(self) -> str:
        """The failing step as the Dockerfile has it."""
        return self._names.get(self.failed or "", "?")

    @property
    def said(self) -> list[str]:
        """What the failing step wrote."""
        return self._said.get(self.failed or "", [])

    @property
    def reason(self) -> str:
        """Why it failed, in BuildKit's words."""
        return self._reasons.get(self.failed or "", "") or self.final


def first_errors(lines: list[str]) -> tuple[str, ...]:
    """The first lines that look like an error, with what follows them; without any, the last lines."""
    start = next((i for i, line in enumerate(lines) if _ERROR_LINE.search(line)), max(0, len(lines) - _SHOWN))
    return tuple(lines[start : start + _SHOWN])


def _cause(said: list[str], found: LogFinding | None) -> tuple[str, ...]:
    """What a step said from its cause line on; without one, its first errors."""
    if found is None or found.line is None or not found.known or found.line > len(said):
        return first_errors(said)
    return tuple(said[found.line - 1 : found.line - 1 + _SHOWN])


def _failure(completed: Completed, trace: _Trace, engine: Engine, dockerfile: Path, log: Path) -> ForgeError:
    tail = completed.stdout.splitlines()[-_SHOWN:]
    reason = " ".join(f"{trace.reason} {trace.final}".split())
    spoken = trace.said[-40:]
    found = explain([*trace.said, reason], Evidence(stage="build", exit_code=completed.returncode, over=True))
    kind = found.kind if found is not None else None
    if kind == "disk_full":
        return EnvironmentFailure(
            "no space left on the disk while building (the engine's, or that of the output)",
            hint="free space: `python -m forge_core store gc`, `docker builder prune`",
            log=log,
            details=first_errors(spoken) or tuple(tail),
        )
    if kind in ("oom_host", "oom_host_build", "terminated"):
        return EnvironmentFailure(
            f"the build step `{trace.step}` was killed, most likely for want of memory",
            hint="free memory, or build fewer units side by side",
            log=log,
            details=first_errors(spoken),
        )
    if "did not complete successfully" in reason:
        return StepFailed(trace.step, _cause(trace.said, found) or (reason,), log, found.hint if found else None)
    if _GONE.search(reason) or (not reason and _GONE.search("\n".join(tail))):
        return EnvironmentFailure(
            f"the engine at {engine.address} went away while building", hint=HINT, log=log, details=(reason,)
        )
    if "dockerfile parse error" in reason or "failed to read dockerfile" in reason:
        return UsageError(f"{dockerfile}: {reason}", log=log)
    return EnvironmentFailure(f"the build failed: {reason or 'no reason given'}", log=log, details=tuple(tail))


@contextmanager
def _aside(output: str) -> Iterator[str]:
    """The same output with its `dest` beside the real one, which it replaces at a clean end."""
    fields = next(csv.reader([output]))
    dest = next((f.partition("=")[2] for f in fields if f.startswith("dest=")), None)
    if dest is None or dest == "-":
        yield output
        return
    final = Path(dest).absolute()
    final.parent.mkdir(parents=True, exist_ok=True)
    aside = final.parent / f".{final.name}.{secrets.token_hex(4)}"
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="").writerow([f"dest={aside}" if f.startswith("dest=") else f for f in fields])
    try:
        yield buffer.getvalue()
        if aside.is_dir():
            shutil.rmtree(final, ignore_errors=True)
        else:
            with aside.open("rb") as stream:
                os.fsync(stream.fileno())
        aside.replace(final)
    finally:
        if aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)
