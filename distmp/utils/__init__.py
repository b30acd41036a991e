"""General helpers: settings, files, imports, units, shards of tensors."""

# Limits of a loss scale: between these, a scale and its reciprocal are normal FP32 numbers, so that
# neither becomes 0 or inf. They are not in `precision`, because settings must not import torch.
SMALLEST_LOSS_SCALE, LARGEST_LOSS_SCALE = 2.0**-126, 2.0**126

# Seed of a run, an integer of 64 bits.
LARGEST_SEED = 2**63 - 1
