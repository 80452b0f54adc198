"""The verb `engine`: start or stop the container engine and the staging registry on loopback."""

from __future__ import annotations

import argparse
import json

from forge_core.cli import Parser
from forge_core.console import Console
from forge_core.engine import install
from forge_core.registry import local


def register(parser: Parser) -> None:
    """Add the verb."""
    verb = parser.verb("engine", _engine, "start a container engine and a staging registry where none answers")
    verb.add_argument("--stop", action="store_true", help="stop what this verb started, and nothing else")


def _engine(options: argparse.Namespace, console: Console) -> None:
    if options.stop:
        stopped = {"registry": local.stop(console), "engine": install.stop(console)}
        if options.json:
            print(json.dumps({"stopped": stopped}))
        return
    engine = install.ensure(console)
    registry = local.ensure(console)
    if engine.remote:
        console.say(
            f"note: the engine is on another machine and cannot pull from {registry}; name a registry both reach"
        )
    if options.json:
        data = {
            "address": engine.address,
            "version": engine.version,
            "buildx": engine.buildx_version,
            "store": engine.store,
            "owned": engine.owned,
            "remote": engine.remote,
            "probe": "passed",
            "registry": registry,
        }
        print(json.dumps(data))
    engine.client.close()
