# Installs the stack into the environment $new, with the interpreter $python. Sourced by
# setup_env.sh; sets $uv to its uv.

deps=() uv_flags=() rest=$state/tmp/rest.txt
# If the index only has torch for CUDA, the pinned build comes from PyTorch's own index.
torch_cpu_index=https://download.pytorch.org/whl/cpu
pip=(-m pip --no-input --disable-pip-version-check --retries 3 install --progress-bar off)
torch=$(grep '^torch==' "$requirements") megatron=$(grep '^megatron-core==' "$requirements")

say "[1/4] uv"
logged "$python" -m venv --clear "$tools" || fail 1 "$python could not make $tools: \
$(tail -n 1 "$log") (log: $log)."
uv=$(type -P uv) || {
  uv=$tools/bin/uv
  logged "$tools/bin/python" "${pip[@]}" "$(grep '^uv==' "$requirements")" || explain uv
}
eval "$("$tools/bin/python" "$parts/pip_settings.py")"
# Relocatable: scripts find their interpreter relative to themselves, so .venv.new can be renamed.
logged "$uv" venv --relocatable --prompt "$folder" --python "$tools/bin/python" "$new" ||
  fail 1 "uv could not make $new: $(tail -n 1 "$log") (log: $log)."
# All indexes are equal, as for pip.
uv_flags+=(--no-progress --python "$new/bin/python" --index-strategy unsafe-best-match)

say "[2/4] $torch and $(grep -cvE '^(#|$|torch=|megatron)' "$requirements") others, the longest step"
grep -v '^megatron-core==' "$requirements" >"$rest"
# The head of requirements-cpu.txt says why its packages come without their dependencies. For uv,
# torch==2.13.0 also matches 2.13.0+cpu if an index or a folder has it.
if [[ $stack == cpu ]]; then
  deps=(--no-deps)
else
  sed -i -E 's/^(torch|torchvision|torchaudio|vllm)==(.*)/&,!=\2+cpu/' "$rest"
fi
if ! logged "$uv" pip install "${uv_flags[@]}" "${deps[@]}" -r "$rest"; then
  [[ $stack == cpu && $(missing) == "$torch" ]] || explain "$(basename "$requirements")"
  if ! logged "$uv" pip install "${uv_flags[@]}" "${deps[@]}" --index "$torch_cpu_index" -r "$rest"
  then
    [[ -n ${MCORE_RL_ACCEPT_CUDA_TORCH:-} ]] || explain "$torch" "$torch_cpu_index"
    say "      $torch is in no index; MCORE_RL_ACCEPT_CUDA_TORCH is set, so the build for CUDA follows"
    # What is checked in the end. torch needs CUDA's libraries, and pins an older triton.
    requirements=$state/tmp/accepted.txt
    sed -E 's/^(torch==.*)\+cpu$/\1/' "$root/scripts/requirements-cpu.txt" >"$requirements"
    grep -v '^megatron-core==' "$requirements" >"$rest"
    { logged "$uv" pip install "${uv_flags[@]}" "${torch%+cpu}" &&
      logged "$uv" pip install "${uv_flags[@]}" "${deps[@]}" -r "$rest"; } || explain "${torch%+cpu}"
  fi
fi

say "[3/4] $megatron"
# It requires Python 3.12 because two of its modules import typing.override; only pip can ignore
# that requirement.
logged "$new/bin/python" "${pip[@]}" --no-deps --ignore-requires-python "$megatron" ||
  explain "$megatron"
if [[ $stack == cuda ]]; then
  # The packages have lib/libcudart.so.13. The linker looks for libcudart.so, and FlashInfer, which
  # compiles kernels while a run starts, lets it look in lib64.
  for library in "$new"/lib/python3.*/site-packages/nvidia/cu13/lib/lib*.so.*; do
    ln -sf "$(basename "$library")" "${library%%.so.*}.so"
    ln -sfn lib "$(dirname "$library")64"
  done
  say "      Transformer Engine, whose extension is compiled (25 minutes of one core)"
  logged bash "$parts/transformer_engine.sh" "$new/bin/python" "$te_requirements" "$rest" \
    "$state/te_wheels" "$uv" pip install "${uv_flags[@]}" || { show_log && say "Transformer Engine \
did not install (see $log): the environment works without it, by Megatron's local implementation of \
the layers."; }
fi
