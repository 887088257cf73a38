#!/bin/sh
# Find a Python that will do, then let tools/environment.py make the environment.
# Usage: sh tools/setup.sh EXTRA   (PYTHON=... in the environment overrides the search)
set -u
here=$(dirname "$0")
recent_enough='import sys; sys.exit(sys.version_info < (3, 11))'

if [ -n "${PYTHON:-}" ]; then
  if ! "$PYTHON" -c "$recent_enough" 2>/dev/null; then
    echo "PYTHON=$PYTHON is not a working Python 3.11 or newer." >&2
    exit 1
  fi
  exec "$PYTHON" "$here/environment.py" "$1"
fi

# 3.11 first: it is the version that requirements.lock is tested with. A name on PATH may be a shim
# for a version that is not there, so each candidate is started once.
for python in python3.11 python3.12 python3.13 python3.14 python3 python; do
  if "$python" -c "$recent_enough" 2>/dev/null; then
    exec "$python" "$here/environment.py" "$1"
  fi
done

cat >&2 <<'MESSAGE'
No Python 3.11 or newer was found on this machine.
  Debian, Ubuntu   sudo apt install python3.11 python3.11-venv   (or python3 python3-venv, where that is newer)
  macOS            brew install python@3.11
  conda            conda env create -f environment.yml && conda activate evolve, then: make run ENV=current
If it is installed elsewhere, name it: make run PYTHON=/path/to/python3.11
MESSAGE
exit 1
