# Prints the interpreter that setup_env.sh builds with: $MCORE_RL_PYTHON, or the first Python in PATH
# that setup.py accepts and that can make environments. Otherwise reports the interpreters found on
# stderr, and exits with the code of setup_env.sh.

setup_py=$(dirname "${BASH_SOURCE[0]}")/../../setup.py
read -r oldest end < <(sed -nE 's/.*python_requires=">=3\.([0-9]+),<3\.([0-9]+)".*/\1 \2/p' "$setup_py")
names=()
for ((minor = oldest; minor < end; minor++)); do names+=("python3.$minor"); done
names+=(python3 python)
[[ -z ${MCORE_RL_PYTHON:-} ]] || names=("$MCORE_RL_PYTHON")
while IFS= read -r candidate; do
  # Run it, because a shim in PATH proves nothing; the code also runs in Python 2.
  answer=$("$candidate" -c '
import sys
try: import ensurepip, venv; complete = 1
except ImportError: complete = 0
print("%d.%d %d" % (sys.version_info[0], sys.version_info[1], complete))' 2>/dev/null) ||
    answer="does not run"
  if [[ $answer =~ ^3\.([0-9]+)\ ([01])$ ]] &&
    ((BASH_REMATCH[1] >= oldest && BASH_REMATCH[1] < end)); then
    ((BASH_REMATCH[2] == 0)) || { echo "$candidate" && exit; }
    incomplete=$candidate package=python3.${BASH_REMATCH[1]}-venv
  fi
  seen+="${seen:+, }$candidate (${answer% [01]})"
done < <(type -aP -- "${names[@]}")

if [[ -n $incomplete ]]; then
  echo "setup_env: $incomplete lacks the modules venv and ensurepip: install them (on Debian and" \
    "Ubuntu the package $package)." >&2
  exit 1
fi
where=PATH
[[ -z ${MCORE_RL_PYTHON:-} ]] || where=MCORE_RL_PYTHON seen=${seen:-$MCORE_RL_PYTHON (not found)}
echo "setup_env: Python 3.$oldest to 3.$((end - 1)) is needed and $where has ${seen:-no Python}:" \
  "install one, or name one with MCORE_RL_PYTHON=/path/to/python3.$oldest." >&2
exit 2
