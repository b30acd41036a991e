"""FP32 accumulation and reduction of gradients, and the tensors that the optimizer updates."""

from distmp.buckets.gradients import Fp32GradBuckets
from distmp.buckets.parameters import FlatParameters, PureParameters

__all__ = ["FlatParameters", "Fp32GradBuckets", "PureParameters"]
