#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train the example language model: bash launch/train.sh [arguments of examples/train_lm.py]
#
# One process for every GPU, else two processes on the CPU; NPROC=n overrides.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment examples
choose_processes
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" \
    "$ROOT/examples/train_lm.py" "$@"
