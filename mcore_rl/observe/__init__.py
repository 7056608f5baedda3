"""What a run says of itself: its directory, metrics, alarms, the clocks of its stages, traces."""
