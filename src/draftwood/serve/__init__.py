"""Serving a model behind OpenAI's API."""
