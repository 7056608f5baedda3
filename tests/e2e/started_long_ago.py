"""Imported by `--rl-import`: every process has started two minutes before it did."""

import time

clock_gettime = time.clock_gettime
time.clock_gettime = lambda clock: clock_gettime(clock) + 120
