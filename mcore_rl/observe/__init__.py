"""Observation of a run: its directory, metrics, alarms, stage timers, watchdog and traces."""
