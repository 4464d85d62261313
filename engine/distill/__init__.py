"""Distillation of a small draft model from a target, behind `outrider train draft`.

Reading order: ``pipeline`` (the stages), ``prompts`` and ``generation`` (the corpus), ``model``, ``loss`` and
``training`` (the draft), ``acceptance`` and ``card`` (what it is worth), ``export`` (the folder).
"""

from engine.distill.pipeline import train_draft
from engine.distill.settings import DistillSettings

__all__ = ["DistillSettings", "train_draft"]
