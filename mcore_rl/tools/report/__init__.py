"""`mcore-rl report`: a run directory as one self-contained HTML page."""
