"""Run by every interpreter that starts with this folder in PYTHONPATH: at a signal its main thread, and so the event
loop on it, stands for some seconds."""

import ctypes
import signal
import time

STANDS = {signal.SIGRTMIN + 1: 4.0, signal.SIGRTMIN + 2: 14.0}
"""Seconds by signal: less than STAND_S, and more than it."""
STANDS_LOCKED = {signal.SIGRTMIN + 3: 4}
"""The same with Python's lock held, as in a call of C: no other thread runs Python code."""

for number, seconds in STANDS.items():
    signal.signal(number, lambda *_, seconds=seconds: time.sleep(seconds))
for number, seconds in STANDS_LOCKED.items():
    signal.signal(number, lambda *_, seconds=seconds: ctypes.PyDLL(None).sleep(seconds))
