"""Where the time of a step goes: spans of stages, model and collectives, as a trace and a table."""
