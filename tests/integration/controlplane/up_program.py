"""`clusterctl` with fake programs: `-m tests.integration.controlplane.up_program WORKER_ARGS ROUTER_ARGS ARGUMENT…`.

The first two are lists in JSON.
"""

import functools
import json
import sys
from pathlib import Path
from unittest import mock

from tandem.clusterctl.main import main
from tandem.controlplane import up

HERE = Path(__file__).resolve().parent

if __name__ == "__main__":
    worker, router = json.loads(sys.argv[1]), json.loads(sys.argv[2])
    options = functools.partial(
        up.UpOptions,
        worker_command=(sys.executable, str(HERE / "fake_worker.py"), *worker),
        router_command=(sys.executable, str(HERE / "fake_router.py"), *router),
    )
    sys.argv = ["clusterctl", *sys.argv[3:]]
    with mock.patch.object(up, "UpOptions", options):
        main()
