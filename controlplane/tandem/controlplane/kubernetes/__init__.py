"""Workers in pods that Kubernetes makes: a small client of its API, the record that follows the pods, the launcher."""
