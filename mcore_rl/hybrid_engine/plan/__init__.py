"""What moves from which rank to which: pure planning."""
