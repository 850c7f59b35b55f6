# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of inference servers: `export` writes them, `from_pretrained_quantized` reads."""
