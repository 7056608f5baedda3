"""Offload of device memory to the host and back, and measured memory."""
