#!/usr/bin/env bash
# A student that learns from a larger teacher, on its own responses and without rewards:
#
#     bash examples/distillation/run.sh CHECKPOINT TEACHER PROMPTS [any Megatron or --rl-* flag]
#
# TEACHER is a Hugging Face folder, or the address of a `vllm serve`. To give a folder's model ranks
# and a layout of its own, on 8 GPUs:
#
#     bash examples/distillation/run.sh CHECKPOINT TEACHER PROMPTS --rl-teacher-ranks 4-7 \
#         --rl-teacher-tp-size 4
#
# NPROC: processes, one per GPU (default 8).
set -euo pipefail

(($# >= 3)) || { echo "usage: run.sh CHECKPOINT TEACHER PROMPTS [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train \
  --rl-config "$here/config.yaml" --rl-hf-checkpoint "$1" --rl-teacher "$2" --rl-prompts "$3" \
  "${@:4}"
