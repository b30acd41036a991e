"""Optimizers and schedules by name; learning rates as a function of applied updates."""

from distmp.optim.build import NamedParameters, OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import LearningRates

__all__ = ["LearningRates", "NamedParameters", "OptimizerFactory", "ScheduleFactory"]
