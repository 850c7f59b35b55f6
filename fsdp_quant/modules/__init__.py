# SPDX-License-Identifier: Apache-2.0
"""Modules whose products are quantized, the plan of those products, and their operator."""
