"""What the router costs by itself: added latency, streams and tokens a second on one pinned core, CPU by workers."""
