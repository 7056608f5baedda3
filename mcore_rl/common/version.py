"""The version of mcore_rl, which setup.py reads and stands nowhere else."""

VERSION = "0.1.0"
