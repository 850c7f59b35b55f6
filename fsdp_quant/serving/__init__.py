"""Checkpoints that inference servers read: `export`, and `from_pretrained_quantized`, which reads them."""
