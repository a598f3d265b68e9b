def demo() -> None:
    """See it work."""
