"""Printing only: what a model will run (`plan`) and what really ran (`receipt`)."""
