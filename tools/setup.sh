#!/usr/bin/env bash
# Builds .venv inside the checkout: the torch pinned in constraints.txt, openk3 in place, and what its developers use.
# The Makefile calls this only when .venv is missing or older than pyproject.toml, constraints.txt or this file.
# pip is used as it is configured on this machine; no package index is named here.
set -euo pipefail
cd "$(dirname "$0")/.."
start=$SECONDS
python=${PYTHON:-python3}

fail() {
    echo "setup: $*" >&2
    exit 1
}

version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
    fail "'$python' does not run; install Python 3.11 or newer, or name it: make setup PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    fail "'$python' is Python $version, openk3 needs 3.11 or newer; name one: make setup PYTHON=/path/to/python"

# Debian ships Python without its venv module.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
    package=python$version-venv
    [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null ||
        fail "'$python' has no venv module; on Debian: sudo apt-get install $package"
    echo "setup: installing $package"
    { apt-get update -qq && apt-get install -y -qq "$package" >/dev/null; } ||
        fail "'$python' has no venv module, and apt-get could not install $package"
fi

install() {
    .venv/bin/pip install -qq --disable-pip-version-check -c constraints.txt "$@" ||
        fail "pip could not install $*; its own message is above"
}

echo "setup: Python $version; torch first, so that the build pinned in constraints.txt is taken"
"$python" -m venv .venv || fail "'$python' could not make the virtual environment .venv"
install torch
echo "setup: openk3 and its development tools"
install -e '.[dev]'
touch .venv/ready
echo "setup: .venv is ready after $((SECONDS - start)) s"
