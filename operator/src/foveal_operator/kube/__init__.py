"""Access to the Kubernetes API: client, watches, queue, Lease, Events."""
