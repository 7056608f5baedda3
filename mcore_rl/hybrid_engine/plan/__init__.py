"""Pure planning of what moves from which rank to which."""
