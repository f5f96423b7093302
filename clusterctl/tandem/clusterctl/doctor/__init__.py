"""`clusterctl doctor`: checks for common problems, each finding with its fix."""
