"""Ranks of a job that meets on this machine's loopback device listen only there.

With any other MASTER_ADDR, torch and vLLM keep their own defaults.
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
    """Restrict this process and its children to loopback, if `address` is a loopback address.

    Call it before the first store or process group. Variables that are already set are kept. NCCL
    is not configured: it opens its sockets for the device that it chooses.
    """
    apply_patch(loopback_stores.PATCH)
    if not loopback_stores.is_loopback(address):
        return False
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    return True
