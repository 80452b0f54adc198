"""`python -m forge_validate VERB`: the right side of the bar."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from forge_core.cli import Parser, work_folder
from forge_core.console import Console
from forge_core.errors import UsageError
from forge_core.explain import cli as explain
from forge_validate import catalogue, offline, receipt, recorded
from forge_validate.bench import ANY
from forge_validate.golden import document
from forge_validate.golden.make import Order, make
from forge_validate.pipeline import Wish, known_profile, validate


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = Parser("forge_validate", "judge a server by its answers; move the tag of a recorded image on a pass")
    verb = parser.verb("validate", _validate, "judge the recorded image (or --image, --url), move its tag on a pass")
    other = verb.add_mutually_exclusive_group()
    other.add_argument(
        "--image", metavar="REF", help="boot and judge this SGLang image, by tag or digest; no tag moves"
    )
    other.add_argument("--url", metavar="URL", help="judge the OpenAI-compatible server at URL; nothing is started")
    verb.add_argument("--served", metavar="NAME", help="the model to ask, where the server at URL serves several")
    verb.add_argument("--api-key-env", metavar="VARIABLE", help="the variable that holds that server's API key")
    verb.add_argument("--suite", metavar="NAME", help="ask this suite instead of the policy's; no tag moves")
    verb.add_argument("--answers", metavar="MODEL", help="hold the server to what this model is known to say")
    verb.add_argument(
        "--model",
        metavar="FOLDER",
        type=Path,
        help="judge this model folder instead of the recorded one; with --url: what the server is said to serve",
    )
    verb.add_argument("--record", metavar="FILE", type=Path, help="the build record (default work/PROFILE)")
    verb.add_argument("--no-promote", action="store_true", help="judge, but move no tag")
    verb = parser.verb(
        "judge", _judge, "judge recorded exchanges: each by itself, or with --profile as the suite of a profile"
    )
    verb.add_argument("--suite", metavar="NAME", help="with --profile: judge as this suite, not the policy's")
    verb.add_argument("exchanges", metavar="FILE", nargs="+", type=Path, help="exchanges, or folders of them")
    verb = parser.verb("golden", _golden, "record a golden file from a server that is trusted, with its own noise")
    verb.add_argument("--url", metavar="URL", help="the server; without it the recorded image is booted")
    verb.add_argument("--served", metavar="NAME", help="the model to ask, where the server at URL serves several")
    verb.add_argument("--api-key-env", metavar="VARIABLE", help="the variable that holds that server's API key")
    verb.add_argument("--suite", metavar="NAME", help="whose `golden` section says what to ask (default the policy's)")
    verb.add_argument("--answers", metavar="MODEL", help="which model it is, where the served name does not say")
    verb.add_argument(
        "--model", metavar="FOLDER", type=Path, help="the model's folder: it goes into the file by sha256"
    )
    verb.add_argument("--record", metavar="FILE", type=Path, help="the build record (default work/PROFILE)")
    verb.add_argument(
        "--why", metavar="TEXT", help="why this server may be trusted, in a sentence; it goes into the file"
    )
    verb.add_argument(
        "--out", metavar="FILE", type=Path, help="the file (default the model's among this package's own)"
    )
    verb.add_argument("--add", action="store_true", help="measure that file's prompts again, on a server started anew")
    parser.verb("suites", _suites, "list the suites: what each asks, and at most how many tokens that costs")
    verb = parser.verb("promote", _promote, "move the tag that a receipt allows, without another look at the server")
    verb.add_argument("receipt", metavar="RECEIPT", type=Path, help="results.json of a passed validation")
    explain.register(parser)
    return parser.main(argv)


def _validate(options: argparse.Namespace, console: Console) -> int:
    outcome = validate(
        Wish(
            profile=options.profile or ANY if options.url else known_profile(options.profile),
            model=options.model,
            record=options.record,
            image=options.image,
            url=options.url,
            served=options.served,
            api_key_env=options.api_key_env,
            suite=options.suite,
            answers=options.answers,
            no_promote=options.no_promote,
            keep=options.keep,
            offline=options.offline,
        ),
        console,
    )
    if options.json:
        sys.stdout.write(receipt.dumps(outcome.receipt))
    return outcome.exit_code


def _judge(options: argparse.Namespace, console: Console) -> int:
    if options.profile is None:
        if options.suite is not None:
            raise UsageError("--suite without --profile: each file is judged by itself then", hint="give a --profile")
        judged = offline.judge(options.exchanges, console)
        if options.json:
            sys.stdout.write(offline.dumps(judged))
        return offline.exit_code(judged)
    found = recorded.judge(known_profile(options.profile, boots=False), options.exchanges, console, options.suite)
    if options.json:
        sys.stdout.write(found.model_dump_json(indent=2) + "\n")
    return recorded.exit_code(found)


def _golden(options: argparse.Namespace, console: Console) -> int:
    profile = options.profile or ANY if options.url else known_profile(options.profile)
    wish = Wish(
        profile=profile,
        model=options.model,
        record=options.record,
        url=options.url,
        served=options.served,
        api_key_env=options.api_key_env,
        suite=options.suite,
        answers=options.answers,
        offline=options.offline,
    )
    work = work_folder(profile) / "golden"
    golden, path = make(Order(wish, options.why or "", options.out, options.add), work, console)
    console.say(f"golden     {path}: {len(golden.prompts)} prompts", "bold")
    if options.json:
        sys.stdout.write(document.dumps(golden))
    return 0


def _suites(options: argparse.Namespace, console: Console) -> int:
    found = catalogue.listed()
    if options.json:
        sys.stdout.write(json.dumps([one.model_dump(mode="json") for one in found], indent=2) + "\n")
    else:
        sys.stdout.write(catalogue.table(found))
    return 0


def _promote(options: argparse.Namespace, console: Console) -> int:
    moved = recorded.promote(options.receipt, options.profile, work_folder, console)
    if options.json:
        sys.stdout.write(moved.model_dump_json(indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
