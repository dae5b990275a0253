"""Native CPU kernels: C sources that are compiled on first use for the machine at hand, and kept."""
