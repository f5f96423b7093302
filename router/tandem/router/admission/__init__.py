"""Who may be sent to workers now, who waits, and what a request is promised. Pure, for the simulator, too."""
