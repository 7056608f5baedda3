"""Execution of a plan: buckets on the wire, delta encoding, a plain gather."""
