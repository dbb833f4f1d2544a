"""A step launched as one graph: CUDA graphs, and what compilers and other devices have for it."""
