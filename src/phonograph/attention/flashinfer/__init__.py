"""FlashInfer as a backend: its wrappers, planned on the host for each step, over buffers that captured graphs read.

Facts about the library are those of flashinfer-python 0.6.14.
"""
