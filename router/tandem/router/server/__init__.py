"""The router as a process: built, started, stopped, and several of it as one."""
