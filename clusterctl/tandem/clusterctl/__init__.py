"""The operator's command line. Connects to admin ports only; `up` hands over to tandem.controlplane."""
