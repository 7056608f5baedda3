#!/usr/bin/env bash
# GRPO on small tasks in words with a real instruct model, SmolLM2-135M-Instruct, on 2 cores:
#
#     bash examples/smollm2/run.sh [any Megatron or --rl-* flag]
#
# The first call sets the environment up, and makes the folder of the model in MCORE_RL_CACHE
# (default ~/.cache/mcore_rl): scripts/make_smollm2.py. Settings are in config.yaml; flags on the
# command line win. NPROC: processes (default 1; on 2 cores, 2 are no faster).
set -euo pipefail

[[ ${1:---} == --* ]] || { echo "usage: run.sh [flags]" >&2 && exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
folder=${MCORE_RL_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/mcore_rl}/smollm2_135m_instruct
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 TORCHDYNAMO_DISABLE=1

[[ -n ${MCORE_RL_SKIP_SETUP:-} ]] || bash "$root/scripts/setup_env.sh"
python=$root/.venv/bin/python
[[ -x $python ]] || python=python
"$python" -c "import gguf" 2>/dev/null || "$python" -m pip install --quiet gguf==0.19.0
"$python" "$root/scripts/make_smollm2.py" --out "$folder"

exec "$python" -m mcore_rl.launch --nproc-per-node "${NPROC:-1}" -m mcore_rl.train \
  --rl-config "$root/examples/smollm2/config.yaml" --rl-hf-checkpoint "$folder" \
  --rl-prompts "$folder/prompts/train.jsonl" --rl-eval-prompts "$folder/prompts/heldout.jsonl" "$@"
