"""Rewards: functions in worker processes, servers, reward models, and their weighted sum.

Worker processes import this package, so it imports nothing here.
"""
