"""The exception type that means "the user can fix this", and the one that ends a run as asked.

Everything else that is raised is a fault of the program or of the machine, and keeps its traceback.
"""


class UsageError(ValueError):
    """A flag, file or layout that a user can correct.

    The message is one sentence that names the flag, the value, the constraint and the remedy. The
    entry points print it without a traceback and end every rank with exit code 2, before any model
    is built.
    """


class RunStopped(SystemExit):
    """The run has ended before its last step on all ranks alike: everything is saved, and said.

    `exit_code` is what its processes are to end with, and do where nobody catches it.
    """

    def __init__(self, exit_code: int) -> None:
        super().__init__(exit_code)
        self.exit_code = exit_code
