#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train the small GPT with flat buffers and a distributed optimizer: bash launch/mini_megatron.sh [arguments of its train.py]
#
# One process for every GPU, else two processes on the CPU; NPROC=n overrides. A grid of ranks, and the same on virtual ranks
# of one process, whose losses must be equal bit for bit:
#
#     NPROC=4 bash launch/mini_megatron.sh --pipeline 2 --tensor 2 --num-experts 4 --experts 2 --ordered --verify
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment examples
choose_processes
cd "$ROOT"
exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$NPROC" -m examples.mini_megatron.train "$@"
