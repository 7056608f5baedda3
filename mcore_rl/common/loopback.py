"""Where the ranks of a job meet on this machine's loopback device, they listen nowhere else.

Told to, by a MASTER_ADDR that is another address, everything is as torch and vLLM have it.
"""

from __future__ import annotations

import os

from mcore_rl.patches.registry import apply_patch
from mcore_rl.patches.torch import loopback_stores

_DEFAULTS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}


def stay_on_loopback(address: str) -> bool:
    """Keep what this process and its children open on loopback, if `address` is there.

    Call it before the first store or process group. What the environment already says is left as
    it is. NCCL is not told anything: it opens its sockets for the device that it chooses.
    """
    apply_patch(loopback_stores.PATCH)
    if not loopback_stores.is_loopback(address):
        return False
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True
