# SPDX-License-Identifier: Apache-2.0
# shellcheck shell=bash
# Sourced by the other scripts: gives them ROOT and an environment that can run the project.
#
#   prepare_environment EXTRA [EXTRA ...]    extras of pyproject.toml: docs, examples, lint, mutants, test
#
# Sets PYTHON and puts its folder first on PATH. FSDP_QUANT_PYTHON is used as it is, and nothing is installed
# (nodes of a cluster that share an environment). Otherwise an active virtual environment is used as it is;
# otherwise .venv is made at the root of the checkout, and sees a torch that the machine already has.
# A torch that imports is never replaced. The second call finds everything in place and does nothing.

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)"
TORCH_VERSION=2.13.0

fail() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

note() {
    printf '%s\n' "$*" >&2
}

check_python_version() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null ||
        fail "$1 is $("$1" --version 2>&1 || echo missing); fsdp_quant needs Python 3.10 or newer:" \
            "activate a virtual environment that has it"
}

choose_python() {
    if [[ -n "${VIRTUAL_ENV:-}" ]]; then
        PYTHON="$VIRTUAL_ENV/bin/python"
        [[ -x "$PYTHON" ]] ||
            fail "VIRTUAL_ENV is $VIRTUAL_ENV, which has no bin/python; unset it or activate another"
        check_python_version "$PYTHON"
        return
    fi
    PYTHON="$(command -v python3)" || fail "there is no python3; fsdp_quant needs Python 3.10 or newer"
    check_python_version "$PYTHON"
    # A python3 that lives in a virtual environment is an active one, whatever VIRTUAL_ENV says.
    if "$PYTHON" -c 'import sys; sys.exit(sys.prefix == sys.base_prefix)'; then
        return
    fi
    if ! "$ROOT/.venv/bin/python" -m pip --version >/dev/null 2>&1; then
        note "making the virtual environment .venv"
        local options=(--clear)
        if "$PYTHON" -c 'import torch' >/dev/null 2>&1; then
            options+=(--system-site-packages)
        fi
        "$PYTHON" -m venv "${options[@]}" "$ROOT/.venv" ||
            fail "$PYTHON could not make a virtual environment; install its venv module (python3-venv)"
    fi
    PYTHON="$ROOT/.venv/bin/python"
}

# True when every module of the extras is there, the project imports from this checkout and nothing
# that the build reads is newer than the last installation.
is_installed() {
    local stamp="$1"
    shift
    (cd / && "$PYTHON" - "$ROOT" "$@") <<'PY' || return 1
import importlib.util
import os
import sys

MODULES = {
    "docs": ["material"],
    "lint": ["pyright", "ruff"],
    "examples": ["matplotlib", "rich"],
    "mutants": ["cosmic_ray"],
    "test": ["accelerate", "hypothesis", "numpy", "pytest", "safetensors", "torchao", "transformers", "xdist"],
}
root, *extras = sys.argv[1:]
wanted = ["torch", *(name for extra in extras for name in MODULES[extra])]
spec = importlib.util.find_spec("fsdp_quant")
here = spec is not None and spec.origin is not None and os.path.realpath(spec.origin).startswith(
    os.path.join(root, "fsdp_quant") + os.sep
)
sys.exit(not (here and all(importlib.util.find_spec(name) for name in wanted)))
PY
    [[ -e "$stamp" ]] || return 0
    [[ -z "$(cd "$ROOT" && find setup.py pyproject.toml csrc -newer "$stamp" 2>/dev/null)" ]]
}

# Processes of this machine: one for every GPU, else two. Threads: the cores divided among them.
choose_processes() {
    if [[ -z "${NPROC:-}" ]]; then
        NPROC="$("$PYTHON" -c 'import torch; print(torch.cuda.device_count() or 2)')"
    fi
    if [[ -z "${OMP_NUM_THREADS:-}" ]]; then
        local cores
        cores="$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)"
        OMP_NUM_THREADS=$((cores / NPROC))
        export OMP_NUM_THREADS=$((OMP_NUM_THREADS > 0 ? OMP_NUM_THREADS : 1))
    fi
}

prepare_environment() {
    if [[ -n "${FSDP_QUANT_PYTHON:-}" ]]; then
        PYTHON="$FSDP_QUANT_PYTHON"
        check_python_version "$PYTHON"
        "$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not (u.find_spec("torch") and u.find_spec("fsdp_quant")))' ||
            fail "FSDP_QUANT_PYTHON is $PYTHON, which does not find torch or fsdp_quant; install them there, or unset it"
        return
    fi
    choose_python
    PATH="$(dirname "$PYTHON"):$PATH"
    export PATH
    local stamp
    stamp="$("$PYTHON" -c 'import sys; print(sys.prefix)')/.fsdp_quant-installed"
    if is_installed "$stamp" "$@"; then
        return
    fi

    local pip=("$PYTHON" -m pip --disable-pip-version-check install --quiet)
    if ! "$PYTHON" -c 'import torch' >/dev/null 2>&1; then
        note "installing torch $TORCH_VERSION"
        "${pip[@]}" "torch==$TORCH_VERSION" || fail "torch $TORCH_VERSION could not be installed"
    fi
    local torch
    torch="$("$PYTHON" -c 'from importlib.metadata import version; print(version("torch"))')"
    "$PYTHON" -c 'import sys; sys.exit(tuple(map(int, sys.argv[1].split(".")[:2])) < (2, 11))' "$torch" ||
        fail "torch $torch is installed and fsdp_quant needs 2.11 or newer; upgrade it, or activate an" \
            "environment without torch and version $TORCH_VERSION is installed there"

    local extras
    extras="$(IFS=,; echo "$*")"
    note "installing fsdp_quant [$extras] with torch $torch"
    # torch is named in both calls so that pip keeps it, and takes the build tools that it allows.
    "${pip[@]}" "torch==$torch" "setuptools>=64" wheel ||
        fail "the build tools could not be installed"
    # Without isolation setup.py sees the same torch.
    "${pip[@]}" "torch==$torch" --no-build-isolation --editable "${ROOT}[$extras]" ||
        fail "fsdp_quant could not be installed; the reason is above (FSDP_QUANT_NATIVE=0 leaves the compiled" \
            "operators out)"
    touch "$stamp" 2>/dev/null || true
}
