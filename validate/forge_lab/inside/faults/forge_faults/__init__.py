"""Faults inside a running SGLang (written against 0.5.23): wrapped when its modules are imported, switched by a file.

Imports the standard library; torch and SGLang's own modules only when a fault is on. Every process of the server
(tokenizer, scheduler, detokenizer) loads this and follows the same switch.
"""

from __future__ import annotations

import sys

from . import forward, hook, layers, memory, requests, sampling, text

WRAPS = {**forward.WRAPS, **layers.WRAPS, **memory.WRAPS, **requests.WRAPS, **sampling.WRAPS, **text.WRAPS}
"""Module of SGLang -> what wraps it after its import."""


def install() -> None:
    """Wait for the modules; one that was imported already could not be wrapped, which is an error."""
    if early := sorted(WRAPS.keys() & sys.modules.keys()):
        raise ImportError(f"forge-faults: imported too early to be wrapped: {', '.join(early)}")
    sys.meta_path.insert(0, hook.Finder(WRAPS))
