"""The launcher, which starts a process per device: `python -m mcore_rl.launch` runs `launcher`."""
