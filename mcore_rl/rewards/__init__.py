"""What a response is worth: functions in worker processes, servers, reward models, their sum.

Worker processes import this package, so nothing is imported here.
"""
