"""Environment that has to be set before anything here is imported."""

import os

# Read when gRPC is first imported: without it, each of hundreds of deaths on purpose is reported on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
