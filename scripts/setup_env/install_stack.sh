# Installs the stack into the environment $new, from the interpreter $python. Sourced by setup_env.sh;
# leaves its uv in $uv.

deps=() uv_flags=() rest=$state/tmp/rest.txt
# Where the index has torch for CUDA only, PyTorch's own one is asked for the build that is pinned.
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
# Relocatable: scripts find their interpreter from where they are, so .venv.new can be renamed.
logged "$uv" venv --relocatable --prompt "$folder" --python "$tools/bin/python" "$new" ||
  fail 1 "uv could not make $new: $(tail -n 1 "$log") (log: $log)."
# As pip has it, all indexes are equal.
uv_flags+=(--no-progress --python "$new/bin/python" --index-strategy unsafe-best-match)

say "[2/4] $torch and $(grep -cvE '^(#|$|torch=|megatron)' "$requirements") others, the longest step"
grep -v '^megatron-core==' "$requirements" >"$rest"
# See the head of requirements-cpu.txt for why its packages come without their dependencies. To
# uv torch==2.13.0 is 2.13.0+cpu as well, where an index or a folder has it.
if [[ $stack == cpu ]]; then
  deps=(--no-deps)
else
  sed -i -E 's/^(torch|torchvision|torchaudio|vllm)==(.*)/&,!=\2+cpu/' "$rest"
fi
if ! logged "$uv" pip install "${uv_flags[@]}" "${deps[@]}" -r "$rest"; then
  [[ $stack == cpu && $(missing) == "$torch" ]] || explain "$(basename "$requirements")"
  logged "$uv" pip install "${uv_flags[@]}" "${deps[@]}" --index "$torch_cpu_index" -r "$rest" ||
    explain "$torch" "$torch_cpu_index"
fi

say "[3/4] $megatron"
# It asks for Python 3.12 for the sake of typing.override, which two of its modules import; only
# pip can be told to ignore that.
logged "$new/bin/python" "${pip[@]}" --no-deps --ignore-requires-python "$megatron" ||
  explain "$megatron"
if [[ $stack == cuda ]]; then
  say "      Transformer Engine, whose extension is compiled (25 minutes of one core)"
  logged bash "$parts/transformer_engine.sh" "$new/bin/python" "$te_requirements" "$rest" \
    "$state/te_wheels" "$uv" pip install "${uv_flags[@]}" || { show_log && say "Transformer Engine \
did not install (see $log): the environment works without it, by Megatron's local implementation of \
the layers."; }
fi
