"""A CUDA device that is not there: code for CUDA runs on CPUs, late and in many orders."""
