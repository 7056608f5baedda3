"""A sandbox for Python that a model writes: run it confined, and grade it by tests."""

PYTHON_SANDBOX = "python_sandbox"  # name of the reward and of the environment
