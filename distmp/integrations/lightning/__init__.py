"""Lightning's Trainer and Fabric with distmp's policies and loss scaling."""

from distmp.integrations.lightning.precision import MixedPrecision
from distmp.integrations.lightning.strategy import MasterWeightsStrategy

__all__ = ["MasterWeightsStrategy", "MixedPrecision"]
