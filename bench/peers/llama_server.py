"""llama.cpp's server out of the package `xllamacpp`, as a process: `python -m bench.peers.llama_server` and the
options of `llama-server` that are below."""

from __future__ import annotations

import argparse
import signal


def main() -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parallel", type=int, required=True)
    parser.add_argument("--ctx-size", type=int, required=True)
    arguments = parser.parse_args()
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path, parameters.port = arguments.model, arguments.port
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = arguments.threads
    parameters.n_parallel, parameters.n_ctx = arguments.parallel, arguments.ctx_size
    stops = {signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, stops)  # in the server's threads, too
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    signal.sigwait(stops)


if __name__ == "__main__":
    main()
