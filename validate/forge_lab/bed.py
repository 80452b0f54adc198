"""The bed of trials: one server that is kept alive while faults are switched on and off in it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from forge_core.errors import EnvironmentFailure
from forge_core.files import write_text
from forge_core.model import Deviation
from forge_lab import mutants
from forge_lab.faults import wire
from forge_lab.faults.proxy import Proxy, proxy
from forge_lab.mutants import Mutant
from forge_lab.plan import Dtype
from forge_validate import reply
from forge_validate.exchange import Exchange, Request
from forge_validate.injected import Injected
from forge_validate.server import Server
from forge_validate.talk import send

CODE_MOUNT = "/forge-faults"
SWITCH_MOUNT = "/forge-switch"
SWITCH_FILE = "mode.json"
_HEAL_S = 60
# A line of the log reaches the file a moment after it was written.
_LOG_S = 2.0

Boot = Callable[[Dtype, Injected], AbstractContextManager[Server]]
"""Starts a server and removes it at the end of the block."""


class Bed(Protocol):
    """What the executor needs of it."""

    @property
    def server(self) -> Server:
        """The server, without what stands in front of it."""

    @property
    def dtype(self) -> Dtype | None:
        """The number format it runs with; none: it does not run."""

    def start(self, dtype: Dtype) -> None:
        """Start it anew; raises what booting raises."""

    def heal(self) -> str | None:
        """Switch every fault off, end what runs, empty the caches; returns why it is not as it was, none if it is."""

    def empty(self) -> None:
        """Empty the prefix cache."""

    def broken(self, mutant: Mutant) -> AbstractContextManager[tuple[Server, Callable[[], bool]]]:
        """Make it wrong for the length of the block: what to ask, and whether the fault did anything so far."""


@dataclass(frozen=True)
class Places:
    """Where the switch lies on this host, and the server's log."""

    folder: Path

    @property
    def switch(self) -> Path:
        """The file that says which fault is on."""
        return self.folder / "switch" / SWITCH_FILE


class Switchable:
    """A server with the faults of this package inside."""

    def __init__(self, boot: Boot, folder: Path) -> None:
        self._boot = boot
        self._places = Places(folder)
        self._stack = ExitStack()
        self._server: Server | None = None
        self._number = 0
        self._truth: str | None = None
        self.dtype: Dtype | None = None

    def __enter__(self) -> Switchable:
        return self

    def __exit__(self, *error: Any) -> None:
        self.dtype, self._server = None, None
        self._stack.close()

    @property
    def server(self) -> Server:
        """The server; raises EnvironmentFailure before its start."""
        if self._server is None:
            raise EnvironmentFailure("no server was started")
        return self._server

    def start(self, dtype: Dtype) -> None:
        """Start a server with this number format in place of the one before; raises as `boot`, and
        EnvironmentFailure when it does not answer a plain question."""
        self._stack.close()
        self._stack, self._server, self.dtype = ExitStack(), None, None
        self._off()
        self._server = self._stack.enter_context(self._boot(dtype, injected(self._places)))
        self.dtype = dtype
        self._truth = _answer(self._ask_truth())
        if self._truth is None:
            raise EnvironmentFailure(
                "the server answers no plain question after its start", hint="read its log", log=self._server.log
            )

    def heal(self) -> str | None:
        """See `Bed`. A flush is refused while anything runs, so what hangs is seen here."""
        self._off()
        if (why := self.server.died()) is not None:
            return why
        # What hung up in vain is ended by name of nobody: all.
        self._post("/abort_request", {"abort_all": True, "rid": ""})
        flushed = self._post(f"/flush_cache?timeout={_HEAL_S // 2}", None)
        if flushed.status != 200:
            return f"the cache is not flushed: {flushed.error or f'HTTP {flushed.status}'}"
        said = _answer(self._ask_truth())
        return None if said == self._truth else f"it says {said!r} in place of {self._truth!r}"

    def empty(self) -> None:
        """See `Bed`."""
        self._post(f"/flush_cache?timeout={_HEAL_S // 2}", None)

    @contextmanager
    def broken(self, mutant: Mutant) -> Iterator[tuple[Server, Callable[[], bool]]]:
        """See `Bed`."""
        if mutant.where == "proxy":
            with proxy(self.server.url, wire.known(mutant.kind), mutant.parameters) as between:
                yield replace(self.server, url=between.url), lambda: _proxy_fired(between)
            return
        self._number += 1
        told = {
            "kind": mutant.kind,
            "parameters": mutant.parameters,
            "seed": mutant.seed,
            "number": self._number,
        }
        _write(self._places.switch, told)
        try:
            yield self.server, lambda: self._fired(self._number)
        finally:
            self._off()

    def _off(self) -> None:
        _write(self._places.switch, {})

    def _fired(self, number: int) -> bool:
        log = self.server.log
        pattern = re.compile(rf"^forge-fault {number} .* fired", re.MULTILINE)
        deadline = time.monotonic() + _LOG_S
        while log is not None:
            with suppress(OSError):
                if pattern.search(log.read_text(encoding="utf-8", errors="replace")):
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return False

    def _post(self, path: str, body: Any) -> Exchange:
        return send(self.server, "heal", Request(method="POST", path=path, body=body), _HEAL_S)

    def _ask_truth(self) -> Exchange:
        body = {
            "model": self.server.served,
            "prompt": "One, two, three, four, five, six,",
            "max_tokens": 8,
            "temperature": 0,
        }
        return self._post("/v1/completions", body)


def injected(places: Places) -> Injected:
    """What brings the faults into a server's container: code and switch, both read-only there, and two variables."""
    return Injected(
        mounts=((mutants.inside(), CODE_MOUNT), (places.switch.parent, SWITCH_MOUNT)),
        environment={
            "PYTHONPATH": CODE_MOUNT,
            "FORGE_FAULT_SWITCH": f"{SWITCH_MOUNT}/{SWITCH_FILE}",
            # A leak of the KV pool must stay silent: SGLang would end itself when it is idle, and be found by that.
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "0",
        },
    )


def deviations(mutant: Mutant | None) -> tuple[Deviation, ...]:
    """What a verdict on a mutant must say of itself."""
    if mutant is None:
        return ()
    detail = f"{mutant.of}: {mutant.kind} {json.dumps(mutant.parameters, sort_keys=True)}, seed {mutant.seed}"
    return (Deviation(kind="injected-fault", subject=mutant.name, detail=detail),)


def _write(path: Path, told: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(told) + "\n")


def _answer(one: Exchange) -> str | None:
    try:
        return None if one.error is not None else reply.read(one).content
    except reply.NotAReply:
        return None


def _proxy_fired(between: Proxy) -> bool:
    return between.fired
