"""`python -m forge_core VERB`: the engine, the store and the log classifier, which both sides of the bar stand on."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from forge_core.cli import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb; returns its exit code."""
    parser = Parser("forge_core", "the container engine, the content-addressed store, and why a log ends")
    # Verbs live with what they drive; each module registers its own.
    for module in ("forge_core.engine.cli", "forge_core.store.cli", "forge_core.explain.cli"):
        if importlib.util.find_spec(module) is not None:
            importlib.import_module(module).register(parser)
    return parser.main(argv)


if __name__ == "__main__":
    sys.exit(main())
