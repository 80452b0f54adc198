"""YAML as plain data, strictly: a key given twice is a mistake, where YAML readers silently keep the last one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from forge_core.errors import UsageError

# libyaml's where PyYAML was built with it: a lock is read ten times faster
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def read(path: Path) -> tuple[Any, tuple[str, ...]]:
    """The file's data and a line for each key given twice; raises UsageError with line and column if it is no YAML."""
    try:
        loader = _Loader(path.read_bytes().decode("utf-8"))
        try:
            node = loader.get_single_node()
            twice = tuple(_twice(node, ())) if node is not None else ()
            return (loader.construct_document(node) if node is not None else None), twice
        finally:
            loader.dispose()
    except FileNotFoundError as error:
        raise UsageError(f"{path} does not exist") from error
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise UsageError(f"{path}: not YAML: {' '.join(str(error).split())}") from error


def read_yaml(path: Path) -> Any:
    """Read a YAML file as plain data; raises UsageError for what is no YAML and for keys given twice."""
    data, twice = read(path)
    if twice:
        raise UsageError(f"{path}: {len(twice)} key{'s' if len(twice) > 1 else ''} given twice", details=twice)
    return data


def _twice(node: yaml.Node, where: tuple[str, ...]) -> Iterator[str]:
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "(no plain key)"
            line = key.start_mark.line + 1
            if name in lines:
                yield f"{'.'.join((*where, name))}: given twice, in lines {lines[name]} and {line}"
            lines.setdefault(name, line)
            yield from _twice(value, (*where, name))
    elif isinstance(node, yaml.SequenceNode):
        for number, item in enumerate(node.value):
            yield from _twice(item, (*where, str(number)))
