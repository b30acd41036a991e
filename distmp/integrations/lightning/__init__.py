"""Lightning's Trainer and Fabric with distmp's policies and loss scaling."""

from distmp.integrations.lightning.precision import MixedPrecision

__all__ = ["MixedPrecision"]
