def doctor() -> None:
    """Tell what this machine has, what is missing, and what will be used."""
