"""Our Triton kernels: tensors in, tensors out. Imported only where an engine runs on a GPU (or by the tests)."""
