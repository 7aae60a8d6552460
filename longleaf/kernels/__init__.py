"""Attention kernels, one backend per kind of device."""
