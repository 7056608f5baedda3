#!/usr/bin/env bash
# GRPO on GSM8K with a dense Qwen3, on the GPUs of one machine:
#
#     bash examples/gsm8k_qwen3/run.sh QWEN3_FOLDER TRAIN.jsonl [any Megatron or --rl-* flag]
#
# TRAIN.jsonl has the columns "question" and "answer", as openai/gsm8k has them. Settings are in
# config.yaml, the reward for the format in reward.py; flags on the command line win.
# NPROC: processes, one per GPU (default 8).
set -euo pipefail

(($# >= 2)) || { echo "usage: run.sh QWEN3_FOLDER TRAIN.jsonl [flags]" >&2 && exit 2; }
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=$here/../../.venv/bin/python
[[ -x $python ]] || python=python

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-8}" -m mcore_rl.train \
  --rl-config "$here/config.yaml" --rl-import "$here/reward.py" \
  --rl-hf-checkpoint "$1" --rl-prompts "$2" "${@:3}"
