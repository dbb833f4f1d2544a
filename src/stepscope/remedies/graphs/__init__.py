"""Launch a step as one graph: CUDA graphs, and their counterparts in compilers and on other devices."""
