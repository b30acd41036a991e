"""FP32 gradient accumulation, reduction over ranks, and the tensors that the optimizer steps."""

from distmp.buckets.gradients import Fp32GradBuckets
from distmp.buckets.parameters import FlatParameters, PureParameters

__all__ = ["FlatParameters", "Fp32GradBuckets", "PureParameters"]
