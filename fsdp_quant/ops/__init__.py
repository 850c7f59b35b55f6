# SPDX-License-Identifier: Apache-2.0
"""Operations on plain tensors: the reference definition, and where a faster one stands in for
it."""
