# SPDX-License-Identifier: Apache-2.0
"""Linear layers, dense and of experts: the program of their three GEMMs, and who runs it."""
