"""Behaves like a worker towards its launcher. Run as `fake_worker.py [--option …] --config FILE`."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True)
    parser.add_argument("--fatal", default="", help="say this and end with code 2")
    parser.add_argument("--fatal-for", default="", help="only in the worker with this id")
    parser.add_argument("--crash", action="store_true", help="end without a word of the protocol")
    parser.add_argument("--never-ready", action="store_true")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    parser.add_argument("--child", action="store_true", help="start a process of its own in the same group")
    options = parser.parse_args()
    with open(options.config) as file:
        config = json.load(file)
    if options.fatal and options.fatal_for in ("", config["worker_id"]):
        print(json.dumps({"fatal": options.fatal}), flush=True)
        return 2
    if options.crash:
        print("something about a missing library", file=sys.stderr)
        return 1
    ended = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: None) if options.stubborn else (lambda *_: ended.set()))
    details = {"pid": os.getpid(), "child": 0, "omp": os.environ["OMP_NUM_THREADS"]}
    if options.child:
        details["child"] = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]).pid
    print("this line is no JSON", flush=True)
    print(json.dumps({"progress": "loading weights"}), flush=True)
    if not options.never_ready:
        print(json.dumps({"ready": details}), flush=True)
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
