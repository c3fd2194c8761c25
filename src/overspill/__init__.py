"""overspill runs, trains and saves PyTorch models larger than the GPU they run on."""

from overspill import errors
from overspill.api import load, plan
from overspill.plan import Plan
from overspill.skeleton import empty_weights

__version__ = "0.1.0"

__all__ = ["Plan", "__version__", "empty_weights", "errors", "load", "plan"]
