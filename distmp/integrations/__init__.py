"""Precision policies and loss scaling of distmp in other frameworks."""
