"""The container engine: find the one that answers, probe it, build with it, install one where none answers."""

from forge_core.engine.client import Engine, connect

__all__ = ["Engine", "connect"]
