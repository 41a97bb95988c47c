"""Structured output: requests' schemas, expressions and grammars become token masks, by the library xgrammar.

Compiling happens in a process of its own, because nothing else can be stopped: a grammar that explodes costs that
process, which has a limit of time and memory, and its request gets an error. The engine's process takes the result.
"""
