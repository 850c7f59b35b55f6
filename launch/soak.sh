#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Soak: every recipe in turn, disturbed and not, to the same bits in flat memory: bash launch/soak.sh [--steps 2000 | --minutes 20]
#
# One process for every GPU, else two processes on the CPU; NPROC=n overrides. What it measured: docs/soak.md.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment examples
choose_processes
cd "$ROOT"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m dist_tests.bench.soak "$@"
