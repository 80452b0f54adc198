"""The verb `store`: verify, collect, carry."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forge_core.cli import Parser, walk_parser
from forge_core.console import Console, size
from forge_core.errors import EnvironmentFailure, IntegrityError
from forge_core.store import Store
from forge_core.store.gc import collect
from forge_core.store.names import known_names, lock_files, named, tree_objects, trees
from forge_core.store.transfer import export_to, import_from
from forge_core.store.verify import verify

Action = Callable[[argparse.Namespace, Console], dict[str, Any]]


def register(parser: Parser) -> None:
    """Add the verb with its actions."""
    verb = parser.verb("store", _store, "verify, collect, export or import the content-addressed store")
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True)

    def add(name: str, action: Action, summary: str) -> argparse.ArgumentParser:
        walk = walk_parser()
        for option in walk._actions:
            # or an option given before the action would be reset by the action's own default
            option.default = argparse.SUPPRESS
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=summary, description=summary, parents=[walk], allow_abbrev=False
        )
        made.set_defaults(run=action)
        return made

    add("verify", _verify, "hash every object, delete what is wrong (exit 5)")
    gc = add("gc", _gc, "drop what no lock of this checkout names and nobody used lately, and stale partials")
    gc.add_argument("--older-than", type=_days, default=30.0, metavar="DAYS", help="spare what was used since (30)")
    gc.add_argument("--dry-run", action="store_true", help="say what would go, drop nothing")
    export = add("export", _export, "copy what the locks name into a folder to carry")
    export.add_argument("folder", type=Path, metavar="FOLDER")
    export.add_argument("--derived", action="store_true", help="also what was made here: bases, wheels, models")
    add("import", _import, "bring an exported folder in, every byte verified").add_argument(
        "folder", type=Path, metavar="FOLDER"
    )


def _days(text: str) -> float:
    days = float(text)
    if not 0 <= days < 36500:
        raise argparse.ArgumentTypeError(f"{text} is no number of days")
    return days


def _store(options: argparse.Namespace, console: Console) -> None:
    data = options.run(options, console)
    if options.json:
        print(json.dumps(data))
    if data.get("wrong"):
        raise IntegrityError(
            f"{len(data['wrong'])} objects of the store had other bytes and were deleted",
            details=tuple(data["wrong"]),
            hint="the next run fetches or makes them again; a disk that changes bytes wants attention",
        )


def _verify(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    store = Store.open()
    names = known_names(store)
    try:
        names |= {item.sha256: item.name for item in named(lock_files()).values()}
    except EnvironmentFailure:
        console.say("note: outside a checkout, so few objects have a name")
    with console.step("verify", str(store.root)) as step:
        seen = verify(store, names, step)
        step.result(f"{seen.objects} objects, {size(seen.size)}, {len(seen.wrong)} wrong")
    return {"store": str(store.root)} | dataclasses.asdict(seen)


def _gc(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    store = Store.open()
    locks = lock_files()
    wanted = named(locks) | tree_objects(store, trees(locks))
    with console.step("gc", f"{store.root}, {len(wanted)} files named by locks") as step:
        done = collect(store, wanted, older_than_days=options.older_than, dry_run=options.dry_run)
        step.result(
            f"{size(done.freed)} {'would be ' if options.dry_run else ''}freed: {done.objects} objects,"
            f" {done.entries} entries, {done.partials} partials; {done.kept} objects kept, {size(done.kept_bytes)}"
        )
    return {"store": str(store.root), "dry_run": options.dry_run, "freed": done.freed} | dataclasses.asdict(done)


def _export(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    store = Store.open()
    locks = lock_files(options.profile)
    wanted = named(locks)
    sources = trees(locks)
    archives = tree_objects(store, sources)
    if len(archives) < len(sources):
        raise EnvironmentFailure(
            f"{len(sources) - len(archives)} of {len(sources)} source trees are not in {store.root}",
            hint="`nox -s build -- --profile NAME` brings them; --profile limits the export to one lock",
        )
    wanted |= archives
    with console.step("export", str(options.folder)) as step:
        done = export_to(store, options.folder.absolute(), wanted, derived=options.derived, step=step)
        step.result(f"{done.objects} objects, {size(done.size)}, {done.new} copied")
    return {"folder": str(options.folder)} | dataclasses.asdict(done)


def _import(options: argparse.Namespace, console: Console) -> dict[str, Any]:
    store = Store.open()
    with console.step("import", f"{options.folder} into {store.root}") as step:
        done = import_from(store, options.folder.absolute(), step)
        step.result(f"{done.objects} objects, {size(done.size)}, {done.new} new")
    return {"store": str(store.root)} | dataclasses.asdict(done)
