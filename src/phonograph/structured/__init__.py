"""Structured output: grammars that constrain the next token."""
