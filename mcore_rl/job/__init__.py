"""What a command line asks for, checked before anything is built: see `resolver`."""
