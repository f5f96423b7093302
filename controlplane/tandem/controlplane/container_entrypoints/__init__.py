"""Entrypoints of a pod's containers: from the chart's configuration and the pod's own facts to the usual processes."""
