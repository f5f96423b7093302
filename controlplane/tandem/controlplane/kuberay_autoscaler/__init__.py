"""Nodes of Ray that KubeRay makes: how many are wanted, which may go, and the patch of the RayCluster for that."""
