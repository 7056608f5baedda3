"""Environments: code that answers the policy between turns, one process per sample.

Environment processes import this package, so it imports nothing here.
"""
