"""The policy laboratory against real clusters of sim engines: the same requests, the same figures within 10 %."""
