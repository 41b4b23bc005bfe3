#!/bin/sh
# Creates a virtual environment and installs torchtitan_lite with pinned versions.
#   sh scripts/setup.sh VENV EXTRAS          e.g. .venv "[dev]"; $PYTHON is the interpreter (default: python3)
set -eu
venv=$1
extras=$2

new_enough='import sys; sys.exit(sys.version_info < (3, 11))'
has_torch='import re, sys, torch; sys.exit(tuple(map(int, re.findall(r"\d+", torch.__version__)[:2])) < (2, 11))'

python=${PYTHON:-python3}
if ! "$python" -c "$new_enough" 2>/dev/null; then
    for candidate in python3.13 python3.12 python3.11 python3.14; do
        if "$candidate" -c "$new_enough" 2>/dev/null; then found=$candidate; break; fi
    done
    if [ -z "${found:-}" ]; then
        echo "torchtitan_lite needs Python 3.11 or newer, and $python is $("$python" --version 2>&1 || echo missing)." >&2
        echo "Install a newer one, or name it: make PYTHON=/path/to/python3.12 train" >&2
        exit 1
    fi
    python=$found
fi

site=""
if [ ! -x "$venv/bin/python" ]; then
    if "$python" -c "$has_torch" 2>/dev/null; then
        echo "setup   using the torch that is installed for $python"
        site="--system-site-packages"
    fi
    echo "setup   making $venv with $("$python" --version)"
    # shellcheck disable=SC2086  # an empty $site must not become an argument
    "$python" -m venv $site "$venv"
    if [ -n "$site" ] && ! "$venv/bin/python" -c "$has_torch" 2>/dev/null; then
        # $python belongs to a virtual environment: system-site-packages does not include its packages
        packages=$("$python" -c 'import pathlib, torch; print(pathlib.Path(torch.__file__).parent.parent)')
        ours=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
        echo "$packages" >"$ours/parent.pth"
    fi
fi

constraints=$venv/constraints.txt
if grep -q 'include-system-site-packages = true' "$venv/pyvenv.cfg"; then
    grep -v '^torch==' constraints.txt >"$constraints"
else
    cp constraints.txt "$constraints"
fi
echo "setup   installing torchtitan_lite$extras (once; torch is large)"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -e ".$extras"
