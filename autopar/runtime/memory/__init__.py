"""Memory beside the device's own: tiers, the process's heap, copies on the host."""
