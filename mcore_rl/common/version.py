"""The version of mcore_rl, defined only here; setup.py reads it."""

VERSION = "0.1.0"
