"""An open-loop load on a whole cluster: TTFT, second token, ITL, throughput and hand-off overhead, beside mixed workers."""
