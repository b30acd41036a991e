"""Helpers without a subject of distmp: settings, files, imports, units, slices of tensors."""
