"""Runs the launcher: `python -m mcore_rl.launch`."""

import sys

from mcore_rl.launch.launcher import main

if __name__ == "__main__":
    sys.exit(main())
