#!/usr/bin/env bash
# The ladder on a machine with PyTorch and no network: bash experiments/bench/bare.sh FOLDER UNTIL [key=value...]
#
# It takes along, from the folder in which it is started,
#   .whl/      wheels of what such a machine lacks, for its Python:
#              pip download --no-deps --only-binary=:all: --python-version 3.12 \
#                  --platform manylinux_2_27_x86_64 --dest .whl optree
#   .kernels/  Triton's cache, where `python tests/cuda_kernels.py .kernels` has filled it ahead.
# FOLDER then holds at most eight files. A rehearsal on a CPU: ... FOLDER 540 device=cpu backend=eager length=16
set -eu
folder=$1 until=$2
shift 2
site=$(mktemp -d)
python3 -m pip install -q --no-index --no-deps --no-compile --disable-pip-version-check --target "$site" .whl/*.whl
if [ -d .kernels ]; then
    export TRITON_CACHE_DIR=/tmp/fnshard-kernels  # Triton writes absolute paths into it
    mkdir -p "$TRITON_CACHE_DIR"
    cp -r .kernels/. "$TRITON_CACHE_DIR"
fi
PYTHONPATH="$site" exec python3 -u -m experiments.bench case=gpu device=cuda "folder=$folder" "until=$until" "$@"
