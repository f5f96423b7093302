"""KV transfers under every fault, workers killed and stopped in every state, every TP pairing: nothing is lost."""

import os

# Read when gRPC is first imported: without it, each of hundreds of deaths on purpose is told on stderr.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")
