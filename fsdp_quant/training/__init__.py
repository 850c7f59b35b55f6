# SPDX-License-Identifier: Apache-2.0
"""Training of a converted model: its state in files, held codes, captured steps."""
