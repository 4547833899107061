"""The job behind `peft-surgical train` and `evaluate`, on transformers' Trainer: data in, a measured delta out."""

from peft_surgical.training.evaluation import Evaluation, evaluate
from peft_surgical.training.job import TrainingJob
from peft_surgical.training.methods import METHODS, Method
from peft_surgical.training.run import TrainingRun, train


__all__ = ["METHODS", "Evaluation", "Method", "TrainingJob", "TrainingRun", "evaluate", "train"]
