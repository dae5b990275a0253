#!/usr/bin/env bash
# Checks and times the Triton kernels and a decode on the GPU at hand, from a checkout, within five minutes.
# Options are those of gpu_check.py; with OUT set, the figures are written to $OUT/gpu_check.json.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH="core:schemas:kernels:plugins:benchmarks${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "${PYTHON:-python3}" benchmarks/gpu_check.py "$@"
