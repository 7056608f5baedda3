"""A run: how it starts, what it is built of, its learner, and what it records and saves."""
