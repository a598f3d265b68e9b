"""The engine: sequences, scheduling, tree sizes and the round."""
