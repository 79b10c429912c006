#!/bin/sh
# Create .venv-colab with the versions of scripts/colab.txt, for the rehearsal in tests/house/test_colab.py, and leave a
# stamp in it. It needs uv. Colab has Python 3.13; where there is none, 3.12 or 3.11 takes its place.
set -eu

if ! command -v uv >/dev/null 2>&1; then
    echo "bertlab: Colab's environment needs uv (pip install uv)" >&2
    exit 1
fi
found=""
for python in 3.13 3.12 3.11; do
    if uv venv --quiet --clear --python $python .venv-colab 2>/dev/null; then
        found=$python
        break
    fi
done
if [ -z "$found" ]; then
    echo "bertlab: Colab's environment needs Python 3.13, 3.12 or 3.11" >&2
    exit 1
fi

install() {
    uv pip install --quiet --python .venv-colab --only-binary :all: --requirement scripts/colab.txt "$@"
}
echo "Installing Colab's versions into .venv-colab, with Python $found"
install --torch-backend cpu 2>/dev/null || install # the second form brings CUDA's packages, about 5 GB
touch .venv-colab/.colab
