"""One file for each way to write tool calls: its signs, its parser and its grammar."""
