"""Execution of a plan: messages in buckets, delta encoding, a plain gather."""
