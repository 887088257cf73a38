#!/bin/sh
# Resolve every extra of pyproject.toml again and write requirements.lock (`make lock`).
# Usage: sh tools/lock.sh PYTHON. The resolver lives in build/uv and in no environment of the project.
set -eu
cd "$(dirname "$0")/.."
[ -x build/uv/bin/uv ] || { "$1" -m venv build/uv && build/uv/bin/python -m pip install --quiet uv; }

resolved=build/resolved.txt
# --universal: one file for every platform and Python >= 3.11, with markers where they differ.
build/uv/bin/uv pip compile pyproject.toml --extra dev --universal --python-version 3.11 \
  --fork-strategy fewest --no-annotate --no-header --no-emit-index-url --upgrade --quiet --output-file "$resolved"

{
  cat <<'HEADER'
# Exact versions of everything `pip install -e '.[dev]'` needs: tested on Linux with Python 3.11.
# Used as constraints (`pip install -c requirements.lock ...`) by `make run` and `make test`.
#
# Written by `make lock`: a universal resolution of pyproject.toml by uv, newest versions first, except
# those held in pyproject.toml under [tool.uv]. PyTorch's own pins choose its CUDA libraries, so they are
# left out. To refresh: `make lock`, then `make test`, then commit both if it passes.
HEADER
  grep -Ev "^(nvidia|cuda)-|== 'emscripten'" "$resolved"
} > requirements.lock.new
mv requirements.lock.new requirements.lock
printf 'requirements.lock: %s packages\n' "$(grep -c '==' requirements.lock)"
