"""Shared foundations: errors, agreement between ranks, objects over gloo, the platform."""
