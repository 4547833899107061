"""`TunedModule` and its kin: modules whose chosen tensors have one trained copy per adapter."""
