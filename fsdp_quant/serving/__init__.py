"""Checkpoints of inference servers: `export` writes them, `from_pretrained_quantized` reads."""
