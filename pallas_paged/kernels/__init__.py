"""Attention kernels over raw arrays: nothing here knows a page table or a pool."""
