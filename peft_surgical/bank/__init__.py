"""Many tasks on one resident model."""

from peft_surgical.bank.bank import DeltaBank
from peft_surgical.bank.cache import BankStats


__all__ = ["BankStats", "DeltaBank"]
