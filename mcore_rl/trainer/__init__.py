"""A run: its start, parts and learner, its records and checkpoints."""
