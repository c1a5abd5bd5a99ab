"""What a CUDA device computes by code of this project: Triton kernels over the paged KV pool."""
