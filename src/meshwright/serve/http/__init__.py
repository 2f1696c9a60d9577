"""The OpenAI-compatible HTTP API of a serving engine."""
