"""The job of a command line, checked before anything is built: see `resolver`."""
