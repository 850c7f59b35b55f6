"""Tensors that several ranks hold: gathers of activations, and the cast of masters that lie in pieces."""
