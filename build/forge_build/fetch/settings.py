"""What the user's pip and uv are told about indexes, folders and certificates: environment first, then pip's files."""

from __future__ import annotations

import configparser
import os
from pathlib import Path
from urllib.parse import unquote, urlsplit

import platformdirs

from forge_core.errors import EnvironmentFailure


def default_indexes() -> tuple[str, ...]:
    """Addresses of the default index; empty when nothing names one."""
    return _setting("index-url", "UV_DEFAULT_INDEX", "UV_INDEX_URL")


def extra_indexes() -> tuple[str, ...]:
    """Addresses of further indexes."""
    return _setting("extra-index-url", "UV_INDEX", "UV_EXTRA_INDEX_URL")


def folders() -> tuple[Path, ...]:
    """The find-links that are folders here."""
    found = []
    for value in _setting("find-links", "UV_FIND_LINKS"):
        parts = urlsplit(value)
        if parts.scheme in ("", "file"):
            found.append(Path(unquote(parts.path) if parts.scheme else value).expanduser())
    return tuple(found)


def certificates() -> tuple[str, ...]:
    """CA bundles of pip's files; those of the environment are the client's own business."""
    return tuple(str(Path(value).expanduser()) for value in _from_files("cert"))


def no_index() -> bool:
    """Whether pip or uv must not ask any index."""
    values = (os.environ.get("PIP_NO_INDEX", ""), os.environ.get("UV_NO_INDEX", ""), *_from_files("no-index"))
    return any(value.lower() in ("1", "true", "yes", "on") for value in values)


def _setting(option: str, *uv_variables: str) -> tuple[str, ...]:
    found: list[str] = []
    for name in (f"PIP_{option.upper().replace('-', '_')}", *uv_variables):
        text = os.environ.get(name, "")
        # uv separates folders by commas and may name its indexes
        parts = text.replace(",", " ").split() if name == "UV_FIND_LINKS" else text.split()
        found += [part.split("=", 1)[1] if name.startswith("UV_") and _is_named(part) else part for part in parts]
    return tuple(dict.fromkeys([*found, *_from_files(option)]))


def _is_named(part: str) -> bool:
    """Whether it reads `name=address`."""
    name, separator, rest = part.partition("=")
    return bool(separator) and "/" not in name and "://" in rest


def _from_files(option: str) -> list[str]:
    values: list[str] = []
    parser = configparser.RawConfigParser()
    own = os.environ.get("PIP_CONFIG_FILE")
    files = []
    # pip reads no file at all when told this one
    if own != os.devnull:
        site = platformdirs.site_config_dir(multipath=True).split(os.pathsep)
        files = [Path(folder) / "pip/pip.conf" for folder in reversed(site)]
        files += [Path("/etc/pip.conf"), Path.home() / ".pip/pip.conf"]
        files += [platformdirs.user_config_path("pip") / "pip.conf"]
        files += [Path(own)] if own else []
    try:
        parser.read(files, encoding="utf-8")
    except (configparser.Error, UnicodeDecodeError) as error:
        raise EnvironmentFailure(f"a configuration file of pip cannot be read: {error}") from error
    for section in ("global", "install", "download"):
        values += parser.get(section, option, fallback="").split()
    return values
