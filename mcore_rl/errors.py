"""The exception type that means "the user can fix this", and the one that ends a run on request.

Everything else that is raised is a fault of the program or of the machine, and keeps its traceback.
"""


class UsageError(ValueError):
    """A flag, file or layout that a user can correct.

    The message is one sentence that names the flag, the value, the constraint and the remedy. The
    entry points print it without a traceback and end every rank with exit code 2, before any model
    is built.
    """


class StoppedByAlarm(Exception):
    """An alarm has ended the run, by `--rl-on-alarm stop`: everything is saved, and said."""
