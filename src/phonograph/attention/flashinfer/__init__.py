"""FlashInfer as a backend. Facts about the library are those of flashinfer-python 0.6.14."""
