#!/bin/sh
# Create .venv if it is not there and install bertlab into it, under constraints.txt.
# Usage: sh scripts/install.sh .run|.docs|.dev     (the stamp to leave in .venv names the extra)
# PYTHON, where set, is the interpreter for a new .venv.
set -eu

stamp=$1
supported='import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 14))'
version='import sys; print("%d.%d.%d" % sys.version_info[:3])'

fail() {
    echo "bertlab: $*" >&2
    exit 1
}

find_python() {
    seen=""
    for python in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14 python3.10 python}; do
        # A name on the PATH may be a shim for a version that is not there, so each one is run.
        found=$("$python" -c "$version" 2>/dev/null) || continue
        seen="$seen $python is $found;"
        "$python" -c "$supported" || continue
        if "$python" -c 'import ensurepip, venv' 2>/dev/null; then
            echo "$python"
            return
        fi
        seen="$seen $python has no venv module (on Debian and Ubuntu: apt-get install python3-venv);"
    done
    fail "needs Python 3.10 to 3.14 with venv, and found:${seen:- none;} choose one by PYTHON=/path/to/python"
}

# An environment that works and has no pip (of uv, say) is somebody's: it gets one, and loses nothing.
if .venv/bin/python -c '' 2>/dev/null && ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
    .venv/bin/python -m ensurepip >/dev/null 2>&1 ||
        fail ".venv has no pip; install it there, or remove .venv to have a new one"
fi
if [ -x .venv/bin/python ] && .venv/bin/python -m pip --version >/dev/null 2>&1; then
    have=$(.venv/bin/python -c "$version")
    .venv/bin/python -c "$supported" ||
        fail ".venv is Python $have, and bertlab needs 3.10 to 3.14; remove .venv and try again"
    if [ -n "${PYTHON:-}" ] && [ "$("$PYTHON" -c "$version" 2>/dev/null)" != "$have" ]; then
        fail ".venv is Python $have and PYTHON=$PYTHON is not; remove .venv to change over"
    fi
else
    python=$(find_python)
    echo "Creating .venv with $python ($("$python" -c "$version"))"
    "$python" -m venv --clear .venv
fi

case $stamp in
    .run) what=. ;;
    .docs) what=.[docs,export] ;; # export: the model in the live pages
    .dev) what=.[dev] ;;
    *) fail "no such stamp: $stamp" ;;
esac

# The progress bar is for people; a log needs none of pip's hundreds of lines.
quiet=--quiet
[ -t 1 ] && quiet=
echo "Installing bertlab into .venv (some minutes the first time)"
# Python 3.10 brings a pip that builds old packages (seqeval) in the environment itself, where what they need is missing.
.venv/bin/python -m pip install $quiet --disable-pip-version-check --use-pep517 --no-compile \
    --constraint constraints.txt --editable "$what"
# pip would compile twenty thousand files on one core. Some packages carry files that are no Python of this version.
.venv/bin/python -m compileall -q -j 0 "$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    >/dev/null 2>&1 || true

# dev holds docs, and each holds what a run needs.
touch .venv/.run
case $stamp in
    .docs) touch .venv/.docs ;;
    .dev) touch .venv/.docs .venv/.dev ;;
esac
