"""`-m mcore_rl.train` in a process that believes to see as many GPUs as CUDA_VISIBLE_DEVICES names.

Nothing can run on them: for mistakes that a start reports before it builds anything.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import torch

NUM_DEVICES = len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
HOPPER: Any = SimpleNamespace(name="H100", major=9, minor=0, total_memory=80 << 30)
torch.cuda.is_available = lambda: True
torch.cuda.device_count = lambda: NUM_DEVICES
torch.cuda.get_device_properties = lambda device=None: HOPPER
torch.cuda.mem_get_info = lambda device=None: (80 << 30, 80 << 30)

if __name__ == "__main__":
    from mcore_rl import train

    train.main(sys.argv[1:])
