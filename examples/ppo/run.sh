#!/usr/bin/env bash
# PPO with a critic, which starts from the actor's checkpoint with a value head of zeros:
#
#     bash examples/ppo/run.sh CHECKPOINT PROMPTS [any Megatron or --rl-* flag]
#
# The critic is trained on the actor's ranks. To give it ranks and a layout of its own, on 8 GPUs:
#
#     bash examples/ppo/run.sh CHECKPOINT PROMPTS --rl-critic-ranks 4-7 --rl-critic-tp-size 2
#
# NPROC: processes, one per GPU (default 8).
set -euo pipefail

(($# >= 2)) || { echo "usage: run.sh CHECKPOINT PROMPTS [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train \
  --rl-config "$here/config.yaml" --rl-hf-checkpoint "$1" --rl-prompts "$2" "${@:3}"
