"""A rank that hangs while it loads: it neither ticks nor speaks, and goes only by SIGKILL."""

import signal

if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    signal.pause()
