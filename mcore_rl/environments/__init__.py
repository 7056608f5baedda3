"""Several turns: what answers the policy between two turns, each sample in a process of its own.

Processes of environments import this package, so nothing is imported here.
"""
