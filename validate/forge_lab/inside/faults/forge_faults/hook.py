"""Wraps a module right after its import, whoever imports it."""

from __future__ import annotations

import importlib.abc
import importlib.util
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

Wrap = Callable[[Any], None]
"""Is given the module and replaces some of what it holds; raises AttributeError where that is not there."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds nothing by itself: lets the others find, and adds a step after the execution of the module."""

    def __init__(self, wraps: Mapping[str, Wrap]) -> None:
        self._wraps = wraps
        self._busy: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of a module that is to be wrapped; none for any other."""
        if name not in self._wraps or name in self._busy:
            return None
        self._busy.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy.discard(name)
        if spec is None or spec.loader is None:
            return spec
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._wraps[name](module)

        loader.exec_module = exec_module
        return spec
