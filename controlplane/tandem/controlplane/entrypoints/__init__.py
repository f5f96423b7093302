"""What a pod's containers run: from the chart's configuration and the pod's own facts to the usual processes."""
