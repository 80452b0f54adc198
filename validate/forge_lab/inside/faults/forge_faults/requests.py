"""Requests that get lost, stand still, or leave something behind in the scheduler.

Kind `hang`: `what`: `lost` (who comes when `waiting` wait is forgotten), `step` (the scheduler stands still while `from_batch` are
computed), `idle` (it does after `seconds` without work), `cancel` (who hung up keeps the place). What stands still moves on when
the fault is switched off.
Kind `leak`, `what`: `memory` (`mib` of each request).
For all kinds it is remembered that a client hung up (`after_abort`).
"""

from __future__ import annotations

import time
from typing import Any

from . import switch
from .switch import Mode

_POLL_S = 0.05


def _hang(what: str) -> Mode | None:
    mode = switch.on("hang")
    return mode if mode is not None and mode.parameters["what"] == what else None


def _wrap(module: Any) -> None:
    scheduler = module.Scheduler
    add, run, abort = scheduler._add_request_to_queue, scheduler.run_batch, scheduler.abort_request

    def _add_request_to_queue(self: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        if (mode := _hang("lost")) is not None and len(self.waiting_queue) >= mode.parameters["waiting"]:
            mode.fired()
            return None
        leak = switch.on("leak")
        if leak is not None and leak.parameters["what"] == "memory":
            # Written to: memory that is only asked for takes no place.
            leak.state.setdefault("held", []).append(bytearray(b"x") * (leak.parameters["mib"] << 20))
            leak.fired()
        return add(self, req, *args, **kwargs)

    def run_batch(self: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if (mode := _hang("step")) is not None and len(batch.reqs) >= mode.parameters["from_batch"]:
            _stand_still(mode)
        if (mode := _hang("idle")) is not None:
            worked = mode.state.get("worked")
            if worked is not None and time.monotonic() - worked > mode.parameters["seconds"]:
                _stand_still(mode)
        done = run(self, batch, *args, **kwargs)
        if mode is not None:
            mode.state["worked"] = time.monotonic()
        return done

    def abort_request(self: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
        if (mode := _hang("cancel")) is not None and not recv_req.abort_all:
            for req in self.running_batch.reqs:
                if req.rid.startswith(recv_req.rid):
                    # Nobody reads what it says any more, and it says it to the end of its context.
                    req.sampling_params.max_new_tokens = 1 << 20
                    req.sampling_params.ignore_eos = True
                    mode.fired()
                    return None
        if (other := switch.current()) is not None:
            other.state["aborted"] = True
        return abort(self, recv_req, *args, **kwargs)

    scheduler._add_request_to_queue = _add_request_to_queue
    scheduler.run_batch = run_batch
    scheduler.abort_request = abort_request


def _stand_still(mode: Mode) -> None:
    mode.fired()
    while switch.current() is mode:
        time.sleep(_POLL_S)


WRAPS = {"sglang.srt.managers.scheduler": _wrap}
