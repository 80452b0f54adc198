"""`python -m forge_build VERB`: lock, build, and questions about one thing."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console as RichConsole

from forge_build import lock as locks
from forge_build import manifest as manifests
from forge_build import patch, pipeline
from forge_build import wheel_check as wheels
from forge_build.fetch.git.mirror import repositories
from forge_build.lock.diff import diff
from forge_build.lock.resolve import resolve
from forge_build.wheel_check import against, exports
from forge_core.cli import Parser
from forge_core.console import Console
from forge_core.errors import Refused, UsageError
from forge_core.store import Store


def lock(options: argparse.Namespace, console: Console) -> int:
    """Resolve a manifest, write its lock, print what changed."""
    manifest = manifests.load(options.profile)
    if options.offline:
        raise UsageError("a lock cannot be resolved offline", hint="leave --offline away")
    previous = locks.read(manifest.profile)
    mirrors = repositories(options.mirror)
    new = resolve(manifest, previous, Store.open(), upgrade=options.upgrade, console=console, mirrors=mirrors)
    changes = diff(previous, new)
    path = locks.save(new)
    if options.json:
        print(json.dumps([change.model_dump() for change in changes], indent=2))
    else:
        print("\n".join(map(str, changes)) or f"{path.name}: nothing changes")
    return 0


def build(options: argparse.Namespace, console: Console) -> int:
    """Run the build side of the line; print where the image is."""
    mirrors = repositories(options.mirror)
    record = pipeline.build(
        options.profile,
        offline=options.offline,
        keep=options.keep,
        console=console,
        mirrors=mirrors,
        subset=options.subset,
    )
    print(record.model_dump_json(indent=2) if options.json else record.image)
    return 0


def patches(options: argparse.Namespace, console: Console) -> int:
    """Say what each patch of a series would do to a source tree, which is left alone; 2 unless all apply."""
    for folder in (options.tree, options.series):
        if not folder.is_dir():
            raise UsageError(f"{folder} is no folder")
    rows = patch.table(options.version, options.tree.resolve(), options.series.resolve())
    if options.json:
        shown = [{"patch": row.patch.name, "outcome": str(row.outcome), "detail": row.detail} for row in rows]
        print(json.dumps(shown, indent=2))
    else:
        for row in rows:
            print(f"{row.outcome:<17} {row.patch.name}" + (f": {row.detail}" if row.detail else ""))
    return 0 if all(row.outcome is patch.Outcome.APPLIES for row in rows) else 2


def wheel_check(options: argparse.Namespace, console: Console) -> int:
    """Look into a wheel as it will be beside a lock's wheels; 1 when anything speaks against it."""
    lock = against.read_lock(options.against)
    with console.step("wheel check", options.file.name) as step:
        report = against.check_against(options.file, lock, offline=options.offline, console=console)
        step.result(wheels.summary(report))
    if options.json:
        print(json.dumps(report.as_json(), indent=2))
    else:
        table = RichConsole(highlight=False, width=None if sys.stdout.isatty() else 160)
        table.print(wheels.table(report))
        print("\n".join(wheels.lines(report)) or "nothing speaks against it")
    if not report.ok:
        errors = sum(f.severity == "error" for f in report.findings)
        raise Refused(f"{report.file}: {errors} finding{'s' if errors > 1 else ''} against the lock {lock.profile!r}")
    return 0


def torch_exports(options: argparse.Namespace, console: Console) -> int:
    """Make the lists anew that name the torch release of an undefined symbol."""
    made = exports.make(options.wheels, console)
    print(f"{exports.FILE.name}: {len(made.symbols)} symbols of torch {', '.join(made.releases)}")
    return 0


def schema(options: argparse.Namespace, console: Console) -> int:
    """Print the JSON schema of a manifest, for editors."""
    print(json.dumps(manifests.json_schema(), indent=2))
    return 0


def _mirror(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--mirror",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="take commits from git clones anywhere below it where they have them; may be given several times",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = Parser("forge_build", "from a manifest to an image in staging and its record")
    verb = parser.verb("lock", lock, "resolve a manifest to versions and sha256")
    verb.add_argument("--upgrade", action="store_true", help="resolve everything anew")
    _mirror(verb)
    verb = parser.verb("build", build, "build the image from locked inputs, push it to staging, write the record")
    _mirror(verb)
    verb.add_argument(
        "--subset",
        metavar="NAME",
        help="compile only this part of what can be had in parts (fp4), for a quick look; deviates",
    )
    verb = parser.verb("patches", patches, "what each patch of a series does to a source tree")
    verb.add_argument("tree", type=Path, metavar="TREE")
    verb.add_argument("--series", type=Path, required=True, metavar="FOLDER", help="folder with a file `series`")
    verb.add_argument("--version", required=True, help="version of the source, for the patches' Applies-To")
    verb = parser.verb("wheel-check", wheel_check, "what a wheel's bytes prove, against a lock")
    verb.add_argument("file", type=Path, metavar="FILE")
    verb.add_argument("--against", required=True, metavar="LOCK", help="path of a lock, or a profile's name")
    verb = parser.verb("torch-exports", torch_exports, "list which symbols differ between wheels of torch")
    verb.add_argument("wheels", type=Path, nargs="+", metavar="WHEEL")
    parser.verb("schema", schema, "print the JSON schema of a manifest")
    return parser.main(argv)


if __name__ == "__main__":
    sys.exit(main())
