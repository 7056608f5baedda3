"""Whether a run goes well: alarms over its metrics, clocks for its stages, and who is stuck."""
