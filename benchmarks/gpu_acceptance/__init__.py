"""Checks on a real GPU that states are right, and that saving and restoring are fast.

python -m benchmarks.gpu_acceptance

torch and this repository are enough, so that it runs in a plain image with CUDA; under ten minutes on one
GPU.
"""
