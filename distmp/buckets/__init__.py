"""FP32 gradient accumulation, reduction over ranks, and FP32 master weights."""

from distmp.buckets.gradients import Fp32GradBuckets
from distmp.buckets.masters import MasterWeights, PureWeights

__all__ = ["Fp32GradBuckets", "MasterWeights", "PureWeights"]
