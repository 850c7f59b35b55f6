#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Run the CPU suite: bash launch/test.sh [arguments of pytest]
#
# Paths among the arguments replace the default folders: bash launch/test.sh dist_tests/single -k storage
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment test examples

# pytest runs at the root; a path is looked up from the caller's folder first.
arguments=()
paths_given=0
for argument in "$@"; do
    path="${argument%%::*}"
    if [[ "$argument" != -* && -e "$path" ]]; then
        argument="$(cd "$(dirname "$path")" && pwd -P)/$(basename "$path")${argument#"$path"}"
        paths_given=1
    elif [[ "$argument" != -* && -e "$ROOT/$path" ]]; then
        paths_given=1
    fi
    arguments+=("$argument")
done

cd "$ROOT"
defaults=()
if ((!paths_given)); then
    for folder in dist_tests/multi dist_tests/single dist_tests/golden; do
        if [[ -d "$folder" ]]; then
            defaults+=("$folder")
        fi
    done
fi
# The workers are the parallelism: one thread each. A worker that is done takes half of what another has left; laws of
# several ranks are few and long, so they come first and beside those of one process.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
exec "$PYTHON" -m pytest -n auto --dist worksteal ${defaults[@]+"${defaults[@]}"} ${arguments[@]+"${arguments[@]}"}
