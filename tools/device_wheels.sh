#!/usr/bin/env bash
# Collects the wheels of tools/device_wheels.txt in .wheels/ (not committed), to be carried to a GPU machine that
# has no package index. There: python3 -m pip install --no-deps .wheels/*.whl
set -euo pipefail
cd "$(dirname "$0")/.."
rm -rf .wheels
python3 -m pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
    --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 \
    --dest .wheels --requirement tools/device_wheels.txt
ls -l .wheels
