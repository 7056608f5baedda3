"""Imported by `--rl-import`: every process has started two minutes before it did."""

import psutil

create_time = psutil.Process.create_time
psutil.Process.create_time = lambda self: create_time(self) - 120
