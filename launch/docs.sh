#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the documents as a site in build/docs: bash launch/docs.sh [arguments of mkdocs build]
#
# Strict: a broken link, a broken anchor, or a page outside the navigation fails.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
prepare_environment docs
cd "$ROOT"
"$PYTHON" docs/site/measurements.py --check
NO_MKDOCS_2_WARNING=1 exec "$PYTHON" -m mkdocs build --strict --quiet --config-file docs/site/mkdocs.yml "$@"
