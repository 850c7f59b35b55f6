#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Mutation testing of the files that bytes and scales depend on: bash launch/mutants.sh [arguments of dist_tests/mutants.py]
#
# Hours for everything: --sample N and --files choose. What it found: docs/mutants.md.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment test mutants
cd "$ROOT"
exec nice -n 19 "$PYTHON" -m dist_tests.mutants "$@"
