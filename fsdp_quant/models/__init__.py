# SPDX-License-Identifier: Apache-2.0
"""Models: which modules are converted, fused and replaced, and the modules that replace them."""
