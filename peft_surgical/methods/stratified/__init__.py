"""SPAFIT and strata of any kind as a method of PEFT."""
