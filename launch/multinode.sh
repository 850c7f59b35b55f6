#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Train the example on several nodes. Run on each of them, with the same values:
#
#   NNODES=2 MASTER_ADDR=host bash launch/multinode.sh --replicate 2 [arguments of examples/train_lm.py]
#
# NNODES       nodes that take part
# MASTER_ADDR  one of them, as all of them reach it; MASTER_PORT (29500) must be free there
# JOIN_TIMEOUT seconds to wait for all nodes (600)
# JOB_ID       tells jobs apart that meet at one port (default: fsdp_quant)
# NPROC        processes of this node: one for every GPU, else two on the CPU
#
# --replicate R keeps R copies of the shards (HSDP): with one copy a node, codes are gathered inside nodes, and only
# gradients are reduced between them.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
for name in NNODES MASTER_ADDR; do
    [[ -n "${!name:-}" ]] || fail "$name is not set; usage: NNODES=2 MASTER_ADDR=host bash launch/multinode.sh ..."
done
prepare_environment examples
choose_processes
endpoint="$MASTER_ADDR:${MASTER_PORT:-29500}" wait="${JOIN_TIMEOUT:-600}"
errors="$(mktemp)"
trap 'rm -f "$errors"' EXIT
"$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --nproc-per-node "$NPROC" --rdzv-backend c10d \
    --rdzv-endpoint "$endpoint" --rdzv-conf "join_timeout=$wait,read_timeout=$wait" --rdzv-id "${JOB_ID:-fsdp_quant}" \
    "$ROOT/examples/train_lm.py" "$@" 2> >(tee "$errors" >&2) || {
    status=$?
    if grep -qE 'Rendezvous(Timeout|Connection)Error' "$errors"; then
        fail "not all of $NNODES nodes came to $endpoint within $wait s; start this script on each of them with the" \
            "same values, and see that they reach that port"
    fi
    exit "$status"
}
