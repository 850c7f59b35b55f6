# SPDX-License-Identifier: Apache-2.0
"""Weights whose masters a trainer holds in flat buffers, cut at any element: `fq.hooks`."""
