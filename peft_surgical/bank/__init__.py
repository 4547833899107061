"""Many tasks on one resident model."""

from peft_surgical.bank.bank import BankStats, DeltaBank


__all__ = ["BankStats", "DeltaBank"]
