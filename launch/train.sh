#!/usr/bin/env bash
# Train the example language model: bash launch/train.sh [arguments of examples/train_lm.py]
#
# One process for every GPU, else two processes on the CPU; NPROC=n overrides.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment examples

if [[ -z "${NPROC:-}" ]]; then
    NPROC="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
fi
if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
    cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
    OMP_NUM_THREADS=$((cores / NPROC))
    export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1))
fi
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" \
    "$ROOT/examples/train_lm.py" "$@"
