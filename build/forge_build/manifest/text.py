"""Checked kinds of text in a manifest; each raises ValueError saying what is wrong with it."""

from __future__ import annotations

import re
from typing import Annotated
from urllib.parse import urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version
from pydantic import AfterValidator, StringConstraints

from forge_core.model import ImageRef

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]*$")]


def _requirement(text: str) -> str:
    try:
        requirement = Requirement(text)
    except InvalidRequirement as error:
        raise ValueError(f"{text!r} is no PEP 508 requirement: {str(error).splitlines()[0]}") from error
    if requirement.url:
        raise ValueError(f"{text!r} names an address; a lock names packages, versions and sha256")
    return text


def image_reference(text: str) -> str:
    """Hold a registry image to `repository@sha256:...`."""
    ImageRef.parse(text)
    return text


def _distribution(text: str) -> str:
    if text != canonicalize_name(text):
        raise ValueError(f"{text!r} must be spelled {canonicalize_name(text)!r}")
    return text


def version_text(text: str) -> str:
    """Hold a version to PEP 440, normalised."""
    try:
        return str(Version(text))
    except InvalidVersion as error:
        raise ValueError(f"{text!r} is no version (PEP 440)") from error


def git_address(text: str) -> str:
    """Transports git itself carries out; never one that runs a command, never a secret."""
    if urlsplit(text).scheme not in ("https", "ssh", "git", "http", "file") and not re.match(
        r"^[\w.-]+@[\w.-]+:", text
    ):
        raise ValueError(f"{text!r} is no https, ssh, git, http or file address")
    if urlsplit(text).password:
        raise ValueError("the address holds a password; git's own credential helpers have it")
    return text


Distribution = Annotated[Name, AfterValidator(_distribution)]
"""Name of a Python distribution, normalised (PEP 503)."""

RequirementText = Annotated[str, AfterValidator(_requirement)]
DebName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9.+-]+$")]
