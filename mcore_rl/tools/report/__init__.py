"""`mcore-rl report`: a run directory as one HTML page that needs nothing beside itself."""
