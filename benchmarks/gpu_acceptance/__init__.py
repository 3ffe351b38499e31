"""What is promised about GPUs, as checks of the real thing: ten that its states are right, eight that it is
fast.

python -m benchmarks.gpu_acceptance

torch and this repository are enough, so that it runs in a plain image with CUDA; under ten minutes on one
GPU.
"""
