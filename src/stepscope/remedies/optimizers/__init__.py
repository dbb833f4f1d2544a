"""Parameter updates in few kernels, and many small trainings as one."""
