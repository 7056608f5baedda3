#!/usr/bin/env bash
# GRPO that trains low-rank adapters and leaves all other weights of the policy as they are:
#
#     bash examples/lora/run.sh CHECKPOINT PROMPTS ADAPTER [any Megatron or --rl-* flag]
#
# ADAPTER is a new folder, which gets the trained adapter in PEFT's format. For a checkpoint with
# the adapter merged add --rl-export-hf MERGED; to continue from an adapter, --rl-lora-adapter FOLDER.
#
# NPROC: processes, one per GPU (default 8).
set -euo pipefail

(($# >= 3)) || { echo "usage: run.sh CHECKPOINT PROMPTS ADAPTER [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train \
  --rl-config "$here/config.yaml" --rl-hf-checkpoint "$1" --rl-prompts "$2" \
  --rl-lora-export "$3" "${@:4}"
