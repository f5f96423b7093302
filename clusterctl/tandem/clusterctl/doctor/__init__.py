"""`clusterctl doctor`: looks for what operators trip over, each finding with its fix."""
