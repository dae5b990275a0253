"""Plain PyTorch kernels: the yardstick of the faster ones, and what runs where there is none."""
