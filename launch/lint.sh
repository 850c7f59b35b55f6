#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Check that the sources are linted, formatted and typed: bash launch/lint.sh [--fix]
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment examples lint test  # types are those of the libraries
cd "$ROOT"
if [[ "${1:-}" == --fix ]]; then
    "$PYTHON" -m ruff check --quiet --fix .
    exec "$PYTHON" -m ruff format --quiet .
fi
"$PYTHON" -m ruff check --quiet .
"$PYTHON" -m ruff format --quiet --check .
exec "$PYTHON" -m pyright --project . --pythonpath "$PYTHON"
