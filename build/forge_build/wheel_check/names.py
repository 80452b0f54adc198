"""Mangled names as people read them."""

from __future__ import annotations

import cpp_demangle

_LONGEST = 120


def demangled(name: str) -> str:
    """A C++ symbol as its source spells it, with the mangled name behind it; any other as it is."""
    plain = _plain(name)
    return name if plain == name else f"{plain} [{name}]"


def demangled_kernel(name: str) -> str:
    """A kernel as its source spells it, without its parameters, cut where a template's arguments fill a page."""
    plain = _plain(name).removeprefix("void ")
    depth = 0
    for at, character in enumerate(plain):
        depth += (character in "<({[") - (character in ">)}]")
        # the parameters' parenthesis; that of `(anonymous namespace)` begins a name
        if character == "(" and depth == 1 and not plain.startswith("(anonymous", at):
            plain = plain[:at]
            break
    return plain if len(plain) <= _LONGEST else plain[:_LONGEST] + "..."


def _plain(name: str) -> str:
    if not name.startswith("_Z"):
        return name
    try:
        return str(cpp_demangle.demangle(name))
    except ValueError:
        return name
