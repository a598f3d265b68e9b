"""Other people's servers: thin adapters that give their batches to one engine."""
