"""What clients leave with the cluster: files, and batches that run in the gaps."""
