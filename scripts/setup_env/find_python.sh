# Prints the interpreter that setup_env.sh builds with: $MCORE_RL_PYTHON, or the first Python 3.11
# or 3.12 in PATH that can make environments. Otherwise reports the interpreters found on stderr,
# and exits with the code of setup_env.sh.

names=(python3.11 python3.12 python3 python)
[[ -z ${MCORE_RL_PYTHON:-} ]] || names=("$MCORE_RL_PYTHON")
while IFS= read -r candidate; do
  # Run it, because a shim in PATH proves nothing; the code also runs in Python 2.
  answer=$("$candidate" -c '
import sys
try: import ensurepip, venv; complete = 1
except ImportError: complete = 0
print("%d.%d %d" % (sys.version_info[0], sys.version_info[1], complete))' 2>/dev/null) ||
    answer="does not run"
  case $answer in
    "3.11 1" | "3.12 1") echo "$candidate" && exit ;;
    "3.11 0" | "3.12 0") incomplete=$candidate minor=${answer% 0} ;;
  esac
  seen+="${seen:+, }$candidate (${answer% [01]})"
done < <(type -aP -- "${names[@]}")

if [[ -n $incomplete ]]; then
  echo "setup_env: $incomplete lacks the modules venv and ensurepip: install them (on Debian and" \
    "Ubuntu the package python$minor-venv)." >&2
  exit 1
fi
where=PATH
[[ -z ${MCORE_RL_PYTHON:-} ]] || where=MCORE_RL_PYTHON seen=${seen:-$MCORE_RL_PYTHON (not found)}
echo "setup_env: Python 3.11 or 3.12 is needed and $where has ${seen:-no Python}: install one, or" \
  "name one with MCORE_RL_PYTHON=/path/to/python3.11." >&2
exit 2
