# Says what this machine lacks to build toque, with the one line that installs it. $1: the Python.
python="${1:-python3}"
name=$(basename "$python")  # python3.12 needs python3.12-venv and python3.12-dev
missing=""
need() { missing="$missing $1"; }

if ! command -v "$python" >/dev/null 2>&1; then
    need "$name"; need "$name-venv"; need "$name-dev"
else
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
        echo "toque needs Python 3.11 or newer; $python is $("$python" -V 2>&1)." >&2
        echo "Name another one: make serve PYTHON=python3.12" >&2
        exit 1
    }
    "$python" -c 'import venv, ensurepip' >/dev/null 2>&1 || need "$name-venv"
    "$python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))' \
        || need "$name-dev"
fi
if ! command -v g++ >/dev/null 2>&1; then
    need g++
elif [ "$(g++ -dumpversion | cut -d. -f1)" -lt 11 ]; then
    echo "The kernels need g++ 11 or newer (C++20); this one is $(g++ -dumpversion)." >&2
    exit 1
fi
if [ -n "$missing" ]; then
    echo "This machine lacks:$missing. Install with:" >&2
    echo "    sudo apt-get update && sudo apt-get install -y$missing" >&2
    exit 1
fi
