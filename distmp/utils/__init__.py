"""General helpers: settings, files, imports, units, shards of tensors."""
