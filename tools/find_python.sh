#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Prints the path of a Python that can build this project's environment: 3.12 or newer,
# from PATH, from pyenv's versions or from uv, in that order.
#
#   PYTHON=...        take this one, or fail
#   NEED_MODULE=jax   only one that can already import this module
#
# Exit 2 and one sentence on stderr when there is none.

MODULE=${NEED_MODULE:-}

# Prints the interpreter's own idea of its path. A name on PATH may be a shim that fails
# when run, so every candidate is run.
probe() {
    "$1" - "$MODULE" 2>/dev/null <<'PROBE'
import importlib.util, sys
if sys.version_info < (3, 12):
    sys.exit(1)
if sys.argv[1] and importlib.util.find_spec(sys.argv[1]) is None:
    sys.exit(1)
print(sys.executable)
PROBE
}

# A Python without venv and ensurepip (some distributions split them off) cannot make
# an environment by itself: it is taken only when no other is found.
can_make_venv() {
    "$1" -c 'import ensurepip, venv' </dev/null >/dev/null 2>&1
}

candidates() {
    # The oldest supported version first: it is the one the tests run on most.
    for name in python3.12 python3.13 python3.14 python3 python; do
        command -v "$name" 2>/dev/null
    done
    versions=${PYENV_ROOT:-${HOME:-/nonexistent}/.pyenv}/versions
    for version in 3.12 3.13 3.14 3; do
        for path in "$versions/$version"*/bin/python; do
            [ -x "$path" ] && echo "$path"
        done
    done
    uv python find '>=3.12' 2>/dev/null
}

if [ -n "${PYTHON:-}" ]; then
    if found=$(probe "$PYTHON") && [ -n "$found" ]; then
        echo "$found"
        exit 0
    fi
    echo "PYTHON=$PYTHON is not a Python 3.12 or newer${MODULE:+ with $MODULE}." >&2
    exit 2
fi

second_choice=
while IFS= read -r candidate; do
    found=$(probe "$candidate") || continue
    [ -n "$found" ] || continue
    if [ -n "$MODULE" ] || can_make_venv "$found"; then
        echo "$found"
        exit 0
    fi
    [ -n "$second_choice" ] || second_choice=$found
done <<CANDIDATES
$(candidates)
CANDIDATES

if [ -n "$second_choice" ]; then
    echo "$second_choice"
    exit 0
fi
echo "No Python 3.12 or newer${MODULE:+ with $MODULE} was found on PATH, among pyenv's versions or by uv: install one, or name it with PYTHON=/path/to/python." >&2
exit 2
