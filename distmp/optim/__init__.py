"""Optimizers by name, and learning rates that follow the applied updates."""

from distmp.optim.build import NamedParameters, OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import LearningRates

__all__ = ["LearningRates", "NamedParameters", "OptimizerFactory", "ScheduleFactory"]
