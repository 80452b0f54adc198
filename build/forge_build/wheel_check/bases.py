"""What a base has without any wheel: documented data by package of the distribution, no logic beyond looking up.

Sonames as Debian 12 and 13 and Ubuntu name their packages' files; a `t64` at the end of a package's name changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from forge_build.wheel_check.families import C_FAMILY

_COMPILER = frozenset({"libstdc++.so.6", "libgcc_s.so.1"})

LIBRARIES: dict[str, frozenset[str]] = {
    "libc6": C_FAMILY - _COMPILER,
    "libgcc-s1": frozenset({"libgcc_s.so.1"}),
    "libstdc++6": frozenset({"libstdc++.so.6"}),
    "libgomp1": frozenset({"libgomp.so.1"}),
    "libatomic1": frozenset({"libatomic.so.1"}),
    "libnuma1": frozenset({"libnuma.so.1"}),
    "libibverbs1": frozenset({"libibverbs.so.1"}),
    "librdmacm1": frozenset({"librdmacm.so.1"}),
    "zlib1g": frozenset({"libz.so.1"}),
    "libzstd1": frozenset({"libzstd.so.1"}),
    "liblzma5": frozenset({"liblzma.so.5"}),
    "libbz2-1.0": frozenset({"libbz2.so.1.0"}),
    "libssl3": frozenset({"libssl.so.3", "libcrypto.so.3"}),
    "libexpat1": frozenset({"libexpat.so.1"}),
    "libffi8": frozenset({"libffi.so.8"}),
    "libuuid1": frozenset({"libuuid.so.1"}),
    "libcrypt1": frozenset({"libcrypt.so.1"}),
}


def provided(packages: Iterable[str]) -> frozenset[str]:
    """The sonames that a root file system of these packages has; the C library's family where none is named.

    A base that a registry holds names no packages: it runs Python and pip's wheels, so it has the family.
    """
    named = [name.removesuffix("t64") for name in packages]
    if not named:
        return C_FAMILY
    return frozenset().union(*(LIBRARIES.get(name, frozenset()) for name in named))
