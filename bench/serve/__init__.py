"""An open-loop load on a whole cluster: latencies, throughput and hand-off overhead, beside mixed workers."""
