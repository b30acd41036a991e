"""Optimizers and schedules by name; learning rates as a function of applied updates."""

from distmp.optim.build import NamedParameters, OptimizerFactory, ScheduleFactory
from distmp.optim.learning_rates import LearningRates
from distmp.optim.muon import Muon

__all__ = ["LearningRates", "Muon", "NamedParameters", "OptimizerFactory", "ScheduleFactory"]
