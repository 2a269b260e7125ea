#!/usr/bin/env bash
# Makes the virtual environment with Python 3.12 and installs the project with its tested versions.
# Usage: make_venv.sh VENV EXTRAS
set -euo pipefail
venv=$1
extras=$2
cd "$(dirname "$0")/.."

find_python() {
    local candidate
    for candidate in ${QUARTET_PYTHON:-} python3.12 python3 python; do
        if command -v "$candidate" >/dev/null 2>&1 &&
            "$candidate" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; then
            command -v "$candidate"
            return 0
        fi
    done
    return 1
}

if [ ! -x "$venv/bin/python" ]; then
    if ! python=$(find_python); then
        echo "no Python 3.12 found: install it (Debian 13, Ubuntu 24.04: apt install python3.12-venv;" \
            "elsewhere: uv python install 3.12, or pyenv install 3.12) or set QUARTET_PYTHON=/path/to/python3.12" >&2
        exit 2
    fi
    "$python" -m venv "$venv"
fi
echo "installing into $venv (torch with Megatron is about 5 GB; one to five minutes) ..."
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[$extras]" \
    2> >(grep -v -E "^WARNING: Location 'file:" >&2)
# Machine code of the planner's kernels is kept beside them; without it the first study or plan compiles them.
echo "compiling the planner's kernels (half a minute) ..."
"$venv/bin/python" -m benchmarks.proposal_time --nodes 2 --devices-per-node 1 --proposals 1 >/dev/null
touch "$venv/.installed"
