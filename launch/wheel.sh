#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Make a wheel that needs no compiler where it is installed: bash launch/wheel.sh FOLDER PYTHON [PYTHON ...]
#
# Each PYTHON has a CUDA build of another release of torch, all of one CUDA major version; the wheel holds the kernels, and glue
# for each release. FSDP_QUANT_CUDA_ARCHS and CUDA_HOME as in setup.py.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
(($# >= 2)) || fail "usage: bash launch/wheel.sh FOLDER PYTHON [PYTHON ...]"
folder="$1" python="$2"
shift 2
FSDP_QUANT_NATIVE=1 FSDP_QUANT_GLUE_FOR="$*" "$python" -m pip --disable-pip-version-check wheel \
    --no-build-isolation --no-deps --wheel-dir "$folder" "$ROOT"
