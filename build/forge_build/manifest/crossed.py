"""Mistakes between the sections of a manifest: names that must exist, or be unique, elsewhere in the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast

from pydantic_core import InitErrorDetails, PydanticCustomError


def crossed(data: Mapping[Any, Any]) -> Iterator[InitErrorDetails]:
    """Mistakes between sections of a raw manifest, whatever else is wrong with it."""

    def mistake(where: tuple[str, ...], text: str, found: object) -> InitErrorDetails:
        return InitErrorDetails(type=PydanticCustomError("crossed", cast(Any, text)), loc=where, input=found)

    def section(name: str) -> Mapping[Any, Any]:
        found = data.get(name)
        return found if isinstance(found, Mapping) else {}

    environments = section("environments")
    for name in sorted({"runtime", "builder"} - environments.keys()) if "environments" in data else ():
        yield mistake(("environments", name), "this environment is needed", None)
    for name in sorted(map(str, environments.keys() - {"runtime", "builder"})):
        yield mistake(("environments", name), "environments are `runtime` and `builder`", None)
    for name, wheel in section("wheels").items():
        source = wheel.get("source") if isinstance(wheel, Mapping) else None
        if isinstance(source, str) and source not in section("sources"):
            yield mistake(("wheels", str(name), "source"), "names no entry of `sources`", source)
    for name, environment in environments.items():
        asked = environment.get("requires_of") if isinstance(environment, Mapping) else None
        for source in asked if isinstance(asked, list | tuple) else ():
            there = section("sources").get(source)
            if not isinstance(there, Mapping) or "git" not in there:
                yield mistake(("environments", str(name), "requires_of"), "names no source from git", source)
    owner: dict[str, str] = {}
    for name, index in section("indexes").items():
        packages = index.get("packages") if isinstance(index, Mapping) else None
        for package in packages if isinstance(packages, list | tuple) else ():
            first = owner.setdefault(str(package), str(name))
            if first != str(name):
                yield mistake(("indexes", str(name), "packages"), f"the index {first!r} has it too", package)
