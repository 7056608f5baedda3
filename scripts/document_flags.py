"""Prints docs/using/megatron_flags.md: what becomes of the flags of the installed Megatron.

python scripts/document_flags.py > docs/using/megatron_flags.md
"""

from __future__ import annotations

from mcore_rl.flags.classes import document
from mcore_rl.megatron import adapter as megatron_adapter
from mcore_rl.megatron.version import check_megatron

if __name__ == "__main__":
    print(document(megatron_adapter.make_parser(), check_megatron().version), end="")
