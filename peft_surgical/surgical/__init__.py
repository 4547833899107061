"""Surgical fine-tuning as a method of PEFT: all weights of chosen layers are trained, the rest is frozen."""
