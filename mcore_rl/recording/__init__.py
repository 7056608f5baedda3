"""What a run says of itself: metrics, samples, the run directory, the bar, other places."""
