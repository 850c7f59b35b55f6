# SPDX-License-Identifier: Apache-2.0
"""Printing only: what a model will run (`plan`) and what really ran (`receipt`).

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
>>> isinstance(fq.plan(model), fq.inspection.plan.ModelPlan)
True
"""
