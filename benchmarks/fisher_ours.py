from fisher_methods import Case


def ours(case: Case, engine: str, uncertainty: bool = False) -> list[float]:
    raise NotImplementedError("engine")
