"""What leaves the device and comes back, and where it stays meanwhile."""
