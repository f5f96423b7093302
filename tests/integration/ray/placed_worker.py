"""Behaves like a worker towards an agent, and reports its place. Run as `placed_worker.py [--option] --config FILE`."""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

from tandem.core.parent_death_signal import tied


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", required=True, type=Path)
    parser.add_argument("--fatal", default="", help="say this and end with code 2")
    parser.add_argument("--stubborn", action="store_true", help="ignore SIGTERM")
    options = parser.parse_args()
    config = json.loads(options.config.read_text())
    if options.fatal:
        print(json.dumps({"fatal": options.fatal}), flush=True)
        return 2
    ended = threading.Event()
    signal.signal(signal.SIGTERM, (lambda *_: None) if options.stubborn else (lambda *_: ended.set()))
    secret = Path(config["secret_file"])
    details = {
        "pid": os.getpid(),
        "agent": os.getppid(),
        "child": subprocess.Popen(tied([sys.executable, "-c", "import signal; signal.pause()"])).pid,
        "host": config["host"],
        "secret": secret.read_text(),
        "modes": [oct(path.stat().st_mode & 0o777) for path in (secret, options.config, secret.parent)],
        "folder": str(secret.parent),
        "model_dir": config["model_dir"],
        "ray": [name for name in os.environ if name.startswith("RAY_")],
        "gpus": os.environ["CUDA_VISIBLE_DEVICES"],
        "threads": os.environ["OMP_NUM_THREADS"],
    }
    print("this line is no JSON", flush=True)
    print(json.dumps({"progress": "loading weights"}), flush=True)
    print(json.dumps({"ready": details}), flush=True)
    ended.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
