"""The launcher, which starts a process per device.

`python -m mcore_rl.launch` runs `launcher`. Importing this package imports nothing else.
"""
