"""Surgical fine-tuning as a method of PEFT, and what it shares with the stratified method."""
