"""The operator's command line. Speaks to admin ports only; `up` hands over to tandem.controlplane."""
