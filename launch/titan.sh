#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The tests of docs/torchtitan.md, which the suite skips: bash launch/titan.sh [arguments of pytest]
#
# Installs torchtitan, whose dependencies contradict those of the test extra, into a folder of its own: build/titan.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment test examples
cd "$ROOT"
if [[ ! -d build/titan/torchtitan ]]; then
    "$PYTHON" -m pip --disable-pip-version-check install --quiet --target build/titan --no-deps torchtitan==0.3.0 \
        torchdata torch_checkpointing tyro docstring_parser typeguard spmd_types==0.2.3 einops tensorboard absl-py grpcio \
        "protobuf<7" triton || fail "torchtitan could not be installed; the reason is above"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
PYTHONPATH="$PWD/build/titan" exec "$PYTHON" -m pytest dist_tests/multi/test_torchtitan.py "$@"
