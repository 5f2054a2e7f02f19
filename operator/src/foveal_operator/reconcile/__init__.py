"""The reconciler: observe, plan, apply, prune, report."""
