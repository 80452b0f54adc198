"""A shell that starts the tests in the background has them ignore SIGINT, and every program they start: undo that.

Property tests have no deadline: how long an example takes says something about the machine's load only.
"""

import signal

from hypothesis import settings

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")
