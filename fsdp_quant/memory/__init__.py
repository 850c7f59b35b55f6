"""Where a step's memory goes. `offload`: to the host between forward and backward."""

from .offload import offload

__all__ = ["offload"]
