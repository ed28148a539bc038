"""Signals that end a process, and how they stop a command."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

ENDING = [signal.SIGTERM] + ([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])
"""Sent by batch systems, and when the terminal ends."""


@contextmanager
def stoppable() -> Iterator[None]:
    """While this is entered, SIGTERM and the end of the terminal raise KeyboardInterrupt, as Ctrl-C
    does.

    Without it they end the process at once, and the run would look as if it went on.
    """
    here = threading.current_thread() is threading.main_thread()
    numbers = [number for number in ENDING if here and signal.getsignal(number) is signal.SIG_DFL]  # nohup's is not
    for number in numbers:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
