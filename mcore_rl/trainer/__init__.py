"""A run: its start, its parts, its learner, and what it records and saves."""
