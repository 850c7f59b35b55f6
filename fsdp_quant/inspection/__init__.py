# SPDX-License-Identifier: Apache-2.0
"""`fq.inspection`: what a model will run, what ran, and how large its quantization errors are.

>>> model = fq.convert(nn.Sequential(nn.Linear(64, 32)), "mxfp8")
>>> isinstance(fq.plan(model), fq.inspection.ModelPlan)
True
"""

from .advise import Advice, Choice, study
from .memory import Memory
from .plan import GemmRow, ModelPlan, Traffic
from .plan import diff as diff_plans
from .plan import load as load_plan
from .receipt import Receipt, reset_receipt
from .recorder import Inspection
from .support import NativeSupport

__all__ = [
    "Advice",
    "Choice",
    "GemmRow",
    "Inspection",
    "Memory",
    "ModelPlan",
    "NativeSupport",
    "Receipt",
    "Traffic",
    "diff_plans",
    "load_plan",
    "reset_receipt",
    "study",
]
