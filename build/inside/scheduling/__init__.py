"""Compiles with memory in mind. Runs in the builder container, beside the script that compiles; standard library only.

A script that compiles opens a `Scheduler` around its ninja and starts every compiler through its launcher. The launcher says
which unit it is about to compile and waits until the broker, a thread of the script, has memory and a core for it:

    with Scheduler(plan["scheduler"], versions) as scheduler:
        subprocess.run(["cmake", ..., *scheduler.cmake_options])
        subprocess.run(["ninja", f"-j{scheduler.window}"], env=os.environ | scheduler.environment)

What happens is told on stderr, one line of JSON after `forge-scheduler: ` each.
"""

from scheduling.scheduler import Scheduler

__all__ = ["Scheduler"]
