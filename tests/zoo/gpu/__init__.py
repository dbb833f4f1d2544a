"""Small programs with faults that only a GPU shows, each with a clean twin, for `scripts/gpu_campaign`.

    python -m tests.zoo.gpu unpinned_copies --fault --device cuda
    stepscope run -m tests.zoo.gpu unpinned_copies --clean --device cuda

A program is a function that builds a step; `FAULTS` of `registry` lists it with what is planted and the rules that may
find it first. With `--device cpu --tiny` the same lines run without a GPU.
"""
