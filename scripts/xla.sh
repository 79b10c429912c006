#!/bin/sh
# Create .venv-xla with torch 2.9, torch_xla 2.9 and this package, and leave a stamp in it.
# It takes some 7 GB: the only torch 2.9 that the registry has brings its CUDA packages along.
# PYTHON, where set, is the interpreter for a new .venv-xla.
set -eu

suits='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))'
if ! .venv-xla/bin/python -m pip --version >/dev/null 2>&1; then # none, or one that was left half made
    found=""
    for python in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.10}; do
        if "$python" -c "$suits" 2>/dev/null; then
            found=$python
            break
        fi
    done
    if [ -z "$found" ]; then
        echo "bertlab: torch_xla 2.9 needs Python 3.10 to 3.13; choose one by PYTHON=/path/to/python" >&2
        exit 1
    fi
    "$found" -m venv --clear .venv-xla
fi

# The rest as it was tested together; of torch and what belongs to it, the release that torch_xla wants.
grep -v -i -E '^(torch|torchao|torchvision|triton|nvidia[-a-z0-9]*|setuptools)[=<> ]' constraints.txt >.venv-xla/constraints.txt
quiet=--quiet
[ -t 1 ] && quiet=
echo "Installing bertlab, torch 2.9 and torch_xla 2.9 into .venv-xla (about 7 GB the first time)"
.venv-xla/bin/python -m pip install $quiet --disable-pip-version-check --constraint .venv-xla/constraints.txt \
    'torch==2.9.*' 'torch_xla==2.9.0' hypothesis pytest pytest-timeout pytest-xdist --editable .
touch .venv-xla/.xla
