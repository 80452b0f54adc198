"""A shell that starts the tests in the background has them ignore SIGINT, and every program they start: undo that."""

import signal

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
